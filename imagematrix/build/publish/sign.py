"""Signing manifests in their registry, in both forms that cosign reads.

The older form is a list of signatures under the tag sha256-HEX.sig. The newer one is a bundle of Sigstore: a
signed statement of in-toto about the digest, in a manifest that refers to the signed one
(github.com/sigstore/cosign/blob/main/specs/BUNDLE_SPEC.md). Registries that cannot list what refers to a
manifest have the list under the tag sha256-HEX (OCI distribution specification, "Referrers Tag Schema").
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from concurrent.futures import ThreadPoolExecutor

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from imagematrix.common import json_documents
from imagematrix.errors import SignatureError
from imagematrix.images.catalog.signature_guard import RepositorySource, get_identity
from imagematrix.images.oci.manifest import (
    CONFIG,
    IMAGE,
    INDEX,
    Descriptor,
    ImageIndex,
    ImageManifest,
    compute_digest,
    parse_manifest,
)
from imagematrix.images.trust.signature import (
    PAYLOAD,
    SIGNATURE,
    Requirement,
    make_signature_tag,
    prove_signature,
)
from imagematrix.images.trust.signing_key import make_payload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from imagematrix.images.oci.registry import Registry
    from imagematrix.images.trust.signing_key import SigningKey

REQUESTS = 8  # at the same time
EMPTY = "application/vnd.oci.empty.v1+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
STATEMENT = "application/vnd.in-toto+json"
PREDICATE = "https://sigstore.dev/cosign/sign/v1"


def sign_manifests(registry: Registry, key: SigningKey, digests: Iterable[str]) -> int:
    """Sign manifests of a repository that have no signature by this key yet; return how many they are.

    Signatures by other keys stay. Raises EngineError if the registry refuses.
    """
    name = get_identity(registry.name)
    required = Requirement(keys=(key.public,), aliases=frozenset(), identity=name)

    def sign_manifest(digest: str) -> bool:
        try:
            prove_signature(RepositorySource(registry), registry.name, digest, required)
        except SignatureError:
            # The tag last: once it is there, so is the bundle.
            _push_bundle(registry, digest, _make_bundle(key, digest))
            payload = make_payload(name, digest)
            _push_blob(registry, payload, PAYLOAD)
            signature = Descriptor(
                digest=compute_digest(payload),
                size=len(payload),
                media_type=PAYLOAD,
                annotations={SIGNATURE: _encode_base64(key.sign(payload))},
                platform={},
            )
            add_signatures(registry, digest, [signature], first=True)
            return True
        return False

    with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
        return sum(pool.map(sign_manifest, dict.fromkeys(digests)))


def is_signed(registry: Registry, digest: str) -> bool:
    """Whether a manifest of a repository has a signature, in either form and by whatever key."""
    if registry.digest(make_signature_tag(digest)) is not None:
        return True
    referrers = registry.list_referrers(digest)
    if referrers is None:
        return any(entry.get("artifactType") == BUNDLE for entry in read_referrers_tag(registry, digest))
    found = filter(None, map(registry.find_manifest, referrers))
    return any(_read_artifact_type(manifest.raw) == BUNDLE for manifest in found)


def add_signatures(registry: Registry, digest: str, new: Iterable[Descriptor], *, first: bool) -> None:
    """Put signatures, whose payloads the registry has, before or behind those under the tag of a manifest.

    Only the first TRIED are verified, so those that nobody has verified belong behind the others.
    """
    tag = make_signature_tag(digest)
    present = registry.find_manifest(tag)
    document = parse_manifest(present.raw, tag, Descriptor) if present else None
    listed = [*map(_make_layer, document.layers or ())] if isinstance(document, ImageManifest) else []
    added = [*map(_make_layer, new)]
    before, behind = (added, listed) if first else (listed, added)
    layers = before + [layer for layer in behind if layer not in before]
    if layers == listed:
        return
    config = {
        "architecture": "",
        "os": "",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }
    registry.push_manifest(tag, *_make_manifest(_push_blob(registry, _encode_json(config), CONFIG), layers))


def _make_layer(signature: Descriptor) -> dict[str, object]:
    """Return a signature as cosign lists it."""
    return {name: value for name, value in signature.to_json().items() if name != "platform"}


def _make_bundle(key: SigningKey, digest: str) -> bytes:
    """Return the bundle that signs a manifest."""
    algorithm, _, number = digest.partition(":")
    statement = _encode_json(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"digest": {algorithm: number}}],
            "predicateType": PREDICATE,
            "predicate": {},
        }
    )
    # What DSSE signs (github.com/secure-systems-lab/dsse/blob/master/protocol.md).
    encoded = b"DSSEv1 %d %s %d %s" % (len(STATEMENT), STATEMENT.encode(), len(statement), statement)
    public = key.public.public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return _encode_json(
        {
            "mediaType": BUNDLE,
            "verificationMaterial": {"publicKey": {"hint": _encode_base64(hashlib.sha256(public).digest())}},
            "dsseEnvelope": {
                "payload": _encode_base64(statement),
                "payloadType": STATEMENT,
                "signatures": [{"sig": _encode_base64(key.sign(encoded))}],
            },
        }
    )


def _push_bundle(registry: Registry, digest: str, bundle: bytes) -> None:
    """Store a bundle in a manifest that refers to another one."""
    subject = registry.find_manifest(digest)
    if subject is None:
        raise SignatureError(f"{registry.name}@{digest} cannot be signed: the registry does not have it")
    raw, media_type = _make_manifest(
        _push_blob(registry, b"{}", EMPTY),
        [_push_blob(registry, bundle, BUNDLE)],
        artifactType=BUNDLE,
        subject={"mediaType": subject.media_type, "digest": digest, "size": len(subject.raw)},
        annotations={
            "dev.sigstore.bundle.content": "dsse-envelope",
            "dev.sigstore.bundle.predicateType": PREDICATE,
        },
    )
    add_referrer(registry, digest, raw, media_type)


def add_referrer(registry: Registry, digest: str, raw: bytes, media_type: str) -> None:
    """Push what refers to a manifest, and list it if the registry does not do so by itself."""
    referrer = compute_digest(raw)
    if registry.digest(referrer) is None:
        registry.push_manifest(referrer, raw, media_type)
    if registry.list_referrers(digest) is not None:
        return
    entries = read_referrers_tag(registry, digest)
    if any(listed_entry["digest"] == referrer for listed_entry in entries):
        return
    entry = {"mediaType": media_type, "digest": referrer, "size": len(raw)}
    if artifact_type := _read_artifact_type(raw):
        entry["artifactType"] = artifact_type
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [*entries, entry]}
    registry.push_manifest(_make_referrers_tag(digest), _encode_json(document), INDEX)


def read_referrers_tag(registry: Registry, digest: str) -> list[dict[str, Any]]:
    """Return what refers to a manifest in a registry that does not list it by itself, as OCI descriptors."""
    tag = _make_referrers_tag(digest)
    present = registry.find_manifest(tag)
    document = parse_manifest(present.raw, tag, Descriptor) if present else None
    return json.loads(present.raw)["manifests"] if present and isinstance(document, ImageIndex) else []


def _read_artifact_type(raw: bytes) -> str | None:
    """Return what a manifest is an artifact of, as a list of referrers has it."""
    where = compute_digest(raw)
    fields = json_documents.Fields(json_documents.parse_json(raw, where), where)
    config = fields.get_object_or_empty("config")
    return fields.get_text_or_none("artifactType") or config.get_text_or_none("mediaType")


def _make_referrers_tag(digest: str) -> str:
    """Return the tag of a manifest's referrers (OCI distribution specification, "Referrers Tag Schema")."""
    return digest.replace(":", "-")


def _make_manifest(
    config: Mapping[str, object], layers: list[dict[str, object]], **more: object
) -> tuple[bytes, str]:
    document = {"schemaVersion": 2, "mediaType": IMAGE, "config": config, "layers": layers, **more}
    return _encode_json(document), IMAGE


def _push_blob(registry: Registry, content: bytes, media_type: str) -> dict[str, object]:
    """Push a blob; return its descriptor."""
    digest = compute_digest(content)
    if not registry.has_blob(digest):
        registry.push_blob(digest, io.BytesIO(content))
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _encode_json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _encode_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
