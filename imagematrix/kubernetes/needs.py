"""What a variant needs from a node, as separate conditions that a scheduler can check.

The conditions are derived from the selection's rules, not written a second time: the rules are evaluated on
sample hosts, one for each interval of driver versions, kind of kernel modules and compute capability. One GPU
per sample is enough, because every rule holds for several GPUs if it holds for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from imagematrix import record
from imagematrix.facts import cuda, gpus, requirements, versions
from imagematrix.kubernetes.labels import BRANDS, NEWEST, NONE, STATES
from imagematrix.node.host import Cpu, Driver, Gpu, Host
from imagematrix.selection.rules import RULES, cpu, device_code, driver_exact
from imagematrix.selection.target import ARCHITECTURES, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.catalog.catalog import Variant

    Version = tuple[int, ...]

__all__ = ["MODULES", "Need", "listed", "needs"]

MODULES = ("open", "proprietary", None)  # kinds of kernel modules; None is an unknown one
MACHINES = {platform: machine for machine, platform in ARCHITECTURES.items()}
# Rules about the CPU, which the fields `arch` and `flags` state.
ABOUT_CPU = frozenset({"platform", "cpu"})
NEW_PRODUCT = "26b9"  # a PCI device id that the newest driver supports: no driver is too new for it
DATA_CENTRE = "Tesla"  # a name that proves a data-centre part with any brand of one
NEWEST_DRIVER = f"{NEWEST}.0"
OLDEST: Version = (100, 0)  # lower versions are Tegra drivers, which are compared only as strings
BEYOND = 4  # major compute capabilities to evaluate beyond the greatest known one
PARTS = 4  # most numbers in a driver version
UNKNOWN_COMPUTE = -1  # in a set of capabilities, times ten: an unknown capability
LAST_MAJOR = 99
# Fields that do not affect a variant's needs of driver and GPUs, with the same values for all variants.
WITHOUT_CPU: dict[str, object] = {
    "reference": "",
    "digest": None,
    "platform": "linux/amd64",
    "cpu_flags": frozenset(),
    "signed_returns": False,
    "march": None,
    "vendor": None,
    "size": None,
    "axes": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One way for a node to fit a variant: all of its conditions have to hold.

    `arch` is as in a platform ("amd64"), `flags` are CPU flags. With `bare` the node has no GPU and no other
    accelerator. With `gpus`, every GPU has a capability in `computes` (times ten, sorted; None for any), a
    state in `states` and a brand in `brands`, is a data-centre part if `data_centre`, and is supported by the
    driver branch `branch`. The driver has the version `driver`, or is not older than `oldest` and older than
    `below`; the kind of its kernel modules is in `modules`.
    """

    arch: str
    flags: frozenset[str]
    bare: bool = False
    no_driver: bool = False
    gpus: bool = False
    computes: tuple[int, ...] | None = None
    states: tuple[str, ...] = ()
    brands: tuple[str, ...] = BRANDS
    data_centre: bool = False
    branch: int | None = None
    driver: str | None = None
    oldest: Version | None = None
    below: Version | None = None
    modules: tuple[str | None, ...] = MODULES


def needs(variant: Variant, *, allow_cpu: bool = False) -> tuple[Need, ...]:
    """Return the ways for a node to fit a variant with all its GPUs; empty if there is no way.

    A node fits if one of the ways holds. With `allow_cpu`, an image without device code may leave GPUs
    unused. Some nodes that fit match no way: nodes with different GPUs, if the image requires certain brands
    with certain capabilities (NVIDIA_REQUIRE_*). A Tegra driver matches only by its exact version.
    """
    arch = variant.platform.split("/")[1]
    sample = Target(host=_host(MACHINES.get(arch, arch), None, None), gpus=())
    flags = cpu.needed_flags(sample, variant)
    if not (variant.gpu or variant.cubins or variant.ptx):
        return (Need(arch=arch, flags=flags, bare=not allow_cpu, no_driver=bool(variant.requires)),)
    same = record.replace(variant, **WITHOUT_CPU)
    return tuple(replace(way, arch=arch, flags=flags) for way in _ways(same))


def listed(ways: Iterable[Need]) -> tuple[Need, ...]:
    """Return the needs without the conditions that hold for every GPU that NVIDIA's software lists.

    The loaded kernel modules drive these GPUs. An image's own driver of mode compat may still not support
    them, so its branch stays a condition.
    """
    some = [way for way in ways if None in way.modules]
    return _merged(
        replace(way, modules=MODULES, branch=way.branch if way.data_centre else None) for way in some
    )


@lru_cache(maxsize=1024)
def _ways(variant: Variant) -> tuple[Need, ...]:
    """Return the ways for GPUs, for any CPU."""
    exact = driver_exact.need(variant)
    own = variant.driver.version if variant.driver else None
    ways: list[Need] = []
    for span in [None] if exact else _spans(variant):
        version = exact or _text(span[0])  # type: ignore[index]  # span is None only with `exact`
        branch = versions.branch(own) if own else _newest_branch(span[1]) if span else None
        spanned = {"driver": exact} if exact else {"oldest": span[0], "below": span[1]}  # type: ignore[index]
        if not _fits(variant, (), version, None):
            continue
        for modules in MODULES:
            ways.extend(
                replace(way, branch=branch, modules=(modules,), **spanned)
                for way in _gpu_needs(variant, version, modules)
            )
    return _merged(ways)


def _gpu_needs(variant: Variant, driver: str, modules: str | None) -> Iterator[Need]:
    """Yield needs with sets of capabilities and brands: a GPU with one of each fits with this driver."""

    def fits(compute: int, brand: str, state: str = "ok") -> bool:
        return _fits(variant, (_gpu(compute, brand, state),), driver, modules)

    compat = variant.driver is not None and variant.driver.mode == "compat"
    codes, possible, asked = _codes(variant), _possible(variant), _required_facts(variant)
    # If brands matter, all known ones; otherwise OTHER represents any brand.
    some = BRANDS[:-1] if compat or "brand" in asked else BRANDS[-1:]
    groups: dict[tuple[int, ...], list[str]] = {}
    for brand in some:
        # Unless requirements name both, a brand fits with the same capabilities as another, or with none.
        before = next((one for one in groups if one), ()) if asked != {"arch", "brand"} else ()
        tried = before[:1] or possible
        served = tuple(code for code in tried if fits(code, brand))
        groups.setdefault(before if before and served else served, []).append(brand)
    for computes in filter(None, groups):
        brands = [brand for other, few in groups.items() if {*computes} <= {*other} for brand in few]
        states = tuple(state for state in STATES if fits(computes[-1], brands[0], state))
        brands = list(BRANDS) if some == BRANDS[-1:] else brands
        yield Need(
            arch="",
            flags=frozenset(),
            gpus=True,
            computes=_extended(computes, codes),
            states=states,
            brands=tuple(sorted(brands, key=BRANDS.index)),
            data_centre=compat,
        )


def _required_facts(variant: Variant) -> set[str]:
    """Return which of arch and brand the image's own requirements (NVIDIA_REQUIRE_*) name."""
    named = {
        condition.name
        for text in variant.requires
        for alternative in requirements.parse(text)
        for condition in alternative
    }
    return named & {"arch", "brand"}


def _fits(variant: Variant, passed: tuple[Gpu, ...], driver: str, modules: str | None) -> bool:
    """Whether a variant fits these GPUs; without GPUs, whether it may fit any with this driver."""
    target = Target(host=_host("x86_64", driver, modules), gpus=passed)
    return all(
        rule.holds(target, variant)
        for rule in RULES
        if rule.name not in ABOUT_CPU
        and rule.need(variant) is not None
        and (passed or rule != device_code.RULE)
    )


@lru_cache(maxsize=4096)
def _host(arch: str, driver: str | None, modules: str | None) -> Host:
    loaded = Driver(version=driver, kind=modules, source="sample") if driver else None
    none = Cpu(vendor=None, model=None, flags=frozenset(), level=None)
    return Host(arch=arch, cpu=none, driver=loaded)


@lru_cache(maxsize=8192)
def _gpu(compute: int, brand: str, state: str) -> Gpu:
    return Gpu(
        index=0,
        name=DATA_CENTRE,
        pci_device_id=NEW_PRODUCT,
        compute=None if compute == UNKNOWN_COMPUTE else f"{compute // 10}.{compute % 10}",
        brand=None if brand == NONE else brand,
        state=state,
    )


@lru_cache(maxsize=16)
def _possible(variant: Variant) -> tuple[int, ...]:
    """Return the capabilities that device code covers with the newest driver; older ones compile less PTX."""
    host = _host("x86_64", NEWEST_DRIVER, None)
    return tuple(
        code
        for code in _codes(variant)
        if device_code.RULE.holds(Target(host=host, gpus=(_gpu(code, NONE, "ok"),)), variant)
    )


def _codes(variant: Variant) -> tuple[int, ...]:
    """Return the capabilities to evaluate, times ten; those above the last behave like it."""
    releases = cuda.releases().values()
    majors = {int(target.rstrip("af")[:-1]) for release in releases for target in release.targets}
    own = {int(code.rstrip("af")[:-1]) for code in (*variant.cubins, *(ptx.target for ptx in variant.ptx))}
    last = min(max(majors | own) + BEYOND, LAST_MAJOR)
    return (UNKNOWN_COMPUTE, *range(10 * (last + 1)))


def _extended(computes: tuple[int, ...], codes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return capabilities with those above the last evaluated one; None for all, including unknown ones."""
    if computes == codes:
        return None
    further = range(codes[-1] + 1, 10 * (LAST_MAJOR + 1)) if computes[-1] == codes[-1] else ()
    return (*computes, *further)


def _spans(variant: Variant) -> Iterator[tuple[Version, Version | None]]:
    """Yield the intervals of driver versions in which no rule changes its verdict."""
    starts = sorted({start for start in (OLDEST, *_changes(variant)) if start >= OLDEST})
    for number, start in enumerate(starts):
        yield start, starts[number + 1] if number + 1 < len(starts) else None


def _changes(variant: Variant) -> Iterator[Version]:
    """Yield the driver versions at which a rule may change its verdict."""
    yield from _table_changes()
    if variant.oldest_driver:
        yield versions.order(variant.oldest_driver)
    if variant.driver and variant.driver.version:
        yield versions.order(variant.driver.version)
        for branch in variant.driver.branches:
            yield from ((branch, 0), (branch + 1, 0))
    for expression in variant.requires:
        for alternative in requirements.parse(expression):
            yield from (
                change
                for condition in alternative
                if condition.name == "driver"
                for change in _bounds(condition.value)
            )


@cache
def _table_changes() -> frozenset[Version]:
    """Return the driver versions at which the tables of CUDA releases and of GPUs may change a verdict."""
    rows = cuda.releases().values()
    listed = {text for row in rows for text in (row.toolkit_driver, row.floor) if text}
    branches = {row.branch for row in rows if row.branch}
    ended = {last + 1 for last in gpus.last_branches()}
    compressed = versions.order(cuda.COMPRESSED_FATBIN_DRIVER)
    return frozenset({compressed, *map(versions.order, listed), *((one, 0) for one in branches | ended)})


def _bounds(version: str) -> Iterator[Version]:
    """Yield the versions from which drivers are no longer less than, or equal to, one in a requirement.

    Requirements ignore trailing zeros: 535 equals 535.0.
    """
    parts = list(versions.order(version.rstrip(".")))[:PARTS]
    while parts and not parts[-1]:
        parts.pop()
    if parts:
        yield (*parts,)
        yield from ((*parts, *[0] * zeros, 1) for zeros in range(PARTS - len(parts)))


def _text(version: Version) -> str:
    """Return a driver version as text, in a form that no Tegra driver has."""
    first, *rest = (*version, 0)[: max(2, len(version))]
    return ".".join([str(first), *(f"{part:02d}" if len(rest) > 1 else str(part) for part in rest)])


def _newest_branch(below: Version | None) -> int:
    """Return the newest branch with a driver below a version, or NEWEST if there is no bound."""
    if below is None:
        return NEWEST
    return below[0] - 1 if not any(below[1:]) else below[0]


def _merged(ways: Iterable[Need]) -> tuple[Need, ...]:
    """Return the ways, joining those that differ only in the kind of modules or in adjacent intervals."""
    kinds: dict[Need, dict[str | None, None]] = {}
    for way in ways:
        kinds.setdefault(replace(way, modules=()), {}).update(dict.fromkeys(way.modules))
    joined: list[Need] = []
    limits = sorted(gpus.last_branches())
    for way, modules in kinds.items():
        one = replace(way, modules=tuple(modules))
        before = next((other for other in joined if _continues(other, one, limits)), None)
        if before is None:
            joined.append(one)
        else:
            joined[joined.index(before)] = replace(before, below=one.below, branch=one.branch)
    return tuple(joined)


def _continues(before: Need, after: Need, limits: list[int]) -> bool:
    """Whether `after` starts where `before` ends, and no GPU loses its support between their branches."""
    same = replace(before, oldest=after.oldest, below=after.below, branch=after.branch) == after
    if not same or before.below is None or before.below != after.oldest:
        return False
    ended = (limit for limit in limits if before.branch is not None and after.branch is not None)
    return not any((before.branch or 0) <= limit < (after.branch or 0) for limit in ended)
