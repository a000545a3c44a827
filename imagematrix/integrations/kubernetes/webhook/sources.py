"""The sources that the webhook polls for nodes and catalogs: files and registries."""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import Protocol

from imagematrix.common.files import read_stamp
from imagematrix.errors import ImagematrixError
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.integrations.kubernetes.nodes.nodes import load_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.integrations.kubernetes.webhook.state import ClusterState
    from imagematrix.integrations.kubernetes.webhook.telemetry import Telemetry

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
        last: object = ()
        while True:
            stamp = read_stamp(self._path)
            if stamp != last:
                last = stamp
                try:
                    state.put_nodes(await asyncio.to_thread(load_nodes, self._path, BytesIO()))
                except ImagematrixError as error:
                    telemetry.record_failure("nodes", error)
            await asyncio.sleep(FILE_S)


async def follow_catalog(
    name: str, state: ClusterState, telemetry: Telemetry, policy: Path | None = None
) -> None:
    """Update `state` when the catalog `name` changes.

    While it cannot be read, or its signatures do not satisfy a policy, the last one is used.
    """
    while True:
        try:
            state.put_catalog(name, await asyncio.to_thread(open_catalog, name, policy=policy))
        except ImagematrixError as error:
            telemetry.record_failure("catalog", error)
        await asyncio.sleep(CATALOG_S)
