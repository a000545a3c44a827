"""The outcome of a build: results, one error for all, and the Build document."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from imagematrix.build.plan.plan import Planned, PlanStatus, make_item_namer
from imagematrix.common.text import shorten_words
from imagematrix.errors import AuditError, BuildError, EngineError, ImagematrixError, TagMovedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.build.executor.image_tester import ImageTester, ImageTestResult
    from imagematrix.build.plan.plan import Plan

SCHEMA = "imagematrix.build/v1"
ENGINE = "engine"  # the compression of images whose layers the engine compresses when it pushes them
SHOWN = 5  # cells listed in a message before "…"


class BuildStatus(StrEnum):
    """The outcome of a cell that was to be built."""

    BUILT = "built"
    ADOPTED = "adopted"
    VERIFIED = "verified"
    TESTED = "tested"  # it was up to date, and its test ran
    FAILED = "failed"
    SKIPPED = "skipped"  # an image it builds on was not built
    STOPPED = "stopped"


class BuildStage(StrEnum):
    """What is done for the image of a cell, in this order."""

    PROMISE = "promise"  # and finding the sources of the build
    BUILD = "build"
    AUDIT = "audit"
    LABEL = "label"
    TEST = "test"
    STORE = "store"


STORED_STATUSES = (BuildStatus.BUILT, BuildStatus.ADOPTED, BuildStatus.VERIFIED, BuildStatus.TESTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one cell, after `seconds`.

    `log` is None if the cell failed before its build began. `warnings` are those of its audit. `compression`
    is that of the layers that the build added, or ENGINE, or None if nothing was built; `libzstd` is the
    version of libzstd that compressed them. `labels` are those of a new image. Results of its steps may be
    from an `imported_cache`. `test` is what came of its test, if it has one. `stage` is the one that failed.
    """

    item: Planned
    status: BuildStatus
    seconds: float = 0
    digest: str | None = None
    reproducible: bool = False
    log: Path | None = None
    error: ImagematrixError | None = None
    warnings: tuple[str, ...] = ()
    compression: str | None = None
    libzstd: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    imported_cache: bool = False
    test: ImageTestResult | None = None
    stage: BuildStage | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the image is in the store now."""
        return self.status in STORED_STATUSES


def complete_results(items: Iterable[Planned], results: Iterable[Result]) -> list[Result]:
    """Return the results of `items`, in order; items without a result were stopped."""
    by_item = {id(result.item): result for result in results}
    return [by_item.get(id(item)) or Result(item=item, status=BuildStatus.STOPPED) for item in items]


def combine_failures(results: Sequence[Result]) -> ImagematrixError | None:
    """Return the error that represents all failed results, or None."""
    failed = [result for result in results if result.status is BuildStatus.FAILED]
    if not failed:
        return None
    for result in failed:
        if isinstance(result.error, EngineError):
            return result.error
    name = make_item_namer(result.item for result in results)
    names = shorten_words([name(result.item) for result in failed], SHOWN, more=", …")
    message = f"{len(failed)} of {len(results)} builds failed: {names}"
    kinds = {type(result.error) for result in failed}
    if ImagematrixError in kinds:  # an unexpected error
        return ImagematrixError(message)
    kind = kinds.pop() if len(kinds) == 1 else BuildError
    return kind(message) if kind in (AuditError, TagMovedError) else BuildError(message)


def make_build_document(
    plan: Plan,
    results: Sequence[Result],
    fatal: str | None = None,
    tester: ImageTester | None = None,
) -> dict[str, object]:
    """Return the Build document: every cell of the plan with its outcome.

    `fatal` is the error that ended the build as a whole. The `tester` knows what came of
    the tests of images that were up to date.
    """
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
                "compression": result.compression,
                "libzstd": result.libzstd,
                "log": str(result.log) if result.log else None,
                "error": str(result.error) if result.error else None,
                "warnings": list(result.warnings),
                "imported_cache": result.imported_cache,
                **({"stage": result.stage} if result.stage else {}),
            }
        if result and result.status is not BuildStatus.VERIFIED:
            test = result.test
        elif tester and isinstance(item, Planned) and item.status is PlanStatus.UP_TO_DATE:
            test = tester.find_known_result(item)
        else:
            test = None
        cells.append(entry | {"test": test.to_json() if test else None})
    return {"schema": SCHEMA, "shard": plan.shard, "error": fatal, "for": plan.hosts, "cells": cells}
