"""The nodes and catalogs that the webhook last read, and the policies that follow from them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from imagematrix.errors import ImagematrixError
from imagematrix.kubernetes.admission import policy
from imagematrix.kubernetes.classes import classes
from imagematrix.kubernetes.labels import CLASS, facts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.kubernetes.admission import AdmissionPolicy
    from imagematrix.kubernetes.nodes import ClusterNode
    from imagematrix.kubernetes.webhook.telemetry import Telemetry
    from imagematrix.selection.question import Where

__all__ = ["ClusterState", "PolicyOptions", "labelled"]

SETTLE_S = 0.2  # changes come in bursts, such as when nodes start


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """How images are chosen, as for `classes`, and whether undecided pods are refused."""

    deny: bool = False
    allow_cpu: bool = False
    where: Where | None = None


class ClusterState:
    """The nodes and catalogs as last read, and the policies for them.

    `policies` is None until the nodes and the catalogs of all `names` are known.
    """

    def __init__(self, names: Iterable[str], options: PolicyOptions, telemetry: Telemetry) -> None:
        self.policies: tuple[AdmissionPolicy, ...] | None = None
        self._names = tuple(names)
        self._options = options
        self._telemetry = telemetry
        self._nodes: tuple[ClusterNode, ...] | None = None
        self._catalogs: dict[str, Catalog] = {}
        self._changed = asyncio.Event()

    def put_nodes(self, nodes: Iterable[ClusterNode]) -> None:
        """Replace the nodes."""
        self._nodes = tuple(nodes)
        self._changed.set()

    def put_catalog(self, name: str, catalog: Catalog) -> None:
        """Replace the catalog `name`."""
        if self._catalogs.get(name) != catalog:
            self._catalogs[name] = catalog
            self._changed.set()

    @property
    def missing(self) -> str | None:
        """Why there are no policies yet."""
        if self._nodes is None:
            return "the nodes are not known yet"
        without = [name for name in self._names if name not in self._catalogs]
        return f"the catalog of {without[0]} is not known yet" if without else "no policies yet"

    async def follow(self) -> None:
        """Make new policies whenever something has changed; after a failure the last ones stay."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            if self._nodes is None or len(self._catalogs) < len(set(self._names)):
                continue
            matching, others = labelled(self._nodes)
            catalogs = {name: self._catalogs[name] for name in self._names}
            try:
                self.policies = await asyncio.to_thread(self._decide, matching, catalogs)
            except ImagematrixError as error:
                self._telemetry.failed("policies", error)
            else:
                self._telemetry.decided(len(matching), others)

    def _decide(
        self, nodes: Sequence[ClusterNode], catalogs: Mapping[str, Catalog]
    ) -> tuple[AdmissionPolicy, ...]:
        options = self._options
        return tuple(
            policy(
                f"{catalog.image}:{catalog.version}",
                classes(nodes, catalog, allow_cpu=options.allow_cpu, where=options.where),
                deny=options.deny,
            )
            for catalog in catalogs.values()
        )


def labelled(nodes: Iterable[ClusterNode]) -> tuple[list[ClusterNode], list[str]]:
    """Return the nodes whose class label matches their other labels, and the names of the other nodes.

    A class label can be missing or wrong while a node starts or gets another driver. No pod with the image of
    a class can start on such a node, because the affinity of the pod requires the class label.
    """
    matching, others = [], []
    for node in nodes:
        if node.labels.get(CLASS) == facts(node.host)[CLASS]:
            matching.append(node)
        else:
            others.append(node.name)
    return matching, others
