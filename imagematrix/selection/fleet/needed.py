"""The variants that the hosts of a fleet need: those that some host would choose, and the given ones.

The axes of an image that are not about hardware are the user's choice, so each combination of their values
is decided on separately: a host would choose one variant of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.common.record import replace
from imagematrix.selection.fleet.at_most import at_most, demand
from imagematrix.selection.fleet.kinds import kinds, miss
from imagematrix.selection.fleet.unserved import unserved
from imagematrix.selection.miss import Miss
from imagematrix.selection.rule import Remedy
from imagematrix.selection.select import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.selection.decision import Decision
    from imagematrix.selection.fleet.at_most import AtMost, HostDemand
    from imagematrix.selection.fleet.kinds import Kind
    from imagematrix.selection.fleet.unserved import Unserved

__all__ = ["Needed", "choosing", "needed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The variants of a catalog that hosts need, by reference.

    `nearest` has for each other variant the host that fails the fewest of its rules, the first by name.
    `unserved` are the hosts that get no image of the needed ones. `limited` is the choice of at most so many
    variants, if it was limited.
    """

    variants: frozenset[str]
    nearest: Mapping[str, str]
    unserved: tuple[Unserved, ...]
    limited: AtMost | None = None


def needed(
    hosts: Mapping[str, Host],
    catalog: Catalog,
    *,
    always: Collection[str] = (),
    limit: int | None = None,
) -> Needed:
    """Return which variants of `catalog` the hosts need, and the variants in `always`; not more than `limit`.

    The defaults of the catalog play no part. Raises UsageError if `always` has more than `limit`.
    """
    whole = Selector(replace(catalog, defaults=()), keep=len(hosts))
    fleet = kinds(hosts, whole.explain)
    decisions = [
        (kind, decision)
        for selector in _selectors(catalog)
        for kind in fleet
        if (decision := selector.explain(kind.sample).decision).fits
    ]
    if limit is None:
        limited, demands = None, []
        chosen = {_choice(decision).reference for _, decision in decisions}
    else:
        demands = [demand(kind.hosts, decision) for kind, decision in decisions]
        limited = at_most(demands, limit, always=always)
        chosen = {*limited.variants}
    chosen.update(always)
    others = frozenset(variant.reference for variant in catalog.variants) - chosen
    misses = [(why, kind.hosts) for kind in fleet if not kind.fits and (why := miss(kind.answer))]
    if limited:
        misses += _left_out(demands, limited)
    return Needed(
        variants=frozenset(chosen),
        nearest=_nearest(fleet, whole, others),
        unserved=unserved(misses),
        limited=limited,
    )


def choosing(hosts: Mapping[str, Host], catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """Return the hosts that would choose each variant, by its reference, as `needed` decides."""
    chosen: dict[str, set[str]] = {}
    for selector in _selectors(catalog):
        for name, host in hosts.items():
            decision = selector.explain(host).decision
            if decision.fits:
                chosen.setdefault(_choice(decision).reference, set()).add(name)
    return {reference: tuple(sorted(names)) for reference, names in chosen.items()}


def _choice(decision: Decision) -> Variant:
    """Return what a host gets; of those that cannot be told apart, one is as good as another."""
    return decision.variant or decision.ranked[0]


def _selectors(catalog: Catalog) -> list[Selector]:
    """Return a selector for each combination of the image's own axes."""
    groups: dict[object, list[Variant]] = {}
    for variant in catalog.variants:
        groups.setdefault(variant.axes, []).append(variant)
    return [Selector(replace(catalog, variants=tuple(some), defaults=())) for some in groups.values()]


def _left_out(demands: Iterable[HostDemand], limited: AtMost) -> list[tuple[Miss, tuple[str, ...]]]:
    kept = frozenset(limited.variants)
    return [
        (
            Miss(
                why=f"it fits none of the variants that are kept; of all, it would get {one.fits[0][0]}",
                remedy=Remedy(words="raise --at-most"),
            ),
            one.hosts,
        )
        for one in demands
        if one.lost(kept) is None
    ]


def _nearest(fleet: Iterable[Kind], whole: Selector, variants: frozenset[str]) -> dict[str, str]:
    """Return for each variant the first host of those that fail the fewest of its rules."""
    by_failures = [(kind.hosts[0], whole.explain(kind.sample).decision.by_failures) for kind in fleet]
    nearest: dict[str, str] = {}
    for failures in range(max((len(some) for _, some in by_failures), default=0)):
        for host, some in by_failures:
            left = variants.difference(nearest)
            nearest |= dict.fromkeys(sorted(left & some[failures]), host)
    return nearest
