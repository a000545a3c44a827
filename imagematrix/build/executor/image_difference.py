"""Comparing builds of an image: the first file that differs, if any, and the layers of a stored image."""

from __future__ import annotations

import hashlib
import itertools
import tarfile
from dataclasses import dataclass

from imagematrix.errors import BuildError
from imagematrix.images.catalog.labels import hash_content, hash_unlabelled_content
from imagematrix.images.oci.compression import get_libzstd_version
from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.layout import require_blob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from imagematrix.build.plan.protocols import StoredImageInfo
    from imagematrix.images.oci.layout import LayoutImage


@dataclass(frozen=True, slots=True, kw_only=True)
class _TarEntry:
    """An entry of a layer: the header of a file and its digest."""

    name: str
    kind: bytes
    mode: int
    owner: tuple[int, int]
    time: float
    target: str
    content: str


def find_difference(first: LayoutImage, second: LayoutImage) -> str | None:
    """Return the first difference between two builds of an image; None if their manifests are equal."""
    if first.digest == second.digest:
        return None
    pairs = itertools.zip_longest(first.layer_files, second.layer_files)
    for position, (mine, its) in enumerate(pairs, 1):
        if mine is None or its is None:
            return f"one has {len(first.layers)} layers, the other {len(second.layers)}"
        if mine.name != its.name:
            return f"layer {position} of {len(first.layers)}: {_describe_layer_difference(mine, its)}"
    return "the layers are the same, but the configuration differs"


def compare_with_stored(stored: StoredImageInfo, image: LayoutImage) -> str | None:
    """Return a warning if a stored image has other bytes than one built again; None if it has the same.

    The bytes of compressed layers depend on the release of libzstd or zlib, so the uncompressed ones must be
    equal, and so must platform and settings: raises BuildError if they differ. Other labels alone, as another
    release of this program may write them, are no difference. What the stored image says of itself does not
    count.
    """
    if stored.digest in (image.digest, image.config):
        return None
    config = image.configuration
    mine = tuple(config["rootfs"]["diff_ids"])
    if stored.layers != mine:
        pairs = enumerate(itertools.zip_longest(stored.layers, mine), 1)
        first = next(position for position, (stored_layer, layer) in pairs if stored_layer != layer)
        raise BuildError(
            f"not reproducible: layer {first} of {len(mine)} is not that of the stored image {stored.digest}"
        )
    if hash_unlabelled_content(stored.configuration) != hash_unlabelled_content(config):
        raise BuildError(
            f"not reproducible: the layers are those of the stored image {stored.digest}, "
            "but its platform or a setting, such as Env or Entrypoint, is another one"
        )
    if hash_content(stored.configuration) != hash_content(config):
        return None
    return (
        f"the stored image {stored.digest} has other compressed layers with the same content, "
        f"as another libzstd than {get_libzstd_version()} writes them; the uncompressed layers are equal"
    )


def _describe_layer_difference(first: Path, second: Path) -> str:
    for mine, its in itertools.zip_longest(_list_entries(first), _list_entries(second)):
        if mine == its:
            continue
        if mine is None or its is None or mine.name != its.name:
            names = (file.name if file else "nothing more" for file in (mine, its))
            return f"one has {' where the other has '.join(names)}"
        facts = [fact for fact in _TarEntry.__slots__ if getattr(mine, fact) != getattr(its, fact)]
        return f"{mine.name} differs in {' and '.join(facts)}"
    return "the files are the same, but in another order or compression"


def _list_entries(layer: Path) -> Iterator[_TarEntry]:
    with require_blob(layer).open("rb") as file:
        content: Any = DecompressedStream(file)  # a stream, of which only read is called
        with tarfile.open(fileobj=content, mode="r|") as archive:
            for member in archive:
                data = archive.extractfile(member) if member.isfile() else None
                yield _TarEntry(
                    name=member.name,
                    kind=member.type,
                    mode=member.mode,
                    owner=(member.uid, member.gid),
                    time=member.mtime,
                    target=member.linkname,
                    content=hashlib.file_digest(data, "sha256").hexdigest() if data else "",  # type: ignore[arg-type]
                )
