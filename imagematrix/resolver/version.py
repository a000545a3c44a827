"""Examining the manifest of a tag: its catalog, and its signature."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix import documents
from imagematrix.catalog import index, labels
from imagematrix.catalog.registry import listed
from imagematrix.errors import SignatureError, UsageError
from imagematrix.oci.registry import DOCKER_LIST, INDEX
from imagematrix.reference import DIGEST
from imagematrix.resolver.signature import prove
from imagematrix.resolver.tag import version as version_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.oci.registry import Manifest
    from imagematrix.resolver.policy import Policy, Rule
    from imagematrix.resolver.signature import Key, Source

__all__ = ["Version", "examine", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A manifest or an index under a tag.

    `catalog` is None if it has no variants of imagematrix. `digests` are its own digest and those of the
    entries in an index. `key` is the key that signed it, None if the policy requires no signature.
    """

    manifest: Manifest
    catalog: Catalog | None
    digests: frozenset[str]
    key: Key | None


def examine(source: Source, policy: Policy, repository: str, tag: str, manifest: Manifest) -> Version:
    """Return the Version for `manifest`, which `source` has for a tag.

    Raises SignatureError if the policy requires a signature that is missing or wrong, UsageError for a
    damaged catalog, EngineError if `source` cannot be read.
    """
    rule = policy.rule(repository)
    try:
        catalog = listed(manifest, repository, tag)
        entries = index.parse(manifest.raw, tag) if manifest.media_type in (INDEX, DOCKER_LIST) else ()
    except UsageError as error:
        raise UsageError(f"{repository}:{tag} cannot be read: {error}") from error
    key = _signer(source, policy, rule, repository, tag, manifest) if rule else None
    if rule:
        _check_tag(source, rule, repository, tag, manifest, catalog)
    digests = frozenset([manifest.digest, *(one.digest for one in entries)])
    return Version(manifest=manifest, catalog=catalog, digests=digests, key=key)


def named(catalog: Catalog | None, repository: str, tag: str) -> str | None:
    """Return the digest of the variant with a tag, or None if the catalog has no such variant."""
    variants = catalog.variants if catalog else ()
    return next((one.digest for one in variants if one.reference == f"{repository}:{tag}"), None)


def _signer(source: Source, policy: Policy, rule: Rule, repository: str, tag: str, manifest: Manifest) -> Key:
    """Return the key that signed a manifest or, for a variant's tag, the index of its version."""
    identity = policy.identity(repository)
    try:
        return prove(source, repository, manifest.digest, rule.keys, identity)
    except SignatureError:
        of_version = _indexed(source, repository, tag, manifest.digest)
        if of_version is None:
            raise
        return prove(source, repository, of_version, rule.keys, identity)


def _check_tag(
    source: Source, rule: Rule, repository: str, tag: str, manifest: Manifest, catalog: Catalog | None
) -> None:
    """Raise SignatureError if the signed annotations or labels name another tag.

    Tags are not signed: whoever controls the registry could present an old version as the new one.
    """
    if catalog:
        tags = {version_of(one.reference.rpartition(":")[2]) for one in catalog.variants}
    else:
        tags = _own_tags(source, repository, manifest)
    if tags and tags != {tag} and tag not in rule.aliases:
        message = f"{repository}:{tag} is signed as {', '.join(sorted(tags))}"
        raise SignatureError(message, remedy=f"if {tag} is an alias, add it to the aliases in the policy")


def _own_tags(source: Source, repository: str, manifest: Manifest) -> set[str]:
    """Return the tag of a variant, from its annotations or labels; an empty set for other images."""
    fields = documents.Fields(documents.parse(manifest.raw, repository), repository)
    texts = fields.named_texts("annotations")
    config = fields.object_or_none("config")
    digest = config.text_or_none("digest") if config else None
    if labels.VERSION not in texts and digest and DIGEST.fullmatch(digest):
        # An engine with the classic image store writes no annotations.
        raw = source.content(repository, digest)
        image = documents.Fields(documents.parse(raw, repository), repository).object_or_none("config")
        texts = image.named_texts("Labels") if image else {}
    own = [texts.get(name) for name in (labels.VERSION, labels.CELL, labels.INPUT)]
    return {labels.tag(*map(str, own))} if all(own) else set()


def _indexed(source: Source, repository: str, tag: str, digest: str) -> str | None:
    """Return the digest of the version's index, if the image `digest` is in it as the variant named `tag`."""
    version = version_of(tag)
    manifest = source.manifest(repository, version) if version != tag else None
    catalog = listed(manifest, repository, version) if manifest else None
    return manifest.digest if manifest and named(catalog, repository, tag) == digest else None
