"""Which file the dynamic loader takes for a library: glibc's rules, as ld.so(8) has them."""

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
ENTRY = struct.Struct("<iIIIQ")  # flags, name, path, -, what of the hardware it is for
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
    """The loader of an image, whose containers have `library_path` as LD_LIBRARY_PATH."""

    def __init__(self, tree: Tree, library_path: str = "") -> None:
        self._tree = tree
        self._given = [folder for folder in library_path.replace(";", ":").split(":") if folder]
        cache = tree.find(CACHE)
        self._cache = dict(_cached(cache[1])) if cache else {}

    def find(
        self, name: str, *, runpath: Iterable[str] = (), rpath: Iterable[str] = (), origin: str = "/"
    ) -> tuple[str, Plain] | None:
        """Return the file that is loaded under a name, and its path; None where none is.

        `runpath` and `rpath` are those of the file, in the folder `origin`, that asks for it.
        """
        first, later = (
            [folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in own]
            for own in (rpath, runpath)
        )
        # With a RUNPATH, an RPATH does not count.
        asked = [f"{folder}/{name}" for folder in (*([] if later else first), *self._given, *later)]
        cached = [self._cache[name]] if name in self._cache else []
        for path in (*asked, *cached, *(f"{folder}/{name}" for folder in DEFAULTS)):
            if entry := self._tree.find(path):
                return entry
        return None


def _cached(cache: Plain) -> Iterator[tuple[str, str]]:
    """Yield name and path of each library in ld.so.cache, the one that is taken last."""
    raw = cache.text or b""
    start = raw.find(MAGIC)
    if start == -1:
        return
    raw = raw[start:]
    count = min(int.from_bytes(raw[len(MAGIC) : len(MAGIC) + 4], "little"), MOST)
    table = raw[HEADER : HEADER + count * ENTRY.size]
    rows = list(ENTRY.iter_unpack(table[: len(table) // ENTRY.size * ENTRY.size]))
    # Of several with a name the first is taken, and those for certain CPUs only where these are.
    rows.reverse()
    for _, name, path, _, _ in sorted(rows, key=lambda row: row[4] == 0):
        yield _text(raw, name), _text(raw, path)


def _text(raw: bytes, start: int) -> str:
    end = raw.find(b"\0", start, start + TEXT)
    return raw[start : max(end, start)].decode("utf-8", "replace")
