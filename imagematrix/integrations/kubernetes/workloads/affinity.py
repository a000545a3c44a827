"""Needs as node affinity: one of the terms has to hold, and all requirements of that term.

A term on our own labels admits exactly the nodes for which its need holds. A term on the labels of Node
Feature Discovery and of NVIDIA may admit fewer. A need that these labels cannot express has no term.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain, combinations

from imagematrix.hardware.vendors import marches
from imagematrix.integrations.kubernetes.nodes import cpuid, host_from_nfd_labels
from imagematrix.integrations.kubernetes.nodes import labels as our_labels
from imagematrix.selection.needs.equivalence import TOP
from imagematrix.selection.needs.grid import find_intervals
from imagematrix.selection.needs.need import Need

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from typing import Any

    Requirement = dict[str, Any]  # key, operator and, for some operators, values
    Term = tuple[Requirement, ...]

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
LAST_MINOR = 9  # the minor of a capability has one digit
LOWEST = 10  # the lowest capability, 1.0, times ten
MIXED = 3  # most different states of a node's GPUs that terms admit
POSITIVE = frozenset({"In", "Exists", "Gt", "Lt"})  # operators that no node without the label meets
INTEGER = re.compile("-?[0-9]{1,19}")  # the values that Gt and Lt compare, if they have 64 bits
LIMIT = 2**63
LABELS = 1_000  # values to keep as integers
KEYS = (
    host_from_nfd_labels.DRIVER_MAJOR,
    host_from_nfd_labels.DRIVER_MINOR,
    host_from_nfd_labels.DRIVER_REVISION,
)


def make_terms_for_our_labels(needs: Iterable[Need]) -> tuple[Term, ...]:
    """Return the terms on our own labels that admit a node if, and only if, one of the needs holds."""
    terms = []
    for need in needs:
        level, requirements = need.cpu_level, []
        if level:
            requirements.append(match_above(our_labels.LEVEL, marches.get_level_rank(level) - 1))
        further = sorted(need.flags - marches.get_level_flags(level))
        requirements += [match_label(f"{our_labels.FLAG}{flag}") for flag in further]
        requirements += [match_no_label(f"{our_labels.FLAG}{flag}") for flag in sorted(need.without)]
        requirements += _match_our_driver_and_gpus(need)
        if requirements and not any(requirement["operator"] in POSITIVE for requirement in requirements):
            requirements.append(match_label(our_labels.COUNT))  # every node with our labels has it
        terms.append((*_match_platform(need.arch, alone=not requirements), *requirements))
    return tuple(terms)


def make_terms_for_foreign_labels(needs: Iterable[Need]) -> tuple[Term, ...]:
    """Return the terms on labels of NFD and NVIDIA that admit a node only if one of the needs holds.

    The needs are those of listed GPUs. The terms assume that NFD's flags show the psABI level, that all GPUs
    are of the model in NVIDIA's labels, and that these GPUs work with the loaded kernel modules and with the
    node's own user-mode driver.
    """
    terms: dict[str, Term] = {}
    for need in needs:
        flags = _match_nfd_flags(need)
        if flags is None:
            continue
        for rest in _match_nvidia_driver_and_gpus(need):
            term = (*_match_platform(need.arch, alone=not (flags or rest)), *flags, *rest)
            terms.setdefault(repr(term), term)
    return tuple(terms.values())


def make_affinity(terms: Iterable[Term]) -> dict[str, Any]:
    """Return the `affinity` of a pod that may run on the nodes that one of the terms admits."""
    return {
        "nodeAffinity": {
            REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": list(term)} for term in terms]}
        }
    }


def get_required_terms(spec: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the terms that a pod's affinity requires, or None if it requires none."""
    node = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    selector = node.get(REQUIRED)
    return None if selector is None else selector.get("nodeSelectorTerms") or []


def is_admitted(terms: Iterable[Term], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels meets all requirements of a term; an empty term admits none."""
    return any(
        term and all(is_requirement_met(requirement, labels.get(requirement["key"])) for requirement in term)
        for term in terms
    )


def is_requirement_met(requirement: Mapping[str, Any], value: str | None) -> bool:
    """Whether one value of a label meets a requirement; to make a set of its values would take longer."""
    return _make_test(requirement, requirement.get("values") or [])(value)


def make_label_test(requirement: Mapping[str, Any]) -> Callable[[str | None], bool]:
    """Return whether a label's value, None if there is none, meets a requirement, for many values."""
    return _make_test(requirement, frozenset(requirement.get("values") or []))


def _make_test(requirement: Mapping[str, Any], listed: Container[str]) -> Callable[[str | None], bool]:
    operator, values = requirement["operator"], requirement.get("values") or []
    if operator == "In":
        return listed.__contains__
    if operator == "NotIn":
        return lambda value: value not in listed
    if operator == "Exists":
        return lambda value: value is not None
    if operator == "DoesNotExist":
        return lambda value: value is None
    if operator not in ("Gt", "Lt"):
        return lambda _: True  # an operator that we do not know may match
    bound, sign = _parse_integer(values[0] if values else None), 1 if operator == "Gt" else -1
    return lambda value: _is_above(_parse_label(value), bound, sign)


def _parse_integer(text: str | None) -> int | None:
    """Return a value as Gt and Lt read it, or None if it is not an integer."""
    number = int(text) if text is not None and INTEGER.fullmatch(text) else None
    return number if number is not None and -LIMIT <= number < LIMIT else None


# Of nodes, whose labels are few and short: a pod may compare each of them with thousands of bounds.
_parse_label = lru_cache(LABELS)(_parse_integer)


def _is_above(number: int | None, bound: int | None, sign: int) -> bool:
    """Whether a number is above a bound, or below it with the sign -1."""
    return number is not None and bound is not None and sign * number > sign * bound


def match_value_in(key: str, *values: str) -> Requirement:
    """Return the requirement that a label has one of these values."""
    return {"key": key, "operator": "In", "values": list(values)}


def match_value_not_in(key: str, *values: str) -> Requirement:
    """Return the requirement that a label does not exist, or has none of these values."""
    return {"key": key, "operator": "NotIn", "values": list(values)}


def match_label(key: str) -> Requirement:
    """Return the requirement that a label exists."""
    return {"key": key, "operator": "Exists"}


def match_no_label(key: str) -> Requirement:
    """Return the requirement that a label does not exist."""
    return {"key": key, "operator": "DoesNotExist"}


def match_above(key: str, bound: int) -> Requirement:
    """Return the requirement that a label's value is greater than a number."""
    return {"key": key, "operator": "Gt", "values": [str(bound)]}


def match_below(key: str, bound: int) -> Requirement:
    """Return the requirement that a label's value is less than a number."""
    return {"key": key, "operator": "Lt", "values": [str(bound)]}


def _match_platform(arch: str, *, alone: bool) -> list[Requirement]:
    """Return the requirements on the platform. Only nodes with Linux have labels of facts."""
    return [
        match_value_in(host_from_nfd_labels.ARCH, arch),
        *([match_value_in(host_from_nfd_labels.SYSTEM, "linux")] if alone else []),
    ]


def _match_our_driver_and_gpus(need: Need) -> list[Requirement]:
    expressions = _match_our_driver(need)
    if need.gpus is not None and not need.states:  # only nodes with GPUs have a label with their states
        key = our_labels.COUNT
        expressions.append(match_above(key, 0) if need.gpus else match_value_in(key, "0"))
    if need.accelerators is not None:
        key = our_labels.ACCELERATORS
        expressions.append(match_above(key, 0) if need.accelerators else match_value_in(key, "0"))
    if need.states:  # the label has the states of all GPUs, sorted and joined
        sizes = range(1, min(len(need.states), MIXED) + 1)
        subsets = chain.from_iterable(combinations(sorted(need.states), size) for size in sizes)
        expressions.append(match_value_in(our_labels.GPU_STATES, *map("_".join, subsets)))
    expressions += _match_our_computes(need)
    if need.brands:
        # No operator asks about all of a node's GPUs, so the labels of all other brands have to be absent.
        expressions += [
            match_no_label(f"{our_labels.BRAND}{brand}")
            for brand in our_labels.BRANDS
            if brand not in need.brands
        ]
    if need.data_centre:
        expressions.append(match_value_in(our_labels.DATA_CENTRE, "true"))
    if need.limit is not None:
        expressions.append(match_above(our_labels.DRIVER_LIMIT, need.limit - 1))
    if need.memory_mib is not None:
        expressions.append(match_above(our_labels.LEAST_MEMORY, need.memory_mib - 1))
    return expressions


def _match_our_driver(need: Need) -> list[Requirement]:
    expressions = []
    if need.loaded is not None:
        expressions.append(
            match_label(our_labels.DRIVER) if need.loaded else match_no_label(our_labels.DRIVER)
        )
    if need.driver:
        expressions.append(match_value_in(our_labels.DRIVER, need.driver))
    if need.oldest:
        # Gt excludes its bound, and no operator includes it.
        expressions.append(match_above(our_labels.RANK, our_labels.rank_version(need.oldest) - 1))
    if need.below:
        expressions.append(match_below(our_labels.RANK, our_labels.rank_version(need.below)))
    if need.other_than:
        expressions.append(match_value_not_in(our_labels.DRIVER, *sorted(need.other_than)))
    if need.modules is not None:
        kinds = [kind for kind in need.modules if kind]
        # Modules of an unknown kind have no label, and NotIn admits that.
        excluded = [kind for kind in our_labels.MODULE_KINDS if kind not in kinds]
        expressions.append(
            match_value_not_in(our_labels.MODULES, *excluded)
            if None in need.modules
            else match_value_in(our_labels.MODULES, *kinds)
        )
    if need.differs is not None:
        expressions.append(
            (match_value_in if need.differs else match_value_not_in)(our_labels.USER_MODE, our_labels.DIFFERS)
        )
    return expressions


def _match_our_computes(need: Need) -> list[Requirement]:
    """Return the requirements on the least and the greatest capability, and on gaps between them."""
    if need.computes is None:
        return []
    codes = [code for code in need.computes if code >= 0]
    if not codes:
        return [match_below(our_labels.GREATEST, 1), match_label(f"{our_labels.COMPUTE}{our_labels.UNKNOWN}")]
    unknown = len(codes) < len(need.computes)
    # In the label of the least capability, an unknown one counts as 0, so others have to be excluded by name.
    expressions = [match_above(our_labels.LEAST, codes[0] - 1)] if codes[0] > 0 and not unknown else []
    if codes[-1] < TOP:
        expressions.append(match_below(our_labels.GREATEST, codes[-1] + 1))
    holes = sorted({*range(LOWEST if unknown else codes[0], codes[-1])} - {*codes})
    expressions += [match_no_label(f"{our_labels.COMPUTE}{code // 10}.{code % 10}") for code in holes]
    if codes[0] > 0 or unknown:
        return expressions
    return [*expressions, match_no_label(f"{our_labels.COMPUTE}{our_labels.UNKNOWN}")]


def _match_nfd_flags(need: Need) -> list[Requirement] | None:
    if need.without:
        return None
    level = need.cpu_level
    proving = cpuid.get_proving_flags(level) if level else frozenset[str]()
    further = need.flags - marches.get_level_flags(level)
    names = cpuid.get_nfd_names("aarch64" if need.arch == "arm64" else "x86_64")
    if not further <= names.keys():
        return None
    return [
        match_value_in(f"{host_from_nfd_labels.CPUID}{names[flag]}", "true")
        for flag in sorted(proving | further)
    ]


def _match_nvidia_driver_and_gpus(need: Need) -> Iterator[list[Requirement]]:
    """Yield the alternatives that express a need in NVIDIA's labels; none if they cannot express it."""
    if need == Need(arch=need.arch, flags=need.flags):
        yield []
    unlabelled = (need.brands, need.data_centre, need.limit, need.other_than, need.accelerators)
    if not need.gpus or any(fact not in (None, False, frozenset()) for fact in unlabelled):
        return
    if need.loaded is False or need.computes == () or "ok" not in (need.states or ("ok",)):
        return
    common = [match_above(host_from_nfd_labels.GPU_COUNT, 0)]
    if "vgpu" not in (need.states or ("vgpu",)):
        common.append(match_value_not_in(host_from_nfd_labels.VGPU, "true"))
    if need.memory_mib is not None:
        # The label has the memory of whole GPUs, where some may be in MIG mode.
        common.append(match_value_not_in(host_from_nfd_labels.STRATEGY, host_from_nfd_labels.MIXED))
        common.append(match_above(host_from_nfd_labels.MEMORY, need.memory_mib - 1))
    if need.driver:
        drivers = [[match_value_in(host_from_nfd_labels.DRIVER_FULL, need.driver)]]
    else:
        lower = _match_driver_at_least(need.oldest) if need.oldest else [[]]
        upper = _match_driver_below(need.below) if need.below else [[]]
        drivers = [[*at_least, *below] for at_least in lower for below in upper]
    for driver in drivers:
        for compute in _match_nvidia_computes(need):
            yield [*common, *driver, *compute]


def _match_driver_at_least(version: tuple[int, ...]) -> list[list[Requirement]]:
    """Return the alternatives for a driver to be of at least this version; trailing zeros do not count.

    Each label has one part of the version, so the parts are compared one after the other. At least 550.54.14
    is `major > 550`, or `major = 550 and minor > 54`, or `major = 550 and minor = 54 and revision >= 14`.
    """
    parts = [*version]
    while parts and not parts[-1]:
        parts.pop()
    if not parts:  # every driver is at least 0.0
        return [[]]
    equal = [
        [match_above(key, part - 1), match_below(key, part + 1)]
        for key, part in zip(KEYS, parts, strict=False)
    ]
    greater = [
        [*chain.from_iterable(equal[:index]), match_above(key, part)]
        for index, (key, part) in enumerate(zip(KEYS, parts, strict=False))
    ]
    last = [*chain.from_iterable(equal[:-1]), match_above(KEYS[len(equal) - 1], parts[len(equal) - 1] - 1)]
    return [*greater[:-1], last] if len(parts) <= len(KEYS) else greater


def _match_driver_below(version: tuple[int, ...]) -> list[list[Requirement]]:
    """Return the alternatives for a driver to be below this version, part by part as above."""
    equal = [
        [match_above(key, part - 1), match_below(key, part + 1)]
        for key, part in zip(KEYS, version, strict=False)
    ]
    return [
        [*chain.from_iterable(equal[:index]), match_below(key, part)]
        for index, (key, part) in enumerate(zip(KEYS, version, strict=False))
        if part > 0
    ]


def _match_nvidia_computes(need: Need) -> Iterator[list[Requirement]]:
    """Yield the alternatives for the capability, each with one range of majors and one of minors."""
    if need.computes is None:
        yield []
        return
    for first, last in find_intervals(code for code in need.computes if code >= 0):
        for majors, minors in _split_computes(first, last):
            yield [
                *_match_between(host_from_nfd_labels.MAJOR, majors, TOP // 10),
                *_match_between(host_from_nfd_labels.MINOR, minors, LAST_MINOR),
            ]


def _split_computes(first: int, last: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield ranges of majors and of minors that together cover all capabilities from `first` to `last`."""
    (low, lowest), (high, highest) = divmod(first, 10), divmod(last, 10)
    if low == high:
        yield (low, high), (lowest, highest)
        return
    if lowest > 0:
        yield (low, low), (lowest, LAST_MINOR)
        low += 1
    if highest < LAST_MINOR:
        yield (high, high), (0, highest)
        high -= 1
    if low <= high:
        yield (low, high), (0, LAST_MINOR)


def _match_between(key: str, numbers: tuple[int, int], greatest: int) -> list[Requirement]:
    low, high = numbers
    if low == high:
        return [match_value_in(key, str(low))]
    return [
        *([match_above(key, low - 1)] if low > 0 else []),
        *([match_below(key, high + 1)] if high < greatest else []),
    ]
