"""Parsing the tag of a request: a version, then values of the image's own axes, `cpu`, or a class of nodes.

`v1` requests the variant that fits this node, `v1-python3.13` one with Python 3.13, `v1-cpu` one without a
GPU, and `v1-class.NAME` the variant for a class of nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.common.image_reference import make_tag_word
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import NONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.images.catalog.catalog import Catalog

CPU = "cpu"
CLASS = "class."  # no axis can have this name
CLASS_NAME = re.compile(r"class\.([A-Za-z0-9_.]+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRequest:
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

    def to_tag(self, version: str) -> str:
        """Return a tag that requests this of a version, the same for every order of its words."""
        words = [f"{axis}{make_tag_word(value)}" for axis, value in self.where]
        node_class = [f"{CLASS}{self.node_class}"] if self.node_class else []
        return "-".join([version, *sorted(words), *([CPU] if self.cpu else []), *node_class])


def parse_request(tag: str, catalog: Catalog) -> TagRequest:
    """Return what `tag` requests of the catalog of its version.

    Raises UsageError if a word is neither `cpu`, nor a class, nor an axis with the value of some variant; if
    a word occurs twice; or if the tag is ambiguous.
    """
    _, dash, rest = tag.partition("-")
    if not dash:
        return TagRequest()
    meanings: dict[str, set[tuple[str, str]]] = {}
    for axis, value in {pair for variant in catalog.variants for pair in variant.axes}:
        meanings.setdefault(f"{axis}{make_tag_word(value)}", set()).add((axis, value))
    # Two values such as 2+1 and 2_1 of a foreign catalog cannot be told apart in a tag.
    words = {name: pairs.pop() for name, pairs in meanings.items() if len(pairs) == 1}
    readings = {
        tuple(sorted(reading)) for reading in _parse_all_ways(rest, [*words.items(), (CPU, (CPU, ""))], ())
    }
    if len(readings) == 1:
        values = dict(readings.pop())
        node_class = values.pop(CLASS, None)
        return TagRequest(
            cpu=values.pop(CPU, None) is not None, node_class=node_class, where=tuple(values.items())
        )
    problem = "is ambiguous" if readings else f"is not a tag of {catalog.image}"
    valid = ", ".join(sorted([*words, CPU, "class.NAME"]))
    remedy = f"valid words after {catalog.version}-, joined by dashes: {valid}"
    raise UsageError(f"{tag} {problem}", remedy=remedy)


def _parse_all_ways(
    rest: str, words: Sequence[tuple[str, tuple[str, str]]], before: tuple[tuple[str, str], ...]
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield every way to parse `rest` after the words `before`; the value of an axis may contain dashes."""
    match = CLASS_NAME.match(rest)
    candidates = [*words, (match[0], (CLASS, match[1]))] if match else words
    for name, pair in candidates:
        if pair[0] in dict(before) or not f"{rest}-".startswith(f"{name}-"):
            continue
        if rest == name:
            yield *before, pair
        else:
            yield from _parse_all_ways(rest[len(name) + 1 :], words, (*before, pair))
