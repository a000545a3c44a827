"""Verifying signatures that cosign made with a key, without any service.

cosign 2 stores the signatures of the manifest sha256:HEX in the image's repository, in an OCI manifest with
the tag sha256-HEX.sig. Each of its layers is a payload: a "simple signing" document that names the manifest
and the repository. An annotation of the layer has the signature of the payload's bytes
(github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md).
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from imagematrix.common import json_documents
from imagematrix.errors import EngineError, SignatureError, UnknownImageError, UsageError
from imagematrix.images.oci.manifest import Descriptor, ImageManifest, parse_manifest
from imagematrix.images.trust.files import read_trusted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.images.oci.manifest import Manifest

SIGNATURE = "dev.cosignproject.cosign/signature"  # an annotation: base64 of the signature
PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
TYPE = "cosign container image signature"  # the type in a payload
TAG = re.compile(r"sha256-[0-9a-f]{64}\.sig")
TRIED = 32  # signatures to verify for an image; a registry may list any number
KEY_LIMIT = 64 * 1024  # bytes of a file with a key
PAYLOAD_LIMIT = 64 * 1024  # bytes; one has some 300


class ManifestSource(Protocol):
    """A source of manifests and small blobs. Every method raises EngineError if it cannot be read."""

    def find_manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return the manifest or the index of a tag or digest, or None."""
        ...

    def read_content(self, repository: str, digest: str) -> bytes:
        """Return a blob of at most 4 MiB, compared with its digest; raise UnknownImageError if missing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A public key, and its file as a policy names it."""

    name: str
    public: EllipticCurvePublicKey

    @classmethod
    def load(cls, path: Path) -> Key:
        """Return the key in a PEM file, as `cosign generate-key-pair` writes cosign.pub; raise UsageError."""
        try:
            raw = read_trusted(path, KEY_LIMIT)
            public = load_pem_public_key(raw)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UsageError(f"{path} is not a public key in PEM", remedy="such as cosign.pub") from error
        if not isinstance(public, EllipticCurvePublicKey):
            message = f"{path}: only ECDSA keys are supported"
            raise UsageError(message, remedy="`cosign generate-key-pair` makes one")
        if raw.count(b"-----BEGIN ") > 1:  # all but the first would count for nothing
            remedy = "give each a file of its own, and name the files in the policy"
            raise UsageError(f"{path} has several keys", remedy=remedy)
        return cls(name=path.name, public=public)

    def verifies(self, payload: bytes, signature: bytes) -> bool:
        """Whether `signature` is a signature of `payload` by this key."""
        try:
            self.public.verify(signature, payload, ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """What a policy requires of a repository: a signature by one of `keys` that names it `identity`.

    `aliases` are tags that may point to any version.
    """

    keys: tuple[Key, ...]
    aliases: frozenset[str]
    identity: str


def prove_signature(source: ManifestSource, repository: str, digest: str, requirement: Requirement) -> Key:
    """Return the key that has signed the manifest `digest`; raises what find_signature does."""
    return find_signature(source, repository, digest, requirement)[0]


def find_signature(
    source: ManifestSource, repository: str, digest: str, requirement: Requirement
) -> tuple[Key, Descriptor]:
    """Return the first signature of the manifest `digest` as `requirement` says, and the key that made it.

    Raises SignatureError if there is no such signature, with what is wrong with each; EngineError if `source`
    cannot be read.
    """
    tag = make_signature_tag(digest)
    manifest = source.find_manifest(repository, tag)
    if manifest is None:
        command = f"cosign sign --key KEY --tlog-upload=false {requirement.identity}@{digest}"
        remedy = f"sign it with cosign 2: {command}"
        raise SignatureError(f"{repository}@{digest} has no signature", remedy=remedy)
    where = f"{repository}:{tag}"
    try:
        signatures = _list_signatures(manifest, where)
    except UsageError as error:
        raise SignatureError(f"the signatures of {repository}@{digest} cannot be read: {error}") from error
    faults: dict[str, None] = {}
    unread: EngineError | None = None
    for descriptor in signatures:
        # One that is damaged, too large, lost or cannot be read hides no other. A descriptor that is none of
        # OCI is no signature: it makes the list a damaged one.
        try:
            payload = _read_payload(source, repository, descriptor)
            # Nothing in a payload is parsed before its signature holds: anybody may have pushed it.
            key = _find_key(payload, _decode_signature(descriptor), requirement.keys)
            _require_names(payload, where, digest, requirement.identity)
        except (SignatureError, UnknownImageError, UsageError) as error:
            faults[str(error)] = None
        except EngineError as error:
            unread = unread or error
        else:
            return key, descriptor
    if unread:  # it may be the valid one
        raise unread
    reason = "; ".join(faults) or "no entry is a signature as cosign 2 writes it"
    raise SignatureError(f"{repository}@{digest} has no valid signature: {reason}")


def is_signature(tag: str) -> bool:
    """Whether a tag is the tag of a manifest's signatures."""
    return TAG.fullmatch(tag) is not None


def make_signature_tag(digest: str) -> str:
    """Return the tag of the signatures of a manifest."""
    return f"{digest.replace(':', '-')}.sig"


def _list_signatures(manifest: Manifest, where: str) -> list[Descriptor]:
    """Return the descriptors of payloads, with their signatures; raise UsageError if the list is damaged."""
    parsed = parse_manifest(manifest.raw, where, Descriptor)
    layers = (parsed.layers or ()) if isinstance(parsed, ImageManifest) else ()
    return [
        layer for layer in layers[:TRIED] if layer.media_type == PAYLOAD and SIGNATURE in layer.annotations
    ]


def _read_payload(source: ManifestSource, repository: str, descriptor: Descriptor) -> bytes:
    """Return a payload; raise SignatureError if it is too large for one, else what `source` does."""
    if descriptor.size > PAYLOAD_LIMIT:
        raise SignatureError(f"a payload has more than {PAYLOAD_LIMIT // 1024} KiB")
    return source.read_content(repository, descriptor.digest)


def _decode_signature(descriptor: Descriptor) -> bytes:
    """Return the signature of a payload; raise SignatureError if it is damaged."""
    try:
        return base64.b64decode(descriptor.annotations[SIGNATURE], validate=True)
    except ValueError as error:  # binascii's is one
        raise SignatureError("a signature is not in base64") from error


def _find_key(payload: bytes, signature: bytes, keys: tuple[Key, ...]) -> Key:
    """Return the key that has signed a payload; raise SignatureError if none has."""
    for key in keys:
        if key.verifies(payload, signature):
            return key
    raise SignatureError(f"it is not signed with {' or '.join(key.name for key in keys)}")


def _require_names(payload: bytes, where: str, digest: str, identity: str) -> None:
    """Raise SignatureError if a validly signed payload does not name this image, UsageError if damaged."""
    critical = json_documents.Fields(json_documents.parse_json(payload, where), where).get_object_or_empty(
        "critical"
    )
    image, name = critical.get_object_or_none("image"), critical.get_object_or_none("identity")
    if not image or not name or critical.get_text_or_none("type") != TYPE:
        raise SignatureError("the signature is not for an image")
    signed = image.get_text_or_none("docker-manifest-digest")
    if signed != digest:
        raise SignatureError(f"the signature is for {signed}")
    reference = name.get_text_or_none("docker-reference")
    if reference != identity:
        raise SignatureError(f"the signature is for an image of {reference}, not of {identity}")
