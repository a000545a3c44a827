"""Needs as node affinity: one of the terms has to hold, and all requirements of that term.

A term on our own labels admits exactly the nodes for which its need holds. A term on the labels of Node
Feature Discovery and of NVIDIA may admit fewer. A need that these labels cannot express has no term.
"""

from __future__ import annotations

import re
from itertools import chain, combinations

from imagematrix.facts import marches
from imagematrix.kubernetes import cpuid, discovered
from imagematrix.kubernetes import labels as own
from imagematrix.kubernetes.needs import MODULES, listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.kubernetes.needs import Need

    Requirement = dict[str, Any]  # key, operator and, for some operators, values
    Term = tuple[Requirement, ...]

__all__ = [
    "above",
    "admits",
    "affinity",
    "below",
    "foreign",
    "has",
    "integer",
    "isin",
    "lacks",
    "owned",
    "required",
    "runs",
]

TOP = 999  # the greatest possible capability, times ten
LAST_MINOR = 9
INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)  # the values that Gt and Lt compare
KEYS = (discovered.DRIVER_MAJOR, discovered.DRIVER_MINOR, discovered.DRIVER_REVISION)


def owned(needs: Iterable[Need]) -> tuple[Term, ...]:
    """Return the terms on our own labels that admit a node if, and only if, one of the needs holds."""
    return tuple(
        (isin(discovered.ARCH, need.arch), *_own_flags(need), *_own_driver_and_gpus(need)) for need in needs
    )


def foreign(needs: Iterable[Need]) -> tuple[Term, ...]:
    """Return the terms on labels of NFD and NVIDIA that admit a node only if one of the needs holds.

    They assume that NFD's flags show the psABI level, that all GPUs are of the model in NVIDIA's labels, and
    that these GPUs work with the loaded kernel modules.
    """
    terms: dict[str, Term] = {}
    for need in listed(needs):
        flags = _foreign_flags(need)
        if flags is None or need.bare or need.no_driver:
            continue
        for rest in _foreign_driver_and_gpus(need) if need.gpus else [()]:
            term = (isin(discovered.ARCH, need.arch), *flags, *rest)
            terms.setdefault(repr(term), term)
    return tuple(terms.values())


def affinity(terms: Iterable[Term]) -> dict[str, Any]:
    """Return the `affinity` of a pod that may run on the nodes that one of the terms admits."""
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": list(term)} for term in terms]
            }
        }
    }


def required(spec: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the terms that a pod's affinity requires, or None if it requires none."""
    node = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    selector = node.get("requiredDuringSchedulingIgnoredDuringExecution")
    return None if selector is None else selector.get("nodeSelectorTerms") or []


def admits(terms: Iterable[Term], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels meets all requirements of a term; an empty term admits none."""
    return any(term and all(_met(one, labels.get(one["key"])) for one in term) for term in terms)


def integer(text: str | None) -> int | None:
    """Return a label's value as Gt and Lt read it, or None if it is not an integer."""
    return int(text) if text is not None and INTEGER.fullmatch(text) else None


def isin(key: str, *values: str) -> Requirement:
    """Return the requirement that a label has one of these values."""
    return {"key": key, "operator": "In", "values": list(values)}


def has(key: str) -> Requirement:
    """Return the requirement that a label exists."""
    return {"key": key, "operator": "Exists"}


def lacks(key: str) -> Requirement:
    """Return the requirement that a label does not exist."""
    return {"key": key, "operator": "DoesNotExist"}


def above(key: str, number: int) -> Requirement:
    """Return the requirement that a label's value is greater than a number."""
    return {"key": key, "operator": "Gt", "values": [str(number)]}


def below(key: str, number: int) -> Requirement:
    """Return the requirement that a label's value is less than a number."""
    return {"key": key, "operator": "Lt", "values": [str(number)]}


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of each run of consecutive numbers; the input is sorted."""
    first = last = None
    for number in numbers:
        if first is None or last is None:
            first = number
        elif number != last + 1:
            yield first, last
            first = number
        last = number
    if first is not None and last is not None:
        yield first, last


def _met(requirement: Requirement, value: str | None) -> bool:
    operator, values = requirement["operator"], requirement.get("values") or []
    if operator in {"Gt", "Lt"}:
        number, bound = integer(value), integer(values[0])
        if number is None or bound is None:
            return False
        return number > bound if operator == "Gt" else number < bound
    if operator in {"Exists", "DoesNotExist"}:
        return (value is not None) is (operator == "Exists")
    return (value in values) is (operator == "In")


def _level(need: Need) -> str | None:
    """Return the highest psABI level whose flags a need has; None below the first, or not x86."""
    return marches.level(need.flags) if need.arch == "amd64" else None


def _implied(level: str | None) -> frozenset[str]:
    rank = marches.level_rank(level)
    return frozenset(chain.from_iterable(added for _, added in marches.LEVELS[:rank]))


def _own_flags(need: Need) -> list[Requirement]:
    level = _level(need)
    expressions = [above(own.LEVEL, marches.level_rank(level) - 1)] if level else []
    return expressions + [has(f"{own.FLAG}{flag}") for flag in sorted(need.flags - _implied(level))]


def _own_driver_and_gpus(need: Need) -> list[Requirement]:
    expressions = _own_driver(need)
    if need.bare:
        expressions += [isin(own.COUNT, "0"), isin(own.ACCELERATORS, "0")]
    if need.gpus:
        expressions += [isin(own.GPU_STATES, *_subsets(need.states)), *_own_computes(need)]
        expressions += [lacks(f"{own.BRAND}{brand}") for brand in own.BRANDS if brand not in need.brands]
    if need.data_centre:
        expressions.append(isin(own.DATA_CENTRE, "true"))
    if need.branch is not None:
        expressions.append(above(own.DRIVER_LIMIT, need.branch - 1))
    return expressions


def _own_driver(need: Need) -> list[Requirement]:
    expressions = [lacks(own.DRIVER)] if need.no_driver else []
    if need.driver:
        expressions.append(isin(own.DRIVER, need.driver))
    if need.oldest:
        expressions.append(above(own.RANK, own.rank(need.oldest) - 1))
    if need.below:
        expressions.append(below(own.RANK, own.rank(need.below)))
    if need.modules != MODULES:
        others = [kind for kind in MODULES if kind and kind not in need.modules]
        named = [kind for kind in need.modules if kind]
        # Modules of an unknown kind have no label, and NotIn admits that.
        expressions.append(
            {"key": own.MODULES, "operator": "NotIn", "values": others}
            if None in need.modules
            else isin(own.MODULES, *named)
        )
    return expressions


def _own_computes(need: Need) -> list[Requirement]:
    """Return the requirements on the least and the greatest capability, and on gaps between them."""
    if need.computes is None:
        return []
    codes = [code for code in need.computes if code >= 0]
    expressions = [above(own.LEAST, codes[0] - 1)] if codes[0] > 0 else []
    if codes[-1] < TOP:
        expressions.append(below(own.GREATEST, codes[-1] + 1))
    holes = sorted({*range(codes[0], codes[-1])} - {*codes})
    expressions += [lacks(f"{own.COMPUTE}{code // 10}.{code % 10}") for code in holes]
    return expressions if codes[0] > 0 else [*expressions, lacks(f"{own.COMPUTE}{own.UNKNOWN}")]


def _subsets(words: tuple[str, ...]) -> list[str]:
    """Return all values that a label with some of these words can have: sorted and joined."""
    some = chain.from_iterable(combinations(sorted(words), size) for size in range(1, len(words) + 1))
    return ["_".join(each) for each in some]


def _foreign_flags(need: Need) -> list[Requirement] | None:
    level = _level(need)
    proving = cpuid.proving(level) if level else frozenset[str]()
    others = need.flags - _implied(level)
    names = cpuid.names(_machine(need.arch))
    if not others <= names.keys():
        return None
    return [isin(f"{discovered.CPUID}{names[flag]}", "true") for flag in sorted(proving | others)]


def _machine(arch: str) -> str:
    return "aarch64" if arch == "arm64" else "x86_64"


def _foreign_driver_and_gpus(need: Need) -> Iterator[list[Requirement]]:
    """Yield the alternatives that express a need in NVIDIA's labels; none if they cannot express it."""
    if need.brands != own.BRANDS or need.data_centre or need.computes == ():
        return
    common = [above(discovered.GPU_COUNT, 0)]
    if "vgpu" not in need.states:
        common.append({"key": discovered.VGPU, "operator": "NotIn", "values": ["true"]})
    for driver in _foreign_drivers(need):
        for compute in _foreign_computes(need):
            yield [*common, *driver, *compute]


def _foreign_drivers(need: Need) -> list[list[Requirement]]:
    if need.driver:
        return [[isin(discovered.DRIVER_FULL, need.driver)]]
    lower = _at_least(need.oldest) if need.oldest else [[]]
    upper = _less_than(need.below) if need.below else [[]]
    return [[*one, *other] for one in lower for other in upper]


def _at_least(version: tuple[int, ...]) -> list[list[Requirement]]:
    """Return the alternatives for a driver to be of at least this version; trailing zeros do not count."""
    parts = [*version]
    while parts and not parts[-1]:
        parts.pop()
    equal = [[above(key, part - 1), below(key, part + 1)] for key, part in zip(KEYS, parts, strict=False)]
    greater = [
        [*chain.from_iterable(equal[:place]), above(key, part)]
        for place, (key, part) in enumerate(zip(KEYS, parts, strict=False))
    ]
    last = [*chain.from_iterable(equal[:-1]), above(KEYS[len(equal) - 1], parts[len(equal) - 1] - 1)]
    return [*greater[:-1], last] if len(parts) <= len(KEYS) else greater


def _less_than(version: tuple[int, ...]) -> list[list[Requirement]]:
    equal = [[above(key, part - 1), below(key, part + 1)] for key, part in zip(KEYS, version, strict=False)]
    return [
        [*chain.from_iterable(equal[:place]), below(key, part)]
        for place, (key, part) in enumerate(zip(KEYS, version, strict=False))
        if part > 0
    ]


def _foreign_computes(need: Need) -> Iterator[list[Requirement]]:
    """Yield the alternatives for the capability, each with one range of majors and one of minors."""
    if need.computes is None:
        yield []
        return
    for first, last in runs(code for code in need.computes if code >= 0):
        for majors, minors in _ranges(first, last):
            yield [
                *_between(discovered.MAJOR, majors, TOP // 10),
                *_between(discovered.MINOR, minors, LAST_MINOR),
            ]


def _ranges(first: int, last: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
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


def _between(key: str, numbers: tuple[int, int], greatest: int) -> list[Requirement]:
    low, high = numbers
    if low == high:
        return [isin(key, str(low))]
    return [*([above(key, low - 1)] if low > 0 else []), *([below(key, high + 1)] if high < greatest else [])]
