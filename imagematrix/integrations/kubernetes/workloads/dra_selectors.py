"""Needs as device selectors for this driver: CEL about one device with the attributes in `dra/slices`.

They compare drivers as texts, and all facts of a GPU that rules read. CPUs are not devices: node affinity
covers CPU needs. To read an attribute that a device lacks is an error, for which the scheduler gives up the
node. Selectors have a limit on their length, so the attributes have a short name.
"""

from __future__ import annotations

from imagematrix.integrations.kubernetes.dra.slices import ATTRIBUTES, DRIVER
from imagematrix.integrations.kubernetes.nodes import labels
from imagematrix.integrations.kubernetes.workloads.nvidia_dra_selectors import (
    join_alternatives,
    join_groups,
    make_semver,
    match_compute_between,
)
from imagematrix.selection.needs.grid import find_intervals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.selection.needs.need import Need

NAME = "gpu"  # of the attributes, within a selector


def make_selector(needs: Iterable[Need]) -> str | None:
    """Return the CEL expression that admits a GPU if it meets what one of the needs asks of a GPU.

    None if a need asks for no GPU. Drivers with four numbers, and those of Tegra, are in no order here.
    """
    needs = tuple(needs)
    if not needs or not all(need.gpus for need in needs):
        return None
    groups = dict.fromkeys(tuple(_make_conditions(need)) for need in needs if need.loaded is not False)
    if not groups:
        return "false"
    return f'device.driver == "{DRIVER}" && cel.bind({NAME}, {ATTRIBUTES}, {join_groups([*groups])})'


def _make_conditions(need: Need) -> Iterator[str]:
    yield from _match_driver(need)
    if need.computes is not None:
        name = "cudaComputeCapability"
        codes = [code for code in need.computes if code >= 0]
        alternatives = [
            " && ".join(match_compute_between(_get_attribute(name), *interval)) or "true"
            for interval in find_intervals(codes)
        ]
        if len(codes) == len(need.computes):
            yield _match_attribute(name)
        else:  # an unknown capability is allowed
            alternatives = [f"{_match_attribute(name)} && {join_alternatives(alternatives)}"] if codes else []
            alternatives.append(_match_no_attribute(name))
        yield join_alternatives(alternatives) if alternatives else "false"
    if need.states:
        yield f"{_get_attribute('state')} in [{_quote_words(need.states)}]"
    yield from _match_one_of("brand", need.brands, labels.NONE)
    if need.data_centre:
        yield _get_attribute("dataCentre")
    if need.limit is not None:
        branch = "lastDriverBranch"
        yield f"({_match_no_attribute(branch)} || {_get_attribute(branch)} >= {need.limit})"
    if need.memory_mib is not None:
        yield f"{_match_attribute('memoryMib')} && {_get_attribute('memoryMib')} >= {need.memory_mib}"


def _match_driver(need: Need) -> Iterator[str]:
    driver, version = _get_attribute("driver"), _get_attribute("driverVersion")
    if need.driver or need.other_than:
        yield _match_attribute("driver")
    if need.driver:
        yield f'{driver} == "{need.driver}"'
    if need.oldest or need.below:
        yield _match_attribute("driverVersion")
    if need.oldest:
        yield f"{version}.compareTo({make_semver(need.oldest)}) >= 0"
    if need.below:
        yield f"{version}.compareTo({make_semver(need.below)}) < 0"
    for version_text in sorted(need.other_than):
        yield f'{driver} != "{version_text}"'
    yield from _match_one_of("kernelModules", need.modules, None)
    if need.differs is not None:
        is_known = _match_attribute("userModeDriver")
        differs = f"{_get_attribute('userModeDriver')} != {driver}"
        yield f"({is_known} && {differs})" if need.differs else f"!({is_known} && {differs})"


def _match_one_of(name: str, values: tuple[str | None, ...] | None, absent: str | None) -> Iterator[str]:
    """Yield the condition that an attribute has one of some values; `absent` means that there is none."""
    if values is None:
        return
    listed = [value for value in values if value not in (absent, labels.OTHER)]
    alternatives = (
        [f"{_match_attribute(name)} && {_get_attribute(name)} in [{_quote_words(listed)}]"] if listed else []
    )
    if absent in values:
        alternatives.append(_match_no_attribute(name))
    if labels.OTHER in values:
        excluded = [brand for brand in labels.BRANDS[:-2] if brand not in values]
        alternatives.append(
            f"{_match_attribute(name)} && !({_get_attribute(name)} in [{_quote_words(excluded)}])"
        )
    yield join_alternatives(alternatives)


def _get_attribute(name: str) -> str:
    return f"{NAME}.{name}"


def _match_attribute(name: str) -> str:
    return f'"{name}" in {NAME}'


def _match_no_attribute(name: str) -> str:
    return f"!({_match_attribute(name)})"


def _quote_words(words: Iterable[str | None]) -> str:
    return ", ".join(f'"{word}"' for word in words)
