"""The catalogs of images in an OCI layout (`oci:FOLDER`) or in an archive (`FILE.tar`).

The variants are those whose configurations have our labels, and their warm images those whose label names one
of them; the annotations of an index count for the size in a registry only. Images that others built on a
variant have its labels, too, and are no variants.
"""

from __future__ import annotations

from pathlib import Path

from imagematrix.common.image_reference import LAYOUT
from imagematrix.errors import AuditError, UnknownImageError, UsageError
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.oci.archive import ImageArchive
from imagematrix.images.oci.layout import INDEX_FILE, MARK, LayoutFolder
from imagematrix.images.oci.manifest import IMAGE, Descriptor, ImageIndex, compute_digest, parse_manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.local_store.origins import ImageOrigin
    from imagematrix.images.trust.policy import SignaturePolicy

    # An entry as in the index of a version, with the image and the version of a variant; None for a warm
    # image, whose label names its variant only.
    NamedEntry = tuple[tuple[str, str] | None, image_index.IndexEntry]

DEEPEST = 3  # levels of nested indexes
MOST = 10_000  # manifests
OURS = (labels.IMAGE, labels.VERSION, labels.CELL, labels.INPUT, labels.VARIANT)


def load_catalog(name: str, image: str | None = None, policies: Sequence[SignaturePolicy] = ()) -> Catalog:
    """Return the catalog in the layout or the archive `name` that an image's name refers to.

    Without `image` it has to have only one. The name is as for `Catalog.known_as`. Raises UnknownImageError
    if there is none, AuditError if it is damaged, UsageError if it cannot be read, and SignatureError if the
    registry in the labels has no signature that one of the policies requires.
    """
    catalogs = load_catalogs(name)
    parts = catalogs if image is None else [part for catalog in catalogs if (part := catalog.known_as(image))]
    listed = ", ".join(f"{catalog.image}:{catalog.version}" for catalog in parts or catalogs)
    if not parts:
        raise UnknownImageError(f"{name} has no variant of {image}", remedy=f"it has {listed}")
    if len(parts) > 1:
        raise UnknownImageError(f"{name} has several versions", remedy=f"name one of {listed}")
    if policies:
        from imagematrix.images.catalog.signature_guard import require_variants

        require_variants(parts[0].variants, policies, parts[0].version)
    return parts[0]


def load_catalogs(name: str) -> list[Catalog]:
    """Return the catalogs in the layout or the archive `name`, sorted.

    Raises UnknownImageError if it has no variant, and what `catalog` raises.
    """
    groups: dict[tuple[str, str], list[image_index.IndexEntry]] = {}
    warm_images = []
    for named, entry in _list_entries(name):
        if named is None:
            warm_images.append(entry)
            continue
        entries = groups.setdefault(named, [])
        if entry.digest not in [listed.digest for listed in entries]:
            entries.append(entry)
    if not groups:
        raise UnknownImageError(f"{name} has no variant of imagematrix")
    return [
        image_index.make_catalog(image, version, entries, warm_images)
        for (image, version), entries in sorted(groups.items())
    ]


def open_source(name: str) -> ImageOrigin:
    """Return the layout or the archive `name` as a source of images."""
    from imagematrix.images.local_store.origins import ArchiveOrigin, LayoutOrigin

    return LayoutOrigin(_read_layout(name)) if name.startswith(LAYOUT) else ArchiveOrigin(Path(name))


def _list_entries(name: str) -> Iterator[NamedEntry]:
    if name.startswith(LAYOUT):
        folder = _read_layout(name)
        yield from _read_listed(folder.read_index(), folder.find_small_blob, name, DEEPEST)
        return
    try:
        with Path(name).open("rb") as file:
            archive = ImageArchive(file, name, lambda *_: None)  # reads nothing of a layer
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error
    if archive.images is None:
        if archive.index is None:
            raise UnknownImageError(f"{name} has neither manifest.json nor index.json")
        yield from _read_listed(archive.index, archive.find_document, name, DEEPEST)
        return
    for saved in archive.images:
        digest = compute_digest(saved.config)
        manifests = [*archive.manifests.get(digest, ())]
        size = sum(layer.size for layer in manifests[0][1].layers or ()) if manifests else None
        yield from _make_entry(saved.config, manifests[0][0] if manifests else digest, size, name)


def _read_layout(name: str) -> LayoutFolder:
    path = Path(name.removeprefix(LAYOUT))
    folder = LayoutFolder(path, AuditError)
    if not folder.is_marked:
        remedy = "for an image in it, name the folder without a tag" if ":" in path.name else None
        raise UsageError(f"{path} is not an OCI layout: {MARK} not found", remedy=remedy)
    return folder


def _read_listed(
    raw: bytes, blob: Callable[[str], bytes | None], name: str, depth: int
) -> Iterator[NamedEntry]:
    """Yield the variants and warm images that an index lists, directly or through other indexes."""
    index = parse_manifest(raw, name, Descriptor)
    if not isinstance(index, ImageIndex):
        raise UsageError(f"{name}: {INDEX_FILE} is not an index")
    if not depth or len(index.entries) > MOST:
        raise AuditError(f"{name} has too many images, or indexes nested too deeply")
    for entry in index.entries:
        content = None if entry.attestation else blob(entry.digest)
        if content is None:  # a copy of an index may have only some of its images
            continue
        inner = parse_manifest(content, name, Descriptor)
        if isinstance(inner, ImageIndex):
            yield from _read_listed(content, blob, name, depth - 1)
        elif inner.config and inner.layers is not None and (config := blob(inner.config.digest)):
            yield from _make_entry(config, entry.digest, sum(layer.size for layer in inner.layers), name)


def _make_entry(config: bytes, digest: str, size: int | None, name: str) -> Iterator[NamedEntry]:
    """Yield the entry of an image as in the index of a version, if it is a variant or a warm image."""
    try:
        config_labels = labels.read_config_labels(config, name)
    except UsageError:  # the configuration of some artifact
        return
    is_variant = {*OURS} <= config_labels.keys()
    if not is_variant and labels.WARM not in config_labels:
        return
    # A variant that was built on a warm image has its label, too.
    kept = labels.ANNOTATED if is_variant else (labels.WARM,)
    annotations = {key: config_labels[key] for key in kept if key in config_labels}
    if size is not None:
        annotations[labels.SIZE] = str(size)
    entry = image_index.IndexEntry(
        digest=digest,
        size=len(config),
        media_type=IMAGE,
        annotations=annotations,
        platform=image_index.make_platform(None),
    )
    yield (config_labels[labels.IMAGE], config_labels[labels.VERSION]) if is_variant else None, entry
