"""HTTP for registries: every answer is read completely, with limits of size and time."""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import os
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import LocationParseError

from imagematrix.documents import natural
from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping
    from typing import IO, Any

    from _typeshed import WriteableBuffer

    from imagematrix.oci.expanded import Stream

__all__ = ["REDIRECTS", "Answer", "Client", "address", "cause", "passes"]

LIMIT = 4 * 1024 * 1024  # bytes: registries have to accept manifests of this size, and few accept larger ones
TIMEOUT = 30  # seconds of silence
SLOWEST = 4096  # minimum average bytes per second of an answer afterwards
# Bytes per second at which registries store what they have received, before they answer: docker-registry
# writes it to its disk, or copies it within an object store.
STORED = 8 << 20
CONNECTIONS = 16
REDIRECTS = 5
MOVED = (301, 302, 307, 308)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete answer; `next` is the URL of the next page, if any."""

    status: int
    url: str
    headers: Mapping[str, str]
    body: bytes
    next: str | None = None

    @property
    def wait(self) -> int:
        """The seconds in Retry-After, or until the date in it (RFC 9110, 10.2.3); 0 if it has neither."""
        text = self.headers.get("Retry-After", "")
        seconds = natural(text)
        if seconds is not None:
            return seconds
        with contextlib.suppress(ValueError, OverflowError):
            return max(0, math.ceil(parsedate_to_datetime(text).timestamp() - time.time()))
        return 0


class Client:
    """Persistent connections. Thread-safe."""

    def __init__(self) -> None:
        self._session = _Session()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _Adapter(pool_maxsize=CONNECTIONS))

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        data: bytes | IO[bytes] | None = None,
        authorization: str | None = None,
    ) -> Answer:
        """Send a request and return its answer; the `authorization` goes only to the host of `url`.

        Raises requests.RequestException if there is no answer, EngineError if it is too large.
        """
        first = urlsplit(url)[:2]
        for _ in range(REDIRECTS):
            given = authorization if urlsplit(url)[:2] == first else None
            answer = self._once(method, url, headers, data, given)
            if answer.status not in MOVED or "Location" not in answer.headers:
                return answer
            url = address(url, answer.headers["Location"])
        raise requests.TooManyRedirects(f"more than {REDIRECTS} redirections")

    @contextlib.contextmanager
    def stream(
        self, url: str, headers: Mapping[str, str], authorization: str | None = None
    ) -> Iterator[tuple[int, Stream]]:
        """Yield the status of `url` and its body of any size as a stream.

        Raises requests.RequestException if there is no answer.
        """
        first = urlsplit(url)[:2]
        for _ in range(REDIRECTS):
            given = authorization if urlsplit(url)[:2] == first else None
            # A transfer encoding would not be undone in the raw stream.
            with self._asked("GET", url, {"Accept-Encoding": "identity", **headers}, None, given) as answer:
                if answer.status_code not in MOVED or "Location" not in answer.headers:
                    yield answer.status_code, answer.raw
                    return
                url = address(url, answer.headers["Location"])
        raise requests.TooManyRedirects(f"more than {REDIRECTS} redirections")

    def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        data: bytes | IO[bytes] | None,
        authorization: str | None,
    ) -> Answer:
        with self._asked(method, url, headers, data, authorization) as answer:
            return Answer(
                status=answer.status_code,
                url=answer.url,
                headers=answer.headers,
                body=_bounded(answer),
                next=answer.links.get("next", {}).get("url"),
            )

    def _asked(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        data: bytes | IO[bytes] | None,
        authorization: str | None,
    ) -> requests.Response:
        """Return an answer whose body is not read yet."""

        def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
            # Without an explicit `auth`, requests would take one from ~/.netrc.
            if authorization:
                request.headers["Authorization"] = authorization
            return request

        size = 0
        if data is not None and not isinstance(data, bytes):
            size = data.seek(0, os.SEEK_END)
            data.seek(0)
        try:
            return self._session.request(
                method,
                url,
                headers=dict(headers or {}),
                data=data,
                auth=sign,
                timeout=(TIMEOUT, TIMEOUT + size / STORED),
                stream=True,
            )
        except LocationParseError as error:  # requests passes some of these on
            raise requests.exceptions.InvalidURL(str(error)) from error


class _Session(requests.Session):
    def __init__(self) -> None:
        super().__init__()
        self._environment: dict[tuple[str, str], Any] = {}

    def merge_environment_settings(self, url: Any, *words: Any, **named: Any) -> Any:
        """Return the proxy and CA settings for `url`, reading the environment once per host.

        Reading it takes a third of the time of a request, and requests does it for each.
        """
        parts = urlsplit(str(url))
        host = parts.scheme, parts.netloc
        if host not in self._environment:
            self._environment[host] = super().merge_environment_settings(url, *words, **named)
        return self._environment[host]

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Follow no redirect, because requests would read the whole redirecting answer, however large."""


class _Paced(io.RawIOBase):
    """The received bytes of a socket, with a minimum speed.

    The timeout of a socket limits only silence: a server that sends single bytes would never exceed it.
    """

    def __init__(self, inner: io.RawIOBase) -> None:
        self._inner = inner
        self._start: float | None = None  # the time of the first bytes
        self._received = 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._inner.fileno()

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        taken = time.monotonic() - self._start if self._start else 0
        if taken > TIMEOUT + self._received / SLOWEST:
            raise TimeoutError(f"it is too slow: {self._received} bytes in {taken:.0f} seconds")
        count = self._inner.readinto(buffer)
        self._start = self._start or time.monotonic()
        self._received += count or 0
        return count

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *words: Any, **named: Any) -> None:
        super().__init__(sock, *words, **named)
        self.fp = io.BufferedReader(_Paced(self.fp.detach()))


class _Http(HTTPConnection):
    response_class = _Response


class _Https(HTTPSConnection):
    response_class = _Response


class _Adapter(HTTPAdapter):
    def get_connection_with_tls_context(self, *words: Any, **named: Any) -> HTTPConnectionPool:
        pool: Any = super().get_connection_with_tls_context(*words, **named)  # other annotations
        pool.ConnectionCls = _Https if isinstance(pool, HTTPSConnectionPool) else _Http
        typed: HTTPConnectionPool = pool
        return typed


def address(base: str, url: str) -> str:
    """Return `url` resolved relative to `base`; raise EngineError if it is invalid."""
    try:
        return urlsplit(urljoin(base, url)).geturl()
    except ValueError as error:
        place = urlsplit(base).netloc
        raise EngineError(f"{place} names an invalid address: {url[:200]!r}") from error


def passes(error: requests.RequestException) -> bool:
    """Whether an error is transient."""
    passing = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
    return isinstance(error, passing) and not isinstance(error, requests.exceptions.SSLError)


def cause(error: BaseException) -> str:
    """Return the cause of an error of requests, without the repeated addresses."""
    while error.__context__ is not None:
        error = error.__context__
    return str(getattr(error, "strerror", None) or error)


def _bounded(answer: requests.Response) -> bytes:
    raw = bytearray()
    for chunk in answer.iter_content(1 << 16):
        raw += chunk
        if len(raw) > LIMIT:
            place = urlsplit(answer.url).netloc
            raise EngineError(
                f"the answer of {place} exceeds {LIMIT // 2**20} MiB, the limit for documents of a registry",
                remedy="check the name, and that it is a registry",
            )
    return bytes(raw)
