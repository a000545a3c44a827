"""Manifests and indexes of images, and the descriptors in them (OCI image specification).

They come from registries, layouts and archives, so every one of them is hostile.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Generic, TypeVar

from imagematrix.common import json_documents
from imagematrix.common.image_reference import DIGEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
IMAGE = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
CONFIGS = (CONFIG, "application/vnd.docker.container.image.v1+json")
INDEXES = (INDEX, DOCKER_LIST)
MANIFESTS = (*INDEXES, IMAGE, "application/vnd.docker.distribution.manifest.v2+json")
LIMIT = 4 * 1024 * 1024  # bytes: registries have to accept manifests of this size, and few accept larger ones
LARGEST = 2**63 - 1  # bytes of a blob, as engines count them
ATTESTED = "vnd.docker.reference.digest"  # an annotation of attestations: the digest of the attested image
ATTESTATION = "vnd.docker.reference.type"  # another one, which says that it is an attestation


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest or an index as a store has it: its bytes and media type."""

    digest: str
    media_type: str
    raw: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What refers to a manifest or a blob. `media_type` is "" if it is not stated."""

    digest: str
    size: int
    media_type: str
    annotations: Mapping[str, str]
    platform: Mapping[str, str]

    @property
    def foreign(self) -> bool:
        """Whether it is a layer that registries need not have, such as one of Windows."""
        return "foreign" in self.media_type or "nondistributable" in self.media_type

    @property
    def attests(self) -> str | None:
        """The digest of the image that it attests, as in BuildKit's attestations, or None."""
        return self.annotations.get(ATTESTED)

    @property
    def attestation(self) -> bool:
        """Whether it describes another manifest, and is no image."""
        return ATTESTATION in self.annotations

    def to_json(self) -> dict[str, object]:
        """Return the descriptor of an entry in an index."""
        return {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
            "annotations": dict(self.annotations),
            "platform": dict(self.platform),
        }


D = TypeVar("D", bound=Descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageIndex(Generic[D]):
    """The entries of an index, and what it says of itself."""

    media_type: str
    entries: tuple[D, ...]
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageManifest:
    """The configuration and the layers of an image, the lowest first.

    `layers` is None if the document has none: some artifacts, or anything else that is no index.
    """

    media_type: str
    config: Descriptor | None
    layers: tuple[Descriptor, ...] | None
    annotations: Mapping[str, str]


def compute_digest(raw: bytes) -> str:
    """Return the digest of a manifest, a configuration or another blob."""
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def parse_manifest(raw: bytes, name: str, entry: type[D]) -> ImageIndex[D] | ImageManifest:
    """Return what a manifest or an index has; raise UsageError if it is damaged.

    The entries of an index are of the class `entry`. `name` is for messages.

    A document that is both is refused, as engines do: clients differ in what they take it for.
    """
    fields = json_documents.Fields(json_documents.parse_json(raw, name), name)
    media_type = fields.get_text_or_none("mediaType")
    annotations = fields.get_text_map("annotations")
    config = fields.get_object_or_none("config")
    layers = None
    if fields.has("layers"):
        layers = tuple(_parse_descriptor(layer, Descriptor) for layer in fields.list_objects("layers"))
    if not fields.has("manifests"):
        return ImageManifest(
            media_type=media_type or IMAGE,
            config=_parse_descriptor(config, Descriptor) if config else None,
            layers=layers,
            annotations=annotations,
        )
    if config or layers is not None or media_type not in (*INDEXES, None):
        raise fields.fail("manifests", "is not allowed in the manifest of an image")
    entries = tuple(_parse_descriptor(item, entry) for item in fields.list_objects("manifests"))
    return ImageIndex(media_type=media_type or INDEX, entries=entries, annotations=annotations)


def _parse_descriptor(fields: json_documents.Fields, kind: type[D]) -> D:
    digest = fields.get_text("digest")
    if not DIGEST.fullmatch(digest):
        raise fields.fail("digest", f"{digest[:80]!r} is not a sha256 digest")
    size = fields.get_integer("size")
    if not 0 <= size <= LARGEST:
        raise fields.fail("size", "is not a number of bytes")
    return kind(
        digest=digest,
        size=size,
        media_type=fields.get_text_or_none("mediaType") or "",
        annotations=fields.get_text_map("annotations"),
        platform=fields.get_text_map("platform"),
    )
