"""HTTP for registries: every answer is read to its end, and bounded in size and in time."""

from __future__ import annotations

import contextlib
import http.client
import io
import time
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from imagematrix.documents import natural
from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping
    from typing import IO, Any

    from _typeshed import WriteableBuffer

    from imagematrix.oci.expanded import Stream

__all__ = ["Answer", "Client", "address", "cause", "passes"]

LIMIT = 4 * 1024 * 1024  # bytes: what registries have to take as a manifest, and few take more
TIMEOUT = 30  # seconds of silence
SLOWEST = 4096  # bytes a second, on average, that an answer has to bring after them
CONNECTIONS = 16
REDIRECTS = 5
MOVED = (301, 302, 307, 308)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, read to its end; `next` is the address of the next page, if it has one."""

    status: int
    url: str
    headers: Mapping[str, str]
    body: bytes
    next: str | None = None

    @property
    def wait(self) -> int:
        """The seconds that it asks the client to wait; 0 if it does not."""
        return natural(self.headers.get("Retry-After", "")) or 0


class Client:
    """Connections that are kept alive. Threads may share it."""

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
        """Send a request and return its answer; the `authorization` goes to the host of `url` and no other.

        Raises requests.RequestException where none comes, EngineError if it is too large.
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
        """Yield the status of what is at `url`, and its body, which may be of any size, to be read in pieces.

        Raises requests.RequestException where none comes.
        """
        first = urlsplit(url)[:2]
        for _ in range(REDIRECTS):
            given = authorization if urlsplit(url)[:2] == first else None
            # Compressed on the way, it would come as it is sent.
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
        """Return an answer that is yet to be read."""

        def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
            # Without an `auth` of ours, requests would take one from ~/.netrc.
            if authorization:
                request.headers["Authorization"] = authorization
            return request

        if data is not None and not isinstance(data, bytes):
            data.seek(0)
        return self._session.request(
            method,
            url,
            headers=dict(headers or {}),
            data=data,
            auth=sign,
            timeout=TIMEOUT,
            stream=True,
        )


class _Session(requests.Session):
    def __init__(self) -> None:
        super().__init__()
        self._environment: dict[tuple[str, str], Any] = {}

    def merge_environment_settings(self, url: Any, *words: Any, **named: Any) -> Any:
        """Return the proxy and the authorities for `url`, by an environment that is read once for each host.

        That is a third of what a request costs, and requests reads it for every one.
        """
        parts = urlsplit(str(url))
        host = parts.scheme, parts.netloc
        if host not in self._environment:
            self._environment[host] = super().merge_environment_settings(url, *words, **named)
        return self._environment[host]

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Follow no redirect: requests would read the whole answer that redirects, however large it is."""


class _Paced(io.RawIOBase):
    """What a socket receives, as long as it is not too slow.

    The timeout of a socket is one of silence: a server that sends a byte now and then would never hit it.
    """

    def __init__(self, inner: io.RawIOBase) -> None:
        self._inner = inner
        self._start = time.monotonic()
        self._received = 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._inner.fileno()

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        taken = time.monotonic() - self._start
        if taken > TIMEOUT + self._received / SLOWEST:
            raise TimeoutError(f"it is too slow: {self._received} bytes in {taken:.0f} seconds")
        count = self._inner.readinto(buffer)
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
        pool: Any = super().get_connection_with_tls_context(*words, **named)  # its annotations differ
        pool.ConnectionCls = _Https if isinstance(pool, HTTPSConnectionPool) else _Http
        typed: HTTPConnectionPool = pool
        return typed


def address(base: str, url: str) -> str:
    """Return the address of `url` relative to `base`; raise EngineError if it is invalid."""
    try:
        return urlsplit(urljoin(base, url)).geturl()
    except ValueError as error:
        place = urlsplit(base).netloc
        raise EngineError(f"{place} names an invalid address: {url[:200]!r}") from error


def passes(error: requests.RequestException) -> bool:
    """Whether the same request may succeed a moment later."""
    passing = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
    return isinstance(error, passing) and not isinstance(error, requests.exceptions.SSLError)


def cause(error: BaseException) -> str:
    """Return what lies beneath an error of requests, which repeats the address more than once."""
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
                f"{place} answers more than {LIMIT // 2**20} MiB, which no document of a registry has",
                remedy="check the name, and that it is a registry",
            )
    return bytes(raw)
