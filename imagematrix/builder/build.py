"""Carrying out a plan: a bounded pool of builds, where a cell that fails costs no other cell."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from graphlib import TopologicalSorter
from typing import Any, Protocol

from imagematrix.audit import layers
from imagematrix.audit.audit import contradictions
from imagematrix.builder.compiler import Compilers
from imagematrix.builder.logs import opened, where
from imagematrix.builder.reproducible import difference
from imagematrix.errors import (
    AuditError,
    BuildError,
    EngineError,
    ImagematrixError,
    TagMovedError,
    UsageError,
)
from imagematrix.oci import layout
from imagematrix.once import Once
from imagematrix.planning import labels
from imagematrix.planning.backend import Later, Order, Sources
from imagematrix.planning.context import Snapshots, settle
from imagematrix.planning.naming import naming
from imagematrix.planning.sequence import leaders_first
from imagematrix.render.dockerfile import beginning
from imagematrix.scratch import scratch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import TextIO

    from imagematrix.catalog.catalog import Variant
    from imagematrix.planning.backend import Builder, Made, Store
    from imagematrix.planning.plan import Item, Plan

__all__ = [
    "SCHEMA",
    "STATUSES",
    "Reporter",
    "Result",
    "build",
    "complete",
    "failure",
    "ordered",
    "report",
]

SCHEMA = "imagematrix.build/v1"
STATUSES = ("built", "adopted", "verified", "failed", "skipped", "stopped")
GRACE = 5  # seconds that what can't be stopped has to end, such as a push
SHOWN = 5  # cells that a message names before it says how many more


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one cell: `status` is one of STATUSES, `seconds` is what it took.

    `log` is None where the cell failed before its build began.
    """

    item: Item
    status: str
    seconds: float
    digest: str | None = None
    reproducible: bool = False
    log: Path | None = None
    error: ImagematrixError | None = None

    @property
    def there(self) -> bool:
        """Whether the image is in the store now."""
        return self.status in ("built", "adopted", "verified")


class Reporter(Protocol):
    """Is told of the build's progress, from several threads."""

    def started(self, item: Item) -> None:
        """Take note that the build of `item` has begun."""
        ...

    def step(self, item: Item, text: str) -> None:
        """Take note of the instruction `item` is at."""
        ...

    def finished(self, result: Result) -> None:
        """Take note of a result."""
        ...


def build(  # noqa: PLR0913 - what to build, with what, where to, and the command's own options
    plan: Plan,
    builder: Builder,
    store: Store,
    *,
    jobs: int,
    logs: Path,
    reporter: Reporter,
    fail_fast: bool = False,
    verify: bool = False,
) -> list[Result]:
    """Build or adopt what `plan` says, `jobs` at a time, each with a log in the folder `logs`.

    With more than one, an image that is made is audited and stored while the next is built in its place.
    With `verify` everything is built twice, what is up to date too, and fails where the bytes differ.
    What an image builds on is built before it, and an image whose base was not built is skipped.

    Returns the results in the order of the plan. Raises TagMovedError before anything is built where an image
    of the same version and cell is there but made of something else. With `fail_fast` the first failure
    stops the rest, as the loss of the engine always does. Interrupted, it ends the builds that run before it
    lets the interrupt through; the `reporter` knows the results then.
    """
    refused = plan.with_status("refused")
    if refused:
        raise _moved(refused)
    failed = [
        Result(item=item, status="failed", seconds=0, error=UsageError(str(item.why)))
        for item in plan.with_status("failed")
    ]
    for result in failed:
        reporter.finished(result)
    items = plan.with_status("build", "adopt", *(["up-to-date"] if verify else []))
    if not items:
        return failed
    try:
        settle(logs.parent)
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    plan.given.require_all(item.cell.image for item in items if verify or item.status == "build")
    with scratch() as folder:
        snapshots = Snapshots(folder, plan.contexts, logs.parent)
        session = _Session(
            items,
            plan,
            snapshots,
            builder,
            store,
            logs,
            reporter,
            fail_fast=fail_fast,
            verify=verify,
        )
        results = [*failed, *session.run(jobs)]
    place = {id(item): number for number, item in enumerate(plan.items)}
    return sorted(results, key=lambda result: place[id(result.item)])


def complete(items: Iterable[Item], results: Iterable[Result]) -> list[Result]:
    """Return the results of `items`, in their order; those that have none were stopped."""
    known = {id(result.item): result for result in results}
    return [known.get(id(item)) or Result(item=item, status="stopped", seconds=0) for item in items]


def ordered(item: Item, sources: Sources, flags: Callable[[], frozenset[str]]) -> Order:
    """Return the image to make for a planned item; `flags` gives the CPU flags its code needs."""
    return Order(
        reference=str(item.reference),
        dockerfile=item.dockerfile,
        sources=sources,
        labels=Later(lambda: labels.for_item(item, flags())),
        replaces=item.instead,
    )


def failure(results: Sequence[Result]) -> ImagematrixError | None:
    """Return the error that stands for all failed results, or None."""
    failed = [result for result in results if result.status == "failed"]
    if not failed:
        return None
    gone = [result.error for result in failed if isinstance(result.error, EngineError)]
    if gone:
        return gone[0]
    name = naming(result.item for result in results)
    names = ", ".join(name(result.item) for result in failed[:SHOWN])
    more = ", …" if len(failed) > SHOWN else ""
    message = f"{len(failed)} of {len(results)} builds failed: {names}{more}"
    kinds = {type(result.error) for result in failed}
    if ImagematrixError in kinds:  # which nobody foresaw
        return ImagematrixError(message)
    kind = kinds.pop() if len(kinds) == 1 else BuildError
    return kind(message) if kind in (AuditError, TagMovedError) else BuildError(message)


def report(plan: Plan, results: Sequence[Result]) -> dict[str, object]:
    """Return the Build document: every cell of the plan with what became of it."""
    by_item = {id(result.item): result for result in results}
    cells = []
    for item in plan.items:
        entry = item.to_json()
        result = by_item.get(id(item))
        if result:
            entry |= {
                "status": result.status,
                "seconds": round(result.seconds, 3),
                "digest": result.digest,
                "reproducible": result.reproducible,
                "log": str(result.log) if result.log else None,
                "error": str(result.error) if result.error else None,
            }
        cells.append(entry)
    return {"schema": SCHEMA, "shard": plan.shard, "cells": cells}


def _moved(refused: Sequence[Item]) -> TagMovedError:
    name = naming(refused)
    lines = [
        f"{name(item)}: {item.why}\n    there is   {item.instead}\n    this gives {item.reference}"
        for item in refused[:SHOWN]
    ]
    more = f"\n  and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
    return TagMovedError(
        "a version never changes, and these cells would:\n  " + "\n  ".join(lines) + more,
        remedy="raise the version in matrix.yaml, or take the change back",
    )


def _of_system(error: OSError) -> BuildError:
    remedy = "make room there, or name another folder with TMPDIR" if error.errno == errno.ENOSPC else None
    said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return BuildError(said, remedy=remedy)


def _unforeseen(error: Exception, log: Path) -> ImagematrixError:
    """Return what stands for an error of our own, whose traceback goes into the log."""
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
    message = f"unforeseen {type(error).__name__}: {error}".strip(": ")
    return ImagematrixError(message, remedy="the log has the traceback: please report it")


class _Session:
    """One run of the pool. A thread has a place for as long as it builds, and works on without one."""

    def __init__(  # noqa: PLR0913 - what `build` has
        self,
        items: Sequence[Item],
        plan: Plan,
        snapshots: Snapshots,
        builder: Builder,
        store: Store,
        logs: Path,
        reporter: Reporter,
        *,
        fail_fast: bool,
        verify: bool,
    ) -> None:
        self._items = {str(item.reference): item for item in items}
        self._bases = plan.bases
        self._snapshots = snapshots
        self._given = plan.given
        self._fail_fast = fail_fast
        self._verify = verify
        self._builder = builder
        self._store = store
        self._logs = logs
        self._reporter = reporter
        self._to_build = [item for item in items if verify or item.status == "build"]
        self._compilers = Compilers(self._to_build, builder)
        self._results: dict[str, Result] = {}
        self._made: dict[str, Made] = {}
        self._needed = {need for item in items for need in item.needs}
        self._kept = contextlib.ExitStack()  # what was made, for what builds on it
        self._layers: Once[str, layers.Layer] = Once()
        self._pins: dict[str, str | None] = {}
        self._stopped = False

    def run(self, jobs: int) -> list[Result]:
        leaders = leaders_first({name: item.dockerfile for name, item in self._items.items()})
        order = TopologicalSorter(
            {name: [need for need in self._items[name].needs if need in self._items] for name in leaders}
        )
        order.prepare()
        places = threading.Semaphore(jobs)
        # Before anything is built: a base that is nowhere would fail every cell, one after the other.
        names = dict.fromkeys(name for item in self._items.values() for name in item.bases)
        self._pins = {name: self._builder.held(name, self._bases[name]) for name in names}
        # All at once, for a person goes on working: an hour later, nothing may be as it was planned.
        for context in dict.fromkeys(item.cell.image.context for item in self._to_build):
            with contextlib.suppress(ImagematrixError, OSError):  # its cells say what is wrong
                self._snapshots.of(context)
        futures: dict[Future[Result], str] = {}
        shared: list[Future[None]] = []
        with self._kept, contextlib.ExitStack() as threads:
            ahead = threads.enter_context(ThreadPoolExecutor(max_workers=2, thread_name_prefix="ahead"))
            workers = ThreadPoolExecutor(max_workers=2 * jobs - 1, thread_name_prefix="build")
            pool = threads.enter_context(workers)
            try:
                shared.append(ahead.submit(self._ask_compilers))
                if jobs > 1:
                    shared.append(ahead.submit(self._export_bases))
                while order.is_active():
                    ready = order.get_ready()
                    futures |= {pool.submit(self._one, self._items[name], places): name for name in ready}
                    done, _ = wait(futures, return_when=FIRST_COMPLETED)
                    finished = {futures.pop(future): future.result() for future in done}
                    self._results |= finished
                    order.done(*finished)
                    if self._stopped:
                        self._abandon(futures)
                        break
                if not all(one.done() for one in shared):  # every cell has failed, and nobody wants it
                    self._builder.stop()
            except BaseException:
                self._abandon(futures)
                # Who stops a build does not wait for long: what became of it is to be told before.
                running: list[Future[Any]] = [*futures, *shared]
                if wait(running, timeout=GRACE).not_done:
                    threads.pop_all()
                    ahead.shutdown(wait=False)
                    pool.shutdown(wait=False)
                raise
        self._results |= {name: future.result() for future, name in futures.items() if not future.cancelled()}
        return complete(self._items.values(), self._results.values())

    def _ask_compilers(self) -> None:
        """Ask for the flags while the first images are built; these say what is wrong."""
        for item in self._compilers.representatives():
            with contextlib.suppress(ImagematrixError, OSError):
                self._compilers.flags(item, self._sources(item))

    def _export_bases(self) -> None:
        """Export and read what the images begin with, while the first are built.

        These end at the same time, and otherwise each would export it. They say what is wrong.
        """
        firsts: dict[tuple[str | None, str], Item] = {}
        for item in self._to_build:
            firsts.setdefault((beginning(item.dockerfile), item.cell.platform), item)
        for (base, _), item in firsts.items():
            if base in item.bases:
                with contextlib.suppress(ImagematrixError, OSError):
                    for path in self._builder.base_layers(base, self._sources(item)):
                        self._layer(path)

    def _abandon(self, futures: Iterable[Future[Result]]) -> None:
        self._stopped = True
        for future in futures:
            future.cancel()
        self._builder.stop()

    def _one(self, item: Item, places: threading.Semaphore) -> Result:
        lost = [name for name in item.needs if name in self._results and not self._results[name].there]
        if lost:
            error = BuildError(f"{lost[0]}, which it builds on, was not built")
            result = Result(item=item, status="skipped", seconds=0, error=error)
            self._reporter.finished(result)
            return result
        with contextlib.ExitStack() as place:
            place.enter_context(places)
            if self._stopped:
                return Result(item=item, status="stopped", seconds=0)
            return self._carried_out(item, place.close)

    def _carried_out(self, item: Item, give_place: Callable[[], None]) -> Result:
        begin = time.monotonic()
        image = item.cell.image
        log = where(self._logs, image.name, image.version, item.cell.id)
        self._reporter.started(item)
        try:
            log.unlink(missing_ok=True)  # that of an earlier build would tell of another failure
            if item.status == "adopt" and not self._verify:
                result = self._adopted(item)
            else:
                result = self._built(item, log, give_place)
        except ImagematrixError as error:
            status = "stopped" if str(error) == "stopped" else "failed"
            result = Result(item=item, status=status, seconds=0, error=error)
        except OSError as error:
            result = Result(item=item, status="failed", seconds=0, error=_of_system(error))
        except Exception as error:  # noqa: BLE001 - one bad cell is one bad cell
            result = Result(item=item, status="failed", seconds=0, error=_unforeseen(error, log))
        seconds = time.monotonic() - begin
        found = os.path.isfile(log)  # noqa: PTH113 - pathlib raises OSError for some names
        result = replace(result, seconds=seconds, log=log if found else None)
        # Without an engine nothing else can be built either.
        if result.status == "failed" and (self._fail_fast or isinstance(result.error, EngineError)):
            self._stopped = True
        self._reporter.finished(result)
        return result

    def _adopted(self, item: Item) -> Result:
        digest = self._store.adopt(str(item.reference))
        return Result(item=item, status="adopted", seconds=0, digest=digest)

    def _built(self, item: Item, log: Path, give_place: Callable[[], None]) -> Result:
        sources = self._sources(item)
        flags = cache(lambda: self._compilers.flags(item, sources))
        if not self._compilers.asks(item):
            flags()  # that nobody can tell is better known before the build
        order = ordered(item, sources, flags)
        with opened(log) as file:
            try:
                return self._stored(item, order, flags, file, give_place)
            except layout.HollowError:  # the store has lost a layer that it had, or another store wants it
                return self._stored(item, replace(order, apart=True), flags, file, give_place)

    def _stored(
        self,
        item: Item,
        order: Order,
        flags: Callable[[], frozenset[str]],
        log: TextIO,
        give_place: Callable[[], None],
    ) -> Result:
        with contextlib.ExitStack() as stack:
            try:
                made = stack.enter_context(
                    self._builder.make(order, log, lambda text: self._reporter.step(item, text))
                )
            except BuildError as error:
                raise self._compilers.reason(item, error) from error
            self._snapshots.require(item.cell.image.context)
            if not self._verify:
                give_place()
            if made.layout:
                promised = labels.variant(item.cell, flags(), order.reference)
                self._audit(layout.Image(made.layout, made.digest), promised)
            if self._verify:
                self._built_again(order, made, log)
            stored = self._put(item, order, made)
            if order.reference in self._needed:  # what builds on it may take it from its layout
                self._kept.push(stack.pop_all())
        self._made[order.reference] = made
        return replace(stored, reproducible=made.layout is not None)

    def _put(self, item: Item, order: Order, made: Made) -> Result:
        """Store what was made; what is there already, and was made to be verified only, stays."""
        if item.status == "up-to-date":
            return Result(item=item, status="verified", seconds=0, digest=made.digest)
        if item.status == "adopt":
            return self._adopted(item)
        return Result(item=item, status="built", seconds=0, digest=self._store.store(order, made))

    def _built_again(self, order: Order, made: Made, log: TextIO) -> None:
        if made.layout is None:
            raise BuildError("the engine's classic image store can't tell whether an image is reproducible")
        with self._builder.make(replace(order, afresh=True), log, lambda _: None) as again:
            assert again.layout is not None  # noqa: S101 - the same builder made it; for the type checker
            found = difference(
                layout.Image(made.layout, made.digest), layout.Image(again.layout, again.digest)
            )
        if found:
            raise BuildError(f"built twice, it is not the same: {found}")

    def _sources(self, item: Item) -> Sources:
        found = {name: self._pins[name] for name in item.bases}
        for name in item.needs:
            found[name] = self._store.source(name, local=self._builder.local)
            made = self._made.get(name)
            if found[name] is None and not self._builder.local and made and made.layout:
                found[name] = f"oci-layout://{made.layout}@{made.digest}"
        images = {name: where for name, where in found.items() if where}
        context = self._snapshots.of(item.cell.image.context)
        return self._given.sources(item.cell, context, images)

    def _audit(self, image: layout.Image, promised: Variant) -> None:
        broken = contradictions(layers.contents(map(self._layer, image.layer_files)), promised)
        if broken:
            raise AuditError("; ".join(broken))

    def _layer(self, path: Path) -> layers.Layer:
        # Layers are shared by many images; each is read once.
        return self._layers(path.name, lambda: layers.read(layout.solid(path)))
