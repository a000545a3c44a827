"""Checking the signatures that policies require of the images in a catalog.

The index of a version has the digests of its variants and the facts for the choice. So its signature counts
for a version, and it is enough for the variants that the index lists under their own tags.

Tags are not signed, but an image has its own in its annotations or labels, which its digest covers. So an old
version that somebody presents as a new one is recognised, in a registry as in a catalog from anywhere.
"""

from __future__ import annotations

import contextlib
import functools

from imagematrix.common import json_documents
from imagematrix.common.image_reference import (
    DIGEST,
    DOCKER_HUB,
    HUB_NAMES,
    Reference,
    is_tag,
    names_registry,
    split_version,
)
from imagematrix.common.text import quote_word
from imagematrix.errors import SignatureError, TagMovedError, UsageError
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.warm_image import make_warm_tag
from imagematrix.images.oci.manifest import CONFIGS, Descriptor, ImageManifest, parse_manifest
from imagematrix.images.oci.registry import Registry
from imagematrix.images.trust.policy import collect_requirements
from imagematrix.images.trust.signature import find_signature, prove_signature

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.images.catalog.warm_image import WarmImage, WarmLabel
    from imagematrix.images.oci.manifest import Manifest
    from imagematrix.images.trust.policy import SignaturePolicy
    from imagematrix.images.trust.signature import Key, ManifestSource, Requirement

UNSTATED = "?"  # the version of an image that states none; no tag begins with it


class RepositorySource:
    """The repository of a Registry as a source of signatures."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def find_manifest(self, _repository: str, reference: str) -> Manifest | None:
        """Return a manifest; see ManifestSource."""
        return self._registry.find_manifest(reference)

    def read_content(self, _repository: str, digest: str) -> bytes:
        """Return a small blob; see ManifestSource."""
        return self._registry.fetch_small_blob(digest)


class Guard:
    """What policies require of the images in the repository of a `registry`."""

    def __init__(self, registry: Registry, requirements: Sequence[Requirement]) -> None:
        self._name = registry.name
        self._source = RepositorySource(registry)
        self._requirements = requirements

    def require_signed_index(self, tag: str, digest: str, entries: Iterable[image_index.IndexEntry]) -> None:
        """Raise SignatureError unless the index of a version is signed, and has the tag of this version.

        Of an index without variants nothing is required.
        """
        versions = {labels.get_version(entry.tag) for entry in entries if entry.ours}
        for requirement in self._requirements if versions else ():
            prove_signature(self._source, self._name, digest, requirement)
            self._require_name(requirement, tag, versions)

    def require_signed_variant(self, tag: str, named: image_index.IndexEntry) -> None:
        """Raise SignatureError unless the variant with a tag is signed, and has this tag."""
        for requirement in self._requirements:
            _KeyFinder(self._source, self._name, requirement).find_key(named.tag, named.digest)
            self._require_name(requirement, tag, {named.tag})

    def find_missing_signatures(self, digest: str, other: Registry) -> list[Descriptor]:
        """Return signatures of a manifest in another repository, for the requirements not met in this one.

        Raises EngineError if a registry cannot be read.
        """
        found = []
        for requirement in self._requirements:
            try:
                prove_signature(self._source, self._name, digest, requirement)
            except SignatureError:
                with contextlib.suppress(SignatureError):
                    theirs = RepositorySource(other)
                    found.append(find_signature(theirs, other.name, digest, requirement)[1])
        return found

    def _require_name(self, requirement: Requirement, tag: str, signed: set[str]) -> None:
        if not DIGEST.fullmatch(tag):  # a digest names its content, whatever its tags
            _require_tag(requirement, self._name, tag, signed)


def get_identity(name: str) -> str:
    """Return how signatures name the repository `name`.

    cosign names Docker Hub by the host that images are named by, not by the one that serves its API.
    """
    reference = Reference.parse(name)
    registry = HUB_NAMES[-1] if reference.registry == DOCKER_HUB else reference.registry
    return f"{registry}/{reference.repository}"


def make_guard(registry: Registry, policies: Sequence[SignaturePolicy]) -> Guard | None:
    """Return the guard of a repository, or None if no policy requires a signature.

    Raises SignatureError if a policy denies it.
    """
    required = _get_requirements(policies, registry.name)
    return Guard(registry, required) if required else None


def require_variants(
    variants: Iterable[Variant], policies: Sequence[SignaturePolicy], version: str | None
) -> bool:
    """Raise SignatureError unless all variants have the signatures that the policies require.

    Each has to be signed as what its name says, and as one of the `version` that its catalog says, if that is
    known. Returns whether a signature was required. Raises EngineError if a registry cannot be reached.
    """
    checked = False
    by_name: dict[str, list[Variant]] = {}
    for variant in variants:
        by_name.setdefault(split_version(variant.reference)[0], []).append(variant)
    for name, members in by_name.items():
        required = _get_requirements(policies, name)
        if not required:
            continue
        if not names_registry(name):
            raise SignatureError(
                f"{members[0].reference} has no signature: it is in no registry",
                remedy="publish it in a registry, sign it there, and use its name with the registry",
            )
        checked = True
        with Registry(name) as registry:
            source = RepositorySource(registry)
            finders = [_KeyFinder(source, name, requirement) for requirement in required]
            for variant in members:
                _, tag = split_version(variant.reference.partition("@")[0])
                digest = get_signed_digest(variant)
                for finder in finders:
                    finder.find_key(str(tag), digest)
                signed_tags = _read_own_tags(source, name, _find_image(source, name, digest))
                signed_versions = {labels.get_version(signed_tag) for signed_tag in signed_tags}
                for requirement in required:
                    for name_part, signed in ((tag, signed_tags), (version, signed_versions)):
                        if name_part is not None:
                            _require_tag(requirement, name, name_part, signed)
    return checked


def require_warm_image(warm_image: WarmImage, policies: Sequence[SignaturePolicy], version: str) -> None:
    """Raise SignatureError unless a warm image has the signatures that the policies require.

    Its catalog may be from anywhere, so the signed image itself has to say for which variant and for which
    hosts of the `version` it is. Raises EngineError if its registry cannot be reached.
    """
    name, tag = split_version(warm_image.reference)
    required = _get_requirements(policies, name)
    if not required:
        return
    if not names_registry(name):
        raise SignatureError(f"{warm_image.reference} has no signature: it is in no registry")
    with Registry(name) as registry:
        source = RepositorySource(registry)
        for requirement in required:
            _KeyFinder(source, name, requirement).find_key(str(tag), warm_image.digest)
        label = _read_warm_label(source, name, warm_image.digest)
    signed = label and (make_warm_tag(version, label.base, label.key), label.base, label.match)
    if signed != (tag, warm_image.base, warm_image.match):
        raise SignatureError(f"{warm_image.reference} is signed as another image than its catalog says")


def _read_warm_label(source: ManifestSource, name: str, digest: str) -> WarmLabel | None:
    """Return the label of a warm image; None if it has none. Raises UsageError if it is damaged."""
    image = parse_manifest(_find_image(source, name, digest).raw, name, Descriptor)
    if not isinstance(image, ImageManifest) or image.config is None:
        return None
    return labels.read_warm_label(source.read_content(name, image.config.digest), name)


def get_signed_digest(variant: Variant) -> str:
    """Return the digest by which a variant is started; raise SignatureError if it is unknown."""
    _, at, digest = variant.reference.partition("@")
    if at and variant.digest not in (None, digest):
        raise SignatureError(
            f"the digest of {variant.reference} is not {variant.digest}, as its catalog says"
        )
    signed = digest or variant.digest
    if signed is None or not DIGEST.fullmatch(signed):
        message = f"{variant.reference} has no digest in its catalog, so its signature cannot be checked"
        raise SignatureError(message, remedy="use the catalog of its registry")
    return signed


def find_signers(
    source: ManifestSource,
    required: Sequence[Requirement],
    repository: str,
    tag: str,
    manifest: Manifest,
    catalog: Catalog | None,
) -> tuple[Key, ...]:
    """Return the keys that signed an image or an index or, for a variant's tag, the index of its version.

    Raises SignatureError if a requirement is not met, or if the signed annotations or labels name another
    tag, EngineError if `source` cannot be read.
    """
    digest = manifest.digest
    finders = (_KeyFinder(source, repository, requirement) for requirement in required)
    keys = tuple(finder.find_key(tag, digest) for finder in finders)
    if not required:
        return keys
    if catalog:
        tags = {labels.get_version(variant.reference.rpartition(":")[2]) for variant in catalog.variants}
    else:
        image = _find_attested(source, repository, manifest)
        tags = _read_own_tags(source, repository, image, labels.get_version(tag))
    for requirement in required:
        _require_tag(requirement, repository, tag, tags)
    return keys


def find_listed_digest(catalog: Catalog | None, repository: str, tag: str) -> str | None:
    """Return the digest of the variant or warm image with a tag, or None if the catalog has no such image."""
    images: tuple[Variant | WarmImage, ...] = (*catalog.variants, *catalog.warm) if catalog else ()
    return next((image.digest for image in images if image.reference == f"{repository}:{tag}"), None)


def _get_requirements(policies: Iterable[SignaturePolicy], name: str) -> tuple[Requirement, ...]:
    """Return what the policies require of the repository `name`, with or without a registry.

    Rules name repositories without their registry. Raises SignatureError if a policy denies it.
    """
    if not names_registry(name):
        return collect_requirements(policies, name)
    registry, _, repository = get_identity(name).partition("/")
    return collect_requirements([policy.with_registry(registry) for policy in policies], repository)


def _require_tag(requirement: Requirement, repository: str, tag: str, signed: set[str]) -> None:
    """Raise SignatureError if what states the tags `signed` may not have another; what states none may.

    An alias stands for a version, and never for an image: its index decides which variant a node gets.
    """
    are_versions = all(is_tag(stated) and "-" not in stated for stated in signed)
    is_alias = are_versions and tag in requirement.aliases
    if signed and signed != {tag} and not is_alias:
        message = f"{repository}:{tag} is signed as {', '.join(sorted(signed))}"
        remedy = f"if {tag} is an alias, add it to the aliases in the policy" if are_versions else None
        raise SignatureError(message, remedy=remedy)


def _read_own_tags(
    source: ManifestSource, repository: str, manifest: Manifest, version: str = UNSTATED
) -> set[str]:
    """Return the tag of a variant, from its annotations or labels; an empty set for other images.

    Of a warm image it is the tag in `version`, as it states no version. An image that was built on a variant
    has its labels, and is another image.
    """
    parsed = parse_manifest(manifest.raw, repository, Descriptor)
    texts = parsed.annotations
    config = parsed.config if isinstance(parsed, ImageManifest) else None
    if labels.VERSION not in texts and config and config.media_type in CONFIGS:
        # An engine with the classic image store writes no annotations, and a warm image has none.
        raw = source.read_content(repository, config.digest)
        fields = json_documents.Fields(json_documents.parse_json(raw, repository), repository)
        inherited = labels.has_inherited(fields.data)
        texts = {} if inherited else fields.get_object_or_empty("config").get_text_map("Labels")
        if labels.VERSION not in texts and (label := labels.read_warm_label(raw, repository)):
            return {make_warm_tag(version, label.base, label.key)}
    parts = [texts.get(name) for name in (labels.VERSION, labels.CELL, labels.INPUT)]
    return {labels.make_tag(*map(str, parts))} if all(parts) else set()


def _find_image(source: ManifestSource, repository: str, digest: str) -> Manifest:
    """Return the manifest with a digest, or that of the image whose index with attestations has it."""
    manifest = source.find_manifest(repository, digest)
    if manifest is None:
        raise _make_missing_error(repository, digest)
    return _find_attested(source, repository, manifest)


def _find_attested(source: ManifestSource, repository: str, manifest: Manifest) -> Manifest:
    """Return the manifest of the image in an index with attestations of it; any other manifest as it is."""
    digest = image_index.get_attested_digest(manifest, repository)
    image = source.find_manifest(repository, digest) if digest else manifest
    if image is None:
        raise _make_missing_error(repository, digest)
    return image


def _make_missing_error(repository: str, digest: str | None) -> SignatureError:
    message = f"{repository}@{digest} is not in its registry, so it is unknown what it is signed as"
    return SignatureError(message)


class _KeyFinder:
    """Finds the keys that have signed images of a repository, or else the indexes of their versions.

    It reads and proves each index once, as a version may have many variants.
    """

    def __init__(self, source: ManifestSource, repository: str, requirement: Requirement) -> None:
        self._source = source
        self._repository = repository
        self._requirement = requirement
        self._find_index = functools.cache(self._read_version)
        self._prove_index = functools.cache(self._prove)

    def find_key(self, tag: str, digest: str) -> Key:
        """Return the key for the image with a tag; raise SignatureError, EngineError if it cannot be read."""
        try:
            return self._prove(digest)
        except SignatureError as error:
            # The signature of the version's index counts, if the image is in it as the variant with this tag.
            version = labels.get_version(tag)
            index, catalog = self._find_index(version) if version != tag else (None, None)
            listed = find_listed_digest(catalog, self._repository, tag)
            if index is None or listed is None:
                raise
            if listed != digest:  # nobody should sign it who has not looked what else is in it
                name = f"{self._requirement.identity}:{version}"
                remedy = (
                    f"`imagematrix publish {quote_word(name)} --sign KEY` signs it if it is {tag} with its"
                    " attestations"
                )
                raise SignatureError(str(error), remedy=remedy) from error
            return self._prove_index(index)

    def _prove(self, digest: str) -> Key:
        return prove_signature(self._source, self._repository, digest, self._requirement)

    def _read_version(self, version: str) -> tuple[str | None, Catalog | None]:
        """Return the digest of a version's index, and its catalog; nothing if it is damaged."""
        manifest = self._source.find_manifest(self._repository, version)
        try:
            index = image_index.find_index(manifest, f"{self._repository}:{version}")
            catalog = index.make_catalog(self._repository, version) if index else None
        except (TagMovedError, UsageError):
            return None, None
        return (index.digest, catalog) if index else (None, None)
