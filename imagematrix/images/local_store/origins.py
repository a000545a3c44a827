"""The origins of images: a registry, an OCI layout, or an archive; and their layers as files to read.

Layers of a registry and of an archive are kept in a folder: those of a registry while they are read, because
an interrupted download goes on from there; those of an archive because that is read from its beginning only.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from imagematrix.common import json_documents
from imagematrix.common.json_documents import Fields
from imagematrix.errors import AuditError, UnknownImageError
from imagematrix.images.local_store.layer_download import LayerDownload, open_download
from imagematrix.images.local_store.merged_image import LayerFile
from imagematrix.images.oci.archive import ImageArchive
from imagematrix.images.oci.decompression import HashedStream
from imagematrix.images.oci.manifest import (
    Descriptor,
    ImageIndex,
    ImageManifest,
    compute_digest,
    parse_manifest,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Any, BinaryIO

    from imagematrix.images.oci.byte_stream import ByteStream
    from imagematrix.images.oci.layout import LayoutFolder
    from imagematrix.images.oci.registry import Registry

PIECE = 1 << 20

L = TypeVar("L")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageParts:
    """The document of an image's configuration, and its layers, the lowest first.

    `sizes` are the bytes of the layers as they are transferred. `tars` are the digests of their tars.
    """

    config: Mapping[str, Any]
    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    tars: tuple[str | None, ...]

    @property
    def size(self) -> int:
        """The bytes of all layers."""
        return sum(self.sizes)


class ImageOrigin(Protocol):
    """Where images come from. `is_remote`: it takes longer to read a layer there than from a disk."""

    is_remote: bool

    def read_parts(self, digest: str) -> ImageParts:
        """Return the parts of the image with a digest; raise UnknownImageError, AuditError, EngineError."""

    def count_missing_bytes(self, parts: ImageParts, folder: Path) -> int:
        """Return how many bytes of layers will be written to a folder."""

    def fetch_layers(
        self,
        parts: ImageParts,
        folder: Path,
        on_bytes: Callable[[int], object],
        on_layer: Callable[[], object],
    ) -> Sequence[LayerFile]:
        """Return the layers, which are written to `folder` if need be, now or as they are read.

        Raises what `read_parts` does, and OSError; so does the reading of the layers.

        `on_bytes` is told the bytes of each piece, by any thread, and `on_layer` is called after each layer.
        """


class RegistryOrigin:
    """The repository of a registry."""

    is_remote = True

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def read_parts(self, digest: str) -> ImageParts:
        """Return the parts of an image; see ImageOrigin."""

        def get_manifest(digest: str) -> bytes | None:
            manifest = self._registry.find_manifest(digest)
            return manifest.raw if manifest else None

        return _read_parts(get_manifest, self._registry.fetch_small_blob, digest)

    def count_missing_bytes(self, parts: ImageParts, folder: Path) -> int:
        """Return how many bytes are missing; see ImageOrigin."""
        downloads = self._make_downloads(parts, folder, lambda _: None, lambda: None)
        return sum(download.count_missing_bytes() for download in downloads.values())

    def fetch_layers(
        self,
        parts: ImageParts,
        folder: Path,
        on_bytes: Callable[[int], object],
        on_layer: Callable[[], object],
    ) -> Sequence[LayerFile]:
        """Return the layers; see ImageOrigin."""
        downloads = self._make_downloads(parts, folder, on_bytes, on_layer)
        return [
            LayerFile(open=downloads[digest].open, name=digest, tar=tar)
            for digest, tar in zip(parts.layers, parts.tars, strict=True)
        ]

    def _make_downloads(
        self,
        parts: ImageParts,
        folder: Path,
        on_bytes: Callable[[int], object],
        on_layer: Callable[[], object],
    ) -> Mapping[str, LayerDownload]:
        """Return a download for each digest."""
        return {
            digest: LayerDownload(
                self._registry, digest, size, get_layer_path(folder, digest), on_bytes, on_layer
            )
            for digest, size in zip(parts.layers, parts.sizes, strict=True)
        }


class LayoutOrigin:
    """A folder with an OCI layout. Its layers are read where they are."""

    is_remote = False

    def __init__(self, folder: LayoutFolder) -> None:
        self._folder = folder

    def read_parts(self, digest: str) -> ImageParts:
        """Return the parts of an image; see ImageOrigin."""
        return _read_parts(self._folder.find_small_blob, self._folder.require_small_blob, digest)

    def count_missing_bytes(self, parts: ImageParts, folder: Path) -> int:  # noqa: ARG002 - as in ImageOrigin
        """Return how many bytes are missing; see ImageOrigin."""
        return 0

    def fetch_layers(
        self,
        parts: ImageParts,
        folder: Path,  # noqa: ARG002 - as in ImageOrigin
        on_bytes: Callable[[int], object],
        on_layer: Callable[[], object],
    ) -> Sequence[LayerFile]:
        """Return the layers; see ImageOrigin."""
        for size in parts.sizes:
            on_bytes(size)
            on_layer()
        return [
            LayerFile(open=partial(self._folder.open, digest), name=digest, digest=digest, tar=tar)
            for digest, tar in zip(parts.layers, parts.tars, strict=True)
        ]


class ArchiveOrigin:
    """An archive of `docker save`, or of an OCI layout; it is read from its beginning for each image."""

    is_remote = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_parts(self, digest: str) -> ImageParts:
        """Return the parts of an image; see ImageOrigin."""

        def measure(_name: str, _digest: str | None, content: ByteStream) -> int:
            size = 0
            while piece := content.read(PIECE):
                size += len(piece)
            return size

        archive = self._read_archive(measure)
        for image in archive.images or ():
            config = compute_digest(image.config)
            if digest in (config, *(manifest for manifest, _ in archive.manifests.get(config, ()))):
                names = tuple(map(archive.get_file_name, image.layers))
                return _read_config(image.config, config, names, tuple(map(archive.get_layer, names)))
        parts = _read_parts(archive.find_document, archive.read_document, digest)
        return replace(parts, layers=tuple(map(archive.get_file_name, parts.layers)))

    def count_missing_bytes(self, parts: ImageParts, folder: Path) -> int:
        """Return how many bytes are missing; see ImageOrigin."""
        pairs = zip(parts.layers, parts.sizes, strict=True)
        return sum(size for name, size in pairs if not get_layer_path(folder, name).exists())

    def fetch_layers(
        self,
        parts: ImageParts,
        folder: Path,
        on_bytes: Callable[[int], object],
        on_layer: Callable[[], object],
    ) -> Sequence[LayerFile]:
        """Return the layers; see ImageOrigin."""

        def copy(name: str, digest: str | None, content: ByteStream) -> bool:
            if name not in parts.layers:
                return True
            path = get_layer_path(folder, name)
            hashed = HashedStream(content, digest or "")
            with open_download(_get_partial_path(path), "wb") as file:
                while piece := hashed.read(PIECE):
                    file.write(piece)
                    on_bytes(len(piece))
                file.flush()
                os.fsync(file.fileno())
            if digest:
                hashed.finish()
            _get_partial_path(path).rename(path)
            on_layer()
            return True

        archive = self._read_archive(copy)
        for layer in parts.layers:
            archive.get_layer(layer)  # raises AuditError if it was damaged
        return _list_layer_files(parts, folder)

    def _read_archive(self, read_layer: Callable[[str, str | None, ByteStream], L]) -> ImageArchive[L]:
        with self._path.open("rb") as file:
            return ImageArchive(file, str(self._path), read_layer)


def _read_parts(
    get_manifest: Callable[[str], bytes | None], get_config: Callable[[str], bytes], digest: str
) -> ImageParts:
    """Return the parts of the image with the manifest `digest`, or of the one image in an index."""
    raw = get_manifest(digest)
    parsed = parse_manifest(raw, digest, Descriptor) if raw is not None else None
    if isinstance(parsed, ImageIndex):
        images = [entry.digest for entry in parsed.entries if not entry.attestation]
        raw = get_manifest(images[0]) if len(images) == 1 else None
        parsed = parse_manifest(raw, digest, Descriptor) if raw is not None else None
    if not isinstance(parsed, ImageManifest) or parsed.config is None or parsed.layers is None:
        raise UnknownImageError(f"there is no image with the digest {digest}")
    layers = [layer for layer in parsed.layers if not layer.foreign]
    return _read_config(
        get_config(parsed.config.digest),
        parsed.config.digest,
        tuple(layer.digest for layer in layers),
        tuple(layer.size for layer in layers),
    )


def _read_config(raw: bytes, name: str, layers: tuple[str, ...], sizes: tuple[int, ...]) -> ImageParts:
    fields = Fields(json_documents.parse_json(raw, name), name)
    root = fields.get_object_or_empty("rootfs")
    tars: tuple[str | None, ...] = root.get_texts("diff_ids") if root.has("diff_ids") else ()
    if min(sizes, default=0) < 0:
        raise AuditError(f"the manifest of {name} has a layer of negative size")
    if len(tars) != len(layers):
        raise AuditError(f"the configuration {name} has {len(tars)} layers instead of {len(layers)}")
    return ImageParts(config=fields.data, layers=layers, sizes=sizes, tars=tars)


def _list_layer_files(parts: ImageParts, folder: Path) -> list[LayerFile]:
    """Return the layers of an archive that are in a folder, where their own digests have been checked."""
    return [
        LayerFile(open=partial(_open_file, get_layer_path(folder, layer)), name=layer, tar=tar)
        for layer, tar in zip(parts.layers, parts.tars, strict=True)
    ]


def _open_file(path: Path) -> BinaryIO:
    return path.open("rb")


def get_layer_path(folder: Path, layer: str) -> Path:
    """Return the path of a layer in a folder; the name of an archive's file may be anything."""
    return folder / hashlib.sha256(layer.encode(errors="surrogateescape")).hexdigest()


def _get_partial_path(path: Path) -> Path:
    """Return the path of a layer that is not complete yet."""
    return path.with_suffix(".part")
