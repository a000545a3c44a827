"""Choosing the variant that a node gets for a tag, or the reasons why it gets none."""

from __future__ import annotations

import json
from dataclasses import dataclass

from imagematrix.common.settings import read_site
from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.integrations.resolver.tag import parse_request
from imagematrix.selection.selection import require_selected
from imagematrix.selection.selector import explain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.catalog.warm_image import WarmImage
    from imagematrix.integrations.resolver.node import HostSources
    from imagematrix.integrations.resolver.tag import TagRequest
    from imagematrix.selection.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTag:
    """The variant that answers a tag, and the GPUs that it was chosen for.

    `tag` is the same for all tags that request the same. `fits` of the version's `variants` fit; this one is
    the best. `warm` is its warm image that fits, which is the answer if it can be had. `warnings` are
    sentences about what the choice assumes or gives up.
    """

    tag: str
    reference: str
    digest: str
    gpus: tuple[str, ...]
    fits: int
    variants: int
    warm: WarmImage | None = None
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        gpus = f"for GPUs {', '.join(self.gpus)}" if self.gpus else "without a GPU"
        warm = f", as its warm image {self.warm.reference}" if self.warm else ""
        number = f"the best of {self.fits} that fit out of {self.variants}"
        return "; ".join([f"{self.reference} {gpus}, {number}{warm}", *self.warnings])


def resolve_tag(nodes: HostSources, tag: str, catalog: Catalog) -> ResolvedTag:
    """Return the variant of `catalog` for `tag` on this node.

    For a class, every node gets the variant of the class's host, if it fits the node, and no warm image: its
    nodes may differ in what that compares. Raises NothingFits with
    every reason; UsageError if the tag is invalid, the choice is ambiguous, or the variant of the class does
    not fit this node.
    """
    request = parse_request(tag, catalog)
    selection = _decide_request(request, nodes.get_host(request.node_class), catalog)
    # Its own remedy would be --where, an option that a client of a registry does not have.
    if selection.variant is None and selection.decision.differing:
        axis, values = next(iter(selection.decision.differing.items()))
        value = next(filter(None, values))  # a variant may have none
        message = f"variants of {catalog.image}:{tag} that fit differ in {axis}"
        raise UsageError(message, remedy=f"name one in the tag, such as {tag}-{axis}{value}")
    variant = require_selected(selection).variant
    if variant is None or variant.digest is None:
        raise UsageError(f"{selection.selected} has no digest in its catalog")
    gpus = selection.gpus
    if request.node_class is not None:
        # The class decides on the variant, but the container gets the GPUs of this node.
        selection_here = _decide_request(request, nodes.get_host(None), catalog)
        if variant.reference not in selection_here.fits:
            message = f"class {request.node_class} gets {variant.reference}, which does not fit this node"
            remedy = f"run `imagematrix explain {quote_word(variant.reference)}` on this node"
            raise UsageError(message, remedy=remedy)
        gpus = selection_here.gpus
    return ResolvedTag(
        tag=request.to_tag(catalog.version),
        reference=variant.reference,
        digest=variant.digest,
        gpus=gpus,
        fits=len(selection.fits),
        variants=len(selection.decision.catalog.variants),
        warnings=tuple([warning.text for warning in selection.warnings]),
        warm=selection.warm if request.node_class is None and _allows_warm_images(selection) else None,
    )


def _allows_warm_images(selection: Selection) -> bool:
    """Whether the site lets a warm image of a selection be the answer; false if it has none."""
    return selection.warm is not None and read_site().warm is not False


def explain_tag(nodes: HostSources, tag: str, catalog: Catalog) -> str:
    """Return the Selection document for `tag`, as JSON; raise UsageError if the tag is invalid."""
    request = parse_request(tag, catalog)
    return json.dumps(_decide_request(request, nodes.get_host(request.node_class), catalog).to_json())


def _decide_request(request: TagRequest, host: Host, catalog: Catalog) -> Selection:
    """Return the selection for all GPUs of a host: what the container gets of it, only its engine knows.

    A warm image that was made for other GPUs than these costs a missed cache. One that was made for a number
    of CPUs would keep to it, so nothing matches that.
    """
    selection = explain(host, catalog, gpus=request.gpus, where=dict(request.where))
    return selection.with_usable_cpus(None) if catalog.warm else selection
