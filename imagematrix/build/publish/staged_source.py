"""Where staged warm images are read: a repository, or the OCI layout that `warm --to` writes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol

from imagematrix.common.image_reference import LAYOUT, Reference
from imagematrix.errors import UsageError
from imagematrix.images.oci.layout import LayoutFolder
from imagematrix.images.oci.manifest import IMAGE, Descriptor, ImageIndex, Manifest, parse_manifest
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from imagematrix.images.oci.byte_stream import ByteStream


class StagedSource(Protocol):
    """Manifests and blobs that anyone may have written; `Registry` says what its methods return and raise."""

    @property
    def name(self) -> str:
        """Its name in messages, before a tag or a digest."""
        ...

    def find_manifest(self, tag: str, /) -> Manifest | None:
        """Return the manifest with a tag or a digest; None if there is none."""
        ...

    def fetch_small_blob(self, digest: str, /) -> bytes:
        """Return a small blob, compared with its digest."""
        ...

    def open(self, digest: str, /) -> AbstractContextManager[ByteStream]:
        """Open a blob of any size, without comparing it with its digest."""
        ...


class StagedLayout:
    """An OCI layout with one image; what cannot be read raises UsageError."""

    def __init__(self, folder: Path) -> None:
        self.name = f"{LAYOUT}{folder}"
        self._layout = LayoutFolder(folder, UsageError)

    def require_digest(self) -> str:
        """Return the digest of the image; raise UsageError unless there is exactly one."""
        index = parse_manifest(self._layout.read_index(), self.name, Descriptor)
        entries = index.entries if isinstance(index, ImageIndex) else ()
        if len(entries) != 1:
            remedy = "name a folder that `imagematrix warm IMAGE --to FOLDER` has written"
            raise UsageError(f"{self.name} has {len(entries)} images; expected one", remedy=remedy)
        return entries[0].digest

    def find_manifest(self, digest: str) -> Manifest | None:
        """Return the manifest with a digest; see StagedSource."""
        raw = self._layout.find_small_blob(digest)
        return None if raw is None else Manifest(digest=digest, media_type=IMAGE, raw=raw)

    def fetch_small_blob(self, digest: str) -> bytes:
        """Return a small blob; see StagedSource."""
        return self._layout.require_small_blob(digest)

    def open(self, digest: str) -> AbstractContextManager[ByteStream]:
        """Open a blob of any size; see StagedSource."""
        return self._layout.open(digest)


@contextlib.contextmanager
def open_staged(name: str) -> Iterator[tuple[StagedSource, str]]:
    """Yield where an image is staged, and its tag or digest there; raise UsageError.

    `name` is REPO:TAG, REPO@DIGEST, both (REPO:TAG@DIGEST), which is read by its digest, or oci:FOLDER.
    """
    if name.startswith(LAYOUT):
        layout = StagedLayout(Path(name.removeprefix(LAYOUT)))
        yield layout, layout.require_digest()
        return
    tagged, at, digest = name.partition("@")
    reference = Reference.parse(tagged)
    if at:
        reference = Reference.parse(f"{reference.name}@{digest}")
    with Registry(reference.name) as registry:
        yield registry, reference.tag
