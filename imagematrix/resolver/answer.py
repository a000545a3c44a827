"""Which variant a node gets for a tag, or why it gets none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.errors import EngineError, ImagematrixError, UsageError
from imagematrix.resolver.tag import wish
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
    """This node, and nodes that stand for classes, by their names. Their facts are read when asked for."""

    here: Node
    classes: Mapping[str, Node]

    def host(self, node_class: str | None) -> Host:
        """Return the host of a class, or this node's; raise UsageError if there is no such class.

        Raises EngineError if it cannot be read now: that is no answer about an image.
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
    """The variant that answers a tag, and the GPUs it was chosen for.

    It is the best of `fits`, among `variants` of the version.
    """

    reference: str
    digest: str
    gpus: tuple[str, ...]
    fits: int
    variants: int

    def __str__(self) -> str:
        what = f"for GPUs {', '.join(self.gpus)}" if self.gpus else "for no GPU"
        return f"{self.reference} {what}, the best of {self.fits} that fit among {self.variants}"


def resolve(nodes: Nodes, catalog: Catalog, tag: str) -> Resolved:
    """Return the variant of `catalog` that `tag` means on this node.

    A class of nodes gets one variant on all of them: the one that its host gets, and only where it fits this
    node too. Raises NothingFits with every reason, UsageError where the tag or the choice is not clear.
    """
    asked = wish(tag, catalog)
    host = nodes.host(asked.node_class)
    selection = explain(host, catalog, gpus=asked.gpus, where=dict(asked.where))
    if selection.variant is None and selection.decision.differing:
        axis, (value, *_) = next(iter(selection.decision.differing.items()))
        message = f"variants of {catalog.image}:{tag} that fit differ in {axis}"
        raise UsageError(message, remedy=f"name one in the tag, such as {tag}-{axis}{value}")
    chosen = _resolved(select(host, catalog, gpus=asked.gpus, where=dict(asked.where)))
    if asked.node_class is None:
        return chosen
    own = explain(nodes.host(None), catalog, gpus=asked.gpus, where=dict(asked.where))
    if chosen.reference not in own.fits:
        message = f"class {asked.node_class} gets {chosen.reference}, which does not fit this node"
        raise UsageError(message, remedy=f"`imagematrix explain {chosen.reference}` here tells why")
    return replace(chosen, gpus=own.gpus)


def explained(nodes: Nodes, catalog: Catalog, tag: str) -> dict[str, object]:
    """Return the Selection document of what `tag` asks for; raise UsageError where that is not clear."""
    asked = wish(tag, catalog)
    host = nodes.host(asked.node_class)
    return explain(host, catalog, gpus=asked.gpus, where=dict(asked.where)).to_json()


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
