"""Reading images from an engine, a registry, an OCI layout, or an archive (of `docker save` or of a layout).

No container is started. Files that are too large for memory are written to temporary files while they are
examined; nothing else of an image is written.
"""

from __future__ import annotations

import contextlib
import stat
from dataclasses import replace
from pathlib import Path

from imagematrix.audit.images.image import list_images, read_image
from imagematrix.audit.packages.attested_sboms import LARGEST, read_sboms
from imagematrix.common import json_documents
from imagematrix.common.groups import group_values
from imagematrix.common.image_reference import Reference, names_registry, split_version
from imagematrix.common.json_documents import Fields
from imagematrix.errors import AuditError, EngineError, UnknownImageError, UsageError
from imagematrix.images.catalog.engine import load_catalog
from imagematrix.images.engine.images import ExportedImage, inspect_image, read_digests
from imagematrix.images.oci.archive import ImageArchive
from imagematrix.images.oci.decompression import HashedStream
from imagematrix.images.oci.layout import MARK, LayoutFolder
from imagematrix.images.oci.manifest import compute_digest
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from imagematrix.audit.images.image import AuditedImage
    from imagematrix.audit.images.layer import Layer
    from imagematrix.audit.images.layers import Layers
    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.images.oci.byte_stream import ByteStream

COMPRESSED = ("gzip", "zstd")  # the ends of the media types of layers whose sizes are those in a registry
TRIES = 5  # attempts to read an image from the engine while its name moves to other images


def read_images(
    reference: str, platform: str, layers: Layers, *, sboms: bool = False
) -> Iterator[AuditedImage]:
    """Yield the images of a reference: a path of a layout or an archive, or a name in an engine or registry.

    `platform`, such as linux/amd64, selects an image from an index without variants of imagematrix. With
    `sboms`, the images have their own SBOMs, where there are some. Raises UnknownImageError if there is no
    image, EngineError if neither engine nor registry can be reached, AuditError if the image cannot be read.
    """
    path = Path(reference)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if reference.startswith((".", "/")):  # no image name begins like this
            raise UnknownImageError(f"{reference}: {error.strerror}") from error
        mode = None
    if mode is None:
        yield from _read_named_images(reference, platform, layers, sboms=sboms)
        return
    try:
        if not stat.S_ISDIR(mode):
            with path.open("rb") as file:
                yield from read_archive(file, reference, platform, layers, sboms=sboms)
            return
        folder = LayoutFolder(path, AuditError)
        if not folder.is_marked:
            raise UnknownImageError(f"{reference} is not an OCI layout: {MARK} not found")
        source = _LayoutSource(folder, layers)
        yield from list_images(source, folder.read_index(), reference, platform, layout=True, sboms=sboms)
    except OSError as error:
        raise AuditError(f"{reference} cannot be read: {error.strerror}") from error


def read_variants(
    catalog: Catalog, layers: Layers, *, sboms: bool = False
) -> Iterator[tuple[Variant, AuditedImage]]:
    """Yield the variants of a catalog with their images, in the registries in their names, or in the engine.

    A variant that its registry lacks may be in the engine, too. Raises as `read_images` does.
    """
    by_name = group_values((split_version(variant.reference)[0], variant) for variant in catalog.variants)
    for name, members in by_name.items():
        if not names_registry(name):
            for variant in members:
                yield variant, _read_from_engine(variant, layers, sboms=sboms)
            continue
        with Registry(name) as registry:
            for variant in members:
                image = _read_from_registry(registry, variant, layers, sboms=sboms)
                try:
                    image = image or _read_from_engine(variant, layers, sboms=sboms)
                except EngineError as error:  # a registry is read without an engine, too
                    raise UnknownImageError(f"the registry has no {variant.reference}") from error
                yield variant, image


def _read_from_registry(
    registry: Registry, variant: Variant, layers: Layers, *, sboms: bool
) -> AuditedImage | None:
    """Return the image of a variant; None if the registry has neither its tag nor its digest."""
    # The index under a tag has the attestations, which the manifest with the digest does not tell.
    names = dict.fromkeys((Reference.parse(variant.reference).tag, variant.digest))
    for name in filter(None, names):
        manifest = registry.find_manifest(name)
        if manifest is None:
            continue
        source = _RegistrySource(registry, layers)
        with contextlib.suppress(UnknownImageError):  # the tag is of another image now, or a blob is gone
            for image in list_images(source, manifest.raw, variant.reference, variant.platform, sboms=sboms):
                if variant.digest in (None, image.digest):
                    return replace(image, reference=variant.reference, names=(variant.reference,))
    return None


def _read_from_engine(variant: Variant, layers: Layers, *, sboms: bool) -> AuditedImage:
    if export := _export_image(variant.reference):
        archive, inspected = export
        with archive:
            for image in read_archive(
                archive, variant.reference, variant.platform, layers, inspected, sboms=sboms
            ):
                return image
    raise UnknownImageError(f"neither a registry nor the engine has {variant.reference}")


def _read_named_images(
    reference: str, platform: str, layers: Layers, *, sboms: bool
) -> Iterator[AuditedImage]:
    """Yield the engine's image with this name, or else its images in the registry."""
    remote = names_registry(reference)
    try:
        export = _export_image(reference)
    except EngineError:
        if not remote:  # a registry is read without an engine, too
            raise
        export = None
    if export is not None:
        archive, inspected = export
        with archive:
            yield from read_archive(archive, reference, platform, layers, inspected, sboms=sboms)
        return

    if not remote:
        # It may be a version of ours in the engine, whose variants are images.
        variants: list[str] = []
        with contextlib.suppress(UnknownImageError, UsageError):
            variants = [variant.reference for variant in load_catalog(reference).variants]
        for variant in variants:
            yield from _read_named_images(variant, platform, layers, sboms=sboms)
        if not variants:
            raise UnknownImageError(f"the engine has no image {reference}", remedy=f"docker pull {reference}")
        return

    name = Reference.parse(reference)
    with Registry(name.name) as registry:
        manifest = registry.find_manifest(name.tag)
        if manifest is None:
            raise UnknownImageError(f"the registry {name.registry} has no {reference}")
        source = _RegistrySource(registry, layers)
        for image in list_images(source, manifest.raw, reference, platform, sboms=sboms):
            yield replace(image, names=(reference,))


def _export_image(reference: str) -> tuple[ExportedImage, Mapping[str, Any]] | None:
    """Return an image that the engine exports, and how it describes it; None if it has no such image.

    The engine exports by name, and a build or a pull may move the name to another image meanwhile.
    """
    inspected = inspect_image(reference)
    for _ in range(TRIES):
        if inspected is None:
            return None
        archive = ExportedImage(reference)
        before, inspected = inspected, inspect_image(reference)
        if inspected is not None and read_digests(inspected) == read_digests(before):
            return archive, inspected
        archive.close()
    raise EngineError(f"{reference} keeps changing in the engine", remedy="run the command again")


class _LayoutSource:
    """An ImageSource: a folder with an OCI layout."""

    def __init__(self, folder: LayoutFolder, layers: Layers) -> None:
        self._folder = folder
        self._layers = layers

    def read_manifest(self, digest: str) -> bytes:
        return self._folder.require_small_blob(digest)

    read_config = read_manifest

    def read_statement(self, digest: str) -> bytes:
        with self._folder.open(digest) as file:
            return _read_small_blob(file, digest)

    def find_attached(self, _: str) -> None:
        return None

    def read_layers(self, digests: Sequence[str]) -> tuple[Layer, ...]:
        return self._layers.read_layers(digests, self._folder.open)


class _RegistrySource:
    """An ImageSource: a repository of a registry."""

    def __init__(self, registry: Registry, layers: Layers) -> None:
        self._registry = registry
        self._layers = layers

    def read_manifest(self, digest: str) -> bytes:
        manifest = self._registry.find_manifest(digest)
        if manifest is None:
            raise UnknownImageError(f"the registry has no {self._registry.name}@{digest}")
        return manifest.raw

    def read_config(self, digest: str) -> bytes:
        return self._registry.fetch_small_blob(digest)

    def read_statement(self, digest: str) -> bytes:
        with self._registry.open(digest) as stream:
            return _read_small_blob(stream, digest)

    def find_attached(self, digest: str) -> bytes | None:
        manifest = self._registry.find_manifest(f"{digest.replace(':', '-')}.att")
        return manifest.raw if manifest else None

    def read_layers(self, digests: Sequence[str]) -> tuple[Layer, ...]:
        return self._layers.read_layers(digests, self._registry.open)


class _ArchiveSource:
    """An ImageSource: an archive."""

    def __init__(self, archive: ImageArchive[Layer]) -> None:
        self._archive = archive

    def read_manifest(self, digest: str) -> bytes:
        return self._archive.read_document(digest)

    read_config = read_statement = read_manifest

    def find_attached(self, _: str) -> None:
        return None

    def read_layers(self, names: Sequence[str]) -> tuple[Layer, ...]:
        return tuple(map(self._archive.get_layer, names))


def _read_small_blob(stream: ByteStream, digest: str) -> bytes:
    """Return the content of a blob with this digest; raise AuditError if it is too large."""
    hashed = HashedStream(stream, digest)
    parts = []
    remaining = LARGEST + 1
    while remaining and (piece := hashed.read(remaining)):
        parts.append(piece)
        remaining -= len(piece)
    if not remaining:
        raise AuditError(f"{digest} is too large for an SBOM: more than {LARGEST >> 20} MiB")
    hashed.finish()
    return b"".join(parts)


def read_archive(
    stream: ByteStream,
    reference: str,
    platform: str,
    layers: Layers,
    inspected: Mapping[str, Any] | None = None,
    *,
    sboms: bool = False,
) -> Iterator[AuditedImage]:
    """Yield the images in an archive of `docker save`, or of an OCI layout; see `image.list_images`.

    `inspected` is how the engine that exports it describes the image. Its digests count: the classic image
    store exports manifests that exist nowhere else.
    """
    digests = None if inspected is None else read_digests(inspected)
    engine_size = (inspected or {}).get("Size")
    size = engine_size if isinstance(engine_size, int) and engine_size > 0 else None

    def read_layer(name: str, digest: str | None, content: ByteStream) -> Layer:
        if digest is None:
            return layers.read_unnamed_layer(content, name)
        return layers.read_layer(digest, lambda _: contextlib.nullcontext(content))

    archive = ImageArchive(stream, reference, read_layer)
    source = _ArchiveSource(archive)
    try:
        saved = archive.images
        if saved is None and archive.index is None:
            raise UnknownImageError(f"{reference} has neither manifest.json nor index.json")
        if saved is None:
            yield from list_images(
                source, archive.index or b"", reference, platform, layout=True, sboms=sboms
            )
            return
        for listed in saved:
            digest, sizes = _identify_image(archive, compute_digest(listed.config), digests)
            name = listed.names[0] if len(saved) > 1 and listed.names else reference
            image = read_image(
                source, listed.config, listed.layers, reference=name, digest=digest, sizes=sizes
            )
            _require_own_layers(archive, listed.config, tuple(layer.digest for layer in image.layers))
            if sboms:
                statements = read_sboms(source, digest, archive.attestations.get(digest, ()))
                image = replace(image, sboms=statements)
            yield replace(image, names=listed.names, size=image.size or size)
    except UsageError as error:
        raise AuditError(str(error)) from error


def _identify_image(
    archive: ImageArchive[Layer], config: str, digests: frozenset[str] | None
) -> tuple[str, Mapping[str, int]]:
    """Return the digest of the manifest with this configuration, or else the configuration's digest.

    If the engine, which has `digests`, knows the image by neither, return the engine's digest: that of an
    index, if the image is for several platforms. Also return the sizes of compressed layers, as a registry
    has them.
    """
    for digest, manifest in archive.manifests.get(config, ()):
        if digest in (digests or {digest}):
            layers = manifest.layers or ()
            compressed = all(layer.media_type.endswith(COMPRESSED) for layer in layers)
            return digest, {layer.digest: layer.size for layer in layers} if compressed else {}
    return config if digests is None or config in digests else min(digests), {}


def _require_own_layers(archive: ImageArchive[Layer], config: bytes, layers: tuple[str, ...]) -> None:
    """Raise AuditError if layers are not those of a configuration: no engine would load such an archive.

    The digests in `layers` are those of their tars, or those of their blobs in a manifest.
    """
    digest = compute_digest(config)
    root = Fields(json_documents.parse_json(config, digest), digest).get_object_or_empty("rootfs")
    tars = root.get_texts("diff_ids") if root.has("diff_ids") else ()
    manifests = (manifest for _, manifest in archive.manifests.get(digest, ()))
    blobs = (tuple(layer.digest for layer in manifest.layers or ()) for manifest in manifests)
    if layers not in (tars, *blobs):
        raise AuditError(f"the layers in the archive do not match its configuration {digest}")
