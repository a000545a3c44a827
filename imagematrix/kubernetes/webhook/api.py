"""The nodes of a cluster from its API server: a list, then a watch.

See https://kubernetes.io/docs/reference/using-api/api-concepts, "Efficient detection of changes".
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from imagematrix import documents
from imagematrix.errors import EngineError, UsageError
from imagematrix.kubernetes.nodes import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from imagematrix.kubernetes.nodes import ClusterNode
    from imagematrix.kubernetes.webhook.state import ClusterState
    from imagematrix.kubernetes.webhook.telemetry import Telemetry

__all__ = ["ApiServer", "WatchedNodes", "inside"]

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NODES = "/api/v1/nodes"
PAGE = 500  # nodes of one answer
LINE = 4 << 20  # bytes; etcd keeps no object of more than 1.5 MiB
WATCH_S = 300  # after which the API server ends a watch
SILENCE_S = 30
PAUSE_S, LONGEST_S = 1.0, 30.0  # before a retry; each pause is twice as long as the last
OK, GONE = 200, 410
# The last two are for a line that is too long: which one depends on the release of aiohttp.
FAILURES = (aiohttp.ClientError, TimeoutError, OSError, HttpProcessingError, ValueError)


class _GoneError(Exception):
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
        try:
            return {"Authorization": f"Bearer {self.token.read_text('utf-8').strip()}"}
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.token} cannot be read: {error}") from error

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of a connection; raise UsageError if the authorities cannot be read."""
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


class WatchedNodes:
    """The nodes of a cluster, watched at its API server."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._nodes: dict[str, ClusterNode] = {}
        self._version: str | None = None

    async def follow(self, state: ClusterState, telemetry: Telemetry) -> None:
        """See NodeSource; while the API server cannot be read, the last nodes are used."""
        pause = PAUSE_S
        while True:
            before = self._version
            try:
                await self._read(state, telemetry)
            except _GoneError:
                self._version = None
                telemetry.note("nodes: listing again, because the API server has dropped older changes")
            except (EngineError, UsageError) as error:
                telemetry.failed("nodes", error)
            except FAILURES as error:
                telemetry.failed("nodes", EngineError(f"the API server cannot be read: {error!r:.300}"))
            pause = PAUSE_S if self._version != before else min(2 * pause, LONGEST_S)
            # Several webhooks should not retry at the same time.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311

    async def _read(self, state: ClusterState, telemetry: Telemetry) -> None:
        """List the nodes if needed, then apply changes until the watch ends."""
        # A watch without changes is silent until the API server ends it.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=WATCH_S + SILENCE_S)
        connector = aiohttp.TCPConnector(ssl=self._api.context())
        async with aiohttp.ClientSession(
            self._api.url, connector=connector, timeout=timeout, read_bufsize=LINE
        ) as session:
            if self._version is None:
                self._version = await self._list(session, telemetry)
                state.put_nodes(self._nodes.values())
            async for changed in self._watch(session, self._version, telemetry):
                if changed:
                    state.put_nodes(self._nodes.values())

    async def _list(self, session: aiohttp.ClientSession, telemetry: Telemetry) -> str:
        """Read all nodes and return their version."""
        nodes: dict[str, ClusterNode] = {}
        query = {"limit": str(PAGE)}
        while True:
            async with session.get(NODES, params=query, headers=self._api.headers()) as answer:
                await _check(answer)
                fields = documents.Fields(documents.parse(await answer.read(), "nodes"), "nodes")
            for item in fields.objects("items"):
                node = _node(item.data, telemetry)
                if node:
                    nodes[node.name] = node
            metadata = fields.object_or_none("metadata") or documents.Fields({}, "nodes: metadata")
            following = metadata.text_or_none("continue")
            if not following:
                self._nodes = nodes
                return metadata.text("resourceVersion")
            query["continue"] = following

    async def _watch(
        self, session: aiohttp.ClientSession, version: str, telemetry: Telemetry
    ) -> AsyncIterator[bool]:
        """Apply the changes since a version; yield for each whether it changed labels of nodes."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            # Without bookmarks, the version of a watch without changes would become too old to go on from.
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with session.get(NODES, params=query, headers=self._api.headers()) as answer:
            await _check(answer)
            async for line in answer.content:
                event = documents.Fields(documents.parse(line, "watch"), "watch")
                item = event.object_or_none("object") or documents.Fields({}, "watch: object")
                if event.text("type") == "ERROR":
                    if item.integer_or_none("code") == GONE:
                        raise _GoneError
                    raise EngineError(f"the watch has ended: {item.text_or_none('message')}")
                metadata = item.object_or_none("metadata") or documents.Fields({}, "watch: metadata")
                changed = self._apply(event.text("type"), item, telemetry)
                # Once the change is applied, because a watch that breaks off goes on from this version.
                self._version = metadata.text("resourceVersion")
                yield changed

    def _apply(self, kind: str, item: documents.Fields, telemetry: Telemetry) -> bool:
        """Apply an event; return whether it changed labels of nodes."""
        if kind == "BOOKMARK":
            return False
        metadata = item.object_or_none("metadata")
        name = metadata.text("name") if metadata else ""
        node = None if kind == "DELETED" else _node(item.data, telemetry)
        if node is None:
            return self._nodes.pop(name, None) is not None
        before, self._nodes[name] = self._nodes.get(name), node
        return before is None or before.labels != node.labels  # most changes are heartbeats


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status == GONE:
        raise _GoneError
    if answer.status != OK:
        text = (await answer.content.read(500)).decode(errors="replace")
        raise EngineError(f"the API server answered {answer.status}: {text}")


def _node(data: Mapping[str, object], telemetry: Telemetry) -> ClusterNode | None:
    try:
        # The items of a list have no kind.
        return parse({**data, "kind": "Node"}, "node")[0]
    except UsageError as error:
        telemetry.failed("nodes", error)
        return None
