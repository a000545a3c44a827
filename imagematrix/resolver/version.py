"""What the upstream has under a tag, examined: its catalog, and whose signature it has."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.catalog import index
from imagematrix.catalog.registry import listed
from imagematrix.errors import SignatureError, UsageError
from imagematrix.oci.registry import DOCKER_LIST, INDEX
from imagematrix.resolver.signature import prove
from imagematrix.resolver.tag import version as version_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.oci.registry import Manifest
    from imagematrix.resolver.policy import Policy, Rule
    from imagematrix.resolver.signature import Proof, Source

__all__ = ["Version", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A manifest or an index under a tag.

    `catalog` is None if it has no variants of imagematrix. `digests` are its own and, of an index, those it
    names. `proof` is None if the policy asks for none.
    """

    manifest: Manifest
    catalog: Catalog | None
    digests: frozenset[str]
    proof: Proof | None


def examine(source: Source, policy: Policy, repository: str, tag: str, manifest: Manifest) -> Version:
    """Return what `manifest`, which `source` has under a tag, is.

    Raises SignatureError if the policy requires a signature that is missing or wrong, UsageError for a
    damaged catalog, EngineError if `source` cannot be read.
    """
    rule = policy.rule(repository)
    try:
        catalog = listed(manifest, repository, tag)
        entries = index.parse(manifest.raw, tag) if manifest.media_type in (INDEX, DOCKER_LIST) else ()
    except UsageError as error:
        raise UsageError(f"{repository}:{tag} cannot be read: {error}") from error
    return Version(
        manifest=manifest,
        catalog=catalog,
        digests=frozenset([manifest.digest, *(one.digest for one in entries)]),
        proof=_proof(source, policy, rule, repository, tag, manifest, catalog) if rule else None,
    )


def _proof(
    source: Source,
    policy: Policy,
    rule: Rule,
    repository: str,
    tag: str,
    manifest: Manifest,
    catalog: Catalog | None,
) -> Proof:
    """Return the proof for a manifest: its own, or for a variant's tag, that of the index of its version."""
    identity = policy.identity(repository)
    try:
        proof = prove(source, repository, manifest.digest, rule.keys, identity)
    except SignatureError:
        of_version = _indexed(source, repository, tag, manifest.digest)
        if of_version is None:
            raise
        return prove(source, repository, of_version, rule.keys, identity)
    versions = (
        {version_of(one.reference.rpartition(":")[2]) for one in catalog.variants} if catalog else {tag}
    )
    if versions != {tag} and tag not in rule.aliases:
        # Tags are not signed: who controls the registry could offer an old version as the new one.
        message = f"{repository}:{tag} is signed as {', '.join(sorted(versions))}"
        raise SignatureError(message, remedy=f"add {tag} to the aliases of the policy, if it is one")
    return proof


def _indexed(source: Source, repository: str, tag: str, digest: str) -> str | None:
    """Return the digest of the version's index, if the image `digest` is in it as the variant named `tag`."""
    version = version_of(tag)
    found = source.manifest(repository, version) if version != tag else None
    catalog = listed(found, repository, version) if found else None
    if found is None or catalog is None:
        return None
    named = f"{repository}:{tag}"
    return (
        found.digest
        if any((one.reference, one.digest) == (named, digest) for one in catalog.variants)
        else None
    )
