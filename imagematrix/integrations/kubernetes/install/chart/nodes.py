"""Parts of a manifest that depend on the values of a chart, found by comparing manifests.

A manifest is made with all options, and again with each option changed. Where the two differ, the manifest
depends on the option. So a new option, or a change of a manifest, needs no template.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _MissingPart:
    """A part that is not there."""


ABSENT = _MissingPart()  # a part that is left out if a condition does not hold
SKIPPED = _MissingPart()  # an item of a list that an Each before it stands for


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """A part that is there if a condition holds, and `other` or ABSENT otherwise."""

    condition: str
    then: Any
    other: Any = ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Each:
    """Items of a list that are repeated for each element of a value."""

    value: str
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A text that is repeated for each element of a value, with a separator."""

    value: str
    text: str
    separator: str


def make_conditional(node: Any, base: Any, off: Any, condition: str) -> Any:
    """Return a part as it depends on one more condition.

    `node` is the part with its other dependencies, `base` the part of the manifest with all options, and
    `off` the same if the condition does not hold. Raises ValueError if `off` has what `base` has not.
    """
    if base == off:
        return node
    if isinstance(node, When):
        return When(
            condition=node.condition, then=make_conditional(node.then, base, off, condition), other=node.other
        )
    if isinstance(base, dict) and isinstance(off, dict):
        if not off.keys() <= base.keys():
            raise ValueError(f"only without {condition}: {sorted(off.keys() - base.keys())}")
        return {
            key: make_conditional(node[key], part, off[key], condition)
            if key in off
            else When(condition=condition, then=node[key])
            for key, part in base.items()
        }
    if isinstance(base, list) and isinstance(off, list):
        return _make_conditional_items(node, base, off, condition)
    return When(condition=condition, then=node, other=off)


def make_repeated(node: Any, single: Any, double: Any, value: str, texts: tuple[str, str]) -> Any:
    """Return a part as it depends on the elements of a value.

    `single` is the part for one element, `double` for two elements; `texts` are these elements. Raises
    ValueError if the part for the second element is not that for the first.
    """
    if single == double:
        return node
    if isinstance(node, When):
        return When(
            condition=node.condition,
            then=make_repeated(node.then, single, double, value, texts),
            other=node.other,
        )
    if isinstance(single, dict) and single.keys() == double.keys():
        return {key: make_repeated(node[key], single[key], double[key], value, texts) for key in single}
    if isinstance(single, list) and len(single) == len(double):
        return [make_repeated(*parts, value, texts) for parts in zip(node, single, double, strict=True)]
    if isinstance(single, list):
        return _make_repeated_items(node, single, double, value, texts)
    if isinstance(single, str) and double.startswith(single) and double.endswith(single.replace(*texts)):
        separator = double.removeprefix(single).removesuffix(single.replace(*texts))
        return Joined(value=value, text=single, separator=separator)
    raise ValueError(f"{value}: {single!r:.200} does not become {double!r:.200} by repetition")


def _make_conditional_items(node: list[Any], base: list[Any], off: list[Any], condition: str) -> list[Any]:
    """Return a list as it depends on a condition: its items differ, or some are left out."""
    if len(base) == len(off):
        return [make_conditional(*parts, condition) for parts in zip(node, base, off, strict=True)]
    items = list(node)
    base_texts, off_texts = ([json.dumps(item, sort_keys=True) for item in part] for part in (base, off))
    for kind, start, end, *_ in difflib.SequenceMatcher(None, base_texts, off_texts, False).get_opcodes():
        if kind not in {"equal", "delete"}:
            raise ValueError(f"without {condition}, a list has other items: {off!r:.200}")
        if kind == "delete":
            items[start:end] = [When(condition=condition, then=item) for item in items[start:end]]
    return items


def _make_repeated_items(
    node: list[Any], single: list[Any], double: list[Any], value: str, texts: tuple[str, str]
) -> list[Any]:
    """Return a list with an Each for the items that a second element repeats.

    For the elements a and b, `single` may be [x, a, y] and `double` [x, a, b, y]. The block [b] follows the
    items of a, and is the same but for the element's text. So [a] becomes an Each, and x and y stay.
    """
    more = len(double) - len(single)
    # The lists are equal up to the first item of the second element.
    pairs = enumerate(zip(single, double, strict=False))
    end = next((index for index, (item, repeated) in pairs if item != repeated), len(single))
    start = end - more
    block = json.loads(json.dumps(single[start:end]).replace(*texts)) if 0 <= start < end else []
    if not block or double != [*single[:end], *block, *single[end:]]:
        raise ValueError(f"{value}: {single!r:.200} does not become {double!r:.200} by repetition")
    items = list(node)
    items[start:end] = [Each(value=value, items=tuple(items[start:end])), *[SKIPPED] * (more - 1)]
    return items
