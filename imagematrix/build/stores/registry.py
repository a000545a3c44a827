"""Registries as stores of images: an image is pushed by digest and tagged once."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self

from imagematrix.audit.contradictions import audit_layers, describe_contradictions
from imagematrix.audit.images.sources import read_archive
from imagematrix.build.plan.protocols import BuiltImage, StoredImageInfo, StoredVariant
from imagematrix.common import json_documents
from imagematrix.common.single_flight import SingleFlight
from imagematrix.common.text import quote_word
from imagematrix.errors import AuditError, EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.engine import make_built_on_error
from imagematrix.images.catalog.registry import read_entry
from imagematrix.images.oci import layout
from imagematrix.images.oci.manifest import INDEX, Descriptor, ImageManifest, compute_digest, parse_manifest
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.audit.images.layers import Layers
    from imagematrix.build.plan.protocols import BuildRequest
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.images.catalog.image_index import IndexEntry
    from imagematrix.images.oci.byte_stream import ByteStream
    from imagematrix.images.oci.manifest import Manifest

REQUESTS = 8  # at the same time
TRIES = 5


class RegistryStore:
    """The Store of registries: an image is stored in the registry in its name. Use it as a context manager.

    Images without a layout, which those of the classic image store are, are audited and pushed by the engine
    `docker`; `layers` are those already read.
    """

    def __init__(self, docker: EngineStore, layers: Layers) -> None:
        self._docker = docker
        self._layers = layers
        self._registries: dict[str, Registry] = {}
        self._digests: dict[str, str] = {}  # by the references seen in registries
        self._completeness_checks: dict[str, CompletenessCheck] = {}  # by repository
        self._pushed: SingleFlight[tuple[str, str], None] = SingleFlight()  # blobs, by repository and digest
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for registry in self._registries.values():
            registry.__exit__()

    def open_registry(self, image: str) -> Registry:
        """Return the repository of an image."""
        with self._lock:
            if image not in self._registries:
                self._registries[image] = Registry(image)
            return self._registries[image]

    def list_variants(self, image: str, version: str) -> list[StoredVariant]:
        """Return the images of `image`:`version` that its registry has, published or only pushed."""
        survey = survey_version(self.open_registry(image), version)
        lost = {entry.tag: entry for entry in survey.listed if entry.digest in survey.lost}
        images = []
        for variant in ({entry.tag: entry for entry in survey.variants} | lost).values():
            reference = f"{image}:{variant.tag}"
            self._digests[reference] = variant.digest
            images.append(
                StoredVariant(
                    reference=reference,
                    cell=variant.annotations[labels.CELL],
                    input_digest=variant.annotations[labels.INPUT],
                    lost=variant.tag in lost,
                    labels=variant.annotations,
                )
            )
        return images

    def find_earlier_versions(self, image: str, cells: Mapping[str, str]) -> dict[str, str]:
        """Return the references of images of any version that were built from the inputs of `cells`, by cell.

        An image without a label of its content, or with another content, is none.
        """
        registry = self.open_registry(image)
        tags: dict[str, list[str]] = {}  # of all versions, by what follows the version
        for tag in registry.list_tags():
            tags.setdefault(tag.removeprefix(labels.get_version(tag)), []).append(tag)
        by_cell = {cell: tags.get(labels.make_tag("", cell, digest), []) for cell, digest in cells.items()}
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            intact = pool.map(lambda cell: self._find_intact(registry, by_cell[cell], cells[cell]), cells)
            return {cell: f"{image}:{tag}" for cell, tag in zip(cells, intact, strict=True) if tag}

    def _find_intact(self, registry: Registry, tags: Iterable[str], input_digest: str) -> str | None:
        """Return the first of `tags` that a complete image built from these inputs has; None if none has."""
        is_complete = self._completeness_checks.setdefault(registry.name, CompletenessCheck(registry))
        for tag in tags:
            try:
                entry = read_entry(registry, tag)
            except UnknownImageError:  # its configuration is missing
                continue
            if (
                entry
                and entry.ours
                and entry.tag == tag
                and entry.annotations[labels.INPUT] == input_digest
                and is_complete(entry.digest)
            ):
                _, raw = _read_documents(registry, entry.digest, tag)
                if labels.read_config_labels(raw, tag).get(labels.CONTENT):
                    self._digests[f"{registry.name}:{tag}"] = entry.digest
                    return tag
        return None

    def load_without_layers(self, reference: str, folder: Path) -> BuiltImage:
        """Return an image of `find_earlier_versions` in a new layout in `folder`, without its layers."""
        digest = self._digests[reference]
        manifest, config = _read_documents(
            self.open_registry(reference.rpartition(":")[0]), digest, reference
        )
        layout.write_without_layers(folder, manifest, config)
        return BuiltImage(digest=digest, layout=folder)

    def get_components(self, reference: str) -> Mapping[str, str]:
        """Return the components of the identity of an image that is present."""
        image, _, _ = reference.rpartition(":")
        variant = read_entry(self.open_registry(image), self._digests[reference])
        return (variant and labels.read_components(variant.annotations)) or {}

    def keeps_layers(self, image: BuiltImage) -> bool:
        """Whether it gets the layers of an image as they are: from a layout, or an engine that has them."""
        return image.layout is not None or self._docker.has_manifests

    def inspect_image(self, reference: str) -> StoredImageInfo:
        """Return an image that is present."""
        image, _, _ = reference.rpartition(":")
        registry, digest = self.open_registry(image), self._digests[reference]
        entry = read_entry(registry, digest)
        manifest, config = _read_documents(registry, entry.digest if entry else digest, reference)
        return StoredImageInfo(
            digest=compute_digest(manifest),
            layers=_parse_diff_ids(config, reference),
            configuration=json_documents.Fields(json_documents.parse_json(config, reference), reference).data,
        )

    def list_layers(self, reference: str) -> frozenset[str]:
        """Return the digests of the uncompressed layers of an image; none if there is no such image."""
        image, _, tag = reference.rpartition(":")
        registry = self.open_registry(image)
        # Whatever uses an image reports what is damaged.
        with contextlib.suppress(UnknownImageError, UsageError):
            entry = read_entry(registry, tag)
            if entry:
                return frozenset(
                    _parse_diff_ids(_read_documents(registry, entry.digest, reference)[1], reference)
                )
        return frozenset()

    def has_base(self, source: str, layers: Sequence[str], sibling_references: Iterable[str]) -> bool:  # noqa: ARG002
        """Whether images can be stored without the bytes of the `layers` of their base.

        `sibling_references` are their references: each of their repositories must have the layers.
        """
        repositories = {self.open_registry(reference.rpartition(":")[0]) for reference in sibling_references}
        blobs = [(registry, layer) for registry in repositories for layer in layers]
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            return all(pool.map(lambda blob: blob[0].has_blob(blob[1]), blobs))

    def find_source(self, reference: str, *, local: bool) -> str | None:
        """Return the source of a present image for a build, by its digest.

        If it is only in the engine, only builders that are `local` to the engine can use it.
        """
        digest = self._digests.get(reference)
        if digest is None:
            return self._docker.find_source(reference, local=local)
        return f"docker-image://{reference}@{digest}"

    def store(self, order: BuildRequest, made: BuiltImage) -> str:
        """Push an image from its layout, or else from the engine, and tag it.

        If another client has since tagged an image with the same input digest, that image is kept. Raises
        AuditError if an image of the engine, which no build could audit, contradicts its labels.
        """
        registry = self.open_registry(order.reference.rpartition(":")[0])
        present = self._find_present(registry, order.reference)
        if present:
            return present
        if made.layout is None:
            self._audit_saved(order.reference, made.digest)
            self._docker.tag_image(order, made)
            self._docker.push(order.reference)
            return self._read_back(registry, order.reference, None)
        tagged_image = layout.LayoutIndex(made.layout, made.attested) if made.attested else made.layout_image
        for image in tagged_image.images:
            for digest in image.blobs:
                self._push_blob(registry, digest, image)
            registry.push_manifest(image.digest, image.raw, image.media_type)
        # Another client may have pushed an image of the same name by now.
        present = self._find_present(registry, order.reference)
        if present:
            return present
        registry.push_manifest(order.reference.rpartition(":")[2], tagged_image.raw, tagged_image.media_type)
        digest = self._read_back(registry, order.reference, tagged_image.digest)
        return made.digest if digest == tagged_image.digest else digest

    def adopt(self, reference: str) -> str:
        """Audit the image of this name in the engine, push it, and return its digest.

        If another client has since tagged an image with the same input digest, that image is kept. Raises
        AuditError if the image contradicts its labels.
        """
        registry = self.open_registry(reference.rpartition(":")[0])
        present = self._find_present(registry, reference)
        if present:
            return present
        image = self._docker.get_image_id(reference)
        self._audit_saved(reference, image)
        self._docker.push(reference)
        if self._docker.get_image_id(reference) != image:
            remedy = "delete it from the registry"
            raise TagMovedError(f"{reference} was replaced by another image during the push", remedy=remedy)
        expected = self._docker.get_digest(reference) if self._docker.has_manifests else None
        return self._read_back(registry, reference, expected)

    def _audit_saved(self, reference: str, image: str) -> None:
        with self._docker.save(image) as archive:
            _audit_archive(reference, archive, self._layers)

    def _push_blob(self, registry: Registry, digest: str, pushed: layout.LayoutImage) -> None:
        def push() -> None:
            if not registry.has_blob(digest):
                with layout.require_blob(pushed.get_blob_path(digest)).open("rb") as file:
                    registry.push_blob(digest, file)

        # Images share most of their layers: the first one uploads a layer, the others wait.
        self._pushed((registry.name, digest), push)

    def _find_present(self, registry: Registry, reference: str, expected: str | None = None) -> str | None:
        """Return the digest of the image with a reference: `expected`, or an image with the same inputs.

        None if there is none. Raises TagMovedError if another image has the reference.
        """
        tag = reference.rpartition(":")[2]
        for _ in range(TRIES):
            digest = registry.digest(tag)
            if digest is None:
                return None
            image = read_entry(registry, digest) if digest != expected else None
            if digest == expected or (image and image.ours and image.tag == tag):
                self._digests[reference] = digest
                return digest
            if image or registry.digest(tag) == digest:
                what = image.tag if image and image.ours else "not an image of imagematrix"
                raise TagMovedError(
                    f"{reference} exists, built from other inputs: {digest}, labelled {what}",
                    remedy="a tag never moves; delete that image from the registry, or raise the version",
                )
            # Another client has withdrawn it meanwhile.
        raise EngineError(
            f"the registry named another image for {reference} each time, and had none of them",
            remedy="find out who pushes to this repository, and run this again",
        )

    def _read_back(self, registry: Registry, reference: str, expected: str | None) -> str:
        """Return the digest that the registry now has under a reference.

        It may differ from the pushed one if the inputs are equal: two concurrent builds of a matrix.
        """
        remedy = "another client moved it; check who pushes to this repository"
        try:
            digest = self._find_present(registry, reference, expected)
        except TagMovedError as error:
            raise TagMovedError(f"{error}; {expected} was just pushed", remedy=remedy) from error
        if digest is None:
            raise TagMovedError(f"{reference} was pushed, but the registry does not have it", remedy=remedy)
        if expected in (None, digest):
            self._withdraw_if_conflicting(registry, reference, digest)
        return digest

    def _withdraw_if_conflicting(self, registry: Registry, reference: str, digest: str) -> None:
        """Withdraw the image and raise TagMovedError if the cell was also pushed from other inputs.

        Two clients that push one cell at the same time use different tags, so neither overwrites the other.
        Both tag before they check, so at least one of them sees the other. Where both do, both withdraw, and
        the last one finds nothing else and puts its image back: one always stays. Of several that do, the
        least stays.
        """
        tag = reference.rpartition(":")[2]
        conflicting = _find_conflicting(registry, tag)
        if not conflicting:
            return
        version = tag.partition("-")[0]
        entries = image_index.read_published(registry.find_manifest(version), registry.name, version)
        if any(entry.digest == digest for entry in entries):
            return  # the version contains it, so the others are too late
        self._digests.pop(reference, None)
        manifest = registry.find_manifest(digest)
        ours = "the registry does not allow this image to be deleted"
        if registry.withdraw(tag, digest):
            ours = "this image is withdrawn"
            if manifest and _put_back(registry, tag, manifest):
                ours = "all were withdrawn at the same time, and this image is there again"
        raise TagMovedError(
            f"{reference}: this cell was also pushed from other inputs: {', '.join(conflicting)}; {ours}",
            remedy="build from the same inputs, or raise the version; "
            f"`imagematrix publish {quote_word(f'{registry.name}:{version}')} --choose TAG` "
            "selects one of them",
        )


def _put_back(registry: Registry, tag: str, manifest: Manifest) -> bool:
    """Push an image that was withdrawn again, if none of its cell is left; return whether it is there."""
    if _find_conflicting(registry, tag) or registry.digest(tag) is not None:
        return False
    registry.push_manifest(tag, manifest.raw, manifest.media_type)
    # Whoever else puts an image back at the same time does so before looking, too: the least stays.
    others = _find_conflicting(registry, tag)
    return not others or tag < min(others) or not registry.withdraw(tag, manifest.digest)


def _find_conflicting(registry: Registry, tag: str) -> list[str]:
    """Return the tags of images of the same version and cell from other inputs than those of a tag."""
    stem = tag.rpartition("-")[0]  # the version and the cell
    rivals = [rival for rival in registry.list_tags() if rival.rpartition("-")[0] == stem and rival != tag]
    images = {rival: read_entry(registry, rival) for rival in rivals}
    return sorted(rival for rival, image in images.items() if image and image.ours and image.tag == rival)


def _read_documents(registry: Registry, digest: str, reference: str) -> tuple[bytes, bytes]:
    """Return the manifest of an image that the registry had, and its configuration.

    Raises UnknownImageError if the image is gone.
    """
    manifest = registry.find_manifest(digest)
    if manifest is None:
        raise UnknownImageError(f"{reference} is no longer in its registry")
    image = parse_manifest(manifest.raw, reference, Descriptor)
    assert isinstance(image, ImageManifest) and image.config  # noqa: S101, PT018 - as read_entry found
    return manifest.raw, registry.fetch_small_blob(image.config.digest)


def _parse_diff_ids(config: bytes, reference: str) -> tuple[str, ...]:
    """Return the digests of the uncompressed layers of an image, from its configuration; raise UsageError."""
    fields = json_documents.Fields(json_documents.parse_json(config, reference), reference)
    return fields.get_object_or_empty("rootfs").get_texts("diff_ids")


def _audit_archive(reference: str, archive: ByteStream, layers: Layers) -> None:
    """Raise AuditError if an image that the engine saved in an `archive` is not the variant in its name.

    Every image that is built on a variant inherits its labels, and `docker tag` gives any image any name. So
    one label has the digest of what a container gets of the image; if it matches, nothing was built on the
    variant. The bytes of the layers, unless `layers` has read them, are also audited, as after a build. This
    does not protect against someone who forges the label; signatures do. Images from the classic image store
    have no such label and are only audited.
    """
    try:
        (image,) = read_archive(archive, reference, "", layers)
        promised = labels.read_variant(image.labels, reference=reference, digest=None, size=None)
    except (AuditError, UnknownImageError, UsageError, ValueError) as error:
        raise AuditError(f"{reference} cannot be read from the engine: {error}") from error
    if image.inherited and labels.is_named(image.labels, reference):
        raise make_built_on_error(reference)
    why = describe_contradictions(
        audit_layers(image.layers, promised, labels.read_optional(image.labels)), promised
    )
    if why:
        raise AuditError(f"{reference}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSurvey:
    """The contents of a version in a registry.

    `entries` are the entries of its index, `listed` the variants among them, `lost` the digests of entries
    whose images are gone. `variants` are the images in the index and the unpublished ones. `superseded` were
    also pushed, but the index has another image for their cells. `damaged` are images with a manifest that
    lack a blob.
    """

    published: Manifest | None
    entries: tuple[IndexEntry, ...]
    listed: tuple[IndexEntry, ...]
    lost: frozenset[str]
    variants: tuple[IndexEntry, ...]
    superseded: tuple[IndexEntry, ...]
    damaged: tuple[IndexEntry, ...] = ()

    @property
    def alive(self) -> list[IndexEntry]:
        """The entries of the index except lost ones, and attestations and warm images of lost ones."""
        return [entry for entry in self.entries if not {entry.digest, entry.subject} & self.lost]


class CompletenessCheck:
    """Whether a registry has an image with all its blobs; each blob is checked once.

    `damaged` are the digests of images with a manifest that lack a blob.
    """

    def __init__(self, registry: Registry) -> None:
        self.damaged: set[str] = set()
        self._registry = registry
        self._has_blob: SingleFlight[str, bool] = SingleFlight()

    def __call__(self, digest: str) -> bool:
        """Whether it has the manifest with this digest, its configuration and its layers.

        Raises UsageError if the manifest is damaged.
        """
        manifest = self._registry.find_manifest(digest)
        if manifest is None:
            return False
        image = parse_manifest(manifest.raw, f"{self._registry.name}@{digest}", Descriptor)
        blobs = (image.config, *(image.layers or ())) if isinstance(image, ImageManifest) else ()
        whole = all(
            self._has_blob(blob.digest, partial(self._registry.has_blob, blob.digest))
            for blob in blobs
            if blob and not blob.foreign
        )
        if not whole:
            self.damaged.add(digest)
        return whole


def survey_version(
    registry: Registry, version: str, complete: CompletenessCheck | None = None
) -> VersionSurvey:
    """Return the contents of a version in a registry.

    Raises UsageError if an index or image is damaged, TagMovedError if the version's tag has something else.
    An image counts as lost if its manifest is gone, or if it is not `complete`.
    """
    exists = complete or (lambda digest: registry.digest(digest) is not None)
    published = registry.find_manifest(version)
    entries = image_index.read_published(published, registry.name, version)
    with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
        exist = pool.map(lambda entry: exists(entry.digest), entries)
        tags = [tag for tag in registry.list_tags() if tag.startswith(f"{version}-")]
        lost = frozenset(entry.digest for entry, is_kept in zip(entries, exist, strict=True) if not is_kept)
        listed = tuple(entry for entry in entries if entry.ours)
        by_tag = {entry.tag: entry for entry in listed if entry.digest not in lost}
        lost_by_tag = {entry.tag: entry for entry in listed if entry.digest in lost}
        rest = [tag for tag in tags if tag not in by_tag]
        pushed = zip(
            rest,
            pool.map(lambda tag: _find_pushed(registry, tag, lost_by_tag.get(tag), complete), rest),
            strict=True,
        )
        # A tag counts only if the labels of its image match it.
        only_pushed = [entry for tag, entry in pushed if entry and entry.ours and entry.tag == tag]
        completeness = pool.map(lambda entry: complete is None or complete(entry.digest), only_pushed)
        damaged = tuple(
            entry for entry, is_whole in zip(only_pushed, completeness, strict=True) if not is_whole
        )
        by_tag |= {entry.tag: entry for entry in only_pushed if entry not in damaged}
    frozen = {entry.annotations[labels.CELL]: entry.tag for entry in listed}
    images = [by_tag[tag] for tag in sorted(by_tag)]
    late = [entry for entry in images if frozen.get(entry.annotations[labels.CELL], entry.tag) != entry.tag]
    return VersionSurvey(
        published=published,
        entries=entries,
        listed=listed,
        lost=lost,
        variants=tuple(entry for entry in images if entry not in late),
        superseded=tuple(late),
        damaged=damaged,
    )


def _find_pushed(
    registry: Registry, tag: str, lost: IndexEntry | None, complete: CompletenessCheck | None
) -> IndexEntry | None:
    """Return the entry of the image with a tag; if the image is damaged, its entry in the index, or None."""
    try:
        return read_entry(registry, tag)
    except UnknownImageError:  # its configuration is missing
        if complete is None or registry.digest(tag) not in complete.damaged:
            raise
        return lost


def find_attestations(registry: Registry, tag: str) -> list[IndexEntry]:
    """Return the attestations of the image with a tag."""
    manifest = registry.find_manifest(tag)
    if manifest is None or manifest.media_type != INDEX:
        return []
    return [entry for entry in image_index.parse_index(manifest.raw, tag) if entry.attests]
