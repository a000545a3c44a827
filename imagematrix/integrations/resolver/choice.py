"""Choosing the variant that a node gets for a tag, or the reasons why it gets none."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.integrations.resolver.tag import parse_request
from imagematrix.selection.selector import explain, select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.integrations.resolver.node import HostSources
    from imagematrix.selection.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTag:
    """The variant that answers a tag, and the GPUs that it was chosen for.

    `tag` is the same for all tags that request the same. `fits` of the version's `variants` fit; this one is
    the best.
    """

    tag: str
    reference: str
    digest: str
    gpus: tuple[str, ...]
    fits: int
    variants: int

    def __str__(self) -> str:
        gpus = f"for GPUs {', '.join(self.gpus)}" if self.gpus else "without a GPU"
        return f"{self.reference} {gpus}, the best of {self.fits} that fit out of {self.variants}"


def resolve_tag(nodes: HostSources, tag: str, catalog: Catalog) -> ResolvedTag:
    """Return the variant of `catalog` for `tag` on this node.

    For a class, every node gets the variant of the class's host, if it fits the node. Raises NothingFits with
    every reason; UsageError if the tag is invalid, the choice is ambiguous, or the variant of the class does
    not fit this node.
    """
    request = parse_request(tag, catalog)
    host = nodes.get_host(request.node_class)
    selection = explain(host, catalog, gpus=request.gpus, where=dict(request.where))
    # `select` would advise --where, an option that a client of a registry does not have.
    if selection.variant is None and selection.decision.differing:
        axis, (value, *_) = next(iter(selection.decision.differing.items()))
        message = f"variants of {catalog.image}:{tag} that fit differ in {axis}"
        raise UsageError(message, remedy=f"name one in the tag, such as {tag}-{axis}{value}")
    selection = select(host, catalog, gpus=request.gpus, where=dict(request.where))
    resolved = _make_resolved_tag(request.to_tag(catalog.version), selection)
    if request.node_class is None:
        return resolved
    selection_here = explain(nodes.get_host(None), catalog, gpus=request.gpus, where=dict(request.where))
    if resolved.reference not in selection_here.fits:
        message = f"class {request.node_class} gets {resolved.reference}, which does not fit this node"
        raise UsageError(
            message, remedy=f"run `imagematrix explain {quote_word(resolved.reference)}` on this node"
        )
    # The class decides on the variant, but the container gets the GPUs of this node.
    return replace(resolved, gpus=selection_here.gpus)


def explain_tag(nodes: HostSources, tag: str, catalog: Catalog) -> str:
    """Return the Selection document for `tag`, as JSON; raise UsageError if the tag is invalid."""
    request = parse_request(tag, catalog)
    host = nodes.get_host(request.node_class)
    return json.dumps(explain(host, catalog, gpus=request.gpus, where=dict(request.where)).to_json())


def _make_resolved_tag(tag: str, selection: Selection) -> ResolvedTag:
    variant = selection.variant
    if variant is None or variant.digest is None:
        raise UsageError(f"{selection.selected} has no digest in its catalog")
    return ResolvedTag(
        tag=tag,
        reference=variant.reference,
        digest=variant.digest,
        gpus=selection.gpus,
        fits=len(selection.fits),
        variants=len(selection.decision.catalog.variants),
    )
