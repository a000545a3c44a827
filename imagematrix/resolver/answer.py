"""Choosing the variant that a node gets for a tag, or the reasons why it gets none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.errors import EngineError, ImagematrixError, UsageError
from imagematrix.resolver.tag import request
from imagematrix.selection.select import explain, select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.node.host import Host
    from imagematrix.resolver.node import Node
    from imagematrix.selection.selection import Selection

__all__ = ["Nodes", "Resolved", "explained", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """This node, and by name the nodes that represent classes. Their facts are read when they are needed."""

    here: Node
    classes: Mapping[str, Node]

    def host(self, node_class: str | None) -> Host:
        """Return the host of a class, or of this node; raise UsageError if there is no such class.

        Raises EngineError if the host cannot be read: a temporary error, not a verdict about an image.
        """
        node = self.here if node_class is None else self.classes.get(node_class)
        if node is not None:
            try:
                return node.host()
            except ImagematrixError as error:
                raise EngineError(f"the node cannot be read: {error}", remedy=error.remedy) from error
        names = ", ".join(sorted(self.classes)) or "none"
        remedy = f"classes of this resolver: {names}; `--class NAME=FILE` adds one"
        raise UsageError(f"class {node_class!r} not found", remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The variant that answers a tag, and the GPUs that it was chosen for.

    `fits` of the version's `variants` fit; this one is the best.
    """

    reference: str
    digest: str
    gpus: tuple[str, ...]
    fits: int
    variants: int

    def __str__(self) -> str:
        gpus = f"for GPUs {', '.join(self.gpus)}" if self.gpus else "without a GPU"
        return f"{self.reference} {gpus}, the best of {self.fits} that fit out of {self.variants}"


def resolve(nodes: Nodes, catalog: Catalog, tag: str) -> Resolved:
    """Return the variant of `catalog` for `tag` on this node.

    For a class, every node gets the variant of the class's host, if it fits the node. Raises NothingFits with
    every reason; UsageError if the tag is invalid, the choice is ambiguous, or the variant of the class does
    not fit this node.
    """
    requested = request(tag, catalog)
    host = nodes.host(requested.node_class)
    selection = explain(host, catalog, gpus=requested.gpus, where=dict(requested.where))
    if selection.variant is None and selection.decision.differing:
        axis, (value, *_) = next(iter(selection.decision.differing.items()))
        message = f"variants of {catalog.image}:{tag} that fit differ in {axis}"
        raise UsageError(message, remedy=f"name one in the tag, such as {tag}-{axis}{value}")
    chosen = _resolved(select(host, catalog, gpus=requested.gpus, where=dict(requested.where)))
    if requested.node_class is None:
        return chosen
    own = explain(nodes.host(None), catalog, gpus=requested.gpus, where=dict(requested.where))
    if chosen.reference not in own.fits:
        message = f"class {requested.node_class} gets {chosen.reference}, which does not fit this node"
        raise UsageError(message, remedy=f"run `imagematrix explain {chosen.reference}` on this node")
    return replace(chosen, gpus=own.gpus)


def explained(nodes: Nodes, catalog: Catalog, tag: str) -> dict[str, object]:
    """Return the Selection document for `tag`; raise UsageError if the tag is invalid."""
    requested = request(tag, catalog)
    host = nodes.host(requested.node_class)
    return explain(host, catalog, gpus=requested.gpus, where=dict(requested.where)).to_json()


def _resolved(selection: Selection) -> Resolved:
    variant = selection.variant
    if variant is None or variant.digest is None:
        raise UsageError(f"{selection.selected} has no digest in its catalog")
    return Resolved(
        reference=variant.reference,
        digest=variant.digest,
        gpus=selection.gpus,
        fits=len(selection.fits),
        variants=len(selection.decision.catalog.variants),
    )
