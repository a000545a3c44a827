"""All checks of a plan, and the hosts that its cells serve."""

from __future__ import annotations

from imagematrix.catalog.catalog import Catalog
from imagematrix.errors import UsageError
from imagematrix.outdated import checks
from imagematrix.outdated.finding import affecting
from imagematrix.outdated.wheels import wheels
from imagematrix.planning import flags, labels
from imagematrix.planning.plan import Planned
from imagematrix.selection.select import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Host
    from imagematrix.outdated.finding import AgeFinding
    from imagematrix.planning.plan import Plan

__all__ = ["outdated"]


def outdated(
    plan: Plan,
    locked: Mapping[str, str],
    hosts: Mapping[str, Host],
    today: dt.date,
    policy: Path | None = None,
) -> list[AgeFinding]:
    """Return what is outdated or unknown of a plan; `locked` are the digests of its bases.

    Each finding names the `hosts` that would choose one of its cells, by what the cells claim.
    Catalogs have to satisfy `policy`, the user's policy of signatures, or are unknown.
    """
    items = [item for item in plan.items if isinstance(item, Planned)]
    findings = [
        *checks.bases(items, locked),
        *checks.drivers(items, today),
        *checks.toolkits(items, policy),
        *wheels(items),
    ]
    return affecting(findings, _chosen(items, hosts) if hosts else {})


def _chosen(items: Sequence[Planned], hosts: Mapping[str, Host]) -> dict[str, list[str]]:
    """Return the hosts that choose each cell, by its reference."""
    by_version: dict[tuple[str, str], list[Variant]] = {}
    for item in items:
        image, march = item.cell.image, item.cell.axes.get("march")
        try:
            needed = flags.from_table(item.cell, march) if march else frozenset()
        except UsageError:  # only its compiler tells, so no host is known to choose it
            continue
        variant = labels.variant(item.cell, needed, item.reference)
        by_version.setdefault((image.name, image.version), []).append(variant)
    chosen: dict[str, list[str]] = {}
    for (image_name, version), variants in by_version.items():
        catalog = Catalog(image=image_name, version=version, variants=tuple(variants))
        selector = Selector(catalog, keep=len(hosts))
        for name, host in hosts.items():
            found = selector.explain(host)
            for reference in [found.selected] if found.selected else found.fits:
                chosen.setdefault(reference, []).append(name)
    return chosen
