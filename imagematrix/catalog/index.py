"""Reading and writing an OCI image index (image-index.md of the OCI image specification)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from imagematrix import documents
from imagematrix.catalog import labels
from imagematrix.catalog.catalog import Catalog
from imagematrix.errors import UsageError
from imagematrix.oci.registry import DOCKER_LIST, INDEX
from imagematrix.reference import DIGEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.catalog.catalog import Variant

__all__ = ["ATTESTED", "Entry", "catalog", "parse", "platform", "write"]

UNKNOWN = "unknown"  # the OS and architecture of entries that no engine should select by platform
ATTESTED = "vnd.docker.reference.digest"  # an annotation of attestations: the digest of the attested image


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of an index: the descriptor of a manifest, with its annotations and platform."""

    digest: str
    size: int
    media_type: str
    annotations: Mapping[str, str]
    platform: Mapping[str, str]

    @property
    def ours(self) -> bool:
        """Whether it is a variant, not an attestation or a foreign image."""
        return {labels.VARIANT, labels.VERSION, labels.CELL, labels.INPUT} <= self.annotations.keys()

    @property
    def tag(self) -> str:
        """The tag that its annotations imply."""
        return labels.tag(
            *(self.annotations.get(key, "?") for key in (labels.VERSION, labels.CELL, labels.INPUT))
        )

    @property
    def attests(self) -> str | None:
        """The digest of the image that it attests, as in BuildKit's attestations, or None."""
        return self.annotations.get(ATTESTED)

    @property
    def hidden(self) -> bool:
        """Whether engines that choose by platform ignore it."""
        return self.platform.get("os") == UNKNOWN

    @property
    def plain(self) -> str | None:
        """Its platform, such as "linux/amd64"; None if it has a CPU level, or no platform."""
        if not {"os", "architecture"} <= self.platform.keys() or "variant" in self.platform:
            return None
        return f"{self.platform['os']}/{self.platform['architecture']}"

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
    """Return the entries of the index `raw`; raise UsageError if it is not one. `name` is for messages."""
    fields = documents.Fields(documents.parse(raw, name), name)
    if fields.text_or_none("mediaType") not in (INDEX, DOCKER_LIST, None) or not fields.present("manifests"):
        remedy = "name a version such as v1, which is an index of variants"
        raise UsageError(f"{name} is a single image, not an index of variants", remedy=remedy)
    return tuple(_entry(item) for item in fields.objects("manifests"))


def platform(name: str | None) -> dict[str, str]:
    """Return the platform object for a name such as "linux/amd64", or one that no engine has for None."""
    system, _, architecture = (name or f"{UNKNOWN}/{UNKNOWN}").partition("/")
    return {"architecture": architecture, "os": system}


def write(entries: Iterable[Entry]) -> bytes:
    """Return an index of `entries`: the same entries always give the same bytes."""
    manifests = [entry.to_json() for entry in sorted(entries, key=_place)]
    data = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
    return json.dumps(data, indent=1, sort_keys=True).encode()


def catalog(image: str, version: str, entries: Sequence[Entry]) -> Catalog:
    """Return the catalog of the variants in an index; raise UsageError if one is damaged."""
    name = f"{image}:{version}"
    variants: dict[str, Variant] = {}
    for entry in entries:
        variant = labels.read(
            entry.annotations,
            reference=f"{image}:{entry.tag}",
            digest=entry.digest,
            size=labels.size(entry.annotations),
        )
        if variant.reference in variants:
            raise UsageError(f"{name}: {variant.reference} occurs twice")
        variants[variant.reference] = variant
    terms = labels.agreed(name, (labels.terms(entry.annotations, name) for entry in entries))
    return Catalog(
        image=image,
        version=version,
        variants=tuple(variants.values()),
        prefer=terms.prefer,
        defaults=terms.defaults,
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
