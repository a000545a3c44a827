"""Needs as device selectors for this driver: CEL about one device with the attributes in `dra/slices`.

They compare drivers as texts, and all facts of a GPU that rules read. CPUs are not devices: node affinity
covers CPU needs. To read an attribute that a device lacks is an error, for which the scheduler gives up the
node. A selector has at most 10 KiB (CELSelectorExpressionMaxLength), so the attributes have a short name.
"""

from __future__ import annotations

from imagematrix.integrations.kubernetes.dra.slices import ATTRIBUTES, DRIVER
from imagematrix.integrations.kubernetes.nodes import labels
from imagematrix.integrations.kubernetes.workloads.devices import between, either, semver
from imagematrix.selection.needs.grid import runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.selection.needs.need import Need

__all__ = ["NAME", "selector"]

NAME = "gpu"  # of the attributes, within a selector


def selector(needs: Iterable[Need]) -> str | None:
    """Return the CEL expression that admits a GPU if it meets what one of the needs asks of a GPU.

    None if a need asks for no GPU. Drivers with four numbers, and those of Tegra, are in no order here.
    """
    ways = [*needs]
    if not ways or not all(need.gpus for need in ways):
        return None
    groups = dict.fromkeys(tuple(_conditions(need)) for need in ways if need.loaded is not False)
    alternatives = [" && ".join(conditions) or "true" for conditions in groups]
    if not alternatives:
        return "false"
    return f'device.driver == "{DRIVER}" && cel.bind({NAME}, {ATTRIBUTES}, {either(alternatives)})'


def _conditions(need: Need) -> Iterator[str]:
    yield from _driver(need)
    yield from _computes(need)
    if need.states:
        yield f"{_attribute('state')} in [{_quoted(need.states)}]"
    yield from _one_of("brand", need.brands, labels.NONE)
    if need.data_centre:
        yield _attribute("dataCentre")
    if need.limit is not None:
        yield f"({_lacks('lastDriverBranch')} || {_attribute('lastDriverBranch')} >= {need.limit})"


def _driver(need: Need) -> Iterator[str]:
    driver, version = _attribute("driver"), _attribute("driverVersion")
    if need.driver or need.other_than:
        yield _has("driver")
    if need.driver:
        yield f'{driver} == "{need.driver}"'
    if need.oldest or need.below:
        yield _has("driverVersion")
    if need.oldest:
        yield f"{version}.compareTo({semver(need.oldest)}) >= 0"
    if need.below:
        yield f"{version}.compareTo({semver(need.below)}) < 0"
    for other in sorted(need.other_than):
        yield f'{driver} != "{other}"'
    yield from _one_of("kernelModules", need.modules, None)
    if need.differs is not None:
        known = _has("userModeDriver")
        differs = f"{_attribute('userModeDriver')} != {driver}"
        yield f"({known} && {differs})" if need.differs else f"!({known} && {differs})"


def _computes(need: Need) -> Iterator[str]:
    if need.computes is None:
        return
    name = "cudaComputeCapability"
    codes = [code for code in need.computes if code >= 0]
    known = [" && ".join((_has(name), *between(_attribute(name), *run))) for run in runs(codes)]
    unknown = [_lacks(name)] if len(codes) < len(need.computes) else []
    yield either([*known, *unknown]) if known or unknown else "false"


def _one_of(name: str, values: tuple[str | None, ...] | None, absent: str | None) -> Iterator[str]:
    """Yield the condition that an attribute has one of some values; `absent` means that there is none."""
    if values is None:
        return
    some = [value for value in values if value not in (absent, labels.OTHER)]
    alternatives = [f"{_has(name)} && {_attribute(name)} in [{_quoted(some)}]"] if some else []
    if absent in values:
        alternatives.append(_lacks(name))
    if labels.OTHER in values:
        others = [brand for brand in labels.BRANDS[:-2] if brand not in values]
        alternatives.append(f"{_has(name)} && !({_attribute(name)} in [{_quoted(others)}])")
    yield either(alternatives)


def _attribute(name: str) -> str:
    return f"{NAME}.{name}"


def _has(name: str) -> str:
    return f'"{name}" in {NAME}'


def _lacks(name: str) -> str:
    return f"!({_has(name)})"


def _quoted(words: Iterable[str | None]) -> str:
    return ", ".join(f'"{word}"' for word in words)
