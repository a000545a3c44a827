"""What differs in the keys of two starts, where a tool writes beside its cache what its key is made of."""

from __future__ import annotations

import posixpath
import tarfile

from imagematrix.common.json_documents import parse_json
from imagematrix.errors import UsageError
from imagematrix.images.oci.tar import open_tar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = frozenset({"cache_key_factors.json"})  # vLLM's
LIMIT = 64 << 10  # bytes of such a file, which has a few thousand; parsed, it takes fifty times as many
MOST = 100  # files that are read
LONGEST = 60  # characters of a name and of a value that are shown


def list_differing_factors(first: Path, second: Path) -> list[str]:
    """Return a line for each factor that differs between two starts, whose caches are in these tars.

    A start with another key has another file of factors beside the first one's.
    """
    before, after = _read_files(first), _read_files(second)
    known = next(iter(before.values()), None)
    new = next((raw for path, raw in after.items() if path not in before), None)
    if known is None or new is None:
        return []
    try:
        return [*_list_differences(parse_json(known, "the first"), parse_json(new, "the second"), "")]
    except (UsageError, RecursionError):  # it is damaged, and the caches are not kept in any case
        return []


def _read_files(archive: Path) -> dict[str, bytes]:
    """Return the files of factors by their paths."""
    found: dict[str, bytes] = {}
    with archive.open("rb") as stream, open_tar(stream) as members:
        for member in members:
            named = posixpath.basename(member.name) in NAMES and member.size <= LIMIT and len(found) < MOST
            file = members.extractfile(member) if named and member.type == tarfile.REGTYPE else None
            if file is not None:
                found[member.name] = file.read()
    return found


def _list_differences(known: object, new: object, name: str) -> Iterator[str]:
    """Yield a line for each value that differs; names within each other are joined with dots."""
    if isinstance(known, dict) and isinstance(new, dict):
        for key in sorted({*known, *new}):
            # Cut at each level: as a whole, the names of all values take the square of the file's size.
            inner = f"{name}.{key}"[: LONGEST + 1]
            yield from _list_differences(known.get(key), new.get(key), inner)
    elif known != new:
        yield f"{name.lstrip('.')}: {_shorten(known)}, then {_shorten(new)}"


def _shorten(value: object) -> str:
    return "absent" if value is None else str(value)[:LONGEST]
