"""Needs as device selectors of dynamic resource allocation (DRA): CEL about one GPU of NVIDIA's DRA driver.

Attributes are those of cmd/gpu-kubelet-plugin/deviceinfo.go in https://github.com/NVIDIA/k8s-dra-driver-gpu.
They contain semantic versions: driver 580.65.06 appears as 580.65.6. So here, and nowhere else, drivers are
compared by their numbers. CPUs are not devices: node affinity covers CPU needs.
"""

from __future__ import annotations

from collections import Counter

from imagematrix.hardware.vendors import gpus, versions
from imagematrix.integrations.kubernetes.nodes import labels as our_labels
from imagematrix.selection.needs.equivalence import TOP
from imagematrix.selection.needs.grid import find_intervals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from imagematrix.selection.needs.need import Need

DRIVER = "gpu.nvidia.com"
ATTRIBUTES = f'device.attributes["{DRIVER}"]'
CAPACITY = f'device.capacity["{DRIVER}"]'
LISTED = ("ok",)
PARTS = 3  # numbers in a semantic version
LONGEST = 10 * 1024  # characters of a selector: CELSelectorExpressionMaxLength of resource.k8s.io


def make_nvidia_selector(needs: Iterable[Need]) -> str | None:
    """Return the CEL expression that admits a GPU only if it meets what one of the needs asks of a GPU.

    The needs are those of listed GPUs: it assumes that every GPU that the DRA driver publishes works with the
    loaded kernel modules and the node's own user-mode driver. None if a need asks for no GPU.
    """
    needs = tuple(needs)
    if not needs or not all(need.gpus for need in needs):
        return None
    groups = dict.fromkeys(group for need in needs if (group := _make_conditions(need)) is not None)
    return f'device.driver == "{DRIVER}" && {join_groups([*groups])}' if groups else "false"


def join_groups(groups: Sequence[Sequence[str]]) -> str:
    """Return the expression that all conditions of one of some groups hold, which && may follow.

    What several groups share is written once: first what all have, then what saves most. The errors of CEL's
    && and || are those of the longer expression, because false and true count whatever the other side is.
    """
    if not all(groups):
        return "true"
    alternatives: list[str] = []
    while groups:
        counts = Counter(condition for group in groups for condition in group)
        rates = {
            condition: (count == len(groups), (count - 1) * len(condition))
            for condition, count in counts.items()
        }
        shared = max(rates, key=rates.__getitem__)
        if counts[shared] == 1:
            alternatives += [" && ".join(group) for group in groups]
            break
        rest = join_groups([[one for one in group if one != shared] for group in groups if shared in group])
        alternatives.append(shared if rest == "true" else f"{shared} && {rest}")
        groups = [group for group in groups if shared not in group]
    return join_alternatives(alternatives)


def join_alternatives(conditions: Sequence[str]) -> str:
    """Return the expression that one of some conditions holds, which && may follow."""
    if len(conditions) == 1:
        return conditions[0]
    return f"({' || '.join(f'({condition})' for condition in conditions)})"


def _make_conditions(need: Need) -> tuple[str, ...] | None:
    """Return the conditions of a need, or None if the attributes cannot express them."""
    if need.brands and not need.data_centre:
        return None  # the attributes write brands in another way
    if need.loaded is False or "ok" not in (need.states or LISTED):
        return None
    if need.driver and len(versions.make_sort_key(need.driver)) > PARTS:
        return None  # a semantic version has no fourth number
    computes = _find_supported_computes(need)
    if computes == ():
        return None
    conditions = [*_match_driver(need)]
    if computes is not None:
        compute, intervals = f"{ATTRIBUTES}.cudaComputeCapability", find_intervals(computes)
        alternatives = [" && ".join(match_compute_between(compute, *interval)) for interval in intervals]
        conditions.append(join_alternatives(alternatives))
    if need.memory_mib is not None:
        conditions.append(f'{CAPACITY}.memory.compareTo(quantity("{need.memory_mib}Mi")) >= 0')
    if need.data_centre:
        brands = sorted(gpus.DATA_CENTRE_BRANDS.intersection(need.brands or our_labels.BRANDS))
        quoted, other_names = ", ".join(f'"{brand}"' for brand in brands), "|".join(gpus.OTHER_NAMES)
        conditions.append(f"{ATTRIBUTES}.brand.lowerAscii() in [{quoted}]")
        conditions.append(f'!{ATTRIBUTES}.productName.lowerAscii().matches("(^| )({other_names})( |$)")')
    return tuple(conditions)


def _match_driver(need: Need) -> Iterator[str]:
    driver = f"{ATTRIBUTES}.driverVersion"
    if need.driver:
        yield f"{driver}.compareTo({make_semver(versions.make_sort_key(need.driver))}) == 0"
    if need.oldest:
        yield f"{driver}.compareTo({make_semver(need.oldest)}) >= 0"
    if need.below:
        yield f"{driver}.compareTo({make_semver(need.below)}) < 0"
    for version in sorted(need.other_than):
        yield f"{driver}.compareTo({make_semver(versions.make_sort_key(version))}) != 0"


def _find_supported_computes(need: Need) -> tuple[int, ...] | None:
    """Return the capabilities whose products the image's user-mode driver all supports.

    Only a driver of mode compat can lack support for a published GPU: in the other modes the driver has the
    version of the kernel modules.
    """
    if need.computes is None:
        return None
    codes = (code for code in need.computes if code >= 0)
    if need.limit is None:
        return tuple(codes)
    ended = {compute for compute, last in gpus.list_first_ends().items() if last < need.limit}
    return tuple(code for code in codes if f"{code // 10}.{code % 10}" not in ended)


def match_compute_between(compute: str, first: int, last: int) -> Iterator[str]:
    """Yield the conditions that an attribute is a capability from the first to the last, times ten."""
    if first > 0:
        yield f"{compute}.compareTo({make_semver((first // 10, first % 10))}) >= 0"
    if last < TOP:
        yield f"{compute}.compareTo({make_semver(((last + 1) // 10, (last + 1) % 10))}) < 0"


def make_semver(version: tuple[int, ...]) -> str:
    """Return a bound as a semantic version; if it has a fourth part, the third is raised by one."""
    major, minor, patch = (*version, 0, 0)[:PARTS]
    return f'semver("{major}.{minor}.{patch + (len(version) > PARTS)}")'
