"""The API server of the cluster that this process runs in, as its service account may use it."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from imagematrix import documents
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CREATED",
    "FAILURES",
    "GONE",
    "OK",
    "SILENCE_S",
    "ApiServer",
    "GoneError",
    "checked",
    "failure",
    "inside",
    "require",
]

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LINE = 4 << 20  # bytes; etcd keeps no object of more than 1.5 MiB
SILENCE_S = 30
OK, CREATED, GONE = 200, 201, 410
SHOWN = 500  # bytes of an answer that an error shows
# The last two are for a line that is too long: which one depends on the release of aiohttp.
FAILURES = (aiohttp.ClientError, TimeoutError, OSError, HttpProcessingError, ValueError)


class GoneError(Exception):
    """The API server no longer has the changes since a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """An API server: its URL, the file with the token, and the file with the authorities to trust.

    The token is read for each request, because kubelet replaces it.
    """

    url: str
    token: Path
    authorities: Path | None

    def headers(self) -> dict[str, str]:
        """Return the headers of a request; raise UsageError if the token cannot be read."""
        return {"Authorization": f"Bearer {_read(self.token)}"}

    def namespace(self) -> str:
        """Return the namespace of this process's pod; raise UsageError if it cannot be read."""
        return _read(self.token.with_name("namespace"))

    def session(self, silence_s: float = SILENCE_S) -> aiohttp.ClientSession:
        """Return a session, which ends a request after so long a silence.

        Raises UsageError if the authorities cannot be read.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=silence_s)
        connector = aiohttp.TCPConnector(ssl=self._context())
        return aiohttp.ClientSession(self.url, connector=connector, timeout=timeout, read_bufsize=LINE)

    def _context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.authorities)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{self.authorities} cannot be read: {error}") from error


def inside(environment: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> ApiServer:
    """Return the API server of the cluster that this process runs in; raise UsageError outside a cluster."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise UsageError(
            "--nodes cluster: not running in a pod",
            remedy="give --nodes NODES.json, from `kubectl get nodes -o json`",
        )
    name = f"[{host}]" if ":" in host else host
    return ApiServer(url=f"https://{name}:{port}", token=account / "token", authorities=account / "ca.crt")


async def checked(answer: aiohttp.ClientResponse, where: str) -> documents.Fields:
    """Return the object in an answer; raise EngineError if the request was refused, GoneError for 410.

    `where` names the object in messages.
    """
    await require(answer)
    return documents.Fields(documents.parse(await answer.read(), where), where)


async def require(answer: aiohttp.ClientResponse) -> None:
    """Raise EngineError if a request was refused, and GoneError if it was for a version that is gone."""
    if answer.status == GONE:
        raise GoneError
    if answer.status not in {OK, CREATED}:
        text = (await answer.content.read(SHOWN)).decode(errors="replace")
        raise EngineError(f"the API server answered {answer.status}: {text}")


def failure(error: BaseException) -> EngineError:
    """Return the error to tell of one of FAILURES."""
    return EngineError(f"the API server cannot be read: {error!r:.300}")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
