"""All checks of a plan."""

from __future__ import annotations

from imagematrix.build.outdated import checks
from imagematrix.build.outdated.finding import add_affected_hosts
from imagematrix.build.outdated.wheels import check_wheels
from imagematrix.build.plan.plan import Planned

TYPE_CHECKING = False
if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.build.outdated.finding import AgeFinding
    from imagematrix.build.outdated.indexes import PackageIndex
    from imagematrix.build.plan.plan import Plan


def find_outdated(
    plan: Plan,
    locked: Mapping[str, str],
    chosen: Mapping[str, Sequence[str]],
    today: dt.date,
    indexes: Callable[[str], tuple[PackageIndex, ...]],
    policy: Path | None = None,
) -> list[AgeFinding]:
    """Return what is outdated or unknown of a plan; `locked` are the digests of its bases.

    `chosen` are the hosts that would choose each cell, by the cell's reference without an input digest.
    `indexes` returns the package indexes for the text of a lock. Catalogs have to satisfy `policy`, the
    user's policy of signatures, or are unknown.
    """
    items = [item for item in plan.items if isinstance(item, Planned)]
    findings = [
        *checks.check_bases(items, locked),
        *checks.check_drivers(items, today),
        *checks.check_toolkits(items, policy),
        *check_wheels(items, indexes),
    ]
    return add_affected_hosts(findings, chosen)
