"""HTTP for registries: every answer is read completely, with limits of size and time."""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import re
import time
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from imagematrix.errors import EngineError
from imagematrix.images.oci.manifest import LIMIT
from imagematrix.images.oci.redirects import Redirects
from imagematrix.images.oci.url import Url

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping
    from typing import IO, Any

    from _typeshed import WriteableBuffer

    from imagematrix.images.oci.byte_stream import ByteStream

TIMEOUT = 30  # seconds without a byte
SLOWEST = 4096  # minimum average speed of an answer after that time, in bytes per second
# Minimum speed at which a registry stores an upload before it answers, in bytes per second: docker-registry
# writes it to its disk, or copies it within an object store.
STORED = 8 << 20
CONNECTIONS = 16
CODE = re.compile(rb'"code"\s*:\s*"([A-Z_]{1,40})"')  # the code of an error, in the body of an answer
ERRORS = 5  # codes to name in a message
FAILED = 400  # the lowest HTTP status of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryResponse:
    """A complete answer, from `url`; `next` is the address of the next page, if any.

    It is `trusted` if no other origin than that of the request decided where it comes from.
    """

    status: int
    url: Url
    trusted: bool
    headers: Mapping[str, str]
    body: bytes
    next: str | None = None

    @property
    def codes(self) -> list[str]:
        """The error codes in it (OCI distribution specification, "Error Codes")."""
        return list(dict.fromkeys(code.decode() for code in CODE.findall(self.body)))[:ERRORS]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedResponse(RegistryResponse):
    """An answer whose body is a `stream`; `body` is empty, except for an error."""

    stream: ByteStream


class HttpClient:
    """Persistent connections. Thread-safe."""

    def __init__(self) -> None:
        self._session = _HttpSession()
        # A jar would send a registry's cookie to all ports of its host, and to hosts that the cookie names.
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _Adapter(pool_maxsize=CONNECTIONS))

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def send(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str] | None = None,
        data: bytes | IO[bytes] | None = None,
        authorization: str | None = None,
    ) -> RegistryResponse:
        """Send a request and return its answer; the `authorization` goes only to the origin of `url`.

        Raises requests.RequestException if there is no answer, EngineError if it is too large, or for
        redirects that `Redirects` does not follow.
        """
        with self._follow_redirects(method, url, headers or {}, data, authorization) as (at, answer):
            return RegistryResponse(**_make_fields(at, answer), body=_read_bounded(at.url, answer))

    @contextlib.contextmanager
    def stream(
        self, url: Url, headers: Mapping[str, str], authorization: str | None = None
    ) -> Iterator[StreamedResponse]:
        """Yield the answer for `url` with its body of any size as a stream; see `send`."""
        # The raw stream would still have a content encoding.
        headers = {"Accept-Encoding": "identity", **headers}
        with self._follow_redirects("GET", url, headers, None, authorization) as (at, answer):
            body = _read_bounded(at.url, answer) if answer.status_code >= FAILED else b""
            yield StreamedResponse(**_make_fields(at, answer), body=body, stream=answer.raw)

    @contextlib.contextmanager
    def _follow_redirects(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str],
        data: bytes | IO[bytes] | None,
        authorization: str | None,
    ) -> Iterator[tuple[Redirects, requests.Response]]:
        """Follow redirects; yield where they ended, and the last answer, whose body is not read yet."""
        redirects = Redirects(method, url)
        form = method == "POST" and data is not None  # it contains a secret, so it follows no redirect
        while True:
            sent = authorization if redirects.trusted else None
            with self._request(method, redirects.url, headers, data, sent) as answer:
                if form or not redirects.follow(answer.status_code, answer.headers):
                    yield redirects, answer
                    return
                _read_bounded(redirects.url, answer)  # read it, to reuse the connection

    def _request(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str],
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
        return self._session.request(
            method,
            str(url),
            headers=dict(headers),
            data=data,
            auth=sign,
            timeout=(TIMEOUT, TIMEOUT + size / STORED),
            stream=True,
        )


class _HttpSession(requests.Session):
    def __init__(self) -> None:
        super().__init__()
        self._environment: dict[tuple[str, str, int], Any] = {}

    def merge_environment_settings(self, url: Any, *words: Any, **named: Any) -> Any:
        """Return the proxy and CA settings for `url`, reading the environment once per origin.

        Reading it takes a third of the time of a request, and requests does it for each.
        """
        origin = Url.parse(str(url)).origin
        if origin not in self._environment:
            self._environment[origin] = super().merge_environment_settings(url, *words, **named)
        return self._environment[origin]

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return None, to follow no redirect: requests would read the whole redirecting answer."""


class _PacedSocket(io.RawIOBase):
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
        elapsed = time.monotonic() - self._start if self._start else 0
        if elapsed > TIMEOUT + self._received / SLOWEST:
            raise TimeoutError(f"it is too slow: {self._received} bytes in {elapsed:.0f} seconds")
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
        self.fp = io.BufferedReader(_PacedSocket(self.fp.detach()))


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


def get_cause(error: BaseException) -> str:
    """Return the message of the exception that an error of requests wraps, without repeated addresses.

    That exception's own context may be one that the caller was handling.
    """
    wrappers = requests.RequestException, urllib3.exceptions.HTTPError
    while isinstance(error, wrappers) and error.__context__ is not None:
        error = error.__context__
    return str(getattr(error, "strerror", None) or error)


def _make_fields(at: Redirects, answer: requests.Response) -> dict[str, Any]:
    """Return the fields of a RegistryResponse except its body."""
    return {
        "status": answer.status_code,
        "url": at.url,
        "trusted": at.trusted,
        "headers": answer.headers,
        "next": answer.links.get("next", {}).get("url"),
    }


def _read_bounded(url: Url, answer: requests.Response) -> bytes:
    raw = bytearray()
    for chunk in answer.iter_content(1 << 16):
        raw += chunk
        if len(raw) > LIMIT:
            what = f"{LIMIT // 2**20} MiB, the limit for documents of a registry"
            raise EngineError(
                f"the answer of {url.authority} exceeds {what}",
                remedy="check the name, and that it belongs to a registry",
            )
    return bytes(raw)
