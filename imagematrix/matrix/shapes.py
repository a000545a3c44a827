"""Helpers to read nodes of a matrix.yaml as maps, lists and words. Errors are collected, not raised."""

from __future__ import annotations

from imagematrix.matrix import document
from imagematrix.matrix.matrix import NO_CUDA
from imagematrix.matrix.problems import Mark, Problem
from imagematrix.spelling import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Shapes"]


class Shapes:
    """Base of readers: errors are added to `problems`, and reading continues."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems

    def _map(self, node: document.Node, what: str, keys: Iterable[str]) -> dict[str, document.Node]:
        fields = {}
        for name, mark, value in self._entries(node, what):
            if name in keys:
                fields[name] = value
            else:
                remedy = nearest(name, keys) or f"it can have {', '.join(keys)}"
                self._problem(f"{what} has no {name!r}", mark, remedy)
        return fields

    def _required(
        self, node: document.Node, fields: dict[str, document.Node], name: str
    ) -> document.Node | None:
        if name not in fields and isinstance(node, document.Mapping):
            self._problem(f"{name!r} is missing", node.mark)
        return fields.get(name)

    def _entries(self, node: document.Node | None, what: str) -> list[tuple[str, Mark, document.Node]]:
        if node is None:
            return []
        if not isinstance(node, document.Mapping):
            self._problem(f"{what}: expected a map, found {_kind(node)}", node.mark)
            return []
        return [(name, mark, value) for name, (mark, value) in node.entries.items()]

    def _list(self, node: document.Node | None, what: str) -> list[document.Node]:
        if node is None:
            return []
        if not isinstance(node, document.Sequence):
            self._problem(f"{what}: expected a list, found {_kind(node)}", node.mark)
            return []
        return node.items

    def _items(self, node: document.Node, what: str) -> list[tuple[str, Mark]]:
        """Return the words of a list; a single word counts as a list of one."""
        words = []
        for item in [node] if isinstance(node, document.Scalar) else self._list(node, what):
            text = self._text(item, what)
            if text is not None:
                words.append((text, item.mark))
        return words

    def _text(self, node: document.Node | None, what: str) -> str | None:
        if node is None:
            return None
        if isinstance(node, document.Scalar) and node.text is not None:
            return node.text
        remedy = f'for no CUDA write "{NO_CUDA}"' if "cuda" in what else None
        self._problem(f"{what}: expected a word, found {_kind(node)}", node.mark, remedy)
        return None

    def _problem(self, message: str, mark: Mark, remedy: str | None = None) -> None:
        self.problems.append(Problem(message, mark, remedy))


def _kind(node: document.Node) -> str:
    if isinstance(node, document.Mapping):
        return "a map"
    if isinstance(node, document.Sequence):
        return "a list"
    return "nothing" if node.text is None else f"the word {node.text[:40]!r}"
