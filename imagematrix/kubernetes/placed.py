"""Images placed on classes: the reference by digest, and the terms that keep a pod on nodes of these classes.

Without the terms, the image could start on any node.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.kubernetes.affinity import admits, foreign, isin
from imagematrix.kubernetes.labels import CLASS
from imagematrix.kubernetes.needs import needs
from imagematrix.selection.selection import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.catalog.catalog import Variant
    from imagematrix.kubernetes.affinity import Term
    from imagematrix.kubernetes.classes import Class

__all__ = ["Placed", "chosen", "each", "gang", "image"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A variant for the nodes of some classes: its image, and the terms of the node affinity."""

    classes: tuple[Class, ...]
    variant: Variant
    terms: tuple[Term, ...]

    @property
    def image(self) -> str:
        """The reference to pull, by digest where the catalog has one."""
        return image(self.variant)


def image(variant: Variant) -> str:
    """Return the reference of a variant, with its digest where the catalog has one."""
    if variant.digest is None or "@" in variant.reference:
        return variant.reference
    return f"{variant.reference}@{variant.digest}"


def chosen(classes: Sequence[Class], names: Sequence[str]) -> tuple[Class, ...]:
    """Return the classes with these names, or all classes without names.

    Raises UsageError if a class does not exist, or if a node of another class has the label of a chosen one:
    pods for the chosen class could start there.
    """
    by_name = {each.name: each for each in classes}
    for name in names:
        if name not in by_name:
            raise UsageError(f"class {name!r} not found", remedy=f"one of {', '.join(sorted(by_name))}")
    selected = tuple(by_name[name] for name in names) if names else tuple(classes)
    for each in classes:
        for node in each.nodes:
            if any(one.has_label(node) for one in selected if one is not each):
                raise UsageError(
                    f"node {node.name} has the label of the class {node.labels[CLASS]}, but the facts of "
                    f"{each.name}",
                    remedy="label it again with `imagematrix kubernetes labels`",
                )
    return selected


def each(classes: Iterable[Class]) -> tuple[Placed, ...]:
    """Return the placement of each class that gets an image; raise NothingFits if no class does."""
    some = list(classes)
    placements = tuple(
        Placed(classes=(one,), variant=one.variant, terms=_terms((one,), one.variant))
        for one in some
        if one.variant
    )
    if not placements:
        raise _nothing_fits(some, some[0].why)
    return placements


def gang(classes: Sequence[Class]) -> Placed:
    """Return the placement of a gang: the variant that fits all classes, for every rank of the gang.

    Of several variants, the one whose worst place in the orders of the classes is best is taken. Raises
    NothingFits if no variant fits all classes.
    """
    ranks: dict[str, list[int]] = {}
    variants: dict[str, Variant] = {}
    for one in classes:
        if isinstance(one.kind.answer, UsageError):
            raise _nothing_fits(classes, f"{one.name}: {one.why}")
        for candidate in one.kind.answer.candidates:
            if candidate.rank is not None:
                ranks.setdefault(candidate.reference, []).append(candidate.rank)
                variants[candidate.reference] = candidate.variant
    common = [reference for reference, places in ranks.items() if len(places) == len(classes)]
    if not common:
        names = ", ".join(one.name for one in classes)
        raise _nothing_fits(classes, f"no variant fits all of the classes {names}")
    best = min(common, key=lambda reference: (max(ranks[reference]), sum(ranks[reference]), reference))
    return Placed(
        classes=tuple(classes), variant=variants[best], terms=_terms(tuple(classes), variants[best])
    )


def _terms(classes: tuple[Class, ...], variant: Variant) -> tuple[Term, ...]:
    """Return terms that admit the nodes of these classes, and no node that the variant does not fit."""
    names = sorted({one.name for one in classes if any(one.has_label(node) for node in one.nodes)})
    terms: tuple[Term, ...] = ((isin(CLASS, *names),),) if names else ()
    if not all(one.labelled for one in classes):
        terms += foreign(needs(variant, allow_cpu=True))
    for one in classes:
        for node in one.nodes:
            if not admits(terms, node.labels):
                raise UsageError(
                    f"labels do not distinguish nodes of the class {one.name} from others",
                    remedy=f"label them with `imagematrix kubernetes labels`, such as {node.name}",
                )
    return terms


def _nothing_fits(classes: Sequence[Class], why: str) -> NothingFits | UsageError:
    for one in classes:
        if not isinstance(one.kind.answer, UsageError):
            return NothingFits(
                why,
                selection=one.kind.answer,
                remedy="choose classes with --class, or see `kubernetes classes`",
            )
    return UsageError(why)
