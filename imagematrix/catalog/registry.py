"""The Catalog of a registry: the image index of a version, read with one request.

Each manifest of the index has its variant in its annotations, with the same names as image labels.
"""

from __future__ import annotations

from imagematrix import documents
from imagematrix.catalog import index, labels
from imagematrix.errors import UnknownImageError
from imagematrix.facts.versions import natural
from imagematrix.oci.registry import DOCKER_LIST, INDEX, MANIFESTS, Registry
from imagematrix.record import replace
from imagematrix.reference import DIGEST, Reference
from imagematrix.spelling import SLIP, nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.catalog.index import Entry
    from imagematrix.oci.registry import Manifest

__all__ = ["catalog", "catalogs", "entry", "listed"]

REQUESTS = 8  # at the same time
IMAGES = tuple(kind for kind in MANIFESTS if kind not in (INDEX, DOCKER_LIST))
CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)


def catalog(name: str) -> Catalog:
    """Return the catalog of `name`, such as registry:5000/ml/training:v1.

    It has one variant if `name` is a variant's reference or digest. Raises UnknownImageError if the registry
    has none, EngineError if it cannot be reached or refuses, UsageError if its content is not a catalog.
    """
    reference = Reference.parse(name)
    with Registry(reference.name) as registry:
        manifest = registry.manifest(reference.tag)
        if manifest is None:
            message = f"the registry {reference.registry} has no {name}"
            raise UnknownImageError(message, remedy=_remedy(reference, registry.tags()))
        whole = listed(manifest, reference.name, reference.tag)
        one = None if whole else entry(registry, reference.tag)
    if whole:
        return whole
    # An image that was built on a variant inherits its labels, but neither its tag nor its content.
    if one and one.ours and (one.tag == reference.tag or DIGEST.fullmatch(reference.tag)):
        # A named variant leaves no axis for defaults to decide.
        return replace(index.catalog(reference.name, one.annotations[labels.VERSION], [one]), defaults=())
    index.parse(manifest.raw, name)
    raise UnknownImageError(f"{name} is an index without variants of imagematrix")


def catalogs(name: str) -> list[Catalog]:
    """Return the catalogs of all versions in the repository `name`; raise EngineError."""
    from concurrent.futures import ThreadPoolExecutor

    with Registry(name) as registry, ThreadPoolExecutor(max_workers=REQUESTS) as pool:
        versions = _versions(registry.tags())
        manifests = zip(versions, pool.map(registry.manifest, versions), strict=True)
        read = [listed(one, name, version) for version, one in manifests if one]
    return [one for one in read if one is not None]


def listed(manifest: Manifest, image: str, version: str) -> Catalog | None:
    """Return the catalog in the index of a version; None if it has no variants.

    Raises UsageError if it is damaged.
    """
    entries = _listed(manifest, f"{image}:{version}")
    return index.catalog(image, version, entries) if entries else None


def _listed(manifest: Manifest, name: str) -> list[Entry]:
    """Return the variants in a manifest: none if it is a single image or a foreign index."""
    if manifest.media_type in IMAGES:
        return []
    return [one for one in index.parse(manifest.raw, name) if one.ours]


def _versions(tags: Iterable[str]) -> list[str]:
    """Return the tags that can be versions, which have no dash."""
    return sorted((tag for tag in tags if "-" not in tag), key=natural)


def _remedy(reference: Reference, tags: Sequence[str]) -> str:
    """Return a suggestion for a reference that a registry does not have."""
    versions = _versions(tags)
    if not tags:
        return "check the name; the registry has no such repository"
    existing = (
        f"it has {', '.join(versions)}"
        if versions
        else "images are pushed but not published yet; run `imagematrix publish`"
    )
    return nearest(reference.tag, tags, likeness=SLIP) or existing


def entry(registry: Registry, tag: str) -> Entry | None:
    """Return the index entry of the image with a tag or digest, read from the image itself.

    For an image with attestations it is the image's entry. Returns None if the tag does not exist, or is
    something else, such as another index or a signature. Raises UsageError if it is damaged.
    """
    manifest = registry.manifest(tag)
    if manifest and manifest.media_type == INDEX:
        attested = {one.attests for one in index.parse(manifest.raw, tag) if one.attests}
        manifest = registry.manifest(attested.pop()) if len(attested) == 1 else None
    if manifest is None or manifest.media_type in (INDEX, DOCKER_LIST):
        return None
    where = f"{registry.name}:{tag}"
    fields = documents.Fields(documents.parse(manifest.raw, where), where)
    config = fields.object_or_none("config")
    if config is None or config.text_or_none("mediaType") not in CONFIGS:
        return None
    annotations = fields.named_texts("annotations")
    if labels.VARIANT not in annotations:  # pushed by an engine with the classic image store
        annotations = _configured(registry, config, where)
    size = sum(layer.integer("size") for layer in fields.objects("layers"))
    return index.Entry(
        digest=manifest.digest,
        size=len(manifest.raw),
        media_type=manifest.media_type,
        annotations={key: annotations[key] for key in labels.ANNOTATED if key in annotations}
        | {labels.SIZE: str(size)},
        platform=index.platform(None),
    )


def _configured(registry: Registry, config: documents.Fields, where: str) -> dict[str, str]:
    """Return the labels in an image's configuration; none if they are inherited from another image."""
    digest = config.text("digest")
    if not DIGEST.fullmatch(digest):
        raise config.fail("digest", f"{digest[:80]!r} is not a sha256 digest")
    image = documents.Fields(documents.parse(registry.blob(digest), where), where)
    inner = image.object_or_none("config")
    own = inner.named_texts("Labels") if inner else {}
    return {} if labels.inherited(image.data) else own
