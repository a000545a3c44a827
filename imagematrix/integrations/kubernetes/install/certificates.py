"""Certificates for the webhook: a new authority signs each, and its key is not kept."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VALID = dt.timedelta(days=365)
SKEW = dt.timedelta(hours=1)  # greatest difference between the clocks of a cluster
LONGEST = 1 << 20  # bytes to read from a file
# What the authority's key is not for: it only signs certificates.
UNUSED = (
    *("content_commitment", "crl_sign", "data_encipherment", "decipher_only", "digital_signature"),
    *("encipher_only", "key_agreement", "key_encipherment"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """A certificate chain, its private key, and the authorities to trust, all PEM."""

    chain: bytes
    key: bytes
    authorities: bytes


def make_certificate(names: Sequence[str], now: dt.datetime | None = None) -> Tls:
    """Return a new certificate for DNS names, valid for a year from now, signed by a new authority."""
    now = now or dt.datetime.now(dt.UTC)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "imagematrix webhook authority")])

    def begin_certificate(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + VALID)
        )

    usage = x509.KeyUsage(key_cert_sign=True, **dict.fromkeys(UNUSED, False))
    authority = (
        begin_certificate(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "imagematrix webhook")])
    chain = (
        begin_certificate(subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return Tls(
        chain=chain.public_bytes(pem),
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
        authorities=authority.public_bytes(pem),
    )


def load_certificate(chain: Path, key: Path, authorities: Path, name: str) -> Tls:
    """Load a certificate from files; raise UsageError if the key does not match or it is not for `name`."""
    tls = Tls(chain=_read_file(chain), key=_read_file(key), authorities=_read_file(authorities))
    require_valid_certificate(tls, (str(chain), str(key), str(authorities)), name)
    return tls


def require_valid_certificate(tls: Tls, where: tuple[str, str, str], name: str) -> None:
    """Raise UsageError if a certificate is invalid, its key does not match, or it is not for `name`.

    `where` names the chain, the key and the authorities in messages.
    """
    chain, key, authorities = where
    try:
        first, *_ = x509.load_pem_x509_certificates(tls.chain)
        x509.load_pem_x509_certificates(tls.authorities)
        private = serialization.load_pem_private_key(tls.key, password=None)
        names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise UsageError(f"{chain}, {key}, {authorities}: invalid certificate or key: {error}") from error
    if private.public_key() != first.public_key():
        raise UsageError(f"{key} is not the key of {chain}")
    if name not in names.value.get_values_for_type(x509.DNSName):
        raise UsageError(f"{chain} is not for {name}", remedy="the API server connects to this name")


def get_end_of_trust(tls: Tls) -> dt.datetime | None:
    """Return when clients stop to trust a valid certificate, or None if they do not trust it at all."""
    chain = x509.load_pem_x509_certificates(tls.chain)
    authorities = x509.load_pem_x509_certificates(tls.authorities)
    last = chain[-1]
    trusted = [authority for authority in authorities if authority == last or _is_issued_by(last, authority)]
    if not trusted:
        return None
    end = max(authority.not_valid_after_utc for authority in trusted)
    return min(end, *(certificate.not_valid_after_utc for certificate in chain))


def merge_authorities(authorities: Sequence[bytes], now: dt.datetime) -> bytes:
    """Return all authorities in some PEM texts that have not expired, without duplicates."""
    certificates = [
        certificate for text in authorities for certificate in x509.load_pem_x509_certificates(text)
    ]
    valid = dict.fromkeys(
        certificate for certificate in certificates if certificate.not_valid_after_utc > now
    )
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in valid)


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(LONGEST)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
