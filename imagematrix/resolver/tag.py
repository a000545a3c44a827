"""What a tag asks for: a version, and after it values of the image's own axes, no GPU, or a class of nodes.

`v1` asks for what fits this node, `v1-python3.13` for one with Python 3.13, `v1-cpu` for one without a GPU,
and `v1-class.NAME` for the one that nodes of a class get.
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

__all__ = ["CLASS_NAME", "Wish", "version", "wish"]

CPU = "cpu"
CLASS = "class."  # which no axis is called
CLASS_NAME = re.compile(r"class\.([A-Za-z0-9_.]+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a tag asks for beyond its version.

    `where` has the values of the image's own axes, `cpu` says that no GPU is wanted, and `node_class` is the
    class of nodes whose variant is wanted, None for this node.
    """

    where: tuple[tuple[str, str], ...] = ()
    cpu: bool = False
    node_class: str | None = None

    @property
    def gpus(self) -> str | None:
        """What `--gpus` would be."""
        return NONE if self.cpu else None


def version(tag: str) -> str:
    """Return the version that a tag names: what comes before its first dash."""
    return tag.partition("-")[0]


def wish(tag: str, catalog: Catalog) -> Wish:
    """Return what `tag` asks of the catalog of its version.

    Raises UsageError if a word is neither an axis with a value that some variant has, nor `cpu`, nor a class,
    if one occurs twice, and if the words can be read in several ways.
    """
    _, dash, rest = tag.partition("-")
    if not dash:
        return Wish()
    words = {f"{axis}{value}": (axis, value) for one in catalog.variants for axis, value in one.axes}
    readings = {tuple(sorted(one)) for one in _readings(rest, [*words.items(), (CPU, (CPU, ""))], ())}
    if len(readings) == 1:
        pairs = dict(readings.pop())
        node_class = pairs.pop(CLASS, None)
        return Wish(cpu=pairs.pop(CPU, None) is not None, node_class=node_class, where=tuple(pairs.items()))
    what = "can be read in several ways" if readings else f"is not a tag of {catalog.image}"
    valid = ", ".join(sorted([*words, CPU, "class.NAME"]))
    remedy = f"after {catalog.version}-, write these words with dashes between them: {valid}"
    raise UsageError(f"{tag} {what}", remedy=remedy)


def _readings(
    rest: str, words: Sequence[tuple[str, tuple[str, str]]], before: tuple[tuple[str, str], ...]
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield what the words of `rest` can mean after `before`; the value of an axis may have dashes in it."""
    named = CLASS_NAME.match(rest)
    readings = [*words, (named[0], (CLASS, named[1]))] if named else words
    for word, pair in readings:
        if pair[0] in dict(before) or not f"{rest}-".startswith(f"{word}-"):
            continue
        if rest == word:
            yield *before, pair
        else:
            yield from _readings(rest[len(word) + 1 :], words, (*before, pair))
