"""Reading /etc/ld.so.cache, in which glibc's loader looks up libraries (dl-cache.h of glibc)."""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = "/etc/ld.so.cache"
MAGIC = b"glibc-ld.so.cache1.1"
HEADER = 48  # bytes before the entries
ENTRY = struct.Struct("<iIIIQ")  # flags, name, path, -, required hardware capabilities
MOST = 200_000  # entries
PATHS = 16  # of one library; a real one has a few, for kinds of CPUs
NAME, PATH = 256, 4096  # bytes of a name and of a path


class LoaderCache:
    """The libraries in the cache `raw`, by name; none if it is damaged."""

    __slots__ = ("_places", "_raw")

    def __init__(self, raw: bytes) -> None:
        # The old format, which libraries before glibc 2.2 know, may precede it.
        start = raw.find(MAGIC)
        self._raw = raw = raw[start:] if start > 0 else raw
        self._places: dict[bytes, list[int]] = {}
        if start == -1:
            return
        count = min(int.from_bytes(raw[len(MAGIC) : len(MAGIC) + 4], "little"), MOST)
        table = raw[HEADER : HEADER + count * ENTRY.size]
        rows = list(ENTRY.iter_unpack(table[: len(table) // ENTRY.size * ENTRY.size]))
        # The loader takes the first entry of a name, and entries for certain CPUs only on such CPUs.
        rows.sort(key=lambda row: row[4] != 0)
        for _, name, path, _, _ in rows:
            end = raw.find(b"\0", name, name + NAME)
            self._places.setdefault(raw[name : max(end, name)], []).append(path)

    def list_paths(self, name: str) -> Iterator[str]:
        """Yield the paths that the cache has for a library, in the loader's order."""
        for start in self._places.get(name.encode("utf-8", "replace"), ())[:PATHS]:
            end = self._raw.find(b"\0", start, start + PATH)
            yield self._raw[start : max(end, start)].decode("utf-8", "replace")
