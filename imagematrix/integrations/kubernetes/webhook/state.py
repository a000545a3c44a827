"""The nodes and catalogs that the webhook last read, and the policies that follow from them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from imagematrix.errors import ImagematrixError
from imagematrix.integrations.http_service.garbage import exempt_from_collection
from imagematrix.integrations.kubernetes.admission.cluster_policy import make_cluster_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy
    from imagematrix.integrations.kubernetes.admission.cluster_policy import ClusterPolicy
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode
    from imagematrix.integrations.kubernetes.webhook.telemetry import Telemetry
    from imagematrix.selection.query import Where

SETTLE_S = 0.2  # changes come in bursts, such as when nodes start


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """How images are chosen, as for `classes`, and whether undecided pods are refused."""

    deny: bool = False
    allow_cpu: bool = False
    where: Where | None = None


class ClusterState:
    """The nodes and catalogs as last read, and the policies for them.

    `policies`, which are those of `cluster_policies`, is None until the nodes and the catalogs of all `names`
    are known.
    """

    def __init__(self, names: Iterable[str], options: PolicyOptions, telemetry: Telemetry) -> None:
        self.policies: tuple[AdmissionPolicy, ...] | None = None
        self.cluster_policies: tuple[ClusterPolicy, ...] = ()
        self._names = tuple(names)
        self._options = options
        self._telemetry = telemetry
        self._nodes: tuple[ClusterNode, ...] | None = None
        self._facts: dict[str, tuple[Mapping[str, str], Host]] | None = None  # what decides, by node
        self._catalogs: dict[str, Catalog] = {}
        self._changed = asyncio.Event()

    @property
    def nodes(self) -> tuple[ClusterNode, ...]:
        """The nodes."""
        return self._nodes or ()

    def put_nodes(self, nodes: Iterable[ClusterNode]) -> None:
        """Replace the nodes; while their labels and Hosts stay, the policies stay."""
        self._nodes = tuple(nodes)
        before, self._facts = self._facts, {node.name: (node.labels, node.host) for node in self._nodes}
        if before != self._facts:
            self._changed.set()

    def put_catalog(self, name: str, catalog: Catalog) -> None:
        """Replace the catalog `name`."""
        if self._catalogs.get(name) != catalog:
            self._catalogs[name] = catalog
            self._changed.set()

    @property
    def unready_reason(self) -> str | None:
        """Why there are no policies yet."""
        if self._nodes is None:
            return "the nodes are not known yet"
        unknown = [name for name in self._names if name not in self._catalogs]
        return f"the catalog of {unknown[0]} is not known yet" if unknown else "no policies yet"

    async def follow(self) -> None:
        """Make new policies whenever something has changed; after a failure the last ones stay."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            if self._nodes is None or len(self._catalogs) < len(set(self._names)):
                continue
            nodes, catalogs = self._nodes, {name: self._catalogs[name] for name in self._names}
            try:
                self.cluster_policies = await asyncio.to_thread(self._make_policies, nodes, catalogs)
            except ImagematrixError as error:
                self._telemetry.record_failure("policies", error)
            else:
                self.policies = tuple(cluster.policy for cluster in self.cluster_policies)
                unlabelled = self.cluster_policies[0].unlabelled if self.cluster_policies else ()
                self._telemetry.record_policies(len(nodes) - len(unlabelled), unlabelled)
                exempt_from_collection()  # the nodes and policies stay

    def _make_policies(
        self, nodes: Sequence[ClusterNode], catalogs: Mapping[str, Catalog]
    ) -> tuple[ClusterPolicy, ...]:
        options = self._options
        return tuple(
            make_cluster_policy(
                nodes, catalog, deny=options.deny, allow_cpu=options.allow_cpu, where=options.where
            )
            for catalog in catalogs.values()
        )
