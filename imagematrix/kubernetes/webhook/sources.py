"""The sources that the webhook follows for nodes and catalogs: the API server, files and registries."""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import Protocol

from imagematrix.catalog.sources import open_catalog
from imagematrix.errors import ImagematrixError
from imagematrix.files import stamp
from imagematrix.kubernetes.nodes import load, parse
from imagematrix.kubernetes.webhook.watch import Watched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from imagematrix.kubernetes.nodes import ClusterNode
    from imagematrix.kubernetes.webhook.api import ApiServer
    from imagematrix.kubernetes.webhook.state import ClusterState
    from imagematrix.kubernetes.webhook.telemetry import Telemetry

__all__ = ["NodeSource", "NodesFile", "WatchedNodes", "follow_catalog"]

NODES = "/api/v1/nodes"
FILE_S = 2.0  # a look at a file's status costs nothing
CATALOG_S = 30.0  # every replica asks the registry for an index


class NodeSource(Protocol):
    """A source of nodes."""

    async def follow(self, state: ClusterState, telemetry: Telemetry) -> None:
        """Update `state` whenever the nodes change, until cancelled."""
        ...


class NodesFile:
    """Nodes from a file, read again when it changes; while it is invalid, the last valid nodes are used."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def follow(self, state: ClusterState, telemetry: Telemetry) -> None:
        """See NodeSource."""
        seen: object = ()
        while True:
            now = stamp(self._path)
            if now != seen:
                seen = now
                try:
                    state.put_nodes(await asyncio.to_thread(load, self._path, BytesIO()))
                except ImagematrixError as error:
                    telemetry.failed("nodes", error)
            await asyncio.sleep(FILE_S)


class WatchedNodes:
    """The nodes of a cluster, watched at its API server."""

    def __init__(self, api: ApiServer) -> None:
        self._watched = Watched(api, NODES, "nodes", _node)

    async def follow(self, state: ClusterState, telemetry: Telemetry) -> None:
        """See NodeSource; while the API server cannot be read, the last nodes are used."""
        nodes = self._watched

        def listed() -> None:
            state.put_nodes(nodes.objects.values())

        def changed(before: ClusterNode | None, after: ClusterNode | None) -> None:
            if before is None or after is None or before.labels != after.labels:
                state.put_nodes(nodes.objects.values())
            elif _takes(before) != _takes(after):  # most changes are heartbeats
                state.put_nodes(nodes.objects.values(), labels=False)

        await nodes.follow(listed, changed, telemetry)


def _takes(node: ClusterNode) -> tuple[object, ...]:
    """Return which pods a node takes, by other facts than its labels."""
    return node.cordoned, node.taints, node.allocatable


def _node(data: dict[str, Any]) -> ClusterNode:
    # The items of a list have no kind.
    return parse({**data, "kind": "Node"}, "node")[0]


async def follow_catalog(name: str, state: ClusterState, telemetry: Telemetry) -> None:
    """Update `state` when the catalog `name` changes; while it cannot be read, the last one is used."""
    while True:
        try:
            state.put_catalog(name, await asyncio.to_thread(open_catalog, name))
        except ImagematrixError as error:
            telemetry.failed("catalog", error)
        await asyncio.sleep(CATALOG_S)
