"""Images placed on classes: the reference by digest, and the terms that keep a pod on nodes of these classes.

Without the terms, the image could start on any node.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.labels import CLASS, VOCABULARY
from imagematrix.integrations.kubernetes.workloads.affinity import (
    is_admitted,
    make_terms_for_foreign_labels,
    match_value_in,
)
from imagematrix.selection.needs.node_needs import derive_needs
from imagematrix.selection.selection import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.integrations.kubernetes.nodes.classes import NodeClass
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode
    from imagematrix.integrations.kubernetes.workloads.affinity import Requirement, Term

HOSTNAME = "kubernetes.io/hostname"  # kubelet sets this label
ELSEWHERE = "all nodes have the labels of other classes"
RELABEL = "label them again with `imagematrix kubernetes labels`"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """A variant for the nodes of some classes: its image, and the terms of the node affinity."""

    classes: tuple[NodeClass, ...]
    variant: Variant
    terms: tuple[Term, ...]

    @property
    def image(self) -> str:
        """The reference to pull, by digest where the catalog has one."""
        return get_image(self.variant)


def get_image(variant: Variant) -> str:
    """Return the reference of a variant, with its digest where the catalog has one."""
    if variant.digest is None or "@" in variant.reference:
        return variant.reference
    return f"{variant.reference}@{variant.digest}"


def choose_classes(classes: Sequence[NodeClass], names: Sequence[str]) -> tuple[NodeClass, ...]:
    """Return the classes with these names, or all classes without names.

    Raises UsageError if a class does not exist.
    """
    by_name = {node_class.name: node_class for node_class in classes}
    for name in names:
        if name not in by_name:
            raise UsageError(f"class {name!r} not found", remedy=f"one of {', '.join(sorted(by_name))}")
    return tuple(by_name[name] for name in dict.fromkeys(names)) if names else tuple(classes)


def require_labels(classes: Iterable[NodeClass]) -> None:
    """Raise UsageError, with all of them, if nodes have the label of one of the classes, but other facts.

    It is for objects that select nodes by this label alone.
    """
    strays = [f"{node.name} ({node_class.name})" for node_class in classes for node in node_class.strays]
    if strays:
        raise UsageError(
            f"{len(strays)} nodes have the label of a class, but other facts: {', '.join(strays)}",
            remedy=RELABEL,
        )


def place_per_class(classes: Iterable[NodeClass]) -> tuple[Placement, ...]:
    """Return the placement of each class that gets an image; raise NothingFits if no class does.

    Classes whose nodes all have the label of another class are left out.
    """
    classes = tuple(classes)
    placements = tuple(
        Placement(
            classes=(node_class,),
            variant=node_class.variant,
            terms=_make_terms((node_class,), node_class.variant),
        )
        for node_class in classes
        if node_class.variant and node_class.placeable_nodes
    )
    if not placements and any(node_class.variant for node_class in classes):
        raise UsageError(ELSEWHERE, remedy=RELABEL)
    if not placements:
        raise _make_miss(classes, classes[0].why)
    return placements


def place_per_node(classes: Sequence[NodeClass]) -> tuple[Placement, ...]:
    """Return the placements of `place_per_class`, for objects that run a pod on every node they admit.

    Raises UsageError also if a node would get several pods.
    """
    placements = place_per_class(classes)
    if all(_have_labels(placement.classes) for placement in placements):
        return placements
    for node_class in classes:
        for node in node_class.nodes:
            if sum(is_admitted(placement.terms, node.labels) for placement in placements) > 1:
                raise _make_ambiguity(node_class, node)
    return placements


def place_gang(classes: Sequence[NodeClass]) -> Placement:
    """Return the placement of a gang: the variant that fits all classes, for every rank of the gang.

    Of several variants, the one whose worst place in the orders of the classes is best is taken. Raises
    NothingFits if no variant fits all classes.
    """
    if not any(node_class.placeable_nodes for node_class in classes):
        raise UsageError(ELSEWHERE, remedy=RELABEL)
    ranks: dict[str, list[int]] = {}
    variants: dict[str, Variant] = {}
    for node_class in classes:
        if isinstance(node_class.kind.answer, UsageError):
            raise _make_miss(classes, f"{node_class.name}: {node_class.why}")
        for rank, variant in enumerate(node_class.kind.answer.decision.ranked):
            ranks.setdefault(variant.reference, []).append(rank)
            variants[variant.reference] = variant
    common = [reference for reference, places in ranks.items() if len(places) == len(classes)]
    if not common:
        names = ", ".join(node_class.name for node_class in classes)
        raise _make_miss(classes, f"no variant fits all of the classes {names}")
    best = min(common, key=lambda reference: (max(ranks[reference]), sum(ranks[reference]), reference))
    return Placement(
        classes=tuple(classes), variant=variants[best], terms=_make_terms(tuple(classes), variants[best])
    )


def _make_terms(classes: tuple[NodeClass, ...], variant: Variant) -> tuple[Term, ...]:
    """Return terms that admit the nodes of these classes, and no node that the variant does not fit.

    Terms for nodes without our labels may admit nodes of other classes that the variant fits.
    """
    names = sorted(
        {
            node_class.name
            for node_class in classes
            if any(map(node_class.has_label, node_class.placeable_nodes))
        }
    )
    terms: tuple[Term, ...] = ()
    if names:
        terms = ((match_value_in(CLASS, *names), *_match_other_nodes(classes)),)
    if not _have_labels(classes):
        terms += make_terms_for_foreign_labels(derive_needs(variant, VOCABULARY, allow_cpu=True, listed=True))
    for node_class in classes:
        for node in node_class.placeable_nodes:
            # Labels of NFD and NVIDIA may be too few for a class, and pods would wait forever.
            if not is_admitted(terms, node.labels):
                raise _make_ambiguity(node_class, node)
    return terms


def _have_labels(classes: Iterable[NodeClass]) -> bool:
    """Whether all nodes of these classes that pods can be placed on have the label of their class."""
    return all(node_class.has_label(node) for node_class in classes for node in node_class.placeable_nodes)


def _make_ambiguity(node_class: NodeClass, node: ClusterNode) -> UsageError:
    return UsageError(
        f"labels do not distinguish nodes of the class {node_class.name} from others",
        remedy=f"label them with `imagematrix kubernetes labels`, such as {node.name}",
    )


def _match_other_nodes(classes: tuple[NodeClass, ...]) -> tuple[Requirement, ...]:
    """Return the requirement that keeps pods off nodes with the label of a class, but other facts."""
    strays = {node.name: node.labels.get(HOSTNAME) for node_class in classes for node in node_class.strays}
    if not strays:
        return ()
    for name, hostname in strays.items():
        if hostname is None:
            raise UsageError(f"node {name} has the label of a class, but other facts", remedy=RELABEL)
    return ({"key": HOSTNAME, "operator": "NotIn", "values": sorted(filter(None, strays.values()))},)


def _make_miss(classes: Sequence[NodeClass], why: str) -> NothingFits | UsageError:
    for node_class in classes:
        if not isinstance(node_class.kind.answer, UsageError):
            name = f"{node_class.kind.answer.image}:{node_class.kind.answer.version}"
            listing = f"`imagematrix kubernetes classes --image {quote_word(name)} --nodes FILE` lists them"
            return NothingFits(
                why, selection=node_class.kind.answer, remedy=f"choose classes with --class; {listing}"
            )
    return UsageError(why)
