"""A client of a registry's API (OCI distribution specification), for one repository.

Transient errors (a dropped connection, a 5xx, a truncated answer or upload) are retried; others, such as a
refused login, are not. Credentials are docker's own, from its configuration or its helpers. They are sent to
the registry and to its token service, and nowhere else.
"""

from __future__ import annotations

import base64
import contextlib
import warnings
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import urlencode
from urllib.request import parse_http_list, parse_keqv_list

import requests

from imagematrix.common import json_documents
from imagematrix.common.image_reference import DIGEST, DOCKER_HUB, Reference, is_tag
from imagematrix.common.settings import read_site
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.images.oci.compression import GZIP_REMEDY, has_zstd
from imagematrix.images.oci.manifest import MANIFESTS, Manifest, compute_digest
from imagematrix.images.oci.retry import BUSY_TRIES, ResumedStream, call_with_retries
from imagematrix.images.oci.transfer import HttpClient, RegistryResponse, get_cause
from imagematrix.images.oci.url import Url

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import IO, Self

    from imagematrix.errors import ImagematrixError
    from imagematrix.images.oci.byte_stream import ByteStream
    from imagematrix.images.oci.transfer import StreamedResponse

PAGES = 1000  # of a list of tags
TAG_BYTES = 32 << 20  # of all pages together; in memory they take eight times as many
PIECE = 1 << 20  # bytes
OK, CREATED, ACCEPTED, NO_CONTENT, PARTIAL = 200, 201, 202, 204, 206  # HTTP statuses
UNAUTHORIZED, FORBIDDEN, MISSING, NOT_ALLOWED = 401, 403, 404, 405
REFERENCED = (400, 409, 412, 422)  # of the deletion of a manifest that another one names, or of a tag
UNFIT = (400, 406, 415, 422)  # of a manifest with something that the registry does not take
UNKNOWN_BLOBS = {"MANIFEST_BLOB_UNKNOWN", "BLOB_UNKNOWN"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
CLIENT = "imagematrix"  # the client_id for token services

A = TypeVar("A", bound=RegistryResponse)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Login:
    """An Authorization for a registry or its token service, or an identity token for the latter."""

    basic: str | None = None
    identity: str | None = None


class Registry:
    """The repository `name`, such as registry:5000/ml/training, without a tag. Thread-safe.

    Raises UsageError for an invalid name, as every method does for an invalid tag or digest. They raise
    EngineError if the registry cannot be reached or refuses. It is a context manager.

    A request is sent at most `busy_tries` times while the registry asks to come later, which may take more
    than a minute: a service whose own clients wait asks less often.
    """

    def __init__(self, name: str, *, busy_tries: int = BUSY_TRIES) -> None:
        self.name = name
        self._busy_tries = busy_tries
        self._reference = Reference.parse(name)
        if self._reference.name != name:
            raise UsageError(f"invalid repository {name!r}: expected one without a tag and a digest")
        self._base = Url.parse(f"{self._reference.url}/v2/{self._reference.repository}")
        self._authorization: str | None = None
        self._client = HttpClient()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    @property
    def authorization(self) -> str | None:
        """The Authorization that the registry last requested; None if it has requested none."""
        return self._authorization

    def make_blob_url(self, digest: str) -> Url:
        """Return the URL of a blob, for other clients."""
        return self._make_url_of("blobs", digest)

    def list_tags(self) -> list[str]:
        """Return the repository's tags; empty if there is no such repository."""
        url = self._make_url("tags/list?n=1000")
        tags: list[str] = []
        size = 0
        for _ in range(PAGES):
            answer = self._request("GET", url)
            if answer.status == MISSING and not tags:
                return []
            self._require_status(answer, OK, "the list of tags")
            size += len(answer.body)
            if size > TAG_BYTES:
                break
            tags += self._parse_list(
                answer, lambda fields: fields.get_texts("tags") if fields.has("tags") else ()
            )
            if answer.next is None:
                return tags
            # Always in this registry, because behind a proxy it may name a host of its own.
            url = replace(self._base, target=answer.url.join(answer.next).target)
        limit = f"{PAGES} pages or {TAG_BYTES >> 20} MiB of tags"
        raise EngineError(f"the registry {self._reference.registry} lists more than {limit}")

    def find_manifest(self, tag: str) -> Manifest | None:
        """Return the manifest or the index with a tag or a digest; None if there is none."""
        answer = self._request("GET", self._make_url_of("manifests", tag), {"Accept": ", ".join(MANIFESTS)})
        if answer.status == MISSING:
            return None
        self._require_status(answer, OK, tag)
        digest = compute_digest(answer.body)
        if DIGEST.fullmatch(tag) and tag != digest:
            raise self._make_mismatch_error(tag)
        media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return Manifest(digest=digest, media_type=media_type, raw=answer.body)

    def digest(self, tag: str) -> str | None:
        """Return the digest of a tag; None if there is no such tag."""
        answer = self._request("HEAD", self._make_url_of("manifests", tag), {"Accept": ", ".join(MANIFESTS)})
        if answer.status == MISSING:
            return None
        self._require_status(answer, OK, tag)
        digest = answer.headers.get("Docker-Content-Digest", "")
        if DIGEST.fullmatch(digest):
            return digest
        manifest = self.find_manifest(tag)
        return manifest.digest if manifest else None

    def fetch_small_blob(self, digest: str) -> bytes:
        """Return a small blob, such as an image's configuration."""
        answer = self._request("GET", self.make_blob_url(digest))
        self._require_status(answer, OK, digest)
        if digest != compute_digest(answer.body):
            raise self._make_mismatch_error(digest)
        return answer.body

    @contextlib.contextmanager
    def open(self, digest: str, start: int = 0) -> Iterator[ByteStream]:
        """Yield a blob of any size as a stream from offset `start`, without comparing it with its digest.

        An interrupted transfer is resumed if the registry supports ranges. Reading raises UnknownImageError
        if there is no such blob, EngineError if the transfer keeps failing.
        """
        blob = ResumedStream(lambda at: self._open_blob(digest, start + at), self._make_unreachable_error)
        with contextlib.closing(blob):
            yield blob

    @contextlib.contextmanager
    def _open_blob(self, digest: str, start: int) -> Iterator[ByteStream]:
        """Yield a blob from offset `start`."""
        if not self.has_blob(digest):  # also fetches a token
            raise self._make_refusal(MISSING, f"{self._reference.name}@{digest}")
        wanted = {"Range": f"bytes={start}-"} if start else {}
        with contextlib.ExitStack() as stack:

            def ask() -> StreamedResponse:
                stack.close()  # reuse the connection of the last attempt
                return stack.enter_context(
                    self._client.stream(self.make_blob_url(digest), wanted, self._authorization)
                )

            answer = self._send_with_retries(ask)
            if answer.status not in (OK, PARTIAL):
                raise self._make_refusal(answer.status, f"{self._reference.name}@{digest}", answer.codes)
            skipped = start if answer.status == OK else 0  # the range may be ignored
            while skipped and (passed := len(answer.stream.read(min(skipped, PIECE)))):
                skipped -= passed
            yield answer.stream

    def has_blob(self, digest: str) -> bool:
        """Whether the repository has a blob."""
        answer = self._request("HEAD", self.make_blob_url(digest))
        if answer.status == MISSING:
            return False
        self._require_status(answer, OK, digest)
        return True

    def push_blob(self, digest: str, file: IO[bytes]) -> None:
        """Upload the content of `file` from its beginning."""

        # An upload is two requests: if the second fails, it restarts with the first.
        def upload() -> RegistryResponse:
            session = self._send_authorized("POST", self._make_url("blobs/uploads/"))
            if session.status != ACCEPTED:
                return session
            url = session.url.follow(session.headers.get("Location", "")).with_query(f"digest={digest}")
            return self._send_authorized("PUT", url, {"Content-Type": "application/octet-stream"}, file)

        self._require_status(self._send_with_retries(upload), CREATED, digest)

    def push_manifest(self, tag: str, raw: bytes, media_type: str) -> None:
        """Push a manifest or an index under a tag, replacing the tag's previous one.

        The registry must already have the blobs or manifests in it. If it denies that, the request is
        repeated: while another client pushes the same blob, docker-registry 2.8 on a file system rewrites the
        file that links the blob to the repository, and a read in between finds that file empty.
        """
        answer = self._request("PUT", self._make_url_of("manifests", tag), {"Content-Type": media_type}, raw)
        name = f"{self._reference.name}:{tag}"
        if answer.status in UNFIT and has_zstd(raw) and not UNKNOWN_BLOBS & {*answer.codes}:
            raise EngineError(str(self._make_refusal(answer.status, name, answer.codes)), remedy=GZIP_REMEDY)
        self._require_status(answer, CREATED, tag)

    def withdraw(self, tag: str, digest: str) -> bool:
        """Delete a tag, or else its manifest; return whether the tag is gone.

        Few registries can delete only a tag, and many cannot delete anything.
        """
        for name in (tag, digest):
            with contextlib.suppress(EngineError):  # for example, it issues no token for deleting
                self._request("DELETE", self._make_url_of("manifests", name))
            if self.digest(tag) is None:
                return True
        return False

    def delete(self, digest: str, tags: Iterable[str] = ()) -> bool:
        """Delete a manifest, whose `tags` are to go with it; return whether it is gone.

        It is not if the registry refuses because another manifest names it. Some registries delete no
        manifest that has a tag, so the tags are then deleted first. Raises EngineError if the registry
        permits no deletion at all.
        """
        if self._delete(digest):
            return True
        for tag in tags:
            with contextlib.suppress(EngineError):  # few registries can delete only a tag
                self._delete(tag)
        return self._delete(digest)

    def _delete(self, name: str) -> bool:
        answer = self._request("DELETE", self._make_url_of("manifests", name))
        if answer.status in (OK, ACCEPTED, NO_CONTENT, MISSING):
            return True
        if answer.status in REFERENCED and "UNSUPPORTED" not in answer.codes:
            return False
        what = (
            f"{self._reference.name}@{name}" if DIGEST.fullmatch(name) else f"{self._reference.name}:{name}"
        )
        if answer.status == NOT_ALLOWED or "UNSUPPORTED" in answer.codes:
            registry = self._reference.registry
            remedy = "enable deletion in its configuration (docker-registry: storage, delete, enabled: true)"
            raise EngineError(f"the registry {registry} permits no deletion of {what}", remedy=remedy)
        raise self._make_refusal(answer.status, what, answer.codes)

    def list_referrers(self, digest: str) -> list[str] | None:
        """Return the digests of the manifests whose subject this is; None if the registry does not tell.

        Registries without this API have them under a tag instead (OCI distribution specification, "Referrers
        Tag Schema").
        """
        answer = self._request("GET", self._make_url_of("referrers", digest))
        if answer.status != OK:
            return None
        return self._parse_list(
            answer, lambda fields: [entry.get_text("digest") for entry in fields.list_objects("manifests")]
        )

    def _parse_list(
        self, answer: RegistryResponse, read: Callable[[json_documents.Fields], Iterable[str]]
    ) -> list[str]:
        """Return what `read` finds in an answer; raise EngineError if the answer is something else."""
        registry, where = self._reference.registry, str(answer.url)
        try:
            fields = json_documents.Fields(json_documents.parse_json(answer.body, where), where)
            return list(read(fields))
        except UsageError as error:
            remedy = "check the name of the registry, and a proxy in front of it"
            raise EngineError(
                f"the registry {registry} does not answer as one: {error}", remedy=remedy
            ) from error

    def _request(
        self, method: str, url: Url, headers: Mapping[str, str] | None = None, data: bytes | None = None
    ) -> RegistryResponse:
        return self._send_with_retries(lambda: self._send_authorized(method, url, headers, data))

    def _send_with_retries(self, request: Callable[[], A]) -> A:
        return call_with_retries(request, self._make_unreachable_error, busy_tries=self._busy_tries)

    def _send_authorized(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str] | None = None,
        data: bytes | IO[bytes] | None = None,
    ) -> RegistryResponse:
        """Send a request, and again with the Authorization that the registry's challenge requests."""
        # The registry may send an upload to another host, which must not get the credentials.
        is_ours = self._is_ours(url)
        authorization = self._authorization if is_ours else None
        answer = self._client.send(method, url, headers, data, authorization)
        if answer.status != UNAUTHORIZED or not is_ours or not answer.trusted:
            return answer
        requested = self._answer_challenge(answer.headers.get("WWW-Authenticate", ""))
        if requested == authorization:
            return answer
        self._authorization = requested
        return self._client.send(method, url, headers, data, requested)

    def _is_ours(self, url: Url) -> bool:
        return url.origin == self._base.origin

    def _make_url_of(self, kind: str, name: str) -> Url:
        """Return the URL of a manifest or a blob; raise UsageError for a name that leads elsewhere.

        Lists in a registry and documents of others name some of them.
        """
        if not (DIGEST.fullmatch(name) or is_tag(name)):
            raise UsageError(f"{self.name} can have no tag or digest {name[:80]!r}")
        return self._make_url(f"{kind}/{name}")

    def _make_url(self, resource: str) -> Url:
        return replace(self._base, target=f"{self._base.target}/{resource}")

    def _answer_challenge(self, challenge: str) -> str:
        """Return the Authorization for a challenge: Basic, or a token of the service in it."""
        registry = self._reference.registry
        login = _find_login(registry)
        basic = login.basic if login else None
        kind, _, parameters = challenge.partition(" ")
        if kind.lower() != "bearer":
            if basic is None:
                raise self._make_refusal(UNAUTHORIZED, self._reference.name)
            return basic
        try:
            query = parse_keqv_list(parse_http_list(parameters))
        except (ValueError, IndexError) as error:
            raise EngineError(f"the registry {registry} requests an unsupported login method") from error
        named = query.pop("realm", None)
        if not named:
            raise EngineError(f"the registry {registry} requests a token without a realm")
        realm = self._base.join(named)
        if realm.scheme != "https" and (realm.scheme, realm.host) != (self._base.scheme, self._base.host):
            message = f"the registry {registry} requests the login at {realm}, without TLS"
            raise EngineError(message, remedy="configure it with a realm that begins with https://")
        if login and login.identity:
            query |= {"grant_type": "refresh_token", "refresh_token": login.identity, "client_id": CLIENT}
            form = urlencode(query).encode()
            answer = self._send_with_retries(lambda: self._client.send("POST", realm, FORM, form))
        else:
            url = realm.with_query(urlencode(query))
            answer = self._send_with_retries(lambda: self._client.send("GET", url, authorization=basic))
        if answer.status in (UNAUTHORIZED, FORBIDDEN):
            raise self._make_refusal(answer.status, self._reference.name)
        try:
            return f"Bearer {_read_token(answer, str(realm))}"
        except UsageError as error:
            # Convert it: a UsageError would blame the command, an UnknownImageError the image's name.
            raise EngineError(f"the registry {registry} did not issue a token: {error}") from error

    def _require_status(self, answer: RegistryResponse, status: int, what: str) -> None:
        if answer.status != status:
            name = f"{self._reference.name}:{what}"
            raise self._make_refusal(answer.status, name, answer.codes, pushed=status == CREATED)

    def _make_refusal(
        self, status: int, what: str, codes: Sequence[str] = (), *, pushed: bool = False
    ) -> ImagematrixError:
        registry = self._reference.registry
        if status == MISSING and not pushed:
            return UnknownImageError(f"the registry {registry} has no {what}")
        if status in (UNAUTHORIZED, FORBIDDEN):
            remedy = f"`docker login {quote_word(registry)}` with an account that has access"
            return EngineError(f"the registry {registry} denies access to {what}", remedy=remedy)
        remedy = "see the registry's log; pushed images are kept, and the same command continues from here"
        why = f": {', '.join(codes)}" if codes else ""
        return EngineError(f"the registry {registry} answered {status} for {what}{why}", remedy=remedy)

    def _make_mismatch_error(self, digest: str) -> EngineError:
        remedy = "its storage, or a proxy in front of it, is damaged"
        registry = self._reference.registry
        return EngineError(
            f"the registry {registry} answered with content that does not match {digest}", remedy=remedy
        )

    def _make_unreachable_error(self, error: requests.RequestException) -> EngineError:
        registry = self._reference.registry
        url = Url.parse(str(error.request.url)) if error.request is not None else self._base
        elsewhere = "" if self._is_ours(url) else f" (at {url.authority})"
        what = "cannot be reached"
        remedy = "check the name, and that the registry is running; the same command continues from here"
        if isinstance(error, requests.exceptions.ChunkedEncodingError):
            what = "truncates its answers"
        if isinstance(error, requests.exceptions.SSLError):
            remedy = "set REQUESTS_CA_BUNDLE to the file of its CA; TLS is optional only on loopback"
        message = f"the registry {registry} {what}{elsewhere}: {get_cause(error)}"
        return EngineError(message, remedy=remedy)


def _read_token(answer: RegistryResponse, realm: str) -> str:
    """Return the token in an answer; raise UsageError if it has none."""
    if answer.status != OK:
        raise UsageError(f"{realm} answered {answer.status}")
    fields = json_documents.Fields(json_documents.parse_json(answer.body, realm), realm)
    token = fields.get_text_or_none("token") or fields.get_text("access_token")
    if not token.isascii() or not token.isprintable():
        raise UsageError(f"the answer of {realm} is not a token")
    return token


def _find_login(registry: str) -> _Login | None:
    """Return the login that docker's configuration or its credential helper has, or else the site's file."""
    from docker import auth, errors

    name = auth.INDEX_NAME if registry == DOCKER_HUB else registry
    try:
        with warnings.catch_warnings(action="ignore"):  # a missing helper is an error, too
            credentials = auth.load_config().resolve_authconfig(name)
            if not credentials and (shared := read_site().credentials):
                credentials = auth.load_config(config_path=shared).resolve_authconfig(name)
    except (errors.DockerException, OSError, ValueError) as error:
        raise EngineError(f"docker's credentials for {name} cannot be read: {error}") from error
    # docker-py returns a helper's answer, and identity tokens, under capitalized names.
    fields = {key.lower(): value for key, value in (credentials or {}).items() if value}
    if "identitytoken" in fields:
        return _Login(identity=fields["identitytoken"])
    if "username" not in fields:
        return None
    pair = f"{fields['username']}:{fields.get('password', '')}"
    return _Login(basic=f"Basic {base64.b64encode(pair.encode()).decode()}")
