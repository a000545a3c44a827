"""The API server of a cluster: its address, single requests, and objects that are listed and then watched.

See https://kubernetes.io/docs/reference/using-api/api-concepts, "Efficient detection of changes".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from imagematrix.common import json_documents
from imagematrix.errors import EngineError, ImagematrixError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    OnError = Callable[[ImagematrixError], None]

T = TypeVar("T")

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE = 500  # objects of one answer
PAGE_BYTES = 64 << 20  # of one answer; as Python objects it takes several times as much
LINE = 4 << 20  # bytes; etcd keeps no object of more than 1.5 MiB
WATCH_S = 300  # after which the API server ends a watch
SILENCE_S = 30
ANSWER_S = 10  # for a single request
PAUSE_S, LONGEST_S = 1.0, 30.0  # before a retry; each pause is twice as long as the last
OK, CREATED, NOT_FOUND, CONFLICT, GONE = 200, 201, 404, 409, 410
EXCERPT = 500  # characters of an answer in an error
# The last two are for a line that is too long: which one depends on the release of aiohttp.
FAILURES = (aiohttp.ClientError, TimeoutError, OSError, HttpProcessingError, ValueError)


class NotFoundError(EngineError):
    """The API server has no such object."""


class ConflictError(EngineError):
    """An object was changed meanwhile."""


class _GoneError(Exception):
    """The API server no longer has the changes since a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """An API server: its URL, and the files with a token, the authorities to trust, and a certificate.

    The `certificate` of this client and its key are given in place of a token. All are read for each request
    or connection, because kubelet replaces them. `authority_text` is the text of further authorities.
    """

    url: str
    token: Path | None = None
    authorities: Path | None = None
    authority_text: str | None = None
    certificate: tuple[Path, Path] | None = None

    def make_url(self, path: str) -> str:
        """Return the URL of a path; the API server's own URL may have one, behind which the cluster is."""
        return self.url.rstrip("/") + path

    def make_headers(self) -> dict[str, str]:
        """Return the headers of a request; raise UsageError if the token cannot be read."""
        if self.token is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self.token.read_text('utf-8').strip()}"}
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.token} cannot be read: {error}") from error

    def make_tls_context(self) -> ssl.SSLContext:
        """Return the TLS context of a connection; raise UsageError if one of the files cannot be read."""
        try:
            context = ssl.create_default_context(cafile=self.authorities, cadata=self.authority_text)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.authorities or 'authorities'} cannot be read: {error}") from error
        if self.certificate:
            try:
                context.load_cert_chain(*self.certificate)
            except OSError as error:
                raise UsageError(f"{self.certificate[0]} cannot be read: {error}") from error
        return context


def find_cluster_api(
    remedy: str, environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT
) -> ApiServer:
    """Return the API server of the cluster that this process runs in.

    Outside of a pod this raises UsageError with the `remedy`.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise UsageError("not running in a pod: the API server is unknown", remedy=remedy)
    name = f"[{host}]" if ":" in host else host
    return ApiServer(url=f"https://{name}:{port}", token=account / "token", authorities=account / "ca.crt")


def read_namespace(account: Path = ACCOUNT) -> str:
    """Return the namespace of the pod that this process runs in; raise UsageError outside of one."""
    path = account / "namespace"
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def require_url(text: str) -> str:
    """Return the URL of an API server; raise UsageError if it is none."""
    with contextlib.suppress(ValueError):  # of an invalid port or address
        url = urlsplit(text)
        if url.scheme in ("http", "https") and url.hostname and url.port != 0 and not url.query:
            return text
    raise UsageError(
        f"invalid URL of an API server: {text[:80]!r}", remedy="give one such as https://10.0.0.1:6443"
    )


async def send_request(
    api: ApiServer, method: str, path: str, document: Mapping[str, object] | None = None
) -> json_documents.Fields:
    """Return the answer to a request.

    Raises NotFoundError, ConflictError, another EngineError, or UsageError.
    """
    limits = aiohttp.ClientTimeout(total=ANSWER_S)
    try:
        async with (
            _open_session(api, limits) as session,
            session.request(method, api.make_url(path), json=document, headers=api.make_headers()) as answer,
        ):
            await _require_success(answer)
            return json_documents.Fields(json_documents.parse_json(await answer.read(), path), path)
    except _GoneError:
        raise EngineError(f"the API server answered {GONE}") from None
    except FAILURES as error:
        raise _make_read_error(error) from error


class Collection(Generic[T]):
    """A collection to watch: its path, what its objects are called, and a query such as a field selector.

    The objects are listed in pages of `limit`, by default PAGE; smaller ones are for objects that users make
    as large as they like. `parse` returns what is kept of an object, and raises UsageError for an object to
    leave out. `is_equivalent` tells whether two versions of an object are the same to the caller.
    """

    def __init__(
        self,
        path: str,
        noun: str,
        parse: Callable[[json_documents.Fields], T],
        *,
        query: Mapping[str, str] | None = None,
        limit: int | None = None,
        is_equivalent: Callable[[T, T], bool] = lambda before, after: before == after,
    ) -> None:
        self.path = path
        self.noun = noun
        self.parse = parse
        self.query = dict(query or {})
        self.limit = limit or PAGE
        self.is_equivalent = is_equivalent


async def watch_collection(
    api: ApiServer,
    collection: Collection[T],
    on_change: Callable[[Mapping[str, T]], None],
    on_message: Callable[[str], None],
    on_error: OnError,
) -> None:
    """Call `on_change` with the objects of a collection, whenever they change, until cancelled.

    They are by name, or by NAMESPACE/NAME, in a mapping that changes with them.

    While the API server cannot be read, `on_error` gets the errors, and reading is tried again.
    """
    watched = _WatchedCollection(api, collection, on_error)
    pause = PAUSE_S
    while True:
        before = watched.version
        try:
            async for objects in watched.follow():
                on_change(objects)
        except _GoneError:
            watched.version = None
            on_message(f"{collection.noun}: listing again, because the API server has dropped older changes")
        except (EngineError, UsageError) as error:
            on_error(error)
        except FAILURES as error:
            on_error(_make_read_error(error))
        pause = PAUSE_S if watched.version != before else min(2 * pause, LONGEST_S)
        # Several processes should not retry at the same time.
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311


class _WatchedCollection(Generic[T]):
    """The objects of a collection, and the version at which they were read."""

    def __init__(self, api: ApiServer, collection: Collection[T], on_error: OnError) -> None:
        self.version: str | None = None
        self._api = api
        self._collection = collection
        self._on_error = on_error
        self._objects: dict[str, T] = {}

    async def follow(self) -> AsyncIterator[Mapping[str, T]]:
        """List the objects if needed, apply changes until the watch ends, and yield the objects each time."""
        # A watch without changes is silent until the API server ends it.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=WATCH_S + SILENCE_S)
        async with _open_session(self._api, limits) as session:
            if self.version is None:
                self.version = await self._list_objects(session)
                yield self._objects
            async for is_changed in self._apply_events(session, self.version):
                if is_changed:
                    yield self._objects

    async def _list_objects(self, session: aiohttp.ClientSession) -> str:
        """Read all objects and return their version."""
        noun = self._collection.noun
        objects: dict[str, T] = {}
        query = {**self._collection.query, "limit": str(self._collection.limit)}
        while True:
            async with session.get(
                self._api.make_url(self._collection.path), params=query, headers=self._api.make_headers()
            ) as answer:
                await _require_success(answer)
                raw = await _read_page(answer, noun)
            fields = json_documents.Fields(json_documents.parse_json(raw, noun), noun)
            for item in fields.list_objects("items"):
                value = self._parse_object(item)
                if value is not None:
                    objects[_get_name(item)] = value
            metadata = fields.get_object_or_empty("metadata")
            next_page = metadata.get_text_or_none("continue")
            if not next_page:
                self._objects = objects
                return metadata.get_text("resourceVersion")
            query["continue"] = next_page

    async def _apply_events(self, session: aiohttp.ClientSession, version: str) -> AsyncIterator[bool]:
        """Apply the changes since a version; yield for each whether it changed what is kept."""
        query = {
            **self._collection.query,
            "watch": "1",
            "resourceVersion": version,
            # Without bookmarks, the version of a watch without changes would become too old to go on from.
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        headers = self._api.make_headers()
        url = self._api.make_url(self._collection.path)
        async with session.get(url, params=query, headers=headers) as answer:
            await _require_success(answer)
            async for line in answer.content:
                event = json_documents.Fields(json_documents.parse_json(line, "watch"), "watch")
                item = event.get_object_or_empty("object")
                if event.get_text("type") == "ERROR":
                    if item.get_integer_or_none("code") == GONE:
                        raise _GoneError
                    raise EngineError(f"the watch has ended: {item.get_text_or_none('message')}")
                metadata = item.get_object_or_empty("metadata")
                is_changed = self._apply_event(event.get_text("type"), item)
                # Once the change is applied, because a watch that breaks off goes on from this version.
                self.version = metadata.get_text("resourceVersion")
                yield is_changed

    def _apply_event(self, kind: str, item: json_documents.Fields) -> bool:
        """Apply an event; return whether it changed what is kept."""
        if kind == "BOOKMARK":
            return False
        name = _get_name(item)
        value = None if kind == "DELETED" else self._parse_object(item)
        if value is None:
            return self._objects.pop(name, None) is not None
        before, self._objects[name] = self._objects.get(name), value
        return before is None or not self._collection.is_equivalent(before, value)

    def _parse_object(self, item: json_documents.Fields) -> T | None:
        try:
            return self._collection.parse(item)
        except UsageError as error:
            self._on_error(error)
            return None


def _get_name(item: json_documents.Fields) -> str:
    metadata = item.get_object_or_empty("metadata")
    namespace = metadata.get_text_or_none("namespace")
    name = metadata.get_text_or_none("name") or ""
    return f"{namespace}/{name}" if namespace else name


@contextlib.asynccontextmanager
async def _open_session(
    api: ApiServer, limits: aiohttp.ClientTimeout
) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(ssl=api.make_tls_context())
    async with aiohttp.ClientSession(connector=connector, timeout=limits, read_bufsize=LINE) as session:
        yield session


async def _require_success(answer: aiohttp.ClientResponse) -> None:
    if answer.status == GONE:
        raise _GoneError
    if answer.status in (OK, CREATED):
        return
    raw = await answer.content.read(LINE)
    message = None
    with contextlib.suppress(UsageError):  # it is no Status, whose message would tell
        status = json_documents.Fields(json_documents.parse_json(raw, "status"), "status")
        message = status.get_text_or_none("message")
    text = message[:EXCERPT] if message else raw[:EXCERPT].decode(errors="replace").strip()
    kinds = {NOT_FOUND: NotFoundError, CONFLICT: ConflictError}
    raise kinds.get(answer.status, EngineError)(f"the API server answered {answer.status}: {text}")


async def _read_page(answer: aiohttp.ClientResponse, noun: str) -> bytes:
    """Return the bytes of a page; raise EngineError if there are too many."""
    raw = bytearray()
    async for chunk in answer.content.iter_any():
        raw += chunk
        if len(raw) > PAGE_BYTES:
            raise EngineError(f"the API server sent more than {PAGE_BYTES >> 20} MiB of {noun} at once")
    return bytes(raw)


def _make_read_error(error: Exception) -> EngineError:
    return EngineError(f"the API server cannot be read: {error!r:.300}")
