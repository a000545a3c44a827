"""The variants that the hosts of a fleet need: those that some host would choose, and the given ones.

The axes of an image that are not about hardware are the user's choice, so each combination of their values
is decided on separately: a host would choose one variant of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.common.groups import group_values
from imagematrix.common.record import replace
from imagematrix.selection.fleet.hardware_kinds import get_miss, group_by_hardware
from imagematrix.selection.fleet.unserved_hosts import group_unserved
from imagematrix.selection.fleet.variant_limit import choose_at_most, make_demand
from imagematrix.selection.miss import Miss
from imagematrix.selection.rule import Remedy
from imagematrix.selection.selector import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.selection.decision import Decision
    from imagematrix.selection.fleet.hardware_kinds import HardwareKind
    from imagematrix.selection.fleet.unserved_hosts import UnservedHosts
    from imagematrix.selection.fleet.variant_limit import HostDemand, LimitedChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededVariants:
    """The variants of a catalog that hosts need, by reference.

    `nearest` has for each other variant the host that fails the fewest of its rules, the first by name.
    `unserved` are the hosts that get no image of the needed ones. `limited` is the choice of at most so many
    variants, if it was limited.
    """

    variants: frozenset[str]
    nearest: Mapping[str, str]
    unserved: tuple[UnservedHosts, ...]
    limited: LimitedChoice | None = None


def find_needed_variants(
    hosts: Mapping[str, Host],
    catalog: Catalog,
    *,
    always: Collection[str] = (),
    limit: int | None = None,
) -> NeededVariants:
    """Return which variants of `catalog` the hosts need, and the variants in `always`; not more than `limit`.

    The defaults of the catalog play no part. Raises UsageError if `always` has more than `limit`.
    """
    selector = Selector(catalog.without_defaults(), keep=len(hosts))
    fleet = group_by_hardware(hosts, selector.explain)
    decisions = [
        (kind, decision)
        for axes_selector in _make_selectors(catalog)
        for kind in fleet
        if (decision := axes_selector.explain(kind.sample).decision).fits
    ]
    if limit is None:
        limited, demands = None, []
        chosen = {_get_choice(decision).reference for _, decision in decisions}
    else:
        demands = [make_demand(kind.hosts, decision) for kind, decision in decisions]
        limited = choose_at_most(demands, limit, always=always)
        chosen = {*limited.variants}
    chosen.update(always)
    unneeded = frozenset(variant.reference for variant in catalog.variants) - chosen
    misses = [(miss, kind.hosts) for kind in fleet if not kind.fits and (miss := get_miss(kind.answer))]
    if limited:
        misses += _find_excluded_hosts(demands, limited)
    return NeededVariants(
        variants=frozenset(chosen),
        nearest=_find_nearest_hosts(fleet, selector, unneeded),
        unserved=group_unserved(misses),
        limited=limited,
    )


def group_hosts_by_choice(hosts: Mapping[str, Host], catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """Return the names of the hosts that would choose each variant, by the variant's reference."""
    chosen: dict[str, set[str]] = {}
    for selector in _make_selectors(catalog):
        for name, host in hosts.items():
            decision = selector.explain(host).decision
            if decision.fits:
                chosen.setdefault(_get_choice(decision).reference, set()).add(name)
    return {reference: tuple(sorted(names)) for reference, names in chosen.items()}


def _get_choice(decision: Decision) -> Variant:
    """Return what a host gets; of those that cannot be told apart, one is as good as another."""
    return decision.variant or decision.ranked[0]


def _make_selectors(catalog: Catalog) -> list[Selector]:
    """Return a selector for each combination of the image's own axes."""
    groups = group_values((variant.axes, variant) for variant in catalog.variants)
    return [Selector(replace(catalog, variants=tuple(group)).without_defaults()) for group in groups.values()]


def _find_excluded_hosts(
    demands: Iterable[HostDemand], limited: LimitedChoice
) -> list[tuple[Miss, tuple[str, ...]]]:
    kept = frozenset(limited.variants)
    misses = []
    for demand in demands:
        if demand.find_loss(kept) is None:
            best, _ = demand.fits[0]
            why = f"it fits none of the variants that are kept; of all, it would get {best}"
            misses.append((Miss(why=why, remedy=Remedy(words="raise --at-most")), demand.hosts))
    return misses


def _find_nearest_hosts(
    fleet: Iterable[HardwareKind], selector: Selector, variants: frozenset[str]
) -> dict[str, str]:
    """Return for each variant the first host of those that fail the fewest of its rules."""
    fleet_failures = [(kind.hosts[0], selector.explain(kind.sample).decision.by_failures) for kind in fleet]
    nearest: dict[str, str] = {}
    for count in range(max((len(by_failures) for _, by_failures in fleet_failures), default=0)):
        for host, by_failures in fleet_failures:
            remaining = variants.difference(nearest)
            nearest |= dict.fromkeys(sorted(remaining & by_failures[count]), host)
    return nearest
