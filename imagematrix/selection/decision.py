"""The Decision: the best variant for one kind of hardware, and on demand every reason."""

from __future__ import annotations

from functools import cached_property
from operator import attrgetter

from imagematrix.common.record import replace
from imagematrix.images.catalog.catalog import Variant
from imagematrix.selection.hardware_key import keep_distinct_gpus, make_hardware_key
from imagematrix.selection.rule import Remedy, suggest_axis_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.selection.candidate import Candidate
    from imagematrix.selection.miss import Miss
    from imagematrix.selection.query import Query
    from imagematrix.selection.rule import RuleResult, RuleWarning
    from imagematrix.selection.selection_target import Target

SHOWN = 8  # indistinguishable variants listed in a message
# Fields that come from the store or an audit, or name the source: the others state what a variant is.
FROM_ELSEWHERE = ("reference", "digest", "size", "facts", "libraries", "partial_flags")
_get_content: Callable[[Variant], Hashable] = attrgetter(
    *(name for name in Variant.__slots__ if name not in FROM_ELSEWHERE)
)


class Decision:
    """The variant that fits a target best, and the reasons why the others do not or are not chosen.

    It is valid for every host of the same `hardware`, and is cached. The candidates are computed each time:
    for a thousand variants they take two megabytes.
    """

    def __init__(self, question: Query, target: Target) -> None:
        self.catalog = question.catalog
        self.question = question
        self._index = question.index
        self._target = target
        sampled = keep_distinct_gpus(target)
        self._fitting = self._index.find_fitting(sampled)
        self._preferred = self._index.keep_first_defaults(self._fitting)
        self.differing = self._index.find_differing_axes(self._preferred)
        # Several if nothing tells the best apart.
        self._best = (
            find_indistinguishable(self._index.find_top_ranked(sampled, self._preferred))
            if self._preferred
            else []
        )
        self.variant = self._best[0] if len(self._best) == 1 and not self.differing else None

    def __reduce__(self) -> tuple[Callable[[Query, Target], Decision], tuple[Query, Target]]:
        # Decisions from a pool's workers share one Query, with its index: see `_share_query`.
        return Decision, (self.question, self._target)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same decision, such as one from another process."""
        if not isinstance(other, Decision):
            return NotImplemented
        return self is other or (self.hardware == other.hardware and self.question == other.question)

    def __hash__(self) -> int:
        return hash((self.hardware, self.question))

    @property
    def hardware(self) -> Hashable:
        """The key of the kind of hardware."""
        target = self._target
        return make_hardware_key(
            target.host, target.gpus, allow_cpu=target.allow_cpu, vram_mib=target.vram_mib
        )

    @property
    def fits(self) -> frozenset[str]:
        """The references of all variants that fit."""
        return self._index.collect_references(self._fitting)

    @property
    def target(self) -> Target:
        """What it was decided for, with one GPU of each kind."""
        return keep_distinct_gpus(self._target)

    @cached_property
    def warnings(self) -> tuple[RuleWarning, ...]:
        """The warnings about the best variant; see `Candidate`."""
        if self.variant is None:
            return ()
        from imagematrix.selection.candidate import collect_warnings

        return (*self._default_warnings, *collect_warnings(self.target, self.variant))

    @cached_property
    def _default_warnings(self) -> tuple[RuleWarning, ...]:
        """The warning that the values of the variants to choose from are not the first defaults, if so."""
        if not (self.question.default_order and self._preferred):
            return ()
        from imagematrix.selection.default_values import warn_of_later_default

        return tuple(warn_of_later_default(self.question, self._preferred, [self._target]))

    @property
    def ranked(self) -> list[Variant]:
        """All variants that fit, best first. It is computed each time."""
        return self._index.rank_variants(self.target, self._fitting)

    @property
    def by_failures(self) -> list[frozenset[str]]:
        """The references of variants that fit, then of those that fail one rule, two, and so on."""
        masks = self._index.group_by_failure_count(self.target, self._index.everything)
        return [self._index.collect_references(mask) for mask in masks]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every variant with every rule's result: those that fit by rank, then the others, nearest first."""
        from imagematrix.selection.candidate import rank_candidates

        candidates = rank_candidates(self.catalog.variants, self._index.criteria, self._target)
        if not self._default_warnings:
            return candidates
        chosen = self._index.collect_references(self._preferred)
        return tuple(
            [
                replace(candidate, warnings=(*self._default_warnings, *candidate.warnings))
                if candidate.reference in chosen
                else candidate
                for candidate in candidates
            ]
        )

    @property
    def refusals(self) -> Iterator[tuple[Variant, tuple[RuleResult, ...]]]:
        """Each variant that does not fit with the rules that it fails, without remedies, which take long."""
        from imagematrix.selection.candidate import find_failing_results

        for variant in self.catalog.variants:
            if failing := find_failing_results(self._target, variant):
                yield variant, failing

    @cached_property
    def ambiguity(self) -> tuple[str, Remedy] | None:
        """Why several fitting variants remain, and how to choose; None if one is best."""
        if self.variant or not self._best:
            return None
        return explain_ambiguity(self.catalog, self.differing, self._best)

    @cached_property
    def miss(self) -> Miss | None:
        """Why nothing is selected, and what would change it; None if something is."""
        if self.variant:
            return None
        from imagematrix.selection.miss import Miss, explain_miss

        if self.ambiguity:
            why, remedy = self.ambiguity
            return Miss(why=why, remedy=remedy)
        return explain_miss(self.question, self._target)


def explain_ambiguity(
    catalog: Catalog,
    differing: Mapping[str, Sequence[str]],
    variants: Sequence[Variant],
    whom: str = "this host",
) -> tuple[str, Remedy]:
    """Return why several fitting `variants` remain, and how to choose.

    They are `differing` in axes of the image, with these values; if there are none, nothing tells them apart.
    """
    name = f"{catalog.image}:{catalog.version}"
    chosen = {axis: value for axis, value in variants[-1].axes if axis in differing}
    by_name = Remedy(words=f"name one of them in place of {name}, such as {variants[0].reference}")
    if not differing:
        return f"variants of {name} cannot be told apart: {_join_references(variants)}", by_name
    open_axes = [
        f"{axis} ({', '.join(value or 'not set' for value in values)})" for axis, values in differing.items()
    ]
    # No option asks for a variant without a value.
    remedy = (
        suggest_axis_values("choose with {}; in matrix.yaml an image may set `defaults`", chosen)
        if len(chosen) == len(differing)
        else by_name
    )
    return f"variants of {name} that fit {whom} differ in {', '.join(open_axes)}", remedy


def warn_of_equal_variants(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yield a warning for each group of variants of which no host can get one, and how to choose.

    They state the same about themselves, so a host that one fits has no reason to prefer it.
    """
    groups: dict[Hashable, list[Variant]] = {}
    for variant in catalog.variants:
        groups.setdefault(_get_content(variant), []).append(variant)
    name = f"{catalog.image}:{catalog.version}"
    for variants in groups.values():
        if len(variants) > 1:
            yield (
                f"nothing tells {_join_references(variants)} apart, so {name} alone chooses none of them",
                f"adopt only one of them, or name it in place of {name}, such as {variants[0].reference}",
            )


def _join_references(variants: Sequence[Variant]) -> str:
    from imagematrix.common.text import shorten_words

    return shorten_words([variant.reference for variant in variants], SHOWN)


def find_indistinguishable(variants: list[Variant]) -> list[Variant]:
    """Return the variants that state the same about themselves as the first.

    Cells of a matrix never do, unless their images were built when labels lacked the image's own axes.
    """
    first, *rest = variants
    content = _get_content(first)
    return [first, *(variant for variant in rest if _get_content(variant) == content)]
