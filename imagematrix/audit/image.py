"""Reading images from a source: manifests, configurations and layers, all of them untrusted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Protocol

from imagematrix import documents
from imagematrix.catalog import labels
from imagematrix.documents import Fields
from imagematrix.errors import AuditError, UnknownImageError, UsageError
from imagematrix.reference import DIGEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.audit.layer import Layer
    from imagematrix.oci.expanded import Stream

__all__ = ["Hashed", "Image", "Source", "digest", "image", "images"]

ATTESTATION = "vnd.docker.reference.type"  # annotation of a manifest that describes another one
NAMED = "io.containerd.image.name"  # annotation in a layout's index: the name of the image in an engine
TAG = "org.opencontainers.image.ref.name"  # annotation in a layout's index: the name of the image there
DEEPEST = 3  # levels of nested indexes
MOST = 1000  # manifests of an index
PIECE = 1 << 20


class Source(Protocol):
    """A store with the blobs of images."""

    def manifest(self, digest: str) -> bytes:
        """Return a manifest or an index; raise UnknownImageError or AuditError."""

    def config(self, digest: str) -> bytes:
        """Return a configuration; raise UnknownImageError or AuditError."""

    def layers(self, digests: Sequence[str]) -> tuple[Layer, ...]:
        """Return layers; raise AuditError if one is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image: its layers, the lowest first, and its configuration.

    `digest` is the digest of its manifest, or of its configuration if it has no manifest. `sizes` are the
    known sizes of its layers in a registry, by digest. Containers inherit its `environment` and `labels`.
    `names` are the names that an archive or a layout gives it. `inherited`: the image was built on a variant
    of imagematrix, and its labels are that variant's.
    """

    reference: str
    digest: str
    platform: str
    layers: tuple[Layer, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    inherited: bool = False


class Hashed:
    """A stream that hashes the bytes read from it, and compares them with the `expected` digest."""

    def __init__(self, stream: Stream, expected: str = "") -> None:
        self._stream = stream
        self._expected = expected
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The digest of the bytes read so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes."""
        piece = self._stream.read(size)
        self._hash.update(piece)
        return piece

    def finish(self) -> None:
        """Read to the end; raise AuditError if the digest is not the expected one."""
        while self.read(PIECE):
            pass
        if self.digest != self._expected:
            raise AuditError(f"the content of blob {self._expected} does not match its digest")


def digest(raw: bytes) -> str:
    """Return the digest of a manifest or a configuration."""
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def images(
    source: Source, raw: bytes, reference: str, platform: str, *, layout: bool = False
) -> Iterator[Image]:
    """Yield the images of a manifest or an index.

    From an index, these are its variants of imagematrix, or else the image for `platform`, such as
    linux/amd64. In the index of a `layout`, the entries of each name count as an index. Raises
    UnknownImageError if there is no image, AuditError if something is damaged.
    """
    try:
        fields = Fields(documents.parse(raw, reference), reference)
        if layout and fields.present("manifests"):
            listed = [_listed(source, one, reference, DEEPEST) for one in _by_name(fields)]
        else:
            listed = [_manifests(source, raw, reference, DEEPEST)]
        manifests = [manifest for one in listed for manifest in _chosen(list(one), reference, platform)]
        for manifest in manifests:
            own = digest(manifest.raw)
            name = reference if len(manifests) == 1 else f"{reference.partition('@')[0]}@{own}"
            layers = list(manifest.fields.objects("layers"))
            config = manifest.fields.object_or_none("config")
            if config is None:
                raise AuditError(f"{name} has no configuration")
            made = image(
                source,
                source.config(_digest(config, "digest")),
                [_digest(layer, "digest") for layer in layers],
                reference=name,
                own=own,
                sizes={layer.text("digest"): layer.integer("size") for layer in layers},
            )
            yield replace(made, names=(manifest.name,)) if manifest.name else made
    except UsageError as error:
        raise AuditError(str(error)) from error


def image(
    source: Source,
    config: bytes,
    layers: Sequence[str],
    *,
    reference: str,
    own: str,
    sizes: Mapping[str, int] | None = None,
) -> Image:
    """Return the image with the digest `own`, a configuration and layers; raise AuditError, UsageError."""
    fields = Fields(documents.parse(config, reference), reference)
    inner = fields.object_or_none("config") or Fields({}, reference)
    pairs = (word.partition("=") for word in (inner.texts("Env") if inner.present("Env") else ()))
    platform = [
        fields.text_or_none("os"),
        fields.text_or_none("architecture"),
        fields.text_or_none("variant"),
    ]
    own_labels = inner.named_texts("Labels")
    return Image(
        reference=reference,
        digest=own,
        platform="/".join(part for part in platform if part),
        layers=source.layers(layers),
        sizes=sizes or {},
        environment={name: value for name, _, value in pairs},
        labels=own_labels,
        inherited=labels.inherited(fields.data),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """The manifest of an image, with its platform and annotations in the index that lists it, if any.

    `name` is the name in an engine of the image, or of the index.
    """

    raw: bytes
    fields: Fields
    platform: str | None
    annotations: Mapping[str, str]
    name: str | None


def _by_name(index: Fields) -> list[list[Fields]]:
    """Return the entries of a layout's index in groups, each of which is an image for several platforms.

    Entries with the same name form a group. Entries without a name form one group, unless two of them are for
    the same platform; then each is an image. A manifest with several names is returned once.
    """
    named: dict[str, list[Fields]] = {}
    seen: set[str] = set()
    for one in index.objects("manifests"):
        annotations = one.named_texts("annotations")
        if ATTESTATION not in annotations and (own := one.text("digest")) not in seen:
            seen.add(own)
            named.setdefault(annotations.get(NAMED) or annotations.get(TAG) or "", []).append(one)
    groups: list[list[Fields]] = []
    for name, entries in named.items():
        apart = not name and len({_platform(one) for one in entries}) < len(entries)
        groups += [[one] for one in entries] if apart else [entries]
    return groups or [[]]


def _manifests(
    source: Source,
    raw: bytes,
    reference: str,
    deep: int,
    entry: Fields | None = None,
    name: str | None = None,
) -> Iterator[_Manifest]:
    """Yield the manifest `raw`, or the manifests in the index `raw`."""
    fields = Fields(documents.parse(raw, reference), reference)
    if fields.present("manifests"):
        yield from _listed(source, list(fields.objects("manifests")), reference, deep, name)
    elif fields.present("layers"):  # an artifact may have none
        yield _Manifest(
            raw=raw,
            fields=fields,
            platform=_platform(entry),
            annotations=entry.named_texts("annotations") if entry else {},
            name=name,
        )


def _listed(
    source: Source, entries: Sequence[Fields], reference: str, deep: int, name: str | None = None
) -> Iterator[_Manifest]:
    """Yield the manifests that entries of an index refer to, directly or through other indexes."""
    if not deep or len(entries) > MOST:
        raise AuditError(f"{reference} has too many images, or indexes nested too deeply")
    for one in entries:
        annotations = one.named_texts("annotations")
        if ATTESTATION not in annotations:
            inner = source.manifest(_digest(one, "digest"))
            yield from _manifests(source, inner, reference, deep - 1, one, annotations.get(NAMED) or name)


def _chosen(listed: list[_Manifest], reference: str, platform: str) -> list[_Manifest]:
    ours = [one for one in listed if labels.VARIANT in one.annotations]
    if ours or len(listed) == 1:
        return ours or listed
    matching = [one for one in listed if one.platform == platform]
    if not matching:
        platforms = ", ".join(sorted({one.platform for one in listed if one.platform})) or "none"
        raise UnknownImageError(f"{reference} has no image for {platform}", remedy=f"it has {platforms}")
    return matching[:1]


def _platform(entry: Fields | None) -> str | None:
    platform = entry.object_or_none("platform") if entry else None
    return f"{platform.text_or_none('os')}/{platform.text_or_none('architecture')}" if platform else None


def _digest(fields: Fields, key: str) -> str:
    value = fields.text(key)
    if not DIGEST.fullmatch(value):
        raise fields.fail(key, f"{value[:80]!r} is not a sha256 digest")
    return value
