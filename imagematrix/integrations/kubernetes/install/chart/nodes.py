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


def make_repeated(node: Any, one: Any, two: Any, value: str, texts: tuple[str, str]) -> Any:
    """Return a part as it depends on the elements of a value.

    `one` is the part for one element, `two` for two elements; `texts` are these elements. Raises ValueError
    if the part for the second element is not that for the first.
    """
    if one == two:
        return node
    if isinstance(node, When):
        return When(
            condition=node.condition, then=make_repeated(node.then, one, two, value, texts), other=node.other
        )
    if isinstance(one, dict) and one.keys() == two.keys():
        return {key: make_repeated(node[key], one[key], two[key], value, texts) for key in one}
    if isinstance(one, list) and len(one) == len(two):
        return [make_repeated(*parts, value, texts) for parts in zip(node, one, two, strict=True)]
    if isinstance(one, list):
        return _make_repeated_items(node, one, two, value, texts)
    if isinstance(one, str) and two.startswith(one) and two.endswith(one.replace(*texts)):
        separator = two.removeprefix(one).removesuffix(one.replace(*texts))
        return Joined(value=value, text=one, separator=separator)
    raise ValueError(f"{value}: {one!r:.200} does not become {two!r:.200} by repetition")


def _make_conditional_items(node: list[Any], base: list[Any], off: list[Any], condition: str) -> list[Any]:
    """Return a list as it depends on a condition: its items differ, or some are left out."""
    if len(base) == len(off):
        return [make_conditional(*parts, condition) for parts in zip(node, base, off, strict=True)]
    items = list(node)
    all_items, others = ([json.dumps(each, sort_keys=True) for each in some] for some in (base, off))
    for kind, start, end, *_ in difflib.SequenceMatcher(None, all_items, others, False).get_opcodes():
        if kind not in {"equal", "delete"}:
            raise ValueError(f"without {condition}, a list has other items: {off!r:.200}")
        if kind == "delete":
            items[start:end] = [When(condition=condition, then=each) for each in items[start:end]]
    return items


def _make_repeated_items(
    node: list[Any], one: list[Any], two: list[Any], value: str, texts: tuple[str, str]
) -> list[Any]:
    """Return a list with an Each for the items that a second element repeats."""
    more = len(two) - len(one)
    end = next(
        (at for at, (each, other) in enumerate(zip(one, two, strict=False)) if each != other), len(one)
    )
    start = end - more
    block = json.loads(json.dumps(one[start:end]).replace(*texts)) if 0 <= start < end else []
    if not block or two != [*one[:end], *block, *one[end:]]:
        raise ValueError(f"{value}: {one!r:.200} does not become {two!r:.200} by repetition")
    items = list(node)
    items[start:end] = [Each(value=value, items=tuple(items[start:end])), *[SKIPPED] * (more - 1)]
    return items
