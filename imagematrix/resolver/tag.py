"""Parsing the tag of a request: a version, then values of the image's own axes, `cpu`, or a class of nodes.

`v1` requests the variant that fits this node, `v1-python3.13` one with Python 3.13, `v1-cpu` one without a
GPU, and `v1-class.NAME` the variant for a class of nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.gpus.spec import NONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.catalog.catalog import Catalog

__all__ = ["CLASS_NAME", "Request", "request", "version"]

CPU = "cpu"
CLASS = "class."  # no axis can have this name
CLASS_NAME = re.compile(r"class\.([A-Za-z0-9_.]+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a tag requests beyond its version.

    `where` has values of the image's own axes. `cpu`: a CPU-only variant is requested. `node_class` is the
    class of nodes whose variant is requested, None for this node.
    """

    where: tuple[tuple[str, str], ...] = ()
    cpu: bool = False
    node_class: str | None = None

    @property
    def gpus(self) -> str | None:
        """The equivalent value of `--gpus`."""
        return NONE if self.cpu else None


def version(tag: str) -> str:
    """Return the version in a tag: the part before its first dash."""
    return tag.partition("-")[0]


def request(tag: str, catalog: Catalog) -> Request:
    """Return what `tag` requests of the catalog of its version.

    Raises UsageError if a word is neither `cpu`, nor a class, nor an axis with the value of some variant; if
    a word occurs twice; or if the tag is ambiguous.
    """
    _, dash, rest = tag.partition("-")
    if not dash:
        return Request()
    words = {f"{axis}{value}": (axis, value) for one in catalog.variants for axis, value in one.axes}
    readings = {tuple(sorted(one)) for one in _readings(rest, [*words.items(), (CPU, (CPU, ""))], ())}
    if len(readings) == 1:
        pairs = dict(readings.pop())
        node_class = pairs.pop(CLASS, None)
        return Request(
            cpu=pairs.pop(CPU, None) is not None, node_class=node_class, where=tuple(pairs.items())
        )
    what = "is ambiguous" if readings else f"is not a tag of {catalog.image}"
    valid = ", ".join(sorted([*words, CPU, "class.NAME"]))
    remedy = f"valid words after {catalog.version}-, joined by dashes: {valid}"
    raise UsageError(f"{tag} {what}", remedy=remedy)


def _readings(
    rest: str, words: Sequence[tuple[str, tuple[str, str]]], before: tuple[tuple[str, str], ...]
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield every way to parse `rest` after the words `before`; the value of an axis may contain dashes."""
    named = CLASS_NAME.match(rest)
    readings = [*words, (named[0], (CLASS, named[1]))] if named else words
    for word, pair in readings:
        if pair[0] in dict(before) or not f"{rest}-".startswith(f"{word}-"):
            continue
        if rest == word:
            yield *before, pair
        else:
            yield from _readings(rest[len(word) + 1 :], words, (*before, pair))
