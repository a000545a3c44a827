"""Reading images from a source: manifests, configurations and layers, all of them untrusted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Protocol

from imagematrix.audit.packages import attested_sboms
from imagematrix.audit.packages.attested_sboms import StatementSource
from imagematrix.common import json_documents
from imagematrix.common.json_documents import Fields
from imagematrix.errors import AuditError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.image_index import IndexEntry, VersionIndex
from imagematrix.images.oci.layout import ENGINE_NAME, NAME
from imagematrix.images.oci.manifest import Descriptor, ImageIndex, compute_digest, parse_manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.audit.images.layer import Layer
    from imagematrix.audit.packages.attested_sboms import Statement
    from imagematrix.images.oci.manifest import ImageManifest

DEEPEST = 3  # levels of nested indexes
MOST = 1000  # manifests of an index
# Labels of a variant that an index states; those that only builds need may be missing there.
SELECTED = {*labels.ANNOTATED} - {labels.INPUTS}


class ImageSource(StatementSource, Protocol):
    """A store with the blobs of images."""

    def read_config(self, digest: str) -> bytes:
        """Return a configuration; raise UnknownImageError or AuditError."""

    def read_layers(self, digests: Sequence[str]) -> tuple[Layer, ...]:
        """Return layers; raise AuditError if one is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedImage:
    """An image: its layers, the lowest first, and its configuration.

    `digest` is the digest of its manifest, or of its configuration if it has no manifest. `sizes` are the
    known sizes of its layers in a registry, by digest, and `size` is their sum, or else what the engine that
    has the image tells; None if neither is known. Containers inherit its `environment` and `labels`.
    `names` are the names that an archive or a layout gives it. `inherited`: the image was built on a variant
    of imagematrix, and its labels are that variant's. `created` is the time in its configuration, and `sboms`
    are its own SBOMs, if they were asked for.
    """

    reference: str
    digest: str
    platform: str
    layers: tuple[Layer, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    size: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    inherited: bool = False
    created: str | None = None
    sboms: tuple[Statement, ...] = ()


def list_images(
    source: ImageSource,
    raw: bytes,
    reference: str,
    platform: str,
    *,
    layout: bool = False,
    sboms: bool = False,
) -> Iterator[AuditedImage]:
    """Yield the images of a manifest or an index, with their own SBOMs if `sboms`.

    From an index, these are its variants of imagematrix, or else the image for `platform`, such as
    linux/amd64. In the index of a `layout`, the entries of each name count as an index. Raises
    UnknownImageError if there is no image, AuditError if something is damaged or an index states other labels
    than its images have, TagMovedError if another tool changed the index of a version.
    """
    try:
        if layout and isinstance(document := parse_manifest(raw, reference, Descriptor), ImageIndex):
            groups = [
                [*_list_entries(source, group, reference, DEEPEST)]
                for group in _group_by_name(document.entries)
            ]
        else:
            digest = compute_digest(raw)
            groups = [[*_list_manifests(source, digest, _parse_intact(raw, reference), reference, DEEPEST)]]
        for group in groups:
            for manifest in group:
                _require_own_labels(source, manifest, reference)
        manifests = [
            manifest for group in groups for manifest in _choose_manifests(group, reference, platform)
        ]
        for manifest in manifests:
            name = reference if len(manifests) == 1 else f"{reference.partition('@')[0]}@{manifest.digest}"
            if manifest.config is None:
                raise AuditError(f"{name} has no configuration")
            image = read_image(
                source,
                source.read_config(manifest.config.digest),
                [layer.digest for layer in manifest.layers],
                reference=name,
                digest=manifest.digest,
                sizes={layer.digest: layer.size for layer in manifest.layers},
            )
            if sboms:
                statements = attested_sboms.read_sboms(source, manifest.digest, manifest.attestations)
                image = replace(image, sboms=statements)
            yield replace(image, names=(manifest.name,)) if manifest.name else image
    except UsageError as error:
        raise AuditError(str(error)) from error


def read_image(
    source: ImageSource,
    config: bytes,
    layers: Sequence[str],
    *,
    reference: str,
    digest: str,
    sizes: Mapping[str, int] | None = None,
) -> AuditedImage:
    """Return the image with a `digest`, a configuration and layers; raise AuditError, UsageError."""
    fields = Fields(json_documents.parse_json(config, reference), reference)
    inner = fields.get_object_or_empty("config")
    pairs = (word.partition("=") for word in (inner.get_texts("Env") if inner.has("Env") else ()))
    platform = [
        fields.get_text_or_none("os"),
        fields.get_text_or_none("architecture"),
        fields.get_text_or_none("variant"),
    ]
    return AuditedImage(
        reference=reference,
        digest=digest,
        platform="/".join(part for part in platform if part),
        layers=source.read_layers(layers),
        sizes=sizes or {},
        size=sum((sizes or {}).values()) or None,
        environment={name: value for name, _, value in pairs},
        labels=inner.get_text_map("Labels"),
        inherited=labels.has_inherited(fields.data),
        created=fields.get_text_or_none("created"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListedManifest:
    """The manifest of an image, with its platform and annotations in the index that lists it, if any.

    `name` is the name in an engine of the image, or of the index. `attestations` are the digests of the
    manifests that attest it.
    """

    digest: str
    config: Descriptor | None
    layers: tuple[Descriptor, ...]
    platform: str | None
    annotations: Mapping[str, str]
    name: str | None
    attestations: tuple[str, ...] = ()


def _parse_intact(raw: bytes, reference: str) -> ImageIndex[IndexEntry] | ImageManifest:
    """Parse a manifest; raise TagMovedError if it is an index with variants that `publish` did not write."""
    document = parse_manifest(raw, reference, IndexEntry)
    if isinstance(document, ImageIndex):
        VersionIndex(
            name=reference,
            digest=compute_digest(raw),
            annotations=document.annotations,
            entries=document.entries,
        ).require_intact()
    return document


def _require_own_labels(source: ImageSource, manifest: _ListedManifest, reference: str) -> None:
    """Raise AuditError if an index states other labels of a variant or a warm image than the image has.

    A selection reads only the index, and whoever may push can write another one for the same images.
    """
    stated = manifest.annotations
    names = SELECTED if labels.VARIANT in stated else {labels.WARM} & stated.keys()
    if not names or manifest.config is None:
        return
    where = f"{reference.partition('@')[0]}@{manifest.digest}"
    config = Fields(json_documents.parse_json(source.read_config(manifest.config.digest), where), where)
    own = config.get_object_or_empty("config").get_text_map("Labels")
    differing = [name for name in sorted(names) if stated.get(name, "") != own.get(name, "")]
    if differing:
        raise AuditError(
            f"the index of {reference} states another {differing[0]} of {manifest.digest} than the image has",
            remedy="delete the tag of the version from the registry, and publish the version again",
        )


def _group_by_name(index: Sequence[Descriptor]) -> list[list[Descriptor]]:
    """Return the entries of a layout's index in groups, each of which is an image for several platforms.

    Entries with the same name form a group. Entries without a name form one group, unless two of them are for
    the same platform; then each is an image. A manifest with several names is returned once.
    """
    by_name: dict[str, list[Descriptor]] = {}
    seen: set[str] = set()
    for entry in index:
        if not entry.attestation and entry.digest not in seen:
            seen.add(entry.digest)
            name = entry.annotations.get(ENGINE_NAME) or entry.annotations.get(NAME) or ""
            by_name.setdefault(name, []).append(entry)
    groups: list[list[Descriptor]] = []
    for name, entries in by_name.items():
        if not name and len({_format_platform(entry) for entry in entries}) < len(entries):
            groups += [[entry] for entry in entries]
        else:
            groups.append(entries)
    return groups or [[]]


def _list_manifests(
    source: ImageSource,
    digest: str,
    document: ImageIndex[IndexEntry] | ImageManifest,
    reference: str,
    levels: int,
    entry: Descriptor | None = None,
    name: str | None = None,
) -> Iterator[_ListedManifest]:
    """Yield the manifest with a `digest`, or the manifests in the index with it."""
    if isinstance(document, ImageIndex):
        yield from _list_entries(source, document.entries, reference, levels, name)
    elif document.layers is not None:  # an artifact may have none
        yield _ListedManifest(
            digest=digest,
            config=document.config,
            layers=document.layers,
            platform=_format_platform(entry) if entry else None,
            annotations=entry.annotations if entry else {},
            name=name,
        )


def _list_entries(
    source: ImageSource, entries: Sequence[Descriptor], reference: str, levels: int, name: str | None = None
) -> Iterator[_ListedManifest]:
    """Yield the manifests that entries refer to, directly or through at most `levels` other indexes."""
    if not levels or len(entries) > MOST:
        raise AuditError(f"{reference} has too many images, or indexes nested too deeply")
    attesting: defaultdict[str | None, list[str]] = defaultdict(list)
    for entry in entries:
        attesting[entry.attests].append(entry.digest)
    for entry in entries:
        if not entry.attestation:
            document = _parse_intact(source.read_manifest(entry.digest), reference)
            inner_name = entry.annotations.get(ENGINE_NAME) or name
            attestations = tuple(attesting[entry.digest])
            for manifest in _list_manifests(
                source, entry.digest, document, reference, levels - 1, entry, inner_name
            ):
                direct = manifest.digest == entry.digest
                yield replace(manifest, attestations=attestations) if direct else manifest


def _choose_manifests(listed: list[_ListedManifest], reference: str, platform: str) -> list[_ListedManifest]:
    ours = [manifest for manifest in listed if labels.VARIANT in manifest.annotations]
    if ours or len(listed) == 1:  # a single image is what its reference names, whatever its platform
        return ours or listed
    matching = [manifest for manifest in listed if manifest.platform == platform]
    if not matching:
        platforms = (
            ", ".join(sorted({manifest.platform for manifest in listed if manifest.platform})) or "none"
        )
        raise UnknownImageError(f"{reference} has no image for {platform}", remedy=f"it has {platforms}")
    return matching[:1]


def _format_platform(entry: Descriptor) -> str | None:
    if not entry.platform:
        return None
    return f"{entry.platform.get('os')}/{entry.platform.get('architecture')}"
