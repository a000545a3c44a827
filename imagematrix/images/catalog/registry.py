"""The Catalog of a registry: the image index of a version, read with one request.

Each manifest of the index has its variant in its annotations, with the same names as image labels.
"""

from __future__ import annotations

from imagematrix.common.image_reference import DIGEST, Reference
from imagematrix.common.suggestions import SLIP, suggest_nearest
from imagematrix.common.text import quote_word, shorten_words
from imagematrix.errors import UnknownImageError
from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.unlabelled_image import make_unlabelled_error
from imagematrix.images.oci.manifest import CONFIGS, INDEXES, Descriptor, ImageManifest, parse_manifest
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.catalog.image_index import IndexEntry
    from imagematrix.images.catalog.signature_guard import Guard
    from imagematrix.images.trust.policy import SignaturePolicy

SHOWN = 10  # versions that an error lists
REQUESTS = 8  # at the same time


def load_catalog(name: str, policies: Sequence[SignaturePolicy] = ()) -> Catalog:
    """Return the catalog of `name`, such as registry:5000/ml/training:v1.

    It has one variant if `name` is a variant's reference or digest. Raises UnknownImageError if the registry
    has none, EngineError if it cannot be reached or refuses, UsageError if its content is not a catalog,
    SignatureError if it lacks a signature that one of the policies requires.
    """
    reference = Reference.parse(name)
    with Registry(reference.name) as registry:
        guard = _make_guard(registry, policies)
        manifest = registry.find_manifest(reference.tag)
        if manifest is None:
            message = f"the registry {reference.registry} has no {name}"
            raise UnknownImageError(message, remedy=_suggest_reference(reference, registry))
        index = image_index.find_index(manifest, f"{reference.name}:{reference.tag}")
        if guard and index:
            guard.require_signed_index(reference.tag, index.digest, index.entries)
        version_catalog = index.make_catalog(reference.name, reference.tag) if index else None
        named = None if version_catalog else read_entry(registry, reference.tag)
        # An image that was built on a variant inherits its labels, but neither its tag nor its content. For a
        # version, a resolver answers with the variant itself.
        is_variant = (
            named is not None
            and named.ours
            and (
                named.tag == reference.tag
                or DIGEST.fullmatch(reference.tag)
                or registry.digest(named.tag) == named.digest
            )
        )
        if guard and named and is_variant:
            guard.require_signed_variant(reference.tag, named)
    if version_catalog:
        return version_catalog
    if named and is_variant:
        # A named variant leaves no axis for defaults to decide.
        version = named.annotations[labels.VERSION]
        return image_index.make_catalog(reference.name, version, [named]).without_defaults()
    entries = [named] if named else (index or image_index.read_index(manifest, name)).entries
    if named and named.warm:
        remedy = "name the version, or a variant of it"
        raise UnknownImageError(f"{name} is a warm image, and no variant", remedy=remedy)
    if entries and not any(entry.ours for entry in entries if entry is not named):
        raise make_unlabelled_error(name)
    raise UnknownImageError(f"{name} is an index without variants of imagematrix")


def load_catalogs(name: str, policies: Sequence[SignaturePolicy] = ()) -> list[Catalog]:
    """Return the catalogs of all versions in the repository `name`.

    Raises EngineError, and SignatureError if one lacks a signature that one of the policies requires.
    """
    from concurrent.futures import ThreadPoolExecutor

    with Registry(name) as registry, ThreadPoolExecutor(max_workers=REQUESTS) as pool:
        guard = _make_guard(registry, policies)
        versions = _select_versions(registry.list_tags())
        catalogs = []
        for version, manifest in zip(versions, pool.map(registry.find_manifest, versions), strict=True):
            index = image_index.find_index(manifest, f"{name}:{version}")
            if guard and index:
                guard.require_signed_index(version, index.digest, index.entries)
            catalogs.append(index.make_catalog(name, version) if index else None)
    return [catalog for catalog in catalogs if catalog is not None]


def _make_guard(registry: Registry, policies: Sequence[SignaturePolicy]) -> Guard | None:
    """Return what checks signatures in a repository, None if no policy requires them."""
    if not policies:
        return None
    from imagematrix.images.catalog import signature_guard

    return signature_guard.make_guard(registry, policies)


def _select_versions(tags: Iterable[str]) -> list[str]:
    """Return the tags that can be versions, which have no dash."""
    return sorted((tag for tag in tags if "-" not in tag), key=make_natural_key)


def _suggest_reference(reference: Reference, registry: Registry) -> str:
    """Return a suggestion for a reference that a registry does not have."""
    tags = registry.list_tags()
    if not tags:
        return "check the name; the registry has no such repository"
    versions = _select_versions(tags)
    pushed = [tag for tag in tags if tag.startswith(f"{reference.tag}-")] or ([] if versions else tags)
    variant = read_entry(registry, pushed[0]) if pushed else None
    if variant and variant.ours and variant.tag == pushed[0]:
        version = f"{reference.name}:{variant.annotations[labels.VERSION]}"
        return f"its images are pushed but not published yet: run `imagematrix publish {quote_word(version)}`"
    existing = shorten_words(versions or sorted(tags, key=make_natural_key), SHOWN)
    return suggest_nearest(reference.tag, tags, likeness=SLIP) or f"it has {existing}"


def read_entry(registry: Registry, tag: str) -> IndexEntry | None:
    """Return the index entry of the image with a tag or digest, read from the image itself.

    For an image with attestations it is the image's entry. Returns None if the tag does not exist, or is
    something else, such as another index or a signature. Raises UsageError if it is damaged.
    """
    manifest = registry.find_manifest(tag)
    if manifest and (image_digest := image_index.get_attested_digest(manifest, tag)):
        manifest = registry.find_manifest(image_digest)
    if manifest is None or manifest.media_type in INDEXES:
        return None
    where = f"{registry.name}:{tag}"
    image = parse_manifest(manifest.raw, where, Descriptor)
    if not isinstance(image, ImageManifest) or not image.config or image.config.media_type not in CONFIGS:
        return None
    annotations = image.annotations
    if labels.VARIANT not in annotations:  # pushed by an engine with the classic image store
        annotations = labels.read_config_labels(registry.fetch_small_blob(image.config.digest), where)
    # A variant that was built on a warm image has its label, too.
    names = labels.ANNOTATED if labels.VARIANT in annotations else (*labels.ANNOTATED, labels.WARM)
    size = sum(layer.size for layer in image.layers or ())
    return image_index.IndexEntry(
        digest=manifest.digest,
        size=len(manifest.raw),
        media_type=manifest.media_type,
        annotations={key: annotations[key] for key in names if key in annotations} | {labels.SIZE: str(size)},
        platform=image_index.make_platform(None),
    )
