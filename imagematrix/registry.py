"""A registry's API, as the OCI distribution specification has it, for one repository.

What passes (a connection that drops, a 5xx) is tried again, as is an upload that broke off; what does not (a
login that is refused) is not. Credentials are docker's own, from its configuration or its helpers.
"""

from __future__ import annotations

import hashlib
import re
import time
import warnings
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from imagematrix import documents
from imagematrix.errors import EngineError, UnknownImageError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO, Any, Self

    from imagematrix.errors import ImagematrixError

__all__ = ["DOCKER_LIST", "INDEX", "MANIFESTS", "Manifest", "Reference", "Registry"]

INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFESTS = (
    INDEX,
    DOCKER_LIST,
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
DOCKER_HUB = "registry-1.docker.io"
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
LIMIT = 64 * 1024 * 1024  # bytes of a document
PAGES = 1000  # of a list of tags
TIMEOUT = 30  # seconds of silence
CONNECTIONS = 16
TRIES = 3
PAUSE = 0.3  # seconds, doubled from one try to the next
OK, CREATED, ACCEPTED = 200, 201, 202  # of HTTP
UNAUTHORIZED, FORBIDDEN, MISSING = 401, 403, 404
PASSING = (408, 429, 500, 502, 503, 504)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A manifest or an index as the registry has it: its bytes, and what they are."""

    digest: str
    media_type: str
    raw: bytes


class Registry:
    """The repository `name`, such as registry:5000/ml/training. Threads may share it.

    Every method raises EngineError where the registry can't be reached or refuses. It is a context manager.
    """

    def __init__(self, name: str) -> None:
        self._reference = Reference.parse(name)
        self._base = f"{self._reference.url}/v2/{self._reference.repository}"
        self._authorization: str | None = None
        # An upload is more than one request: what broke off in the middle starts with the first again.
        self._uploads = _session(Retry(0))
        self._session = _session(
            Retry(
                TRIES,
                backoff_factor=PAUSE,
                status_forcelist=PASSING,
                allowed_methods=None,
                raise_on_status=False,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()
        self._uploads.close()

    def tags(self) -> list[str]:
        """Return the repository's tags; none where there is no such repository."""
        url: str | None = f"{self._base}/tags/list?n=1000"
        found: list[str] = []
        for _ in range(PAGES):
            answer = self._ask("GET", str(url))
            if answer.status_code == MISSING:
                return []
            self._expect(answer, OK, "the list of tags")
            fields = documents.Fields(documents.parse(_bounded(answer), str(url)), str(url))
            found += fields.texts("tags") if fields.present("tags") else ()
            url = self._next(answer)
            if url is None:
                break
        return found

    def manifest(self, tag: str) -> Manifest | None:
        """Return the manifest or the index with a tag or a digest; None where there is none."""
        answer = self._ask("GET", f"{self._base}/manifests/{tag}", headers={"Accept": ", ".join(MANIFESTS)})
        if answer.status_code == MISSING:
            return None
        self._expect(answer, OK, tag)
        raw = _bounded(answer)
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        if DIGEST.fullmatch(tag) and tag != digest:
            raise EngineError(f"the registry {self._reference.registry} answered something else than {tag}")
        media_type = answer.headers.get("Content-Type", "").partition(";")[0]
        return Manifest(digest=digest, media_type=media_type, raw=raw)

    def digest(self, tag: str) -> str | None:
        """Return the digest that a tag stands for; None where there is no such tag."""
        answer = self._ask("HEAD", f"{self._base}/manifests/{tag}", headers={"Accept": ", ".join(MANIFESTS)})
        if answer.status_code == MISSING:
            return None
        self._expect(answer, OK, tag)
        told = answer.headers.get("Docker-Content-Digest")
        if told is None:
            found = self.manifest(tag)
            told = found.digest if found else None
        return told

    def blob(self, digest: str) -> bytes:
        """Return a small blob, such as an image's configuration."""
        answer = self._ask("GET", f"{self._base}/blobs/{digest}")
        self._expect(answer, OK, digest)
        raw = _bounded(answer)
        if digest != f"sha256:{hashlib.sha256(raw).hexdigest()}":
            raise EngineError(
                f"the registry {self._reference.registry} answered something else than {digest}"
            )
        return raw

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has a blob."""
        answer = self._ask("HEAD", f"{self._base}/blobs/{digest}")
        if answer.status_code == MISSING:
            return False
        self._expect(answer, OK, digest)
        return True

    def push_blob(self, digest: str, file: IO[bytes]) -> None:
        """Upload what `file` has from its beginning."""
        for attempt in range(1, TRIES + 1):
            try:
                answer = self._upload(digest, file)
                if answer.status_code not in PASSING or attempt == TRIES:
                    return self._expect(answer, CREATED, digest)
            except requests.RequestException as error:
                if attempt == TRIES:
                    raise self._unreachable(error) from error
            time.sleep(PAUSE * 2 ** (attempt - 1))
        raise AssertionError  # pragma: no cover - the last try returns or raises

    def push_manifest(self, tag: str, raw: bytes, media_type: str) -> None:
        """Put a manifest or an index under a tag; an older one of that tag is replaced."""
        headers = {"Content-Type": media_type}
        self._expect(
            self._ask("PUT", f"{self._base}/manifests/{tag}", headers=headers, data=raw), CREATED, tag
        )

    def _upload(self, digest: str, file: IO[bytes]) -> requests.Response:
        begun = self._ask("POST", f"{self._base}/blobs/uploads/")
        if begun.status_code != ACCEPTED:
            return begun
        where = urljoin(begun.url, begun.headers.get("Location", ""))
        url = f"{where}{'&' if urlsplit(where).query else '?'}digest={digest}"
        headers = {"Content-Type": "application/octet-stream"}

        def send() -> requests.Response:
            file.seek(0)
            return self._uploads.put(url, data=file, headers=self._headers(url, headers), timeout=TIMEOUT)

        return self._authorized(send)

    def _ask(
        self, method: str, url: str, headers: dict[str, str] | None = None, **more: Any
    ) -> requests.Response:
        def send() -> requests.Response:
            return self._session.request(
                method, url, headers=self._headers(url, headers or {}), timeout=TIMEOUT, stream=True, **more
            )

        try:
            return self._authorized(send)
        except requests.RequestException as error:
            raise self._unreachable(error) from error

    def _authorized(self, send: Callable[[], requests.Response]) -> requests.Response:
        """Send a request, and once more with what the registry's challenge asks for."""
        answer = send()
        if answer.status_code == UNAUTHORIZED:
            answer.close()
            self._authorization = self._answer(answer.headers.get("WWW-Authenticate", ""))
            answer = send()
        return answer

    def _headers(self, url: str, headers: dict[str, str]) -> dict[str, str]:
        # An upload may be sent elsewhere, and elsewhere has no use for our credentials.
        ours = urlsplit(url).netloc == urlsplit(self._base).netloc
        return headers | ({"Authorization": self._authorization} if self._authorization and ours else {})

    def _answer(self, challenge: str) -> str:
        """Return the Authorization that a challenge asks for: Basic, or a token from where it says."""
        login = _login(self._reference.registry)
        kind, _, parameters = challenge.partition(" ")
        if kind.lower() != "bearer":
            if login is None:
                raise self._refusal(UNAUTHORIZED, self._reference.name)
            return str(requests.Request("GET", self._base, auth=login).prepare().headers["Authorization"])
        asked = requests.utils.parse_dict_header(parameters)
        realm = asked.pop("realm", None)
        if not realm:
            registry = self._reference.registry
            raise EngineError(f"the registry {registry} asks for a token and does not say where")
        token = self._session.get(realm, params=asked, auth=login, timeout=TIMEOUT, stream=True)
        self._expect(token, OK, self._reference.name)
        fields = documents.Fields(documents.parse(_bounded(token), realm), realm)
        return f"Bearer {fields.text_or_none('token') or fields.text('access_token')}"

    def _next(self, answer: requests.Response) -> str | None:
        link = answer.links.get("next", {}).get("url")
        url = urljoin(self._base, link) if link else None
        return url if url and urlsplit(url).netloc == urlsplit(self._base).netloc else None

    def _expect(self, answer: requests.Response, status: int, what: str) -> None:
        if answer.status_code != status:
            answer.close()
            raise self._refusal(answer.status_code, f"{self._reference.name}:{what}")

    def _refusal(self, status: int, what: str) -> ImagematrixError:
        registry = self._reference.registry
        if status == MISSING:
            return UnknownImageError(f"the registry {registry} has no {what}")
        if status in (UNAUTHORIZED, FORBIDDEN):
            remedy = f"`docker login {registry}` with an account that may"
            return EngineError(f"the registry {registry} does not let us read or write {what}", remedy=remedy)
        return EngineError(f"the registry {registry} answered {status} for {what}")

    def _unreachable(self, error: Exception) -> EngineError:
        return EngineError(f"the registry {self._reference.registry} can't be reached: {error}")


def _session(retries: Retry) -> requests.Session:
    session = requests.Session()
    session.trust_env = True
    adapter = HTTPAdapter(pool_maxsize=CONNECTIONS, max_retries=retries)
    for scheme in ("http://", "https://"):
        session.mount(scheme, adapter)
    return session


def _bounded(answer: requests.Response) -> bytes:
    raw = bytearray()
    try:
        for chunk in answer.iter_content(1 << 16):
            raw += chunk
            if len(raw) > LIMIT:
                answer.close()
                raise UsageError(f"{answer.url}: larger than {LIMIT // 2**20} MiB, which no document is")
    except requests.RequestException as error:
        raise EngineError(f"{answer.url}: the answer broke off: {error}") from error
    return bytes(raw)


def _login(registry: str) -> tuple[str, str] | None:
    """Return user and password from docker's configuration or its credential helper."""
    from docker import auth, errors

    name = auth.INDEX_NAME if registry == DOCKER_HUB else registry
    try:
        with warnings.catch_warnings(action="ignore"):  # a helper that is missing is an error, too
            found = auth.load_config().resolve_authconfig(name)
    except (errors.DockerException, OSError) as error:
        raise EngineError(f"docker's credentials for {name} can't be read: {error}") from error
    if not found or not found.get("username"):
        return None
    return str(found["username"]), str(found.get("password", ""))
