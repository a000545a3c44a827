"""Comparing two builds of an image: the first file that differs, if any."""

from __future__ import annotations

import hashlib
import itertools
import tarfile
from dataclasses import dataclass

from imagematrix.oci.layout import solid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from imagematrix.oci.layout import Image

__all__ = ["difference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """An entry of a layer: the header of a file and its digest."""

    name: str
    kind: bytes
    mode: int
    owner: tuple[int, int]
    time: float
    target: str
    content: str


def difference(first: Image, second: Image) -> str | None:
    """Return the first difference between two builds of an image; None if their manifests are equal."""
    if first.digest == second.digest:
        return None
    pairs = itertools.zip_longest(first.layer_files, second.layer_files)
    for number, (one, other) in enumerate(pairs, 1):
        if one is None or other is None:
            return f"one has {len(first.layers)} layers, the other {len(second.layers)}"
        if one.name != other.name:
            return f"layer {number} of {len(first.layers)}: {_in_layer(one, other)}"
    return "the layers are the same, but the configuration differs"


def _in_layer(one: Path, other: Path) -> str:
    for mine, its in itertools.zip_longest(_files(one), _files(other)):
        if mine == its:
            continue
        if mine is None or its is None or mine.name != its.name:
            names = (file.name if file else "nothing more" for file in (mine, its))
            return f"one has {' where the other has '.join(names)}"
        facts = [fact for fact in _File.__slots__ if getattr(mine, fact) != getattr(its, fact)]
        return f"{mine.name} differs in {' and '.join(facts)}"
    return "the files are the same, but in another order or compression"


def _files(layer: Path) -> Iterator[_File]:
    with tarfile.open(solid(layer), "r|*") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            yield _File(
                name=member.name,
                kind=member.type,
                mode=member.mode,
                owner=(member.uid, member.gid),
                time=member.mtime,
                target=member.linkname,
                content=hashlib.file_digest(file, "sha256").hexdigest() if file else "",  # type: ignore[arg-type]
            )
