"""Signatures as cosign 2 makes and stores them, with keys of the tests."""

import base64
import json

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from distribution import CONFIG, MANIFEST, digest

PAYLOAD = "application/vnd.dev.cosign.simplesigning.v1+json"
ANNOTATION = "dev.cosignproject.cosign/signature"


class Signer:
    """A key pair; `public` is the file of its public half."""

    def __init__(self, folder, name="cosign"):
        self._private = ec.generate_private_key(ec.SECP256R1())
        self.public = folder / f"{name}.pub"
        self.public.write_bytes(pem(self._private.public_key()))

    def layer(self, repository, signed, identity, *, kind="cosign container image signature"):
        """Store a payload about the image `signed` in a repository; return the layer of its signature."""
        payload = json.dumps(
            {
                "critical": {
                    "identity": {"docker-reference": identity},
                    "image": {"docker-manifest-digest": signed},
                    "type": kind,
                },
                "optional": None,
            }
        ).encode()
        return self.sealed(repository, payload)

    def sealed(self, repository, payload):
        """Store any payload in a repository; return the layer of its signature."""
        repository.blobs[digest(payload)] = payload
        signature = base64.b64encode(self._private.sign(payload, ec.ECDSA(SHA256()))).decode()
        return {
            "mediaType": PAYLOAD,
            "digest": digest(payload),
            "size": len(payload),
            "annotations": {ANNOTATION: signature},
        }

    def sign(self, repository, signed, identity):
        """Sign the image `signed` in a repository as `cosign sign` does."""
        attach(repository, signed, [self.layer(repository, signed, identity)])


def attach(repository, signed, layers):
    """Put layers of signatures under the tag that belongs to an image."""
    config = {"mediaType": CONFIG, "digest": digest(b"{}"), "size": 2}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}
    repository.put(f"{signed.replace(':', '-')}.sig", json.dumps(manifest).encode(), MANIFEST)


def pem(public):
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
