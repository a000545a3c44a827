"""Conditions on the values of an axis: a word, a glob, a comparison, a negation, or a list of them.

`znver4` is a value, `znver*` a glob, `>=12.4` compares versions, `!5.2` is everything but. A list matches
where one of its words does (any value, if all of them are negations) and none of its negations does.
"""

from __future__ import annotations

import operator
import re

from imagematrix.spelling import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from packaging.version import Version

__all__ = ["ConditionError", "among", "matching", "parse_only"]

COMPARISONS: dict[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
COMPARISON = re.compile(r"(>=|<=|==|!=|>|<)\s*(.+)")


class ConditionError(ValueError):
    """A condition that can't be read; the message says why."""


def matching(words: Sequence[str], values: Iterable[str]) -> frozenset[str]:
    """Return those of an axis' `values` that the condition `words` matches; raise ConditionError."""
    wanted = [_predicate(word) for word in words if not _negated(word)]
    unwanted = [_predicate(word[1:]) for word in words if _negated(word)]
    return frozenset(
        value
        for value in values
        if (not wanted or any(test(value) for test in wanted)) and not any(test(value) for test in unwanted)
    )


def among(
    values: Mapping[str, Sequence[str]], wanted: Mapping[str, Sequence[str]], what: str
) -> dict[str, frozenset[str]]:
    """Return by axis those of its `values` that the condition `wanted` on it matches.

    Raises ConditionError that tells what there is where `what` has no such axis, or no value matches.
    """
    found = {}
    for axis, words in wanted.items():
        if axis not in values:
            hint = nearest(axis, values) or f"the axes are {', '.join(values)}"
            raise ConditionError(f"{axis!r} is no axis of {what}: {hint}")
        found[axis] = matching(words, values[axis])
        if not found[axis]:
            there = ", ".join(values[axis])
            raise ConditionError(f"no value of the axis {axis} matches {', '.join(words)}: it has {there}")
    return found


def parse_only(expression: str) -> dict[str, list[str]]:
    """Return the conditions of `--only 'cuda=12.4,march=znver*'` by axis; raise ConditionError.

    The same axis may come several times; its words then form one list. Comparisons are written as they are:
    `cuda>=12.4`.
    """
    conditions: dict[str, list[str]] = {}
    for part in expression.split(","):
        found = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*(>=|<=|==|!=|=|>|<)\s*(.+?)\s*", part)
        if not found:
            raise ConditionError(f"{part.strip()!r} is no condition such as march=znver* or cuda>=12.4")
        axis, comparison, word = found.groups()
        if comparison == "!=":
            word = f"!{word}"
        elif comparison not in ("=", "=="):
            word = comparison + word
        conditions.setdefault(axis, []).append(word)
    return conditions


def _negated(word: str) -> bool:
    return word.startswith("!") and not word.startswith("!=")


def _predicate(word: str) -> Callable[[str], bool]:
    found = COMPARISON.fullmatch(word)
    if not found:
        import fnmatch

        pattern = re.compile(fnmatch.translate(word))
        return lambda value: pattern.match(value) is not None
    from packaging.version import Version

    compare = COMPARISONS[found[1]]
    try:
        bound = Version(found[2])
    except ValueError as error:  # InvalidVersion is one, and what Python says of thousands of digits
        raise ConditionError(f"{found[2][:80]!r} is no version to compare with") from error
    return lambda value: (version := _version(value)) is not None and compare(version, bound)


def _version(value: str) -> Version | None:
    # "none" and other words of an axis are no versions, and no comparison matches them. The letter of 9.0a
    # and 10.0f names a kind of device code; to a version it would be an alpha release, lower than 9.0.
    from packaging.version import InvalidVersion, Version

    try:
        return Version(re.sub(r"(?<=\d)[af]$", "", value))
    except InvalidVersion:
        return None
