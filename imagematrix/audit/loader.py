"""Which file the dynamic loader takes for a library, by glibc's rules (ld.so(8))."""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.layer import Plain
    from imagematrix.audit.tree import Tree

__all__ = ["Loader"]

CACHE = "/etc/ld.so.cache"
MAGIC = b"glibc-ld.so.cache1.1"
HEADER = 48  # bytes before the entries
ENTRY = struct.Struct("<iIIIQ")  # flags, name, path, -, required hardware capabilities
MOST = 200_000
TEXT = 4096
DEFAULTS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)


class Loader:
    """The dynamic loader of an image whose containers have `library_path` as LD_LIBRARY_PATH."""

    def __init__(self, tree: Tree, library_path: str = "") -> None:
        self._tree = tree
        self._given = [folder for folder in library_path.replace(";", ":").split(":") if folder]
        cache = tree.find(CACHE)
        self._cache = dict(_cached(cache[1])) if cache else {}

    def find(
        self, name: str, *, runpath: Iterable[str] = (), rpath: Iterable[str] = (), origin: str = "/"
    ) -> tuple[str, Plain] | None:
        """Return the path of the file that is loaded for a name, and the file, or None if there is none.

        `runpath` and `rpath` are those of the file that needs it, which is in the folder `origin`.
        """
        first, later = (
            [folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in own]
            for own in (rpath, runpath)
        )
        # The loader ignores an RPATH if there is a RUNPATH.
        searched = [f"{folder}/{name}" for folder in (*([] if later else first), *self._given, *later)]
        cached = [self._cache[name]] if name in self._cache else []
        for path in (*searched, *cached, *(f"{folder}/{name}" for folder in DEFAULTS)):
            if entry := self._tree.find(path):
                return entry
        return None


def _cached(cache: Plain) -> Iterator[tuple[str, str]]:
    """Yield the name and the path of each library in ld.so.cache; for each name, the last pair counts."""
    raw = cache.text or b""
    start = raw.find(MAGIC)
    if start == -1:
        return
    raw = raw[start:]
    count = min(int.from_bytes(raw[len(MAGIC) : len(MAGIC) + 4], "little"), MOST)
    table = raw[HEADER : HEADER + count * ENTRY.size]
    rows = list(ENTRY.iter_unpack(table[: len(table) // ENTRY.size * ENTRY.size]))
    # The loader takes the first entry of a name, and entries for certain CPUs only on such CPUs.
    rows.reverse()
    for _, name, path, _, _ in sorted(rows, key=lambda row: row[4] == 0):
        yield _text(raw, name), _text(raw, path)


def _text(raw: bytes, start: int) -> str:
    end = raw.find(b"\0", start, start + TEXT)
    return raw[start : max(end, start)].decode("utf-8", "replace")
