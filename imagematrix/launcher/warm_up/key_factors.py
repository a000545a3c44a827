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
LIMIT = 4 << 20  # bytes of such a file
MOST = 100  # files that are read
LONGEST = 60  # characters of a value that are shown


def list_differing_factors(first: Path, second: Path) -> list[str]:
    """Return a line for each factor that differs between two starts, whose caches are in these tars.

    A start with another key has another file of factors beside the first one's.
    """
    before, after = _read_factors(first), _read_factors(second)
    known = next(iter(before.values()), None)
    new = next((factors for path, factors in after.items() if path not in before), None)
    if known is None or new is None:
        return []
    return [
        f"{name}: {_shorten(known.get(name))}, then {_shorten(new.get(name))}"
        for name in sorted({*known, *new})
        if known.get(name) != new.get(name)
    ]


def _read_factors(archive: Path) -> dict[str, dict[str, object]]:
    """Return the factors in each file of them, by their names joined with dots."""
    found: dict[str, dict[str, object]] = {}
    with archive.open("rb") as stream, open_tar(stream) as members:
        for member in members:
            named = posixpath.basename(member.name) in NAMES and member.size <= LIMIT and len(found) < MOST
            file = members.extractfile(member) if named and member.type == tarfile.REGTYPE else None
            if file is not None:
                try:
                    found[member.name] = dict(_flatten(parse_json(file.read(), member.name), ""))
                except UsageError:  # it is damaged, and the caches are not kept in any case
                    continue
    return found


def _flatten(value: object, prefix: str) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        yield prefix.lstrip("."), value
        return
    for name, inner in value.items():
        yield from _flatten(inner, f"{prefix}.{name}")


def _shorten(value: object) -> str:
    return "absent" if value is None else str(value)[:LONGEST]
