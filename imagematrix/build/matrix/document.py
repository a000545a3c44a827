"""Parse YAML text into a tree of nodes with their line and column. Scalars keep their text.

It uses the parser's events, not its constructors: nothing becomes a float (12.10 stays "12.10"), a duplicate
key is an error, and neither deep nesting nor aliases of aliases can exhaust memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from imagematrix.build.matrix.matrix import NO_CUDA
from imagematrix.build.matrix.problems import Mark, MatrixError, Problem
from imagematrix.common.suggestions import suggest_nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEPTH = 32
SHELL = ("/bin/sh", "-c")  # of a command that is one line, as in a Dockerfile
NODES = 1_000_000  # after aliases are followed; a matrix of 100,000 cells has a few hundred in the file


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value. `text` is None for an empty value or a bare `null` or `~`."""

    text: str | None
    mark: Mark
    size: int = 1


@dataclass(slots=True)
class Sequence:
    """A list. `size` is the number of nodes in it, including itself, with aliases followed."""

    mark: Mark
    items: list[Node] = field(default_factory=list)
    size: int = 1


@dataclass(slots=True)
class Mapping:
    """A map in the order of the file; each key has its position."""

    mark: Mark
    entries: dict[str, tuple[Mark, Node]] = field(default_factory=dict)
    size: int = 1


Node = Scalar | Sequence | Mapping


def parse_yaml(text: str, where: str) -> Node:
    """Return the one document in `text`; raise MatrixError naming `where`, line and column."""
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return _Composer(where, text).compose(yaml.parse(text, Loader=loader))
    except yaml.reader.ReaderError as error:
        message = f"the character {error.character!r} is not allowed in YAML"
        raise MatrixError(
            where, [Problem(message, Mark(text.count("\n", 0, error.position) + 1, 1))]
        ) from error
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        mark = _make_mark(at) if at else Mark(1, 1)
        message = f"not valid YAML: {error.problem}" + (f" ({error.context})" if error.context else "")
        line = (text.splitlines() or [""])[min(mark.line, text.count("\n")) - 1]
        indent = line[: len(line) - len(line.lstrip())]
        remedy = "indent with spaces: YAML does not allow tabs" if "\t" in indent else None
        raise MatrixError(where, [Problem(message, mark, remedy)], text) from error


def _make_mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


class _Composer:
    """Builds the tree from the parser's events, with an explicit stack."""

    def __init__(self, where: str, text: str) -> None:
        self._where = where
        self._read_text = text
        self._anchors: dict[str, Node] = {}
        self._stack: list[_OpenCollection] = []

    def compose(self, events: Iterator[yaml.Event]) -> Node:
        root: Node | None = None
        for event in events:
            mark = _make_mark(event.start_mark)
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise self._make_error("a second document starts here; a matrix is one document", mark)
            complete = self._process_event(event, mark)
            if complete is not None:
                root = complete
        if root is None:
            raise self._make_error("the file is empty", Mark(1, 1), "start from `imagematrix init`")
        return root

    def _process_event(self, event: yaml.Event, mark: Mark) -> Node | None:
        """Process one event; return the root once it is complete."""
        if isinstance(event, yaml.ScalarEvent):
            self._require_untagged(event, mark)
            bare = event.style is None or event.style == ""
            empty = bare and event.value in ("", "~", "null", "Null", "NULL")
            return self._complete(Scalar(None if empty else event.value, mark), event.anchor)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._make_error(f"the alias *{event.anchor} has no anchor before it", mark)
            return self._complete(self._anchors[event.anchor], None)
        if isinstance(event, yaml.CollectionStartEvent):
            self._require_untagged(event, mark)
            if len(self._stack) == DEPTH:
                raise self._make_error(f"nested deeper than {DEPTH} levels", mark)
            node = Mapping(mark) if isinstance(event, yaml.MappingStartEvent) else Sequence(mark)
            self._stack.append(_OpenCollection(node, event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = self._stack.pop()
            return self._complete(closed.node, closed.anchor)
        return None

    def _require_untagged(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, mark: Mark) -> None:
        if event.tag not in (None, "", "!", "tag:yaml.org,2002:str"):
            raise self._make_error(f"the tag {event.tag} is not supported", mark, "remove the tag")

    def _complete(self, node: Node, anchor: str | None) -> Node | None:
        if anchor:
            self._anchors[anchor] = node
        if not self._stack:
            return node
        top = self._stack[-1]
        top.node.size += node.size
        if top.node.size > NODES:
            raise self._make_error(f"more than {NODES:,} values once aliases are followed", node.mark)
        if isinstance(top.node, Sequence):
            top.node.items.append(node)
        elif top.key is None:
            top.key = self._require_key(top, top.node, node)
        else:
            self._put_entry(top.node, top.key, node)
            top.key = None
        return None

    def _require_key(self, top: _OpenCollection, mapping: Mapping, node: Node) -> Scalar:
        if not isinstance(node, Scalar) or node.text is None:
            raise self._make_error("a key must be a word", node.mark)
        if node.text in top.written_keys:
            first = mapping.entries[node.text][0]
            raise self._make_error(
                f"the key {node.text!r} occurs twice (first on line {first.line})", node.mark
            )
        if node.text != "<<":
            top.written_keys.add(node.text)
        return node

    def _put_entry(self, mapping: Mapping, key: Scalar, node: Node) -> None:
        if key.text == "<<":
            for source in node.items if isinstance(node, Sequence) else [node]:
                if not isinstance(source, Mapping):
                    raise self._make_error("<< takes a map, or a list of maps", source.mark)
                for name, entry in source.entries.items():
                    mapping.entries.setdefault(name, entry)
        else:
            mapping.entries[str(key.text)] = (key.mark, node)

    def _make_error(self, message: str, mark: Mark, remedy: str | None = None) -> MatrixError:
        return MatrixError(self._where, [Problem(message, mark, remedy)], self._read_text)


@dataclass(slots=True)
class _OpenCollection:
    """A collection that is still open, the key whose value is still missing, and the keys written in it.

    Keys written here take precedence over those merged by <<, wherever << stands.
    """

    node: Sequence | Mapping
    anchor: str | None
    key: Scalar | None = None
    written_keys: set[str] = field(default_factory=set)


class NodeReader:
    """Base of classes that read nodes as maps, lists and words.

    Errors are added to `problems`, and reading continues.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems

    def _read_map(self, node: Node, what: str, keys: Iterable[str]) -> dict[str, Node]:
        fields = {}
        for name, mark, value in self._read_entries(node, what):
            if name in keys:
                fields[name] = value
            else:
                remedy = suggest_nearest(name, keys) or f"it can have {', '.join(keys)}"
                self._add_problem(f"{what} has no {name!r}", mark, remedy)
        return fields

    def _require_field(
        self, node: Node, fields: dict[str, Node], name: str, example: str | None = None
    ) -> Node | None:
        """Return a field that there must be; `example` is a line that would give it a value."""
        if name not in fields and isinstance(node, Mapping):
            self._add_problem(f"{name!r} is missing", node.mark, example and f"write {example}")
        return fields.get(name)

    def _read_entries(self, node: Node | None, what: str) -> list[tuple[str, Mark, Node]]:
        if node is None:
            return []
        if not isinstance(node, Mapping):
            self._add_problem(f"{what}: expected a map, found {_describe_kind(node)}", node.mark)
            return []
        return [(name, mark, value) for name, (mark, value) in node.entries.items()]

    def _read_list(self, node: Node | None, what: str) -> list[Node]:
        if node is None:
            return []
        if not isinstance(node, Sequence):
            self._add_problem(f"{what}: expected a list, found {_describe_kind(node)}", node.mark)
            return []
        return node.items

    def _read_words(self, node: Node, what: str) -> list[tuple[str, Mark]]:
        """Return the words of a list; a single word counts as a list of one."""
        words = []
        for item in [node] if isinstance(node, Scalar) else self._read_list(node, what):
            text = self._read_text(item, what)
            if text is not None:
                words.append((text, item.mark))
        return words

    def _read_command(self, node: Node, what: str) -> tuple[str, ...]:
        """Return the words of a command: those of a list, or a shell and its line; none if it is empty."""
        words = tuple(word for word, _ in self._read_words(node, what))
        if not (words and words[0]):
            return ()
        return (*SHELL, *words) if isinstance(node, Scalar) else words

    def _read_text(self, node: Node | None, what: str) -> str | None:
        if node is None:
            return None
        if isinstance(node, Scalar) and node.text is not None:
            return node.text
        remedy = f'for no CUDA write "{NO_CUDA}"' if "cuda" in what else None
        self._add_problem(f"{what}: expected a word, found {_describe_kind(node)}", node.mark, remedy)
        return None

    def _add_problem(self, message: str, mark: Mark, remedy: str | None = None) -> None:
        self.problems.append(Problem(message, mark, remedy))


def _describe_kind(node: Node) -> str:
    if isinstance(node, Mapping):
        return "a map"
    if isinstance(node, Sequence):
        return "a list"
    return "nothing" if node.text is None else f"the word {node.text[:40]!r}"
