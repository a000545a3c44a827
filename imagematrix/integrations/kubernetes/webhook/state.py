"""The nodes and catalogs that the webhook last read, and the policies that follow from them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from imagematrix.errors import ImagematrixError
from imagematrix.integrations.http_service.garbage import exempt_from_collection
from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy
from imagematrix.integrations.kubernetes.admission.cluster_policy import make_cluster_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
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
    are known. While no policy can be made from one of the catalogs, its last policy stays, or if there is
    none, its image is undecided.
    """

    def __init__(self, names: Iterable[str], options: PolicyOptions, telemetry: Telemetry) -> None:
        self.policies: tuple[AdmissionPolicy, ...] | None = None
        self.cluster_policies: tuple[ClusterPolicy, ...] = ()
        self._policies_by_catalog: dict[str, ClusterPolicy] = {}
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
        """Make new policies whenever something has changed; those that fail stay as they were."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            if self._nodes is None or len(self._catalogs) < len(set(self._names)):
                continue
            nodes, catalogs = self._nodes, {name: self._catalogs[name] for name in self._names}
            results = await asyncio.to_thread(self._make_policies, nodes, catalogs)
            problems = {}
            for name, result in results.items():
                if isinstance(result, ImagematrixError):
                    problems[name] = result
                    self._telemetry.record_failure("policies", result)
                else:
                    self._policies_by_catalog[name] = result
            self.cluster_policies = tuple(
                self._policies_by_catalog[name] for name in catalogs if name in self._policies_by_catalog
            )
            self.policies = tuple(
                self._policies_by_catalog[name].policy
                if name in self._policies_by_catalog
                else self._make_undecided_policy(catalog, problems[name])
                for name, catalog in catalogs.items()
            )
            if len(problems) < len(results):
                unlabelled = self.cluster_policies[0].unlabelled
                self._telemetry.record_policies(len(nodes) - len(unlabelled), unlabelled)
            exempt_from_collection()  # the nodes and policies stay

    def _make_policies(
        self, nodes: Sequence[ClusterNode], catalogs: Mapping[str, Catalog]
    ) -> dict[str, ClusterPolicy | ImagematrixError]:
        """Return the policy from each catalog, or why there is none: teams have different catalogs."""
        options = self._options
        results: dict[str, ClusterPolicy | ImagematrixError] = {}
        for name, catalog in catalogs.items():
            try:
                results[name] = make_cluster_policy(
                    nodes, catalog, deny=options.deny, allow_cpu=options.allow_cpu, where=options.where
                )
            except ImagematrixError as error:
                results[name] = error
        return results

    def _make_undecided_policy(self, catalog: Catalog, problem: ImagematrixError) -> AdmissionPolicy:
        return AdmissionPolicy(
            name=f"{catalog.image}:{catalog.version}",
            classes=(),
            deny=self._options.deny,
            problem=f"no image can be chosen: {problem}",
        )
