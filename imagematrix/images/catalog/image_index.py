"""Reading and writing an OCI image index (image-index.md of the OCI image specification).

The index of a version states image, version and the digest of its entries in annotations of its own. So an
index that another tool wrote or changed under the version's tag is recognised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from imagematrix.common.image_reference import Reference
from imagematrix.common.record import replace
from imagematrix.errors import TagMovedError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.oci import manifest as manifests
from imagematrix.images.oci.manifest import INDEX, INDEXES, MANIFESTS, Descriptor, ImageIndex, compute_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.warm_image import WarmImage, WarmLabel
    from imagematrix.images.oci.manifest import Manifest

IMAGES = tuple(kind for kind in MANIFESTS if kind not in INDEXES)
UNKNOWN = "unknown"  # the OS and architecture of entries that no engine should select by platform

# The fields of an index, of its entries and of their platforms. Engines take a field by its name in any case,
# and the last of several: "Manifests" behind "manifests" is to them what the index has.
FIELDS = (
    {"schemaVersion", "mediaType", "manifests", "annotations"},
    {"mediaType", "artifactType", "digest", "size", "annotations", "platform"},
    {"os", "architecture", "variant"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry(Descriptor):
    """An entry of an index: the descriptor of a manifest, with its annotations and platform."""

    @property
    def ours(self) -> bool:
        """Whether it is a variant, not an attestation or a foreign image."""
        return {labels.VARIANT, labels.VERSION, labels.CELL, labels.INPUT} <= self.annotations.keys()

    @property
    def tag(self) -> str:
        """The tag that its annotations imply."""
        return labels.make_tag(
            *(self.annotations.get(key, "?") for key in (labels.VERSION, labels.CELL, labels.INPUT))
        )

    @property
    def hidden(self) -> bool:
        """Whether engines that choose by platform ignore it."""
        return self.platform.get("os") == UNKNOWN

    @property
    def warm(self) -> bool:
        """Whether it is a warm image of a variant."""
        return labels.WARM in self.annotations and not self.ours

    def read_warm_label(self) -> WarmLabel | None:
        """Return what a warm image says of itself; None of anything else, and if it is damaged or newer."""
        if not self.warm:
            return None
        from imagematrix.images.catalog.warm_image import parse_warm_label

        return parse_warm_label(self.annotations[labels.WARM])

    @property
    def subject(self) -> str | None:
        """The digest of the image that it attests or warms up, without which it is of no use; else None."""
        label = self.read_warm_label()
        return label.base if label else self.attests


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionIndex:
    """An index, of any tool or of `publish`, as it was parsed; `name` is for messages."""

    name: str
    digest: str
    annotations: Mapping[str, str]
    entries: tuple[IndexEntry, ...]

    def require_intact(self) -> VersionIndex:
        """Return it; raise TagMovedError if it has variants, but not as `publish` has written it."""
        stated = self.annotations.get(labels.CONTENT)
        change = None
        if stated is None:  # an index without variants states nothing
            change = "does not state its entries" if any(entry.ours for entry in self.entries) else None
        elif stated != _hash_entries(self.entries):
            change = "has other entries than it states"
        if change:
            remedy = "delete the tag from the registry, and publish the version again; or raise the version"
            message = f"{self.name} is not as imagematrix published it: {self.digest} {change}"
            raise TagMovedError(message, remedy=remedy)
        return self

    def make_catalog(self, image: str, version: str) -> Catalog | None:
        """Return the catalog of a version; None if it has no variants.

        Raises UsageError if it is damaged, TagMovedError if another tool changed it.
        """
        entries = [entry for entry in self.require_intact().entries if entry.ours]
        if not entries:
            return None
        warm_images = (
            [entry for entry in self.entries if entry.warm] if len(entries) < len(self.entries) else ()
        )
        return make_catalog(image, version, entries, warm_images)


def read_index(manifest: Manifest, name: str) -> VersionIndex:
    """Return an index, of any tool or of `publish`; raise UsageError if it is not an index."""
    index = _parse_image_index(manifest.raw, name)
    return VersionIndex(
        name=name, digest=manifest.digest, annotations=index.annotations, entries=index.entries
    )


def find_index(manifest: Manifest | None, name: str) -> VersionIndex | None:
    """Return the index that a tag has; None if it has a single image or nothing."""
    return None if manifest is None or manifest.media_type in IMAGES else read_index(manifest, name)


def parse_index(raw: bytes, name: str) -> tuple[IndexEntry, ...]:
    """Return the entries of the index `raw`; raise UsageError if it is not one. `name` is for messages."""
    return _parse_image_index(raw, name).entries


def get_attested_digest(manifest: Manifest, name: str) -> str | None:
    """Return the digest of the image in an index of one image with attestations of it; else None.

    The media type that its registry sent counts for nothing. Raises UsageError if it is damaged.
    """
    parsed = manifests.parse_manifest(manifest.raw, name, IndexEntry)
    entries = parsed.entries if isinstance(parsed, ImageIndex) else ()
    images = {entry.attests for entry in entries if entry.attests}
    return images.pop() if len(images) == 1 else None


def is_attested_image(manifest: Manifest, name: str, digest: str) -> bool:
    """Whether it is an index of the image with this digest and of attestations that no engine selects.

    One with a field that is not among FIELDS is none, and neither is anything damaged.
    """
    try:
        index = manifests.parse_manifest(manifest.raw, name, IndexEntry)
    except UsageError:
        return False
    return (
        isinstance(index, ImageIndex)
        and {entry.attests for entry in index.entries if entry.attests} == {digest}
        and all(
            entry.digest == digest or (entry.attests == digest and entry.hidden) for entry in index.entries
        )
        and _has_known_fields(manifest.raw)
    )


def read_published(manifest: Manifest | None, image: str, version: str) -> tuple[IndexEntry, ...]:
    """Return the entries of the index of a version, none if `manifest`, which its tag has, is None.

    Raises TagMovedError if it is anything else: a tag never moves, not even from another tool's image.
    """
    if manifest is None:
        return ()
    name = f"{image}:{version}"
    remedy = f"delete the tag {version} from the registry, or raise the version"
    try:
        published_index = read_index(manifest, name).require_intact()
    except UsageError as error:
        message = f"{name} is {manifest.digest}, not the index of the version: {error}"
        raise TagMovedError(message, remedy=remedy) from error
    stated = tuple(map(published_index.annotations.get, (labels.IMAGE, labels.VERSION)))
    if stated != (Reference.parse(name).repository, version):
        what = f"the index of {stated[0]}:{stated[1]}" if all(stated) else "an index of another tool"
        message = f"{name} is {manifest.digest}, {what}, not of this version"
        raise TagMovedError(message, remedy=remedy)
    return published_index.entries


def make_platform(name: str | None) -> dict[str, str]:
    """Return the platform object for a name such as "linux/amd64", or one that no engine has for None."""
    system, _, architecture = (name or f"{UNKNOWN}/{UNKNOWN}").partition("/")
    return {"architecture": architecture, "os": system}


def write_index(entries: Iterable[IndexEntry], image: str, version: str) -> bytes:
    """Return the index of a version: the same entries always give the same bytes."""
    ordered = sorted(entries, key=_make_sort_key)
    # Clients reach a registry by different addresses, so its address is not part of the image's name.
    repository = Reference.parse(f"{image}:{version}").repository
    stated = {labels.IMAGE: repository, labels.VERSION: version, labels.CONTENT: _hash_entries(ordered)}
    listed = [entry.to_json() for entry in ordered]
    data = {"schemaVersion": 2, "mediaType": INDEX, "annotations": stated, "manifests": listed}
    # Another form would be another digest, which moves the tag of each version that is published again.
    return json.dumps(data, indent=1, sort_keys=True).encode()


def make_catalog(
    image: str, version: str, entries: Sequence[IndexEntry], warm_entries: Sequence[IndexEntry] = ()
) -> Catalog:
    """Return the catalog of the variants in an index, and of those warm images that belong to one of them.

    Raises UsageError if a variant is damaged; a damaged warm image is left out.
    """
    name = f"{image}:{version}"
    variants: dict[str, Variant] = {}
    for entry in entries:
        variant = labels.read_variant(
            entry.annotations,
            reference=f"{image}:{entry.tag}",
            digest=entry.digest,
            size=labels.read_size(entry.annotations),
        )
        if variant.reference in variants:
            raise UsageError(f"{name}: {variant.reference} occurs twice")
        variants[variant.reference] = variant
    terms = labels.require_equal_terms(
        name, (labels.read_terms(entry.annotations, name) for entry in entries)
    )
    catalog = Catalog(
        image=image,
        version=version,
        variants=tuple(variants.values()),
        prefer=terms.prefer,
        defaults=terms.defaults,
        default_order=terms.default_order,
    )
    warm_images = _read_warm_images(image, version, warm_entries)
    return replace(catalog, warm=warm_images).keep(catalog.variants) if warm_images else catalog


def _read_warm_images(image: str, version: str, entries: Sequence[IndexEntry]) -> tuple[WarmImage, ...]:
    """Return the warm images that entries have, by name; of several with one name, the first."""
    if not entries:
        return ()
    from imagematrix.images.catalog.warm_image import make_warm_tag

    warm_images: dict[str, WarmImage] = {}
    for entry in sorted(entries, key=_make_sort_key):
        if label := entry.read_warm_label():
            reference = f"{image}:{make_warm_tag(version, label.base, label.key)}"
            size = labels.read_size(entry.annotations)
            warm_images.setdefault(reference, label.make_image(reference, entry.digest, size))
    return tuple(warm_images[reference] for reference in sorted(warm_images))


def _parse_image_index(raw: bytes, name: str) -> ImageIndex[IndexEntry]:
    index = manifests.parse_manifest(raw, name, IndexEntry)
    if not isinstance(index, ImageIndex):
        remedy = "name a version such as v1, which is an index of variants"
        raise UsageError(f"{name} is a single image, not an index of variants", remedy=remedy)
    return index


def _has_known_fields(raw: bytes) -> bool:
    """Whether the index `raw`, which was parsed before, has the fields of FIELDS only."""
    document = json.loads(raw)
    entries = document["manifests"]
    platforms = [entry.get("platform") or {} for entry in entries]
    return all(
        found.keys() <= fields
        for fields, objects in zip(FIELDS, ([document], entries, platforms), strict=True)
        for found in objects
    )


def _hash_entries(entries: Iterable[IndexEntry]) -> str:
    """Return the digest of the entries of an index, whatever their order."""
    listed = [entry.to_json() for entry in sorted(entries, key=_make_sort_key)]
    text = json.dumps(listed, sort_keys=True, separators=(",", ":"))
    return compute_digest(text.encode())


def _make_sort_key(entry: IndexEntry) -> tuple[str, str]:
    return entry.annotations.get(labels.CELL, ""), entry.digest
