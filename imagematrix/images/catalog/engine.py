"""The Catalog of a Docker engine, read from the labels of its images in one request."""

from __future__ import annotations

from imagematrix.common.image_reference import shorten_name, split_version
from imagematrix.common.suggestions import SLIP, suggest_nearest
from imagematrix.common.text import quote_word
from imagematrix.errors import AuditError, UnknownImageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.catalog.unlabelled_image import make_unlabelled_error
from imagematrix.images.engine import images

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.images.catalog.labels import Terms
    from imagematrix.images.catalog.warm_image import WarmImage
    from imagematrix.images.trust.policy import SignaturePolicy

# Podman qualifies short names: with docker.io if the image came through Docker's API, with localhost if it is
# from an archive or from a podman build. It finds both by the short name.
FULL = ("docker.io/library/", "docker.io/", "localhost/")


def load_catalog(name: str, policies: Sequence[SignaturePolicy] = ()) -> Catalog:
    """Return the catalog of `name` (IMAGE:VERSION, or IMAGE if it has one version) in the local engine.

    It has one variant if `name` is a variant's reference or digest. Raises UnknownImageError if the engine
    has no variant of it, EngineError if no engine answers, SignatureError if one lacks a signature that one
    of the policies requires.
    """
    image, _ = split_version(name)
    catalogs = load_catalogs(image)
    named_catalogs = [part for catalog in catalogs if (part := catalog.named(name))]
    if not named_catalogs:
        if images.inspect_image(name):
            raise make_unlabelled_error(name)
        raise UnknownImageError(f"the engine has no variant of {name}", remedy=_suggest_name(name, catalogs))
    if len(named_catalogs) > 1:
        versions = ", ".join(f"{image}:{catalog.version}" for catalog in named_catalogs)
        raise UnknownImageError(f"{image} has several versions", remedy=f"name one of {versions}")
    return _require_signed(named_catalogs, policies)[0]


def require_own(image: Mapping[str, Any], reference: str) -> None:
    """Raise AuditError if an image with the name of a variant was built on that variant.

    `image` is its configuration, or what an engine tells of it.
    """
    if labels.is_named(labels.get_labels(image), reference) and labels.has_inherited(image):
        raise make_built_on_error(reference)


def make_built_on_error(reference: str) -> AuditError:
    """Return the error for an image with the name of a variant that was built on that variant."""
    return AuditError(
        f"{reference} is not the variant of this name, but an image built on the variant",
        remedy=f"run `docker image rm {quote_word(reference)}` and build again",
    )


def require_named(references: Iterable[str]) -> None:
    """Raise AuditError as `require_own` does, for names of variants in the engine.

    The engine's list does not tell enough of an image, so each of these is inspected.
    """
    for reference in references:
        require_own(images.inspect_image(reference) or {}, reference)


def _suggest_name(name: str, catalogs_of_image: list[Catalog]) -> str:
    """Return a suggestion for `name`, which is in none of the catalogs of its image."""
    catalogs = catalogs_of_image or load_catalogs()
    versions = [f"{catalog.image}:{catalog.version}" for catalog in catalogs]
    variants = [variant.reference for catalog in catalogs_of_image for variant in catalog.variants]
    if not versions:
        return "build variants with `imagematrix build`"
    names = versions if split_version(name)[1] else list(dict.fromkeys(catalog.image for catalog in catalogs))
    return suggest_nearest(name, [*names, *variants], likeness=SLIP) or f"it has {', '.join(versions)}"


def load_catalogs(image: str | None = None, policies: Sequence[SignaturePolicy] = ()) -> list[Catalog]:
    """Return the catalogs of all images in the engine, or of one image, sorted by name and version.

    Raises SignatureError if an image lacks a signature that one of the policies requires.
    """
    wanted = labels.IMAGE if image is None else f"{labels.IMAGE}={image}"
    groups: dict[tuple[str, str], dict[str, tuple[Variant, Terms]]] = {}
    items = [item for item in images.list_labelled(wanted) if isinstance(item, dict)]
    for item in items:
        for name, version, variant, terms in _read_variants(item):
            groups.setdefault((name, version), {})[variant.reference] = variant, terms
    # Only variants with a warm-up have warm images, and only for these is the engine asked once more.
    has_warm_up = any((item.get("Labels") or {}).get(labels.WARM_UP) for item in items)
    warm_images = _list_warm_images() if has_warm_up else {}
    catalogs = []
    for (name, version), members in sorted(groups.items()):
        terms = labels.require_equal_terms(f"{name}:{version}", (terms for _, terms in members.values()))
        catalog = Catalog(
            image=name,
            version=version,
            variants=tuple(members[reference][0] for reference in sorted(members)),
            prefer=terms.prefer,
            defaults=terms.defaults,
            default_order=terms.default_order,
            warm=tuple(warm_images.get((name, version), ())),
        )
        catalogs.append(catalog.keep(catalog.variants) if catalog.warm else catalog)
    return _require_signed(catalogs, policies)


def _require_signed(catalogs: list[Catalog], policies: Sequence[SignaturePolicy]) -> list[Catalog]:
    """Return the catalogs, of which all variants have the signatures that the policies require."""
    if policies:
        from imagematrix.images.catalog.signature_guard import require_variants

        for catalog in catalogs:
            require_variants(catalog.variants, policies, catalog.version)
    return catalogs


def _read_variants(item: Mapping[str, Any]) -> Iterator[tuple[str, str, Variant, Terms]]:
    """Yield image, version, variant and terms of one element of the engine's list.

    Nothing if the image is no variant, or lacks the tag of its labels, as an image built on a variant does.
    """
    if not isinstance(item.get("Labels"), dict):
        return
    image_labels = item["Labels"]
    identity = [image_labels.get(key) for key in (labels.IMAGE, labels.VERSION, labels.CELL, labels.INPUT)]
    if not all(isinstance(text, str) for text in identity):
        return
    image, version, cell, input_digest = identity
    reference = f"{image}:{labels.make_tag(version, cell, input_digest)}"
    if {reference, shorten_name(reference)} & {*_list_names(item.get("RepoTags"))}:
        digest = get_repository_digest(item, image)
        variant = labels.read_variant(image_labels, reference=reference, digest=digest, size=item.get("Size"))
        yield image, version, variant, labels.read_terms(image_labels, reference)


def _list_warm_images() -> dict[tuple[str, str], list[WarmImage]]:
    """Return the warm images that the engine has under their names, by image and version."""
    from imagematrix.images.catalog.warm_image import get_warm_version, parse_warm_label

    found: dict[tuple[str, str], list[WarmImage]] = {}
    for item in images.list_labelled(labels.WARM):
        if not isinstance(item, dict):
            continue
        label = parse_warm_label(labels.get_labels({"Config": item}).get(labels.WARM))
        for name in _list_names(item.get("RepoTags")) if label else ():
            image, _, tag = name.rpartition(":")
            if label and (version := get_warm_version(label, tag)):
                digest = get_repository_digest(item, image)
                warm_image = label.make_image(name, digest, item.get("Size"))
                found.setdefault((image, version), []).append(warm_image)
    return found


def get_repository_digest(item: Mapping[str, Any], image: str) -> str:
    """Return the manifest digest in the repository `image`, or the ID if the store keeps no manifests."""
    for name in _list_names(item.get("RepoDigests")):
        repository, _, digest = name.partition("@")
        if repository in (image, shorten_name(image)):
            return digest
    return str(item.get("Id"))


def _list_names(listed: object) -> list[str]:
    """Return the names in an engine's answer, and the short forms of names that podman qualified."""
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    return names + [name.removeprefix(full) for name in names for full in FULL if name.startswith(full)]
