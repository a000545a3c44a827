"""One run of builds: a bounded pool of threads, in which failed cells do not affect others."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from typing import Protocol

from imagematrix.builder.logs import log_path
from imagematrix.builder.result import BuildStatus, Result, complete
from imagematrix.errors import BuildError, EngineError, ImagematrixError
from imagematrix.planning.backend import StoppedError
from imagematrix.planning.sequence import leaders_first

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from imagematrix.builder.maker import Maker
    from imagematrix.planning.backend import Builder
    from imagematrix.planning.plan import Planned

__all__ = ["Reporter", "Session"]

GRACE = 5  # seconds to wait for work that cannot be stopped, such as a push
HEAD_START = 1.0  # seconds that builds wait for the export of bases: a small base is then exported only once


class Reporter(Protocol):
    """Receives the progress of a build, from several threads."""

    def started(self, item: Planned) -> None:
        """Receive that the build of `item` has begun."""
        ...

    def step(self, item: Planned, text: str) -> None:
        """Receive the current instruction of `item`."""
        ...

    def finished(self, result: Result) -> None:
        """Receive a result."""
        ...


class Session:
    """One run of the pool. A thread holds a slot while it builds, and finishes its work without one."""

    def __init__(
        self,
        items: Sequence[Planned],
        maker: Maker,
        builder: Builder,
        reporter: Reporter,
        logs: Path,
        *,
        fail_fast: bool,
    ) -> None:
        self._items = {item.reference: item for item in items}
        self._maker = maker
        self._builder = builder
        self._reporter = reporter
        self._logs = logs
        self._fail_fast = fail_fast
        self._results: dict[str, Result] = {}
        self._stopped = False
        self._running = 0  # builds, also those in threads that the pool has not recorded
        self._changed = threading.Condition()  # guards these two

    def run(self, jobs: int) -> list[Result]:
        """Make all images, `jobs` at a time, and return their results in the order of the items.

        Raises the errors of `Maker.prepare`. An interrupt stops the running builds first.
        """
        leaders = leaders_first({name: item.dockerfile for name, item in self._items.items()})
        order = TopologicalSorter(
            {name: [need for need in self._items[name].needs if need in self._items] for name in leaders}
        )
        order.prepare()
        self._maker.prepare()
        slots = threading.Semaphore(jobs)
        futures: dict[Future[Result], str] = {}
        shared: list[Future[None]] = []
        with contextlib.ExitStack() as threads:
            ahead = threads.enter_context(ThreadPoolExecutor(max_workers=2, thread_name_prefix="ahead"))
            workers = ThreadPoolExecutor(max_workers=2 * jobs - 1, thread_name_prefix="build")
            pool = threads.enter_context(workers)
            try:
                shared.append(ahead.submit(self._maker.query_compilers))
                if jobs > 1:
                    exported = threading.Event()
                    shared.append(ahead.submit(self._maker.export_bases, exported.set))
                    exported.wait(HEAD_START)
                while order.is_active():
                    ready = order.get_ready()
                    futures |= {pool.submit(self._one, self._items[name], slots): name for name in ready}
                    done, _ = wait(futures, return_when=FIRST_COMPLETED)
                    finished = {futures.pop(future): future.result() for future in done}
                    self._results |= finished
                    order.done(*finished)
                    if self._stopped:
                        self._abandon(futures)
                        break
                if not all(one.done() for one in shared):  # all cells have failed, so nothing needs this work
                    self._builder.stop()
            except BaseException:
                self._abandon(futures)
                # The results have to be reported soon after a build is stopped.
                if not self._ended(shared):
                    threads.pop_all()
                    ahead.shutdown(wait=False)
                    pool.shutdown(wait=False)
                raise
        self._results |= {name: future.result() for future, name in futures.items() if not future.cancelled()}
        return complete(self._items.values(), self._results.values())

    def _abandon(self, futures: Iterable[Future[Result]]) -> None:
        with self._changed:
            self._stopped = True
        for future in futures:
            future.cancel()
        self._builder.stop()

    def _ended(self, shared: Iterable[Future[None]]) -> bool:
        """Wait GRACE seconds for stopped work to end; return whether it has.

        An interrupt can arrive after a thread starts and before the pool records it, so this counts running
        builds instead of the pool's threads.
        """
        deadline = time.monotonic() + GRACE
        not_done = wait(shared, timeout=GRACE).not_done
        with self._changed:
            left = max(0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: not self._running, left) and not not_done

    def _one(self, item: Planned, slots: threading.Semaphore) -> Result:
        unbuilt = [name for name in item.needs if name in self._results and not self._results[name].stored]
        if unbuilt:
            error = BuildError(f"the image that it builds on was not built: {unbuilt[0]}")
            result = Result(item=item, status=BuildStatus.SKIPPED, error=error)
            self._reporter.finished(result)
            return result
        with contextlib.ExitStack() as slot:
            slot.enter_context(slots)
            with self._changed:
                if self._stopped:
                    return Result(item=item, status=BuildStatus.STOPPED)
                self._running += 1
            try:
                return self._carried_out(item, slot.close)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify()

    def _carried_out(self, item: Planned, release_slot: Callable[[], None]) -> Result:
        begin = time.monotonic()
        image = item.cell.image
        log = log_path(self._logs, image.name, image.version, item.cell.id)
        self._reporter.started(item)
        try:
            log.unlink(missing_ok=True)  # the log of an earlier build would show another failure
            result = self._maker.make(item, log, partial(self._reporter.step, item), release_slot)
        except StoppedError as error:
            result = Result(item=item, status=BuildStatus.STOPPED, error=error)
        except ImagematrixError as error:
            result = Result(item=item, status=BuildStatus.FAILED, error=error)
        except OSError as error:
            result = Result(item=item, status=BuildStatus.FAILED, error=_of_system(error))
        except Exception as error:  # noqa: BLE001 - an exception fails only its cell
            result = Result(item=item, status=BuildStatus.FAILED, error=_unexpected(error, log))
        seconds = time.monotonic() - begin
        logged = os.path.isfile(log)  # noqa: PTH113 - pathlib raises OSError for some names
        result = replace(result, seconds=seconds, log=log if logged else None)
        # Without an engine no other cell can be built.
        lost = isinstance(result.error, EngineError)
        if result.status is BuildStatus.FAILED and (self._fail_fast or lost):
            self._stopped = True
        self._reporter.finished(result)
        return result


def _of_system(error: OSError) -> BuildError:
    remedy = "free some space, or set TMPDIR to another folder" if error.errno == errno.ENOSPC else None
    message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return BuildError(message, remedy=remedy)


def _unexpected(error: Exception, log: Path) -> ImagematrixError:
    """Return the error for a bug in imagematrix, and write its traceback to the log."""
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    message = f"unexpected {type(error).__name__}: {error}".strip(": ")
    return ImagematrixError(message, remedy="this is a bug; please report it with the traceback in the log")
