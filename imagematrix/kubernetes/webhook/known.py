"""What the webhook knows of nodes and catalogs, and the policies that follow."""

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
    from imagematrix.kubernetes.admission import Policy
    from imagematrix.kubernetes.nodes import Node
    from imagematrix.kubernetes.webhook.journal import Journal
    from imagematrix.selection.question import Where

__all__ = ["Known", "Question", "labelled"]

SETTLE_S = 0.2  # changes come in bursts, such as when nodes start


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """How images are chosen, as for `classes`, and whether undecided pods are refused."""

    deny: bool = False
    allow_cpu: bool = False
    where: Where | None = None


class Known:
    """The nodes and catalogs as they were last read, and the policies for them.

    `policies` is None until the nodes and the catalogs with all of `names` are known.
    """

    def __init__(self, names: Iterable[str], question: Question, journal: Journal) -> None:
        self.policies: tuple[Policy, ...] | None = None
        self._names = tuple(names)
        self._question = question
        self._journal = journal
        self._nodes: tuple[Node, ...] | None = None
        self._catalogs: dict[str, Catalog] = {}
        self._changed = asyncio.Event()

    def put_nodes(self, nodes: Iterable[Node]) -> None:
        """Take the nodes as they are now."""
        self._nodes = tuple(nodes)
        self._changed.set()

    def put_catalog(self, name: str, catalog: Catalog) -> None:
        """Take a catalog as it is now."""
        if self._catalogs.get(name) != catalog:
            self._catalogs[name] = catalog
            self._changed.set()

    @property
    def missing(self) -> str | None:
        """What is not known yet."""
        without = [name for name in self._names if name not in self._catalogs]
        return (
            "the nodes are not known yet"
            if self._nodes is None
            else (f"the catalog of {without[0]} is not known yet" if without else "no decisions yet")
        )

    async def follow(self) -> None:
        """Decide anew whenever something has changed; after a failure the last policies stay."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            if self._nodes is None or len(self._catalogs) < len(set(self._names)):
                continue
            right, others = labelled(self._nodes)
            catalogs = {name: self._catalogs[name] for name in self._names}
            try:
                self.policies = await asyncio.to_thread(self._decide, right, catalogs)
            except ImagematrixError as error:
                self._journal.failed("policies", error)
            else:
                self._journal.decided(len(right), others)

    def _decide(self, nodes: Sequence[Node], catalogs: Mapping[str, Catalog]) -> tuple[Policy, ...]:
        asked = self._question
        return tuple(
            policy(
                f"{catalog.image}:{catalog.version}",
                classes(nodes, catalog, allow_cpu=asked.allow_cpu, where=asked.where),
                deny=asked.deny,
            )
            for catalog in catalogs.values()
        )


def labelled(nodes: Iterable[Node]) -> tuple[list[Node], list[str]]:
    """Return the nodes whose label of the class is that of their other labels, and the names of the others.

    The others come and go while nodes start or get a driver. No pod with an image of a class can get there,
    because it has the affinity to the label.
    """
    right, others = [], []
    for node in nodes:
        if node.labels.get(CLASS) == facts(node.host)[CLASS]:
            right.append(node)
        else:
            others.append(node.name)
    return right, others
