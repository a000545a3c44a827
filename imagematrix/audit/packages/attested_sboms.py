"""The statements about its packages that an image's builder attached to it: SBOMs in SPDX, by in-toto.

BuildKit stores them in a manifest that the index of the image lists, cosign in one under the tag
sha256-HEX.att. Nothing of them is proven: whoever pushed the image may have written them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from imagematrix.errors import AuditError, UnknownImageError, UsageError
from imagematrix.images.oci.manifest import Descriptor, ImageManifest, parse_manifest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PREDICATE = "https://spdx.dev/Document"  # the type of statements with an SBOM in SPDX
TYPES = ("in-toto.io/predicate-type", "predicateType")  # annotations that name it: BuildKit's and cosign's
LARGEST = 32 << 20  # bytes
ALL = 64 << 20  # bytes of all statements of an image
MOST = 8  # statements of an image


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement with the digest of its blob. If it cannot be read, `problem` says why."""

    digest: str
    raw: bytes = b""
    problem: str | None = None


class StatementSource(Protocol):
    """A store with attestations."""

    def read_manifest(self, digest: str) -> bytes:
        """Return a manifest or an index; raise UnknownImageError or AuditError."""

    def read_statement(self, digest: str) -> bytes:
        """Return the blob of a statement; raise UnknownImageError or AuditError."""

    def find_attached(self, digest: str) -> bytes | None:
        """Return the manifest of the attestations that cosign attached to an image; None if it has none."""


def read_sboms(
    source: StatementSource, digest: str, attestations: Sequence[str] = ()
) -> tuple[Statement, ...]:
    """Return the SBOMs of the image `digest`; `attestations` are the manifests that an index lists for it.

    Raises EngineError if the registry cannot be reached.
    """
    statements: dict[str, Statement] = {}
    remaining = ALL
    for number, found in enumerate(_find_statements(source, digest, attestations)):
        if number >= MOST or remaining < 0:
            problem = f"the image has more than {MOST} SBOMs, or more than {ALL >> 20} MiB of them"
            statements[digest] = Statement(digest=digest, problem=problem)
            break
        statement = found if isinstance(found, Statement) else _read_statement(source, found)
        remaining -= len(statement.raw)
        if remaining >= 0:
            statements[statement.digest] = statement
    return tuple(statements.values())


def _find_statements(
    source: StatementSource, digest: str, attestations: Sequence[str]
) -> Iterator[str | Statement]:
    """Yield the digest of each SBOM, and a Statement with the problem for what cannot be searched for any."""
    for attestation in attestations[:MOST]:
        try:
            blobs = list(_list_blobs(source.read_manifest(attestation), attestation))
        except (AuditError, UnknownImageError, UsageError) as error:
            yield Statement(digest=attestation, problem=str(error))
        else:
            yield from blobs
    try:
        attached = source.find_attached(digest)
        blobs = list(_list_blobs(attached, digest)) if attached else []
    except (AuditError, UsageError) as error:
        yield Statement(digest=digest, problem=str(error))
    else:
        yield from blobs


def _list_blobs(raw: bytes, name: str) -> Iterator[str]:
    """Yield the digests of the SBOMs in the manifest of an attestation."""
    manifest = parse_manifest(raw, name, Descriptor)
    layers = (manifest.layers or ()) if isinstance(manifest, ImageManifest) else ()
    for layer in layers:
        if PREDICATE in map(layer.annotations.get, TYPES):
            yield layer.digest


def _read_statement(source: StatementSource, digest: str) -> Statement:
    try:
        return Statement(digest=digest, raw=source.read_statement(digest))
    except (AuditError, UnknownImageError) as error:
        return Statement(digest=digest, problem=str(error))
