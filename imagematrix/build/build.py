"""Carrying out a plan: a bounded pool of builds, where a cell that fails costs no other cell."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from imagematrix.audit import layers
from imagematrix.audit.audit import contradictions
from imagematrix.build import labels, layout
from imagematrix.build.backend import Order
from imagematrix.build.compiler import Compilers
from imagematrix.build.naming import naming
from imagematrix.errors import (
    AuditError,
    BuildError,
    EngineError,
    ImagematrixError,
    TagMovedError,
    UsageError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from imagematrix.build.backend import Backend, Made
    from imagematrix.build.plan import Item, Plan
    from imagematrix.catalog.catalog import Variant

__all__ = ["SCHEMA", "Reporter", "Result", "build", "failure", "ordered", "report"]

SCHEMA = "imagematrix.build/v1"
SHOWN = 5  # cells that a message names before it says how many more


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one cell: `status` is "built", "failed" or "stopped".

    `log` is None where the cell failed before its build began.
    """

    item: Item
    status: str
    seconds: float
    digest: str | None = None
    reproducible: bool = False
    log: Path | None = None
    error: ImagematrixError | None = None


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


def build(
    plan: Plan, backend: Backend, *, jobs: int, logs: Path, reporter: Reporter, fail_fast: bool = False
) -> list[Result]:
    """Build what `plan` says is to be built, `jobs` at a time, each with a log in the folder `logs`.

    Returns the results in the order of the plan. Raises TagMovedError before anything is built where an image
    of the same version and cell is there but made of something else. With `fail_fast` the first failure
    stops the rest, as the loss of the engine always does. Interrupted, it ends the builds that run before it
    lets the interrupt through.
    """
    refused = plan.with_status("refused")
    if refused:
        raise _moved(refused)
    items = plan.with_status("build")
    if not items:
        return []
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    session = _Session(backend, logs, reporter, Compilers(items, backend))
    return session.run(items, jobs, fail_fast=fail_fast)


def ordered(item: Item, flags: frozenset[str]) -> Order:
    """Return the image to make for a planned item; `flags` are the CPU flags its code needs."""
    return Order(
        reference=str(item.reference),
        dockerfile=item.dockerfile,
        context=item.cell.image.context,
        platform=item.cell.platform,
        labels=labels.for_item(item, flags),
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
    return AuditError(message) if kinds == {AuditError} else BuildError(message)


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
        f"{name(item)}: {', '.join(item.changed)} changed\n"
        f"    there is   {item.instead}\n"
        f"    this gives {item.reference}"
        for item in refused[:SHOWN]
    ]
    more = f"\n  and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
    return TagMovedError(
        "a version never changes, and these cells would:\n  " + "\n  ".join(lines) + more,
        remedy="raise the version in matrix.yaml, or take the change back",
    )


class _Session:
    """One run of the pool."""

    def __init__(self, backend: Backend, logs: Path, reporter: Reporter, compilers: Compilers) -> None:
        self._backend = backend
        self._logs = logs
        self._reporter = reporter
        self._compilers = compilers
        self._layers: dict[str, layers.Layer] = {}
        self._lock = threading.Lock()

    def run(self, items: Sequence[Item], jobs: int, *, fail_fast: bool) -> list[Result]:
        with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="build") as pool:
            futures: list[Future[Result]] = []
            try:
                futures += (pool.submit(self._one, item) for item in items)
                self._wait(futures, fail_fast=fail_fast)
            except BaseException:
                self._abandon(futures)
                raise
        stopped = [Result(item=item, status="stopped", seconds=0) for item in items]
        return [
            found if future.cancelled() else future.result()
            for found, future in zip(stopped, futures, strict=True)
        ]

    def _wait(self, futures: list[Future[Result]], *, fail_fast: bool) -> None:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            failed = [result for result in (future.result() for future in done) if result.status == "failed"]
            # Without an engine nothing else can be built either.
            if any(fail_fast or isinstance(result.error, EngineError) for result in failed):
                self._abandon(futures)
                return

    def _abandon(self, futures: list[Future[Result]]) -> None:
        for future in futures:
            future.cancel()
        self._backend.stop()

    def _one(self, item: Item) -> Result:
        begin = time.monotonic()
        image = item.cell.image
        log = self._logs / f"{image.name.replace('/', '_')}-{image.version}-{item.cell.id}.log"
        self._reporter.started(item)
        digest, reproducible, error = None, False, None
        try:
            log.unlink(missing_ok=True)  # that of an earlier build would tell of another failure
            made = self._make(item, log)
            digest, reproducible = made.digest, made.layout is not None
        except ImagematrixError as problem:
            error = problem
        except OSError as problem:  # no space left for the log, say
            error = BuildError(str(problem))
        result = Result(
            item=item,
            status="built" if error is None else "stopped" if str(error) == "stopped" else "failed",
            seconds=time.monotonic() - begin,
            digest=digest,
            reproducible=reproducible,
            log=log if log.is_file() else None,
            error=error,
        )
        self._reporter.finished(result)
        return result

    def _make(self, item: Item, log: Path) -> Made:
        flags = self._compilers.flags(item)
        order = ordered(item, flags)
        promised = labels.variant(item.cell, flags, order.reference)
        with (
            log.open("w", encoding="utf-8") as file,
            self._backend.make(order, file, lambda text: self._reporter.step(item, text)) as made,
        ):
            if made.layout:
                self._audit(layout.Image(made.layout, made.digest), promised)
            self._backend.store(order, made)
        if item.instead:
            self._backend.remove(item.instead)
        return made

    def _audit(self, image: layout.Image, promised: Variant) -> None:
        broken = contradictions(layers.contents(map(self._layer, image.layer_files)), promised)
        if broken:
            raise AuditError("; ".join(broken))

    def _layer(self, path: Path) -> layers.Layer:
        # Layers are shared by many images; each is read once.
        with self._lock:
            if path.name not in self._layers:
                self._layers[path.name] = layers.read(path)
            return self._layers[path.name]
