"""A catalog of audited images.

The entry of an image built by imagematrix comes from its labels, the entry of any other image from its bytes
and its publisher's claims. An image built on a variant of imagematrix inherits the variant's labels, so it
counts as another image.
"""

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
    """Return the catalog `image`:`version` of audited images.

    `note` is called with a text for each claim that was ignored. Raises AuditError if an image contradicts
    its labels or is for AMD's GPUs; UsageError if two images have the same reference, or if their labels
    disagree on the preferred order or the default axes.
    """
    variants: list[Variant] = []
    stated: list[labels.Terms] = []
    for audited in audits:
        variant = claimed(audited)
        if variant and not _built_on_one(audited.image):
            variants.append(_labelled(audited, variant))
            stated.append(labels.terms(audited.image.labels, audited.image.reference))
            continue
        own = entry(audited, _reference(audited.image), audited.image.digest)
        for ignored in own.ignored:
            note(f"{audited.image.reference}: {ignored}")
        variants.append(_on(own.variant, variant) if variant else own.variant)
    terms = labels.agreed(f"{image}:{version}", stated)
    adopted = Catalog(
        image=image, version=version, variants=tuple(variants), prefer=terms.prefer, defaults=terms.defaults
    )
    # Names in archives may be anything: reading the catalog back validates them.
    return Catalog.from_json(adopted.to_json(), f"{image}:{version}")


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


def _on(own: Variant, base: Variant) -> Variant:
    """Return the entry of an image that was built on the variant `base`, and so also contains its code.

    The CPU requirements that the compiler reported for `base` still hold; all else may have changed.
    """
    return replace(
        own,
        march=base.march,
        vendor=base.vendor,
        cpu_flags=own.cpu_flags | base.cpu_flags,
        signed_returns=base.signed_returns,
        axes=base.axes,
        facts=tuple(one for one in own.facts if one[0] != "cpu_flags"),
    )


def _reference(image: Image) -> str:
    """Return the name by which an engine finds an image, or its digest if it has no name."""
    own = image.labels
    if all(key in own for key in OURS) and not _built_on_one(image):
        return f"{own[labels.IMAGE]}:{labels.tag(own[labels.VERSION], own[labels.CELL], own[labels.INPUT])}"
    return next(iter(image.names), image.digest)


def _built_on_one(image: Image) -> bool:
    """Whether an image was built on a variant of imagematrix and inherits its labels.

    Variants in the classic image store have no content digest; there, only a different name shows it.
    """
    own = image.labels
    if labels.CONTENT in own or labels.IMAGE not in own or not image.names:
        return image.inherited
    return familiar(own[labels.IMAGE]) not in {familiar(split(name)[0]) for name in image.names}
