"""An OCI image index (image-index.md of the OCI image specification), as far as we read and write it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from imagematrix import documents
from imagematrix.catalog import labels
from imagematrix.catalog.catalog import DIGEST, Catalog
from imagematrix.errors import UnknownImageError, UsageError
from imagematrix.registry import DOCKER_LIST, INDEX, Reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.catalog.catalog import Variant

__all__ = ["ATTESTED", "Entry", "catalog", "parse", "write"]

ATTESTED = "vnd.docker.reference.digest"  # an annotation of attestations: the image that they are of


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A manifest in an index: its descriptor, with the annotations and the platform that it has there."""

    digest: str
    size: int
    media_type: str
    annotations: Mapping[str, str]
    platform: Mapping[str, str]

    @property
    def ours(self) -> bool:
        """Whether it is a variant, and no attestation or an image of others."""
        return {labels.VARIANT, labels.VERSION, labels.CELL, labels.INPUT} <= self.annotations.keys()

    @property
    def tag(self) -> str:
        """The tag that it should have, by what it says of itself."""
        return labels.tag(
            *(self.annotations.get(key, "?") for key in (labels.VERSION, labels.CELL, labels.INPUT))
        )

    @property
    def attests(self) -> str | None:
        """The digest of the image that it says something of, as BuildKit's attestations have it; or None."""
        return self.annotations.get(ATTESTED)

    def to_json(self) -> dict[str, object]:
        """Return the descriptor."""
        return {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
            "annotations": dict(self.annotations),
            "platform": dict(self.platform),
        }


def parse(raw: bytes, name: str) -> tuple[Entry, ...]:
    """Return the entries of the index `raw`; raise UsageError where it is none. `name` is for messages."""
    fields = documents.Fields(documents.parse(raw, name), name)
    if fields.text_or_none("mediaType") not in (INDEX, DOCKER_LIST, None) or not fields.present("manifests"):
        remedy = "name a version as its variants have it, such as v1; no image by itself can have that tag"
        raise UsageError(f"{name} is one image and no index of variants", remedy=remedy)
    return tuple(_entry(item) for item in fields.objects("manifests"))


def write(entries: Iterable[Entry]) -> bytes:
    """Return an index of `entries`: the same entries always give the same bytes."""
    manifests = [entry.to_json() for entry in sorted(entries, key=_place)]
    data = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
    return json.dumps(data, indent=1, sort_keys=True).encode()


def catalog(raw: bytes, reference: Reference) -> Catalog:
    """Return the catalog that an index is; raise UnknownImageError or UsageError where it is none."""
    name = f"{reference.name}:{reference.tag}"
    variants: dict[str, Variant] = {}
    ours = [entry for entry in parse(raw, name) if entry.ours]
    for entry in ours:
        variant = labels.read(
            entry.annotations,
            reference=f"{reference.name}:{entry.tag}",
            digest=entry.digest,
            size=labels.size(entry.annotations),
        )
        if variant.reference in variants:
            raise UsageError(f"{name}: {variant.reference} is there twice")
        variants[variant.reference] = variant
    if not variants:
        raise UnknownImageError(f"{name} is an index without variants of imagematrix")
    stated = {labels.prefer(entry.annotations, name) for entry in ours}
    return Catalog(
        image=reference.name,
        version=reference.tag,
        variants=tuple(variants.values()),
        prefer=labels.agreed(name, stated),
    )


def _entry(fields: documents.Fields) -> Entry:
    digest = fields.text("digest")
    if not DIGEST.fullmatch(digest):
        raise fields.fail("digest", f"{digest[:80]!r} is not a sha256 digest")
    return Entry(
        digest=digest,
        size=fields.integer("size"),
        media_type=fields.text_or_none("mediaType") or "",
        annotations=fields.named_texts("annotations"),
        platform=fields.named_texts("platform"),
    )


def _place(entry: Entry) -> tuple[str, str]:
    return entry.annotations.get(labels.CELL, ""), entry.digest
