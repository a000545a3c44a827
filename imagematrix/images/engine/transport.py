"""The ways to the engine: plain requests over a local socket, docker-py's client for other addresses.

Each call of the engine's API is written once, in the modules beside this one, for a Transport. A request over
the socket takes a millisecond; docker-py takes a hundred to import, so it is loaded only where it is needed.
"""

from __future__ import annotations

import _socket  # the core of `socket`, which takes longer to import than most requests take
import contextlib
import json

from imagematrix.common.record import Record
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError, EngineUnreachableError
from imagematrix.images.engine.endpoint import find_address

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator
    from typing import Any, Protocol, TypeVar

    import docker

    T = TypeVar("T")

    class Transport(Protocol):
        """A way to an engine."""

        def get(self, resource: str, answer_s: float | None = None) -> EngineResponse:
            """Return the response for `resource`; raise EngineError.

            `answer_s` is the timeout without data; by default that of the transport.
            """


OK, MISSING = 200, 404  # HTTP status codes
START = "start one (`systemctl start docker`), or set DOCKER_HOST to its address"
TIMEOUT = 600  # seconds without data; loading a large image takes long
ANSWER_S = 30  # seconds without data: milliseconds, unless dozens launch at once
RESPONSE_LIMIT = 256 * 1024 * 1024  # bytes


class EngineResponse(Record):
    """The response of the engine at `where`, with the names of its headers in lower case."""

    where: str
    status: int
    headers: frozenset[str]
    body: bytes

    def json(self) -> object:
        """Return the content; raise EngineError if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"not a Docker engine at {self.where}") from error

    def expect(self, kind: type[T]) -> T:
        """Return the content, of the type `kind`; raise EngineError if the engine refused."""
        answer = self.json()
        if self.status != OK or not isinstance(answer, kind):
            raise make_refused_error(self.where, answer)
        return answer

    def expect_or_none(self, kind: type[T]) -> T | None:
        """Return the same as `expect`, or None if the engine has no such thing."""
        return None if self.status == MISSING and isinstance(self.json(), dict) else self.expect(kind)


class UnixSocket:
    """The transport over the local socket at `where`; `answer_s` is its timeout, by default ANSWER_S."""

    def __init__(self, where: str, answer_s: float | None = None) -> None:
        self._where = where
        self._answer_s = answer_s

    def get(self, resource: str, answer_s: float | None = None) -> EngineResponse:
        """Return the response for `resource`; raise EngineError."""
        timeout = self._choose_timeout(answer_s)
        connection = self._request(resource, timeout)
        try:
            head, _, body = read_limited(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        except OSError as error:
            raise make_unreachable_error(self._where, error, timeout) from error
        finally:
            connection.close()
        first, *lines = head.split(b"\r\n")
        status = first[9:12]  # after "HTTP/1.0 "
        return EngineResponse(
            where=self._where,
            status=int(status) if status.isdigit() else 0,
            headers=frozenset(line.partition(b":")[0].decode("latin-1").lower() for line in lines),
            body=body,
        )

    def open_response(self, resource: str) -> socket.socket:
        """Request `resource` and return the connection with the response; raise EngineError.

        The response includes its head, and ends when the engine closes the connection.
        """
        import socket

        timeout = self._choose_timeout()
        # Callers read lines, which the core's sockets cannot.
        connection = socket.socket(fileno=self._request(resource, timeout).detach())
        connection.settimeout(timeout)
        return connection

    def _choose_timeout(self, answer_s: float | None = None) -> float:
        chosen_s = self._answer_s if answer_s is None else answer_s
        return ANSWER_S if chosen_s is None else chosen_s

    def _request(self, resource: str, timeout: float) -> _socket.socket:
        # HTTP/1.0 has neither chunks nor keep-alive: the body ends when the engine closes the connection.
        connection = None
        try:
            connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
            connection.settimeout(timeout)
            connection.connect(self._where.removeprefix("unix://"))
            connection.sendall(f"GET {resource} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
        except OSError as error:
            if connection:
                connection.close()
            raise make_unreachable_error(self._where, error, timeout) from error
        return connection


class DockerPy:
    """The transport of a docker-py `client`."""

    def __init__(self, client: docker.DockerClient) -> None:
        self._api: Any = client.api

    def get(self, resource: str, answer_s: float | None = None) -> EngineResponse:
        """Return the response for `resource`; raise EngineError."""
        # docker-py's own methods have only the client's timeout, and no limit on the size.
        timeout = self._api.timeout if answer_s is None else answer_s
        with convert_errors():
            requested = self._api.get(f"{self._api.base_url}{resource}", timeout=timeout, stream=True)
            with contextlib.closing(requested) as response:
                return EngineResponse(
                    where=find_address(),
                    status=response.status_code,
                    headers=frozenset(map(str.lower, response.headers)),
                    body=read_limited(response.iter_content(1 << 16)),
                )


@contextlib.contextmanager
def connect(transport: Transport | None = None) -> Iterator[Transport]:
    """Yield `transport`, or else one to the engine at `find_address`; raise EngineError."""
    if transport:
        yield transport
    elif local := open_local_socket():
        yield local
    else:
        with contextlib.closing(open_client()) as connection:
            yield DockerPy(connection)


def open_local_socket(answer_s: float | None = None) -> UnixSocket | None:
    """Return the transport to the engine at `find_address`, None if that is not a local socket."""
    where = find_address()
    return UnixSocket(where, answer_s) if where.startswith("unix://") else None


def is_responding() -> bool:
    """Return whether the engine responds at a local socket; False if its address is not one.

    Raises EngineError if it does not respond.
    """
    local = open_local_socket()
    if local:
        local.get("/_ping")
    return local is not None


def open_client() -> docker.DockerClient:
    """Return a docker-py client that is connected to the engine; raise EngineError."""
    is_responding()  # else docker-py would be loaded for nothing

    import docker
    import requests

    from imagematrix.images.engine.docker_client import Client

    where = find_address()
    try:
        return Client(where, TIMEOUT)
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise make_unreachable_error(where, error) from error
    except ValueError as error:
        raise EngineError(f"docker's configuration for {where} cannot be read: {error}") from error


def read_limited(chunks: Iterable[bytes]) -> bytes:
    """Return the whole of a response; raise EngineError if it is too large."""
    whole = []
    size = 0
    for chunk in chunks:
        whole.append(chunk)
        size += len(chunk)
        if size > RESPONSE_LIMIT:
            raise EngineError(f"response of the engine exceeds {RESPONSE_LIMIT // 2**20} MiB")
    return b"".join(whole)


def quote(text: str) -> str:
    """Return `text` percent-encoded for a query."""
    # Like urllib.parse.quote, without the milliseconds that importing urllib takes.
    return "".join(
        char if char.isalnum() and char.isascii() else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in text
    )


def make_filters(**wanted: list[str]) -> str:
    """Return the query for those entries of a list that have one of the `wanted` values of each property."""
    return f"filters={quote(json.dumps(wanted))}"


@contextlib.contextmanager
def convert_errors(*passed: type[Exception]) -> Iterator[None]:
    """Raise EngineError in place of docker-py's errors, except for those of the types `passed`."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except passed:
        raise
    except APIError as error:
        raise make_refused_error(find_address(), error.explanation or str(error)) from error
    except (DockerException, RequestException, HTTPError, ConnectionError, TimeoutError) as error:
        raise make_unreachable_error(find_address(), error) from error


def make_unreachable_error(where: str, error: Exception, answer_s: float = TIMEOUT) -> EngineUnreachableError:
    """Return the error for an engine that cannot be reached at `where`, or not within `answer_s`."""
    text = str(error)
    if "Permission denied" in text and where.startswith("unix"):
        remedy = "join the group docker, or run this as root"
        return EngineUnreachableError(
            f"cannot reach the Docker engine at {where}: permission denied", remedy=remedy
        )
    if isinstance(error, TimeoutError):
        remedy = "check what it is busy with, or restart it: `systemctl status docker`"
        return EngineUnreachableError(
            f"the Docker engine at {where} did not respond within {answer_s:g} seconds", remedy=remedy
        )
    remedies = {
        "ssh": f"run `ssh {quote_word(where)} docker version` to check machine, login and engine",
        "tcp": "start it on that machine (`systemctl start docker`), or set DOCKER_HOST to another",
    }
    return EngineUnreachableError(
        f"cannot reach the Docker engine at {where}", remedy=remedies.get(where.partition("://")[0], START)
    )


def make_refused_error(where: str, answer: object) -> EngineError:
    """Return the error for a request that the engine at `where` answered with an error, or strangely."""
    message = answer.get("message", answer) if isinstance(answer, dict) else answer
    return EngineError(f"the Docker engine at {where} refused: {message}")
