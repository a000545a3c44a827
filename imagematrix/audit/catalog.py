"""A catalog of audited images: of ours by their labels, of all others by what their bytes and makers tell."""

from __future__ import annotations

from imagematrix.audit.claims import broken, claimed
from imagematrix.audit.entry import entry
from imagematrix.audit.proof import proven
from imagematrix.catalog import labels
from imagematrix.catalog.catalog import Catalog
from imagematrix.errors import AuditError
from imagematrix.record import replace
from imagematrix.reference import familiar, split

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from imagematrix.audit.image import Image
    from imagematrix.audit.report import Audit
    from imagematrix.catalog.catalog import Variant

__all__ = ["catalog"]

OURS = (labels.IMAGE, labels.VERSION, labels.CELL, labels.INPUT)


def catalog(
    audits: Iterable[Audit], image: str, version: str, note: Callable[[str], object] = str
) -> Catalog:
    """Return the catalog `image`:`version` of audited images; `note` gets what had to be ignored of them.

    Raises AuditError where an image contradicts its labels, or is not for GPUs that are known here, and
    UsageError where two are one, or prefer different orders.
    """
    variants: list[Variant] = []
    stated: list[labels.Terms] = []
    for audited in audits:
        variant = claimed(audited)
        if variant:
            variants.append(_labelled(audited, variant))
            stated.append(labels.terms(audited.image.labels, audited.image.reference))
            continue
        own = entry(audited, _reference(audited.image), audited.image.digest)
        for ignored in own.ignored:
            note(f"{audited.image.reference}: {ignored}")
        variants.append(own.variant)
    terms = labels.agreed(f"{image}:{version}", stated)
    found = Catalog(
        image=image, version=version, variants=tuple(variants), prefer=terms.prefer, defaults=terms.defaults
    )
    return Catalog.from_json(found.to_json(), f"{image}:{version}")  # names in archives may be anything


def _labelled(audited: Audit, variant: Variant) -> Variant:
    why = broken(audited, variant)
    if why:
        raise AuditError(f"{audited.image.reference}: {why}")
    return replace(
        variant,
        reference=_reference(audited.image),
        digest=audited.image.digest,
        size=sum(audited.image.sizes.values()) or None,
        facts=tuple(sorted({**dict(variant.facts), **dict(proven(audited, variant))}.items())),
    )


def _reference(image: Image) -> str:
    """Return the name by which an engine finds an image: its digest where it has none."""
    return _labelled_name(image) or next(iter(image.names), image.digest)


def _labelled_name(image: Image) -> str | None:
    """Return the name of a variant of imagematrix; None of other images, also of those built on one.

    They inherit its labels. Images of the classic store have no digest of their content, so that only other
    names tell.
    """
    own = image.labels
    if image.inherited or not all(key in own for key in OURS):
        return None
    known = {familiar(split(name)[0]) for name in image.names}
    if labels.CONTENT not in own and known and familiar(own[labels.IMAGE]) not in known:
        return None
    return f"{own[labels.IMAGE]}:{labels.tag(own[labels.VERSION], own[labels.CELL], own[labels.INPUT])}"
