"""Carrying out a plan: refused changes, builds, and results in order."""

from __future__ import annotations

from imagematrix.builder.maker import Maker
from imagematrix.builder.result import BuildStatus, Result
from imagematrix.builder.session import Session
from imagematrix.errors import TagMovedError, UsageError
from imagematrix.planning.context import Snapshots, settle
from imagematrix.planning.naming import naming
from imagematrix.planning.plan import PlanStatus
from imagematrix.scratch import scratch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from imagematrix.audit.layers import Layers
    from imagematrix.builder.session import Reporter
    from imagematrix.planning.backend import Builder, Store
    from imagematrix.planning.plan import Plan, Planned

__all__ = ["build"]

SHOWN = 5  # cells listed in a message before "and N more"


def build(  # noqa: PLR0913 - the plan, builder and store, and the command's options
    plan: Plan,
    builder: Builder,
    store: Store,
    *,
    jobs: int,
    logs: Path,
    reporter: Reporter,
    layers: Layers,
    fail_fast: bool = False,
    verify: bool = False,
) -> list[Result]:
    """Build or adopt the images of `plan`, `jobs` at a time, each with a log in the folder `logs`.

    With more than one job, an image is audited and stored while the next is built. With `verify` everything
    is built twice, even up-to-date images, and fails if the bytes differ. An image is built after the images
    it builds on, and skipped if one of them was not built.

    Returns the results in the order of the plan. Raises TagMovedError before anything is built if an image
    of the same version and cell exists but was built from other inputs. With `fail_fast` the first failure
    stops the remaining cells, as a lost engine always does. An interrupt ends the running builds before it
    propagates; the `reporter` has the results then.
    """
    refused = plan.with_status(PlanStatus.REFUSED)
    if refused:
        raise _moved(refused)
    failed = [
        Result(item=item, status=BuildStatus.FAILED, error=UsageError(str(item.why)))
        for item in plan.with_status(PlanStatus.FAILED)
    ]
    for result in failed:
        reporter.finished(result)
    verified = [PlanStatus.UP_TO_DATE] if verify else []
    items = plan.with_status(PlanStatus.BUILD, PlanStatus.ADOPT, *verified)
    if not items:
        return failed
    try:
        settle(logs.parent)
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    plan.given.require_all(item.cell.image for item in items if verify or item.status is PlanStatus.BUILD)
    with scratch() as folder:
        snapshots = Snapshots(folder, plan.contexts, logs.parent)
        with Maker(items, plan, snapshots, builder, store, layers, verify=verify) as maker:
            session = Session(items, maker, builder, reporter, logs, fail_fast=fail_fast)
            results = [*failed, *session.run(jobs)]
    place = {id(item): number for number, item in enumerate(plan.items)}
    return sorted(results, key=lambda result: place[id(result.item)])


def _moved(refused: Sequence[Planned]) -> TagMovedError:
    name = naming(refused)
    lines = [
        f"{name(item)}: {item.why}\n    existing  {item.difference.reference}\n    new       {item.reference}"
        for item in refused[:SHOWN]
        if item.difference
    ]
    more = f"\n  and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
    return TagMovedError(
        "a version never changes, and these cells would change:\n  " + "\n  ".join(lines) + more,
        remedy="raise the version in matrix.yaml, or revert the change",
    )
