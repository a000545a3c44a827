"""Signing manifests with a private key, as cosign does without any service.

The key is cosign's own, encrypted with a password, or any ECDSA key in PEM. cosign's is a PEM block around
JSON: scrypt's parameters, and the key as PKCS #8 in a box of NaCl
(github.com/secure-systems-lab/go-securesystemslib/blob/main/encrypted/encrypted.go).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_private_key, load_pem_private_key
from nacl.exceptions import CryptoError
from nacl.secret import SecretBox

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.images.trust.signature import KEY_LIMIT, TYPE, Key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - the name of a variable
SEALED = re.compile(
    rb"-----BEGIN ENCRYPTED (SIGSTORE|COSIGN) PRIVATE KEY-----\s(.*?)-----END ENCRYPTED \1 PRIVATE KEY-----",
    re.DOTALL,
)
MEMORY = 1 << 28  # bytes for scrypt; cosign's keys take a quarter of it
PASSES = 16  # of scrypt over its memory, one after the other; cosign's keys take one


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """A private key; `public` is its public half."""

    private: EllipticCurvePrivateKey
    public: Key

    @classmethod
    def load(cls, path: Path, password: str | None) -> SigningKey:
        """Return the key in a file; raise UsageError, also for a wrong or missing password."""
        try:
            with path.open("rb") as file:
                raw = file.read(KEY_LIMIT)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        sealed = SEALED.search(raw)
        try:
            if sealed:
                private = load_der_private_key(_decrypt_key(sealed[2], str(path), password), None)
            else:
                secret = password.encode() if password and b"ENCRYPTED" in raw else None
                private = load_pem_private_key(raw, secret)
        except TypeError as error:  # an encrypted key without a password
            raise _make_password_error(str(path)) from error
        except (ValueError, UnsupportedAlgorithm) as error:
            message = f"{path} is not a private key in PEM, or {PASSWORD} is wrong"
            raise UsageError(message, remedy="such as cosign.key") from error
        if not isinstance(private, EllipticCurvePrivateKey):
            message = f"{path}: only ECDSA keys are supported"
            raise UsageError(message, remedy="`cosign generate-key-pair` makes one")
        return cls(private=private, public=Key(name=path.name, public=private.public_key()))

    def sign(self, content: bytes) -> bytes:
        """Return the signature of `content`."""
        return self.private.sign(content, ECDSA(SHA256()))


def make_payload(identity: str, digest: str) -> bytes:
    """Return what is signed of the manifest `digest` of a repository, as cosign writes it."""
    critical = {
        "identity": {"docker-reference": identity},
        "image": {"docker-manifest-digest": digest},
        "type": TYPE,
    }
    return json.dumps({"critical": critical, "optional": None}, separators=(",", ":")).encode()


def _decrypt_key(text: bytes, where: str, password: str | None) -> bytes:
    """Return the key in PKCS #8 from cosign's format; raise UsageError, ValueError if it is damaged."""
    if password is None:
        raise _make_password_error(where)
    fields = json_documents.Fields(json_documents.parse_json(base64.b64decode(text), where), where)
    kdf, cipher = fields.get_object_or_empty("kdf"), fields.get_object_or_empty("cipher")
    kinds = kdf.get_text("name"), cipher.get_text("name")
    if kinds != ("scrypt", "nacl/secretbox"):
        raise UsageError(f"{where}: unknown encryption {' and '.join(kinds)}")
    cost = kdf.get_object_or_empty("params")
    n, r, p = (cost.get_integer(name) for name in ("N", "r", "p"))
    if min(n, r, p) < 1 or 128 * n * r > MEMORY or p > PASSES:
        raise UsageError(f"{where}: scrypt's parameters N={n}, r={r}, p={p} take too much or are invalid")
    key = hashlib.scrypt(
        password.encode(),
        salt=base64.b64decode(kdf.get_text("salt")),
        n=n,
        r=r,
        p=p,
        maxmem=2 * MEMORY,  # OpenSSL counts its other buffers, too
        dklen=SecretBox.KEY_SIZE,
    )
    nonce = base64.b64decode(cipher.get_text("nonce"))
    try:
        return SecretBox(key).decrypt(base64.b64decode(fields.get_text("ciphertext")), nonce)
    except (CryptoError, ValueError) as error:
        raise UsageError(f"{where} cannot be decrypted", remedy=f"check {PASSWORD}") from error


def _make_password_error(where: str) -> UsageError:
    return UsageError(f"{where} is encrypted", remedy=f"set {PASSWORD} to its password")
