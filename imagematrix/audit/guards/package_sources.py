"""Which Python sources of a layer an audit keeps: those that may say on which GPUs a package uses a file.

While the layer is read, nobody knows which files of a package have device code, so its sources are kept on
disk until the end.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from imagematrix.audit.guards import capability_queries, modules
from imagematrix.audit.guards.module_reading import get_stem
from imagematrix.common.groups import group_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet
    from typing import BinaryIO

SITE = re.compile(r"/.*/(?:site|dist)-packages/.*\.py")
WHOLE = 1 << 30  # bytes of all sources of a layer; PyTorch has 30 MB, vLLM 50 MB
MOST_TEXT = 4 << 20  # bytes that are kept of a package; of vLLM, these are 0.6 MB
MOST_FILES = 1_000  # with device code in a package; the names of all are searched for in each source
WORD = re.compile(rb"\w+")
DOTTED = re.compile(rb"\b\w+(?:\.\w+)+")
COMMENT = re.compile(rb"#[^\n]*")
IMPORTING = re.compile(rb"\bimport\b([^\n;]*)")
FROM = re.compile(rb"from\s*([.\w]+)\s*import\b[ \t]*(\([^()]*\)|(?:\\\r?\n|[^\n;\\])*)")
IMPORTED = re.compile(rb"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import|import[ \t]+([.\w]+))", re.MULTILINE)


class PackageSources:
    """The Python sources of a layer, kept in a `file`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0

    def keep(self, path: str, text: bytes) -> None:
        """Keep the text of a source, if it is one of a package and there is room.

        Of one that is too long, it keeps the beginning, which is no module.
        """
        text = text[: modules.LONGEST + 1]
        if SITE.fullmatch(path) is None or len(text) > WHOLE - self._end:
            self._places.pop(path, None)
            return
        self._file.seek(self._end)
        self._file.write(text)
        self._places[path] = self._end, len(text)
        self._end += len(text)

    def choose_sources(self, packages: Iterable[tuple[list[str], list[str]]]) -> Iterator[tuple[str, bytes]]:
        """Yield the sources that may say when files are used: of each package, all files and those with code.

        A package with one such file has no other that GPUs could use instead, and one with very many asks for
        none by its name.
        """
        for paths, coded in packages:
            if not 1 < len(coded) <= MOST_FILES:
                continue
            kept = [path for path in paths if path in self._places]
            chosen = _choose_sources(kept, self._read_source, frozenset(map(get_stem, coded)))
            # Of too many, none: a part of them could lack the one that uses a file on all GPUs.
            if sum(self._places[path][1] for path in chosen) <= MOST_TEXT:
                yield from ((path, self._read_source(path)) for path in chosen)

    def _read_source(self, path: str) -> bytes:
        start, length = self._places[path]
        self._file.seek(start)
        return self._file.read(length)


def _choose_sources(paths: Sequence[str], read: Callable[[str], bytes], stems: frozenset[str]) -> list[str]:
    """Return the sources that name files, and those that answer their questions.

    They are read one by one, as together they may take much memory. Of the others that import a module which
    names a file and asks nothing, one is enough to show that there are such.
    """
    # A name such as kernels_sm90 may be made of its beginning and a number.
    beginnings = (re.match(r"[A-Za-z_]{3,}(?=\d)", stem) for stem in stems)
    words = {*stems, *(match[0] for match in beginnings if match)}
    naming = _Beginnings(max(WORD.findall(word.encode()), key=len, default=b"") for word in words)
    chosen = dict.fromkeys(path for path in paths if any(naming.find(WORD.findall(read(path)))))
    names = {path: modules.make_dotted_name(path.partition("-packages/")[2]) for path in paths}
    silent = {
        names[path] for path in chosen if not path.endswith("/__init__.py") and _is_silent(read(path), naming)
    }
    unchosen = sorted({*paths} - chosen.keys())
    for path in unchosen:
        found = _find_imported(read(path), path, names[path], silent) if silent else set()
        if found:
            chosen[path] = None
            silent -= found
    imported = {
        name.decode().rpartition(".")[2]
        for path in chosen
        for match in IMPORTED.finditer(read(path))
        for name in filter(None, match.groups())
    }
    answering = (
        path
        for path, name in names.items()
        if name.rpartition(".")[2] in imported and capability_queries.QUESTION.search(read(path))
    )
    return [*chosen, *(path for path in answering if path not in chosen)]


class _Beginnings:
    """Beginnings of words, in time that does not grow with their number."""

    def __init__(self, beginnings: Iterable[bytes]) -> None:
        self._sorted: list[bytes] = []
        for beginning in sorted(beginnings):
            if not self._sorted or not beginning.startswith(self._sorted[-1]):
                self._sorted.append(beginning)

    def find(self, words: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the beginnings of words. As none begins another, that of a word is the last one before it."""
        for word in set(words):
            index = bisect_right(self._sorted, word)
            if index and word.startswith(self._sorted[index - 1]):
                yield self._sorted[index - 1]


def _is_silent(text: bytes, naming: _Beginnings) -> bool:
    """Whether a module imports a file, and asks nothing."""
    imported = [*IMPORTING.findall(text), *(part for parts in _list_imports(text) for part in parts)]
    return not capability_queries.QUESTION.search(text) and any(
        naming.find(WORD.findall(b" ".join(imported)))
    )


def _list_imports(text: bytes) -> list[tuple[bytes, bytes]]:
    """Return what a module imports from others, each with the text between `from` and `import`."""
    return FROM.findall(COMMENT.sub(b"", text))


def _find_imported(text: bytes, path: str, name: str, targets: AbstractSet[str]) -> set[str]:
    """Return which of some modules another one imports, or something of them, or names."""
    dotted = _Beginnings(f"{target}.".encode() for target in targets)
    found = {name[:-1].decode() for name in dotted.find(token + b"." for token in DOTTED.findall(text))}
    by_parent = group_values(target.rpartition(".")[::2] for target in targets)
    for base, imported in _list_imports(text):
        relative = base.lstrip(b".")
        level = len(base) - len(relative)
        full_name = modules.resolve_import(name, path, relative.decode("ascii", "replace"), level)
        words = {word.decode("ascii", "replace") for word in WORD.findall(imported)}
        found |= {f"{full_name}.{child}" for child in words.intersection(by_parent.get(full_name, ()))}
        found |= targets & {full_name}
    return found
