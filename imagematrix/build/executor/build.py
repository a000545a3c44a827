"""Carrying out a plan: refused changes, then builds in a bounded pool of threads, and results in order.

A failed cell does not affect others.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import threading
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from queue import Empty, SimpleQueue
from typing import Protocol

from imagematrix.build.dockerfile.dockerfile import split_stages
from imagematrix.build.executor.cell_builder import CellBuilder, CellRun
from imagematrix.build.executor.image_tester import ImageTestError, ImageTestOutcome, ImageTestResult
from imagematrix.build.executor.logs import get_log_path, record_dockerfile
from imagematrix.build.executor.result import BuildStatus, Result, complete_results
from imagematrix.build.plan.context import Snapshots, create_state_folder
from imagematrix.build.plan.plan import REFUSED_REMEDY, PlanStatus, make_item_namer
from imagematrix.build.plan.protocols import StoppedError
from imagematrix.common.temp_folder import make_scratch_folder
from imagematrix.errors import BuildError, EngineError, ImagematrixError, TagMovedError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.build.executor.cell_builder import BuildBackend
    from imagematrix.build.executor.image_tester import ImageTester
    from imagematrix.build.plan.plan import Plan, Planned

POLL_S = 0.1
GRACE = 5  # seconds to wait for work that cannot be stopped, such as a push
# Images for each job that are built, audited or stored at a time. Builds thus go on while the first audit
# reads the base. Each image takes the disk space of its layers.
OPEN = 4
SHOWN = 5  # cells listed in a message before "and N more"


def build(
    plan: Plan,
    backend: BuildBackend,
    *,
    jobs: int,
    logs: Path,
    reporter: Reporter,
    fail_fast: bool = False,
    verify: bool = False,
) -> list[Result]:
    """Build or adopt the images of `plan`, `jobs` at a time, each with a log in the folder `logs`.

    With more than one job, an image is audited and stored while the next is built. With `verify` everything
    is built twice, even up-to-date images, and fails if the bytes differ. An image is built after the images
    it builds on, and skipped if one of them was not built.

    Returns the results in the order of the plan. Raises TagMovedError before anything is built if an image
    of the same version and cell exists but was built from other inputs. The backend's tester tests images,
    also up-to-date ones whose test is due; without one, nothing is tested. With `fail_fast` the first failure
    stops the remaining cells, as a lost engine always does. An interrupt ends the running builds before it
    propagates; the `reporter` has the results then.
    """
    tester = backend.tester
    refused = plan.with_status(PlanStatus.REFUSED)
    if refused:
        raise _make_tag_moved_error(refused)
    failures = [
        Result(item=item, status=BuildStatus.FAILED, error=item.error)
        for item in plan.with_status(PlanStatus.FAILED)
    ]
    for result in failures:
        image = result.item.cell.image
        with contextlib.suppress(OSError):  # the log of an earlier build would show another failure
            get_log_path(logs, image.name, image.version, result.item.cell.id).unlink()
        reporter.on_finish(result)

    verified = [PlanStatus.UP_TO_DATE] if verify else []
    to_make = plan.with_status(PlanStatus.BUILD, PlanStatus.ADOPT, *verified)
    up_to_date = plan.with_status(PlanStatus.UP_TO_DATE) if tester and not verify else ()
    items = (*to_make, *(item for item in up_to_date if tester and tester.is_due(item)))
    if not items or (failures and fail_fast):
        return failures

    try:
        create_state_folder(logs.parent)
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    plan.build_inputs.require_all(
        item.cell.image for item in items if verify or item.status is PlanStatus.BUILD
    )
    with make_scratch_folder() as folder:
        snapshots = Snapshots(folder, plan.contexts, logs.parent)
        with CellBuilder(items, plan, snapshots, backend, verify=verify) as cell_builder:
            run = _BuildRun(items, cell_builder, reporter, logs, tester, fail_fast=fail_fast)
            results = [*failures, *run.build_all(jobs)]
    position = {id(item): index for index, item in enumerate(plan.items)}
    return sorted(results, key=lambda result: position[id(result.item)])


def _make_tag_moved_error(refused: Sequence[Planned]) -> TagMovedError:
    name = make_item_namer(refused)
    conflicts = [(item, item.difference.reference) for item in refused if item.difference]
    lines = [
        line
        for item, existing in conflicts[:SHOWN]
        for line in (
            f"  {name(item)}: {item.why}",
            f"    existing  {existing}",
            f"    new       {item.reference}",
        )
    ]
    more = [f"  and {len(conflicts) - SHOWN} more"] if len(conflicts) > SHOWN else []
    return TagMovedError(
        "a version never changes, and these cells would change:",
        *lines,
        *more,
        remedy=REFUSED_REMEDY,
    )


class Reporter(Protocol):
    """Receives the progress of a build, from several threads."""

    def on_start(self, item: Planned) -> None:
        """Receive that the build of `item` has begun."""
        ...

    def on_step(self, item: Planned, text: str) -> None:
        """Receive the current instruction of `item`."""
        ...

    def on_output(self, item: Planned, text: str) -> None:
        """Receive lines that were written to the log of `item`."""
        ...

    def on_finish(self, result: Result) -> None:
        """Receive a result."""
        ...


class _BuildRun:
    """One run of the pool. A thread holds a slot while it builds, and finishes its work without one."""

    def __init__(
        self,
        items: Sequence[Planned],
        cell_builder: CellBuilder,
        reporter: Reporter,
        logs: Path,
        tester: ImageTester | None,
        *,
        fail_fast: bool,
    ) -> None:
        self._items = {item.reference: item for item in items}
        self._cell_builder = cell_builder
        self._reporter = reporter
        self._logs = logs
        self._tester = tester
        self._fail_fast = fail_fast
        self._results: dict[str, Result] = {}
        self._stopped = False

    def build_all(self, jobs: int) -> list[Result]:
        """Make all images, `jobs` at a time, and return their results in the order of the items.

        Raises the errors of `CellBuilder.prepare`. An interrupt stops the running builds first.
        """
        self._cell_builder.prepare()
        outcomes: SimpleQueue[list[Result] | BaseException] = SimpleQueue()

        # An interrupt is raised in the main thread. If that happened while it held a lock of the pool, the
        # pool's threads would wait for the lock forever; a SimpleQueue has none.
        def run_pool() -> None:
            try:
                outcomes.put(self._collect_results(jobs))
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                outcomes.put(error)

        outcome = None
        try:
            threading.Thread(target=run_pool, name="pool", daemon=True).start()
            # A signal that arrives while this thread hands over the interpreter, just before it waits, does
            # not wake it. So it wakes by itself.
            while outcome is None:
                with contextlib.suppress(Empty):
                    outcome = outcomes.get(timeout=POLL_S)
        except BaseException:
            self._stopped = True
            self._cell_builder.stop()
            with contextlib.suppress(Empty):  # the results have to be reported soon
                outcomes.get(timeout=GRACE)
            raise
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _collect_results(self, jobs: int) -> list[Result]:
        leaders = order_by_new_stages({name: item.dockerfile for name, item in self._items.items()})
        order = TopologicalSorter(
            {name: [need for need in self._items[name].needs if need in self._items] for name in leaders}
        )
        order.prepare()
        slots = threading.Semaphore(jobs)
        threads = OPEN * jobs if jobs > 1 else 1
        futures: dict[Future[Result], str] = {}
        prefetches: list[Future[None]] = []
        with (
            ThreadPoolExecutor(max_workers=2, thread_name_prefix="ahead") as prefetch_pool,
            ThreadPoolExecutor(max_workers=threads, thread_name_prefix="build") as pool,
        ):
            try:
                prefetches.append(prefetch_pool.submit(self._cell_builder.query_compilers))
                if jobs > 1:
                    prefetches.append(prefetch_pool.submit(self._cell_builder.export_bases))
                while order.is_active() and not self._stopped:
                    ready = order.get_ready()
                    futures |= {
                        pool.submit(self._build_after_needs, self._items[name], slots): name for name in ready
                    }
                    completed, _ = wait(futures, return_when=FIRST_COMPLETED)
                    finished = {futures.pop(future): future.result() for future in completed}
                    self._results |= finished
                    order.done(*finished)
            except BaseException:
                self._stopped = True
                raise
            finally:
                for future in futures:
                    future.cancel()
                # Nothing needs the other work, such as after all cells have failed.
                if self._stopped or not all(future.done() for future in prefetches):
                    self._cell_builder.stop()
        self._results |= {name: future.result() for future, name in futures.items() if not future.cancelled()}
        return complete_results(self._items.values(), self._results.values())

    def _build_after_needs(self, item: Planned, slots: threading.Semaphore) -> Result:
        unbuilt = [name for name in item.needs if name in self._results and not self._results[name].is_stored]
        if unbuilt:
            error = BuildError(f"the image that it builds on was not built: {unbuilt[0]}")
            result = Result(item=item, status=BuildStatus.SKIPPED, error=error)
            self._reporter.on_finish(result)
            return result
        with contextlib.ExitStack() as slot:
            slot.enter_context(slots)
            if self._stopped:
                return Result(item=item, status=BuildStatus.STOPPED)
            return self._build_item(item, slot.close)

    def _build_item(self, item: Planned, release_slot: Callable[[], None]) -> Result:
        begin = time.monotonic()
        image = item.cell.image
        log = get_log_path(self._logs, image.name, image.version, item.cell.id)
        on_step, on_output = partial(self._reporter.on_step, item), partial(self._reporter.on_output, item)
        run = CellRun(item, log, on_step, on_output, release_slot)
        self._reporter.on_start(item)
        try:
            log.unlink(missing_ok=True)  # the log of an earlier build would show another failure
            result = self._cell_builder.make(run)
            record_dockerfile(log, item.dockerfile)
            if self._tester and result.status is not BuildStatus.VERIFIED:
                self._tester.record_result(item, result.test)
        except StoppedError as error:
            result = Result(item=item, status=BuildStatus.STOPPED, error=error)
        except ImageTestError as error:
            test = ImageTestResult(outcome=ImageTestOutcome.FAILED, why=str(error))
            result = Result(item=item, status=BuildStatus.FAILED, error=error, test=test)
        except ImagematrixError as error:
            result = Result(item=item, status=BuildStatus.FAILED, error=error)
        except OSError as error:
            remedy = (
                "free some space, or set TMPDIR to another folder" if error.errno == errno.ENOSPC else None
            )
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            build_error = BuildError(message, remedy=remedy)
            result = Result(item=item, status=BuildStatus.FAILED, error=build_error)
        except Exception as error:  # noqa: BLE001 - an exception fails only its cell
            result = Result(item=item, status=BuildStatus.FAILED, error=_log_unexpected_error(error, log))
        seconds = time.monotonic() - begin
        logged = os.path.isfile(log)  # noqa: PTH113 - pathlib raises OSError for some names
        stage = run.stage if result.status is BuildStatus.FAILED else None
        result = replace(result, seconds=seconds, log=log if logged else None, stage=stage)
        # Without an engine no other cell can be built.
        lost = isinstance(result.error, EngineError)
        if result.status is BuildStatus.FAILED and (self._fail_fast or lost):
            self._stopped = True
        self._reporter.on_finish(result)
        return result


def _log_unexpected_error(error: Exception, log: Path) -> ImagematrixError:
    """Return the error for a bug in imagematrix, and write its traceback to the log."""
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    message = f"unexpected {type(error).__name__}: {error}".strip(": ")
    return ImagematrixError(message, remedy="this is a bug; please report it with the traceback in the log")


def order_by_new_stages(dockerfiles: Mapping[str, str]) -> list[str]:
    """Return the names of `dockerfiles`: the next is always the one with the most new stages.

    Shared stages are thus fetched and compiled early and in parallel, and a failing stage fails at the
    beginning. Ties keep the order of `dockerfiles`.
    """
    stages = {name: frozenset(split_stages(text)) for name, text in dockerfiles.items()}
    seen: set[str] = set()
    # The number of new stages only decreases, so the first file whose number is current is the next.
    heap = [(-len(stages[name]), position, name) for position, name in enumerate(stages)]
    heapq.heapify(heap)
    names = []
    while heap:
        old_priority, position, name = heapq.heappop(heap)
        priority = -len(stages[name] - seen)
        if priority == old_priority:
            seen |= stages[name]
            names.append(name)
        else:
            heapq.heappush(heap, (priority, position, name))
    return names
