"""The nodes of a cluster, watched at its API server."""

from __future__ import annotations

from imagematrix.integrations.kubernetes.client.api import Collection, watch_collection
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.common.json_documents import Fields
    from imagematrix.integrations.kubernetes.client.api import ApiServer
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode
    from imagematrix.integrations.kubernetes.webhook.state import ClusterState
    from imagematrix.integrations.kubernetes.webhook.telemetry import Telemetry


class WatchedNodes:
    """The nodes of a cluster, watched at its API server."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api

    async def follow(self, state: ClusterState, telemetry: Telemetry) -> None:
        """See NodeSource; while the API server cannot be read, the last nodes are used."""
        await watch_collection(
            self._api,
            Collection("/api/v1/nodes", "nodes", _parse_node, is_equivalent=_is_equivalent),
            lambda nodes: state.put_nodes(nodes.values()),
            telemetry.log,
            lambda error: telemetry.record_failure("nodes", error),
        )


def _parse_node(item: Fields) -> ClusterNode:
    # The items of a list have no kind.
    return parse_nodes({**item.data, "kind": "Node"}, "node")[0]


def _is_equivalent(before: ClusterNode, after: ClusterNode) -> bool:
    """Whether a node has not changed in what decides which pods it takes: most changes are heartbeats.

    Its Host depends on its capacity, too.
    """
    return (before.labels, before.host, before.cordoned, before.taints, before.allocatable) == (
        after.labels,
        after.host,
        after.cordoned,
        after.taints,
        after.allocatable,
    )
