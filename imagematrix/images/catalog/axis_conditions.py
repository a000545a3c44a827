"""Conditions on the values of an axis: a word, a glob, a comparison, a negation, or a list of them.

`znver4` is a value, `znver*` a glob, `>=12.4` compares versions, `!5.2` matches every other value. A list
matches a value if one of its words does (or all of them are negations) and no negation excludes the value.
"""

from __future__ import annotations

import re

from imagematrix.common.suggestions import suggest_nearest
from imagematrix.hardware.vendors.versions import COMPARISONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from packaging.version import Version

COMPARISON = re.compile(r"(>=|<=|==|!=|>|<)\s*(.+)")
GLOB = re.compile(r"[*?\[]")
# Values have at most 64 characters, and the time for a pattern grows with the square of its length.
LONGEST_GLOB = 200


class ConditionError(ValueError):
    """A condition is invalid; the message states the reason."""


def match_values(words: Sequence[str], values: Collection[str]) -> frozenset[str]:
    """Return the `values` of an axis that match the condition `words`; raise ConditionError."""
    unwanted = [_match_word(word[1:], values) for word in words if _is_negated(word)]
    wanted = [_match_word(word, values) for word in words if not _is_negated(word)]
    return frozenset(values if not wanted else set().union(*wanted)).difference(*unwanted)


def match_axes(
    values: Mapping[str, Sequence[str]], wanted: Mapping[str, Sequence[str]], what: str
) -> dict[str, frozenset[str]]:
    """Return, for each axis in `wanted`, the `values` that match its condition.

    Raises ConditionError with the alternatives if `what` has no such axis, or if no value matches.
    """
    matches = {}
    for axis, words in wanted.items():
        if axis not in values:
            hint = suggest_nearest(axis, values) or f"the axes are {', '.join(values)}"
            raise ConditionError(f"{what} has no axis {axis!r}: {hint}")
        matches[axis] = match_values(words, values[axis])
        if not matches[axis]:
            listed = ", ".join(values[axis])
            raise ConditionError(f"no value of the axis {axis} matches {', '.join(words)}: it has {listed}")
    return matches


def parse_only(expression: str) -> dict[str, list[str]]:
    """Return the conditions of `--only 'cuda=12.4,march=znver*'` by axis; raise ConditionError.

    An axis may occur several times; its words then form one list. Comparisons are written as in `cuda>=12.4`.
    """
    conditions: dict[str, list[str]] = {}
    for part in expression.split(","):
        match = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*(>=|<=|==|!=|=|>|<)\s*(.+?)\s*", part)
        if not match:
            raise ConditionError(
                f"invalid condition {part.strip()!r}: expected a condition such as march=znver* or cuda>=12.4"
            )
        axis, comparison, word = match.groups()
        if comparison == "!=":
            word = f"!{word}"
        elif comparison not in ("=", "=="):
            word = comparison + word
        conditions.setdefault(axis, []).append(word)
    return conditions


def _is_negated(word: str) -> bool:
    return word.startswith("!") and not word.startswith("!=")


def _match_word(word: str, values: Collection[str]) -> set[str]:
    """Return the `values` that match a value, a glob or a comparison; raise ConditionError."""
    match = COMPARISON.fullmatch(word)
    if match:
        from packaging.version import Version

        compare = COMPARISONS[match[1]]
        try:
            bound = Version(match[2])
        except ValueError as error:  # InvalidVersion, or too many digits for Python
            raise ConditionError(f"invalid version in a comparison: {match[2][:80]!r}") from error
        versions = ((value, _parse_version(value)) for value in values)
        return {value for value, version in versions if version is not None and compare(version, bound)}

    if not GLOB.search(word):
        return {word} if word in values else set()
    if len(word) > LONGEST_GLOB:
        raise ConditionError(f"more than {LONGEST_GLOB} characters in the pattern {word[:80]!r}")
    import fnmatch

    pattern = re.compile(fnmatch.translate(word))
    return {value for value in values if pattern.match(value)}


def _parse_version(value: str) -> Version | None:
    # "none" and other words of an axis are not versions: no comparison matches them. The letter of 9.0a and
    # 10.0f names a kind of device code; as a version it would be an alpha release, lower than 9.0.
    from packaging.version import InvalidVersion, Version

    try:
        return Version(re.sub(r"(?<=\d)[af]$", "", value))
    except InvalidVersion:
        return None
