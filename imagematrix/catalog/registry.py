"""The Catalog that a registry's image index is, read with one request.

The index is that of the OCI image specification (image-index.md); each of its manifests has the variant in
its annotations, under the names that images have in their labels.
"""

from __future__ import annotations

from imagematrix import documents
from imagematrix.catalog import labels
from imagematrix.catalog.catalog import DIGEST, Catalog
from imagematrix.errors import UnknownImageError, UsageError
from imagematrix.registry import DOCKER_LIST, INDEX, Reference, Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Variant

__all__ = ["catalog", "from_index"]


def catalog(name: str) -> Catalog:
    """Return the catalog of `name`, such as registry:5000/ml/training:v1.

    Raises UnknownImageError where the registry has none, EngineError where it can't be reached or refuses,
    UsageError where what it has is no catalog.
    """
    reference = Reference.parse(name)
    with Registry(reference.name) as registry:
        found = registry.manifest(reference.tag)
    if found is None:
        raise UnknownImageError(f"the registry {reference.registry} has no {name}")
    return from_index(found.raw, reference)


def from_index(raw: bytes, reference: Reference) -> Catalog:
    """Return the catalog that an index is; raise UnknownImageError or UsageError where it is none."""
    name = f"{reference.name}:{reference.tag}"
    fields = documents.Fields(documents.parse(raw, name), name)
    if fields.text_or_none("mediaType") not in (INDEX, DOCKER_LIST, None):
        raise UsageError(f"{name} is one image and no index of variants", remedy="name the version alone")
    variants: dict[str, Variant] = {}
    preferences = set()
    for manifest in fields.objects("manifests"):
        found = _variant(manifest, reference)
        if not found:
            continue
        variant, prefer = found
        if variant.reference in variants:
            raise UsageError(f"{name}: {variant.reference} is there twice")
        variants[variant.reference] = variant
        preferences.add(prefer)
    if not variants:
        raise UnknownImageError(f"{name} is an index without variants of imagematrix")
    return Catalog(
        image=reference.name,
        version=reference.tag,
        variants=tuple(variants.values()),
        prefer=labels.agreed(name, preferences),
    )


def _variant(manifest: documents.Fields, reference: Reference) -> tuple[Variant, tuple[str, ...]] | None:
    """Return the variant of one manifest, and what it prefers; None where it is another's, an attestation."""
    annotations = manifest.object_or_none("annotations")
    if annotations is None or not annotations.present(labels.VARIANT):
        return None
    digest = manifest.text("digest")
    if not DIGEST.fullmatch(digest):
        raise manifest.fail("digest", f"{digest[:80]!r} is not a sha256 digest")
    cell, made_of = annotations.text(labels.CELL), annotations.text(labels.INPUT)
    version = annotations.text_or_none(labels.VERSION) or reference.tag
    name = f"{reference.name}:{labels.tag(version, cell, made_of)}"
    own = {
        labels.VARIANT: annotations.text(labels.VARIANT),
        labels.PREFER: annotations.text_or_none(labels.PREFER) or "",
    }
    return labels.read(own, reference=name, digest=digest, size=None), labels.prefer(own, name)
