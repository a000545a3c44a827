"""Which Python sources of a layer an audit keeps: those that may say on which GPUs a package uses a file.

While the layer is read, nobody knows which files of a package have device code, so its sources are kept on
disk until the end.
"""

from __future__ import annotations

import re

from imagematrix.audit.guards import capability_queries, modules
from imagematrix.audit.guards.module_reading import get_stem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import BinaryIO

SITE = re.compile(r"/.*/(?:site|dist)-packages/.*\.py")
WHOLE = 1 << 30  # bytes of all sources of a layer; PyTorch has 30 MB, vLLM 50 MB
MOST_TEXT = 4 << 20  # bytes that are kept of a package; of vLLM, these are 0.6 MB
MOST_FILES = 1_000  # with device code in a package; the names of all are searched for in each source
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
            sources: dict[str, bytes] = {}
            for path in paths:
                if path in self._places:
                    start, length = self._places[path]
                    self._file.seek(start)
                    sources[path] = self._file.read(length)
            chosen = _choose_sources(sources, frozenset(map(get_stem, coded)))
            # Of too many, none: a part of them could lack the one that uses a file on all GPUs.
            if sum(len(sources[path]) for path in chosen) <= MOST_TEXT:
                yield from ((path, sources[path]) for path in chosen)


def _choose_sources(sources: Mapping[str, bytes], stems: frozenset[str]) -> list[str]:
    """Return the sources that name files, those that answer their questions, and those that import these."""
    # A name such as kernels_sm90 may be made of its beginning and a number.
    beginnings = (re.match(r"[A-Za-z_]{3,}(?=\d)", stem) for stem in stems)
    words = {*stems, *(match[0] for match in beginnings if match)}
    naming = re.compile(
        rb"(?<!\w)(?:" + b"|".join(re.escape(word.encode()) for word in sorted(words)) + rb")"
    )
    chosen = dict.fromkeys(path for path, text in sources.items() if naming.search(text))
    names = {path: modules.make_dotted_name(path.partition("-packages/")[2]) for path in sources}
    loading = re.compile(rb"^[ \t]*(?:from|import)\b.*" + naming.pattern, re.MULTILINE)
    silent = [
        names[path].encode()
        for path in chosen
        if not path.endswith("/__init__.py")
        and loading.search(sources[path])
        and not capability_queries.QUESTION.search(sources[path])
    ]
    if silent:
        importing = re.compile(rb"\b(?:" + b"|".join(map(re.escape, silent)) + rb")\b")
        chosen |= dict.fromkeys(path for path, text in sources.items() if importing.search(text))
    imported = {
        name.decode().rpartition(".")[2]
        for path in chosen
        for match in IMPORTED.finditer(sources[path])
        for name in filter(None, match.groups())
    }
    answering = (
        path
        for path, name in names.items()
        if name.rpartition(".")[2] in imported and capability_queries.QUESTION.search(sources[path])
    )
    return [*chosen, *(path for path in answering if path not in chosen)]
