"""Coverage: which hosts of a fleet a catalog serves, with which variants, and which it does not need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.errors import UsageError
from imagematrix.selection.fleet.at_most import at_most, by_number, demand
from imagematrix.selection.fleet.cover import cover
from imagematrix.selection.fleet.kinds import Kind, kinds, miss
from imagematrix.selection.fleet.unserved import Unserved, unserved
from imagematrix.selection.fleet.upgrade import Upgrade, upgrade
from imagematrix.selection.index import bits, differing
from imagematrix.selection.question import asked
from imagematrix.selection.select import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.selection.fleet.at_most import AtMost
    from imagematrix.selection.fleet.kinds import Answer
    from imagematrix.selection.question import Where

__all__ = ["SCHEMA", "Coverage", "Few", "Service", "Smallest", "Unserved", "Upgrade", "coverage", "with_few"]

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

    def to_json(self) -> dict[str, object]:
        """Return one element of the Coverage document's `variants`."""
        return {
            "reference": self.reference,
            "hosts": list(self.hosts),
            "share": self.share,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
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
class Few:
    """The few variants that serve the most hosts, and the best choice for each number of variants."""

    chosen: AtMost
    by_number: tuple[AtMost, ...]

    def to_json(self) -> dict[str, object]:
        """Return the Coverage document's `at_most`."""
        return {"chosen": self.chosen.to_json(), "by_number": [one.to_json() for one in self.by_number]}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coverage:
    """How `catalog` serves a fleet of `hosts` hosts.

    `kinds` are the kinds of hardware in the fleet. `variants` are all variants of the catalog, sorted by the
    number of hosts that they serve, most first. `few` are the best few of them, if they were asked for.
    """

    catalog: Catalog
    hosts: int
    kinds: tuple[Kind, ...]
    unserved: tuple[Unserved, ...]
    variants: tuple[Service, ...]
    smallest: Smallest
    upgrades: tuple[Upgrade, ...] = ()
    few: Few | None = None

    @property
    def image(self) -> str:
        """The image's name, as the catalog has it."""
        return self.catalog.image

    @property
    def version(self) -> str:
        """The image's version, as the catalog has it."""
        return self.catalog.version

    def short(self, reference: str) -> str:
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
            "unserved": [unserved.to_json() for unserved in self.unserved],
            "unused": [service.reference for service in self.unused],
            "variants": [service.to_json() for service in self.variants],
            "smallest": self.smallest.to_json(),
            "at_most": self.few.to_json() if self.few else None,
            "upgrades": [upgrade.to_json() for upgrade in self.upgrades],
        }


def coverage(
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
    selector = Selector(catalog, asked(where), keep=len(hosts))  # so that nothing is decided twice

    def answer(host: Host) -> Answer:
        try:
            return selector.explain(host, gpus=gpus, allow_cpu=allow_cpu)
        except UsageError as error:
            return error

    fleet = kinds(hosts, answer)
    _require_unambiguous(fleet)
    catalog = selector.question.catalog
    variants = _services(fleet, catalog, len(hosts))
    return Coverage(
        catalog=catalog,
        hosts=len(hosts),
        kinds=fleet,
        unserved=unserved((why, kind.hosts) for kind in fleet if (why := miss(kind.answer))),
        variants=variants,
        smallest=_smallest({kind.fits for kind in fleet if kind.fits}, variants),
        upgrades=tuple(upgrade(fleet, answer, old, new) for old, new in sorted((drivers or {}).items())),
    )


def with_few(coverage: Coverage, limit: int, *, always: Collection[str] = ()) -> Coverage:
    """Return a coverage with the at most `limit` variants that serve the most hosts and then lose least.

    The variants in `always` are among them. Raises UsageError if these are more than `limit`.
    """
    answers = [(kind.hosts, kind.answer) for kind in coverage.kinds]
    demands = [
        demand(hosts, answer.decision) for hosts, answer in answers if not isinstance(answer, UsageError)
    ]
    chosen = at_most(demands, limit, always=always)
    return replace(coverage, few=Few(chosen=chosen, by_number=by_number(demands, chosen, always=always)))


def _require_unambiguous(kinds: Iterable[Kind]) -> None:
    """Raise UsageError if hosts would get variants that differ in one of the image's own axes."""
    chosen = []
    for kind in kinds:
        if isinstance(kind.answer, UsageError):
            continue
        ambiguity = kind.answer.decision.ambiguity
        if ambiguity:
            raise UsageError(f"{kind.hosts[0]}: {ambiguity[0]}", remedy=ambiguity[1].shown)
        chosen += [kind.answer.variant] if kind.answer.variant else []
    for axis, values in differing(chosen).items():
        raise UsageError(
            f"the fleet would get a mix of {axis} ({', '.join(value or 'not set' for value in values)})",
            remedy=f"choose one, such as --where {axis}={values[-1]}",
        )


def _services(kinds: Iterable[Kind], catalog: Catalog, total: int) -> tuple[Service, ...]:
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
    return tuple(sorted(services, key=lambda one: (-len(one.hosts), -one.fits, one.reference)))


def _smallest(demands: Iterable[frozenset[str]], variants: tuple[Service, ...]) -> Smallest:
    """Return the smallest set; among equally good variants, those are taken that serve the most hosts now."""
    bit = {service.reference: 1 << index for index, service in enumerate(variants)}
    smallest = cover(sum(bit[reference] for reference in demand) for demand in demands)
    chosen = [variants[member.bit_length() - 1].reference for member in bits(smallest.members)]
    return Smallest(variants=tuple(chosen), least=smallest.least)
