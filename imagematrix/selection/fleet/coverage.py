"""Coverage: which hosts of a fleet a catalog serves, with which variants, and which it does not need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from imagematrix.common.record import describe_fields
from imagematrix.errors import UsageError
from imagematrix.selection.fleet.hardware_kinds import HardwareKind, get_miss, group_by_hardware
from imagematrix.selection.fleet.set_cover import find_cover
from imagematrix.selection.fleet.unserved_hosts import UnservedHosts, group_unserved
from imagematrix.selection.fleet.upgrade import Upgrade, compute_upgrades
from imagematrix.selection.fleet.variant_limit import choose_at_most, choose_for_each_number, make_demand
from imagematrix.selection.query import normalize_where
from imagematrix.selection.selector import Selector
from imagematrix.selection.variant_index import find_differing_axes, split_mask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.selection.fleet.variant_limit import LimitedChoice
    from imagematrix.selection.query import Where

SCHEMA = "imagematrix.coverage/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The use of one variant in a fleet.

    `hosts` are the names of the hosts that get it, sorted; `share` is their proportion of all hosts. `fits`
    is the number of hosts that it fits, though another variant may be better for them.
    """

    reference: str
    hosts: tuple[str, ...]
    share: float
    fits: int

    to_json = describe_fields  # an element of the Coverage document's `variants`


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestSet:
    """The smallest set of variants with a fitting one for every served host.

    No set of fewer than `least` is sufficient, which is proved. If `variants` are more, the search ended
    early, and a smaller set may exist.
    """

    variants: tuple[str, ...]
    least: int

    @property
    def exact(self) -> bool:
        """Whether no smaller set is sufficient."""
        return len(self.variants) == self.least

    def to_json(self) -> dict[str, object]:
        """Return the Coverage document's `smallest`."""
        return {"variants": list(self.variants), "exact": self.exact, "least": self.least}


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedVariants:
    """The few variants that serve the most hosts, and the best choice for each number of variants."""

    chosen: LimitedChoice
    by_number: tuple[LimitedChoice, ...]

    to_json = describe_fields  # the Coverage document's `at_most`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coverage:
    """How `catalog` serves a fleet of `hosts` hosts.

    `kinds` are the kinds of hardware in the fleet. `variants` are all variants of the catalog, sorted by the
    number of hosts that they serve, most first. `few` are the best few of them, if they were asked for.
    """

    catalog: Catalog
    hosts: int
    kinds: tuple[HardwareKind, ...]
    unserved: tuple[UnservedHosts, ...]
    variants: tuple[Service, ...]
    smallest: SmallestSet
    upgrades: tuple[Upgrade, ...] = ()
    few: LimitedVariants | None = None

    @property
    def image(self) -> str:
        """The image's name, as the catalog has it."""
        return self.catalog.image

    @property
    def version(self) -> str:
        """The image's version, as the catalog has it."""
        return self.catalog.version

    def shorten_reference(self, reference: str) -> str:
        """Return a variant's reference without the prefix that all in the catalog share."""
        return reference.removeprefix(f"{self.image}:{self.version}-")

    @property
    def served(self) -> int:
        """How many hosts get an image."""
        return sum(len(service.hosts) for service in self.variants)

    @property
    def worse(self) -> int:
        """How many hosts would get a worse variant than now from the smallest set of variants."""
        kept = {*self.smallest.variants}
        return sum(len(kind.hosts) for kind in self.kinds if kind.selected and kind.selected not in kept)

    @property
    def unused(self) -> tuple[Service, ...]:
        """The variants that no host gets."""
        return tuple(service for service in self.variants if not service.hosts)

    @property
    def complete(self) -> bool:
        """Whether every host gets an image, also of the few variants, and keeps one through every upgrade."""
        lost = any(upgrade.lost for upgrade in self.upgrades)
        return not (self.unserved or lost or (self.few and self.few.chosen.left_out))

    def to_json(self) -> dict[str, object]:
        """Return the Coverage document."""
        return {
            "schema": SCHEMA,
            "image": self.image,
            "version": self.version,
            "hosts": self.hosts,
            "served": self.served,
            "unserved": [group.to_json() for group in self.unserved],
            "unused": [service.reference for service in self.unused],
            "variants": [service.to_json() for service in self.variants],
            "smallest": self.smallest.to_json(),
            "at_most": self.few.to_json() if self.few else None,
            "upgrades": [upgrade.to_json() for upgrade in self.upgrades],
        }


def compute_coverage(
    hosts: Mapping[str, Host],
    catalog: Catalog,
    *,
    gpus: str | None = None,
    allow_cpu: bool = False,
    drivers: Mapping[str, str] | None = None,
    where: Where | None = None,
) -> Coverage:
    """Return how `catalog` serves a fleet; `hosts` maps names to hosts.

    `gpus`, `allow_cpu` and `where` are as for `select`. `drivers` maps each driver that is to be replaced to
    the new one. Each kind of hardware is decided on once. Raises UsageError if the question leaves one of the
    image's own axes open, so that the fleet would get a mix of its values.
    """
    if not hosts:
        raise UsageError("no hosts given")
    selector = Selector(catalog, normalize_where(where), keep=len(hosts))  # so that nothing is decided twice
    explain_host = partial(selector.explain_or_refuse, gpus=gpus, allow_cpu=allow_cpu)
    fleet = group_by_hardware(hosts, explain_host)
    _require_unambiguous(fleet)
    catalog = selector.query.catalog
    services = _count_services(fleet, catalog, len(hosts))

    # Among equally good variants, the smallest set has those that serve the most hosts now.
    bit = {service.reference: 1 << index for index, service in enumerate(services)}
    demands = {kind.fits for kind in fleet if kind.fits}
    cover = find_cover(sum(bit[reference] for reference in demand) for demand in demands)
    smallest = [services[member.bit_length() - 1].reference for member in split_mask(cover.members)]

    return Coverage(
        catalog=catalog,
        hosts=len(hosts),
        kinds=fleet,
        unserved=group_unserved((why, kind.hosts) for kind in fleet if (why := get_miss(kind.answer))),
        variants=services,
        smallest=SmallestSet(variants=tuple(smallest), least=cover.least),
        upgrades=compute_upgrades(fleet, explain_host, drivers or {}),
    )


def with_limit(coverage: Coverage, limit: int, *, always: Collection[str] = ()) -> Coverage:
    """Return a coverage with the at most `limit` variants that serve the most hosts and then lose least.

    The variants in `always` are among them. Raises UsageError if these are more than `limit`.
    """
    answers = [(kind.hosts, kind.answer) for kind in coverage.kinds]
    demands = [
        make_demand(hosts, answer.decision) for hosts, answer in answers if not isinstance(answer, UsageError)
    ]
    chosen = choose_at_most(demands, limit, always=always)
    return replace(
        coverage,
        few=LimitedVariants(chosen=chosen, by_number=choose_for_each_number(demands, chosen, always=always)),
    )


def _require_unambiguous(kinds: Iterable[HardwareKind]) -> None:
    """Raise UsageError if hosts would get variants that differ in one of the image's own axes."""
    chosen = []
    for kind in kinds:
        kind.require_unambiguous()
        variant = kind.variant
        chosen += [variant] if variant else []
    for axis, values in find_differing_axes(chosen).items():
        raise UsageError(
            f"the fleet would get a mix of {axis} ({', '.join(value or 'not set' for value in values)})",
            remedy=f"choose one, such as --where {axis}={values[-1]}",
        )


def _count_services(kinds: Iterable[HardwareKind], catalog: Catalog, total: int) -> tuple[Service, ...]:
    hosts: dict[str, list[str]] = {variant.reference: [] for variant in catalog.variants}
    fits = dict.fromkeys(hosts, 0)
    for kind in kinds:
        if kind.selected is not None:
            hosts[kind.selected].extend(kind.hosts)
        for reference in kind.fits:
            fits[reference] += len(kind.hosts)
    services = [
        Service(
            reference=reference, hosts=tuple(sorted(names)), share=len(names) / total, fits=fits[reference]
        )
        for reference, names in hosts.items()
    ]
    return tuple(
        sorted(services, key=lambda service: (-len(service.hosts), -service.fits, service.reference))
    )
