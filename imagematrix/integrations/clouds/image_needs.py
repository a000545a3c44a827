"""What an image needs from a node, for people and for systems that know only some facts of their nodes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from imagematrix.common.record import replace
from imagematrix.common.text import quote_word
from imagematrix.errors import UnservedError, UsageError
from imagematrix.hardware.vendors import cuda, device_code, gpus, marches, versions
from imagematrix.integrations.kubernetes.nodes.labels import VOCABULARY
from imagematrix.selection import drivers
from imagematrix.selection.needs.equivalence import NEWEST, OLDEST, TOP, UNKNOWN_COMPUTE
from imagematrix.selection.needs.grid import find_intervals
from imagematrix.selection.needs.knowledge import CUDA, DRIVER, Knowledge
from imagematrix.selection.needs.node_needs import derive_needs
from imagematrix.selection.needs.statement import (
    Alternative,
    Assumption,
    derive_statement,
    find_limiting_rules,
    find_missing_facts,
    list_assumptions,
    split_flags,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.selection.needs.equivalence import Version
    from imagematrix.selection.needs.need import Need

SCHEMA = "imagematrix.image-needs/v1"
VENDOR = "nvidia"
EXACT = "exact"
IMAGE, CODE = "image", "code"  # whose condition is the stricter
# The fields of a Need that have another form in the document.
SHAPED = frozenset({"arch", "flags", "gpus", "computes", "limit", "driver", "oldest", "below", "other_than"})
# Catalogs of earlier releases do not have them.
NO_REQUIREMENTS = Assumption(
    fact="nvidia-require",
    text="the image's own NVIDIA_REQUIRE_* ask for no more than its code: the catalog has none of them",
)
SHOWN_MISSING = 3  # sets of missing facts in a sentence


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A variant that a system cannot use, and why; it lacks all facts of each of the sets `missing`."""

    reference: str
    reason: str
    missing: tuple[tuple[str, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return one element of the document's `left_out`."""
        missing = [list(facts) for facts in self.missing]
        return {"reference": self.reference, "reason": self.reason, "missing": missing}


@dataclass(frozen=True, kw_only=True)
class VariantNeeds:
    """The needs of one variant: a node meets one of the `alternatives`, and the `assumptions` hold.

    `knowledge` is None for all facts. `stricter` says whose condition is the stricter if the image has
    requirements of its own: those of the image, or those of its code.
    """

    variant: Variant
    knowledge: Knowledge | None
    alternatives: tuple[Alternative, ...]
    assumptions: tuple[Assumption, ...] = ()
    stricter: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one element of the document's `variants`."""
        variant = self.variant
        requires = {"expressions": list(variant.requires), "stricter": self.stricter}
        return {
            "reference": variant.reference,
            "digest": variant.digest,
            "platform": variant.platform,
            "driver": drivers.get_driver_mode(variant),
            "cuda": variant.cuda,
            "needs": [self.describe(alternative) for alternative in self.alternatives],
            "requires": requires if variant.requires else None,
            "assumptions": [{"fact": one.fact, "text": one.text} for one in self.assumptions],
        }

    def describe(self, alternative: Alternative) -> dict[str, Any]:
        """Return the conditions of an alternative, all of which hold; a fact without one is absent."""
        need = alternative.need
        names = alternative.gpu_names if self.knowledge else list_product_names(need)
        codes = need.computes if need.computes is not None else _list_codes(alternative.gpu_names)
        return {
            **self._describe_driver(alternative),
            **({"gpus": need.gpus} if need.gpus is not None else {}),
            **({"vendor": VENDOR} if need.gpus else {}),
            **({"computes": describe_computes(codes)} if codes else {}),
            **({"unknown_compute": True} if UNKNOWN_COMPUTE in codes else {}),
            **({"gpu_names": list(names)} if names else {}),
            **({"last_branch": None if need.limit == NEWEST else need.limit} if need.limit else {}),
            **self._describe_cpu(need),
            **_describe_others(need),
        }

    def _describe_driver(self, alternative: Alternative) -> dict[str, Any]:
        need = alternative.need
        if self.knowledge and DRIVER not in self.knowledge.words:
            return {"cuda": describe_releases(need)} if CUDA in self.knowledge.words and need.oldest else {}
        if need.driver:
            return {"driver": {"version": need.driver}}
        oldest = need.oldest if need.oldest != OLDEST else None
        rules = find_limiting_rules(self.variant, alternative) if oldest else ()
        conditions = {
            **({"oldest": format_driver(oldest)} if oldest else {}),
            **({"rules": list(rules)} if rules else {}),
            **({"below": format_driver(need.below)} if need.below else {}),
            **({"other_than": sorted(need.other_than)} if need.other_than else {}),
        }
        return {"driver": conditions} if conditions else {}

    def _describe_cpu(self, need: Need) -> dict[str, Any]:
        level, flags, _ = split_flags(need, self.knowledge)
        return {"cpu": {"level": level, "flags": sorted(flags)}} if level or flags else {}


@dataclass(frozen=True, kw_only=True)
class ImageNeeds:
    """The needs of a version: of the variants that a system can use; the others are left out, with a reason.

    `injects` says whether the system adds its node's driver to every container.
    """

    catalog: Catalog
    knowledge: Knowledge | None
    injects: bool
    variants: tuple[VariantNeeds, ...]
    left_out: tuple[LeftOut, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the ImageNeeds document."""
        return {
            "schema": SCHEMA,
            "image": self.catalog.image,
            "version": self.catalog.version,
            "knows": sorted(self.knowledge.words) if self.knowledge else None,
            "injects": self.injects,
            "least": self.describe_least(),
            "variants": [one.to_json() for one in self.variants],
            "left_out": [one.to_json() for one in self.left_out],
        }

    def describe_least(self) -> dict[str, Any]:
        """Return what the version as a whole runs on: of each fact, the least that some variant needs."""
        needs = [alternative.need for one in self.variants for alternative in one.alternatives]
        codes = {code for need in needs for code in need.computes or () if code >= 0}
        names = {name for one in self.variants for other in one.alternatives for name in other.gpu_names}
        codes.update(_list_codes(names))
        levels = {need.cpu_level for need in needs if need.arch == "amd64"}
        releases = {one.variant.cuda for one in self.variants if one.variant.cuda}
        memory = min((need.memory_mib or 0 for need in needs if need.gpus), default=0)
        return {
            "platforms": sorted({one.variant.platform for one in self.variants}),
            "driver": self._find_oldest_driver(),
            "cuda": sorted(releases, key=versions.make_sort_key),
            "computes": describe_computes(sorted(codes)),
            "memory_mib": memory or None,
            "cpu_level": min(levels, key=marches.get_level_rank, default=None),
        }

    def _find_oldest_driver(self) -> dict[str, Any] | None:
        """Return the oldest driver with which some variant fits, and the rules that set it.

        None if no variant needs a driver, or one fits with any.
        """
        found = [
            (need.oldest or versions.make_sort_key(str(need.driver)), one.variant, alternative)
            for one in self.variants
            for alternative in one.alternatives
            if (need := alternative.need).oldest or need.driver
        ]
        first = min(found, key=lambda row: row[0], default=None)
        if first is None or first[0] == OLDEST:
            return None
        oldest, variant, alternative = first
        version = alternative.need.driver
        rules = ("driver-exact",) if version else find_limiting_rules(variant, alternative)
        return {
            "version": version or format_driver(oldest),
            "reference": variant.reference,
            "rules": list(rules),
        }

    def require_variants(self) -> None:
        """Raise UnservedError with every reason if the system can use no variant."""
        if self.variants:
            return
        name = f"{self.catalog.image}:{self.catalog.version}"
        raise UnservedError(
            f"no statement about nodes proves that they run {name}",
            *(f"{one.reference}: {one.reason}" for one in self.left_out),
            remedy=f"let the node choose: `imagematrix run {quote_word(name)}`",
        )


def find_image_needs(
    catalog: Catalog, knowledge: Knowledge | None, *, injects: bool, allow_cpu: bool = False
) -> ImageNeeds:
    """Return the needs of a version, for a system that knows all facts, or those of `knowledge`.

    A system that `injects` its node's driver compares the image's own NVIDIA_REQUIRE_* with the node.
    """
    rows = [
        _find_variant_needs(
            _write_requirements(variant) if injects else variant,
            knowledge,
            injects=injects,
            allow_cpu=allow_cpu,
        )
        for variant in catalog.variants
    ]
    return ImageNeeds(
        catalog=catalog,
        knowledge=knowledge,
        injects=injects,
        variants=tuple(row for row in rows if isinstance(row, VariantNeeds)),
        left_out=tuple(row for row in rows if isinstance(row, LeftOut)),
    )


def _write_requirements(variant: Variant) -> Variant:
    """Return the variant with the requirements as its image has them, which NVIDIA's runtime compares."""
    return replace(variant, requires=variant.runtime_requires or variant.requires)


def _find_variant_needs(
    variant: Variant, knowledge: Knowledge | None, *, injects: bool, allow_cpu: bool
) -> VariantNeeds | LeftOut:
    if injects and drivers.get_driver_mode(variant) == EXACT:
        own = drivers.get_baked_driver(variant)
        reason = f"it has driver {own} inside, and the system would add its node's: two user-mode drivers"
        return LeftOut(reference=variant.reference, reason=reason)
    try:
        alternatives = _find_alternatives(variant, knowledge, allow_cpu=allow_cpu)
        if not alternatives:
            return _leave_out(variant, knowledge, allow_cpu=allow_cpu)
    except UsageError as error:
        return LeftOut(reference=variant.reference, reason=str(error).removeprefix(f"{variant.reference}: "))
    return VariantNeeds(
        variant=variant,
        knowledge=knowledge,
        alternatives=alternatives,
        assumptions=(
            *(list_assumptions(variant, knowledge, alternatives) if knowledge else ()),
            *((NO_REQUIREMENTS,) if injects and variant.gpu and not variant.runtime_requires else ()),
        ),
        stricter=_find_stricter(variant, knowledge, alternatives, allow_cpu=allow_cpu),
    )


def _find_alternatives(
    variant: Variant, knowledge: Knowledge | None, *, allow_cpu: bool
) -> tuple[Alternative, ...]:
    if knowledge:
        return derive_statement(variant, knowledge, allow_cpu=allow_cpu)
    return tuple(Alternative(need=need) for need in derive_needs(variant, VOCABULARY, allow_cpu=allow_cpu))


def _leave_out(variant: Variant, knowledge: Knowledge | None, *, allow_cpu: bool) -> LeftOut:
    if not derive_needs(variant, VOCABULARY, allow_cpu=allow_cpu):
        return LeftOut(reference=variant.reference, reason="no node fits it")
    missing = find_missing_facts(variant, knowledge, allow_cpu=allow_cpu) if knowledge else ()
    if not missing:
        return LeftOut(reference=variant.reference, reason="no statement in these facts proves a node to fit")
    shown = " or ".join(" and ".join(facts) for facts in missing[:SHOWN_MISSING])
    return LeftOut(
        reference=variant.reference, reason=f"a statement would need more facts: {shown}", missing=missing
    )


def _find_stricter(
    variant: Variant, knowledge: Knowledge | None, alternatives: tuple[Alternative, ...], *, allow_cpu: bool
) -> str | None:
    """Return whose condition is the stricter; None if the image has none of its own."""
    if not variant.requires:
        return None
    alone = _find_alternatives(replace(variant, requires=()), knowledge, allow_cpu=allow_cpu)
    return CODE if set(alone) == set(alternatives) else IMAGE


def _list_codes(names: Iterable[str]) -> tuple[int, ...]:
    """Return the capabilities of GPUs with these names, times ten, sorted."""
    computes = {product.compute for name in names for product in gpus.find_products(name) if product.compute}
    return tuple(sorted(int(device_code.make_target(compute)) for compute in computes))


def list_product_names(need: Need) -> tuple[str, ...]:
    """Return the names of the products whose capability a need admits, sorted; none if it admits any."""
    codes = need.computes
    if not need.gpus or codes is None:
        return ()
    return tuple(
        sorted(
            {
                product.name
                for product in gpus.list_products()
                if product.compute and int(device_code.make_target(product.compute)) in codes
            }
        )
    )


def describe_computes(codes: Iterable[int]) -> list[dict[str, str | None]]:
    """Return capabilities, times ten, as ranges; the last one may have no end."""
    return [
        {"first": f"{first // 10}.{first % 10}", "last": None if last >= TOP else f"{last // 10}.{last % 10}"}
        for first, last in find_intervals(code for code in codes if code >= 0)
    ]


def describe_releases(need: Need) -> dict[str, str | None]:
    """Return the CUDA releases whose drivers a need admits: the first and the last, None for the newest."""
    firsts = {versions.make_sort_key(first): name for name, first in cuda.list_first_drivers().items()}
    names = [*firsts.values()]
    last = names[names.index(firsts[need.below]) - 1] if need.below else None
    return {"first": firsts[need.oldest or ()], "last": last}


def format_driver(version: Version) -> str:
    """Return a driver version as NVIDIA writes it: 580.65.06 has a zero that its numbers lack."""
    known = {versions.make_sort_key(text): text for text in cuda.list_drivers()}
    return known.get(version, ".".join(map(str, version)))


def _describe_others(need: Need) -> dict[str, Any]:
    """Return the conditions on all other facts, by the names of a Need's fields."""
    others: dict[str, Any] = {}
    for field in fields(need):
        value = getattr(need, field.name)
        if field.name not in SHAPED and value != field.default:
            others[field.name] = (
                sorted(value)
                if isinstance(value, frozenset)
                else [*value]
                if isinstance(value, tuple)
                else value
            )
    return others
