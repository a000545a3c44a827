"""The Catalog that a registry's image index is, read with one request.

The index is that of the OCI image specification (image-index.md); each of its manifests has the variant in
its annotations, under the names that images have in their labels.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass

import requests

from imagematrix import documents
from imagematrix.catalog import labels
from imagematrix.catalog.catalog import DIGEST, Catalog
from imagematrix.errors import EngineError, ImagematrixError, UnknownImageError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Variant

__all__ = ["Reference", "catalog"]

INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_HUB = "registry-1.docker.io"
LIMIT = 64 * 1024 * 1024  # bytes
TIMEOUT = 30  # seconds
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
FOUND, UNAUTHORIZED, FORBIDDEN, MISSING = 200, 401, 403, 404  # of HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference taken apart: "reg:5000/ml/training:v1" is registry, repository and tag (or a digest)."""

    registry: str
    repository: str
    tag: str
    name: str  # all before the tag, as it was written

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Return the parts of `text`, with docker's defaults for what is left out; raise UsageError."""
        name, at, digest = text.partition("@")
        tag = digest
        if not at:
            head, colon, last = name.rpartition(":")
            name, tag = (head, last) if colon and "/" not in last else (name, "latest")
        first, slash, rest = name.partition("/")
        named = slash and ("." in first or ":" in first or first == "localhost")
        registry, repository = (first, rest) if named else (DOCKER_HUB, name if slash else f"library/{name}")
        if (
            not name
            or not repository
            or not tag
            or any(char.isspace() or not char.isprintable() for char in text)
        ):
            raise UsageError(f"{text!r} is no image reference such as registry:5000/ml/training:v1")
        return cls(registry=registry, repository=repository, tag=tag, name=name)

    @property
    def url(self) -> str:
        """The registry's address. One on this machine is spoken to without TLS, as docker does."""
        host = self.registry.rpartition(":")[0] or self.registry
        return f"{'http' if host in LOOPBACK else 'https'}://{self.registry}"


def catalog(name: str) -> Catalog:
    """Return the catalog of `name`, such as registry:5000/ml/training:v1.

    Raises UnknownImageError where the registry has none, EngineError where it can't be reached or refuses,
    UsageError where what it has is no catalog.
    """
    reference = Reference.parse(name)
    try:
        raw = _index(reference)
    except requests.RequestException as error:
        raise EngineError(f"the registry {reference.registry} can't be reached: {error}") from error
    fields = documents.Fields(documents.parse(raw, name), name)
    if fields.text_or_none("mediaType") not in (INDEX, DOCKER_LIST, None):
        raise UsageError(f"{name} is one image and no index of variants", remedy="name the version alone")
    variants: dict[str, Variant] = {}
    preferences = set()
    for manifest in fields.objects("manifests"):
        found = _variant(manifest, reference)
        if not found:
            continue
        variant, prefer = found
        if variant.reference in variants:
            raise UsageError(f"{name}: {variant.reference} is there twice")
        variants[variant.reference] = variant
        preferences.add(prefer)
    if not variants:
        raise UnknownImageError(f"{name} is an index without variants of imagematrix")
    return Catalog(
        image=reference.name,
        version=reference.tag,
        variants=tuple(variants.values()),
        prefer=labels.agreed(name, preferences),
    )


def _variant(manifest: documents.Fields, reference: Reference) -> tuple[Variant, tuple[str, ...]] | None:
    """Return the variant of one manifest, and what it prefers; None where it is another's, an attestation."""
    annotations = manifest.object_or_none("annotations")
    if annotations is None or not annotations.present(labels.VARIANT):
        return None
    digest = manifest.text("digest")
    if not DIGEST.fullmatch(digest):
        raise manifest.fail("digest", f"{digest[:80]!r} is not a sha256 digest")
    cell, made_of = annotations.text(labels.CELL), annotations.text(labels.INPUT)
    name = f"{reference.name}:{labels.tag(reference.tag, cell, made_of)}"
    own = {
        labels.VARIANT: annotations.text(labels.VARIANT),
        labels.PREFER: annotations.text_or_none(labels.PREFER) or "",
    }
    return labels.read(own, reference=name, digest=digest, size=None), labels.prefer(own, name)


def _index(reference: Reference) -> bytes:
    with requests.Session() as session:
        session.headers["Accept"] = f"{INDEX}, {DOCKER_LIST}"
        url = f"{reference.url}/v2/{reference.repository}/manifests/{reference.tag}"
        answer = session.get(url, timeout=TIMEOUT, stream=True)
        if answer.status_code == UNAUTHORIZED:
            answer.close()
            session.headers["Authorization"] = _authorization(session, reference, answer)
            answer = session.get(url, timeout=TIMEOUT, stream=True)
        with answer:
            if answer.status_code != FOUND:
                raise _refusal(reference, answer.status_code)
            raw = _bounded(answer, f"{reference.name}:{reference.tag}")
    if DIGEST.fullmatch(reference.tag) and reference.tag != f"sha256:{hashlib.sha256(raw).hexdigest()}":
        raise EngineError(f"the registry {reference.registry} answered something else than {reference.tag}")
    return raw


def _bounded(answer: requests.Response, name: str) -> bytes:
    raw = bytearray()
    for chunk in answer.iter_content(1 << 16):
        raw += chunk
        if len(raw) > LIMIT:
            raise UsageError(f"{name}: larger than {LIMIT // 2**20} MiB, which no index is")
    return bytes(raw)


def _refusal(reference: Reference, status: int) -> ImagematrixError:
    name = f"{reference.name}:{reference.tag}"
    if status == MISSING:
        return UnknownImageError(f"the registry {reference.registry} has no {name}")
    if status in (UNAUTHORIZED, FORBIDDEN):
        remedy = f"`docker login {reference.registry}` with an account that may read it"
        return EngineError(f"the registry {reference.registry} does not let us read {name}", remedy=remedy)
    return EngineError(f"the registry {reference.registry} answered {status} for {name}")


def _authorization(session: requests.Session, reference: Reference, answer: requests.Response) -> str:
    """Return the Authorization that the registry's challenge asks for, with docker's own credentials.

    The two forms are those of the distribution specification: Basic, and a Bearer token from where the
    challenge says.
    """
    login = _login(reference)
    challenge = answer.headers.get("WWW-Authenticate", "")
    kind, _, parameters = challenge.partition(" ")
    if kind.lower() == "bearer":
        asked = requests.utils.parse_dict_header(parameters)
        realm = asked.pop("realm", None)
        if not realm:
            raise EngineError(f"the registry {reference.registry} asks for a token and does not say where")
        token = session.get(realm, params=asked, auth=login, timeout=TIMEOUT)
        if token.status_code != FOUND:
            raise _refusal(reference, token.status_code)
        fields = documents.Fields(documents.parse(token.content, realm), realm)
        return f"Bearer {fields.text_or_none('token') or fields.text('access_token')}"
    if login is None:
        raise _refusal(reference, UNAUTHORIZED)
    request = requests.Request("GET", reference.url, auth=login).prepare()
    return request.headers["Authorization"]


def _login(reference: Reference) -> tuple[str, str] | None:
    """Return user and password from docker's configuration or its credential helper."""
    from docker import auth, errors

    registry = auth.INDEX_NAME if reference.registry == DOCKER_HUB else reference.registry
    try:
        with warnings.catch_warnings(action="ignore"):  # a helper that is missing is an error, too
            found = auth.load_config().resolve_authconfig(registry)
    except (errors.DockerException, OSError) as error:
        raise EngineError(f"docker's credentials for {registry} can't be read: {error}") from error
    if not found or not found.get("username"):
        return None
    return str(found["username"]), str(found.get("password", ""))
