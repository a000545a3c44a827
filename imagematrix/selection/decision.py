"""The Decision: what a catalog has for one kind of hardware, and on demand every reason."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from operator import attrgetter

from imagematrix.catalog.catalog import Variant
from imagematrix.gpus.spec import spec
from imagematrix.record import replace
from imagematrix.selection.candidate import Candidate, distances, results, without
from imagematrix.selection.hardware import hardware, kind, kinds
from imagematrix.selection.miss import Miss
from imagematrix.selection.order import key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from typing import Any

    from imagematrix.node.host import Gpu
    from imagematrix.selection.question import Question
    from imagematrix.selection.rule import RuleResult
    from imagematrix.selection.target import Target

__all__ = ["Decision"]

SHOWN = 8  # indistinguishable variants that are named
# All that a variant says of itself, which is all but what the store says of it.
_content: Callable[[Variant], Hashable] = attrgetter(
    *(name for name in Variant.__slots__ if name not in ("reference", "digest", "size"))
)


class Decision:
    """The variant that fits a target best, and what there is to say about the others.

    It holds for every host of the same `hardware`, and is kept for the next. The candidates are computed each
    time: those of a thousand variants take two megabytes.
    """

    def __init__(self, question: Question, target: Target) -> None:
        self.catalog = question.catalog
        self.question = question
        self._index = question.index
        self._target = target
        self._sample = replace(target, gpus=kinds(target.gpus))
        self._fitting = self._index.fitting(self._sample)
        self.differing = self._index.differing(self._fitting)
        self._leading = _alike(self._index.leading(self._sample, self._fitting)) if self._fitting else []
        self.variant = self._leading[0] if len(self._leading) == 1 and not self.differing else None

    def __reduce__(self) -> tuple[Callable[[Question, Target], Decision], tuple[Question, Target]]:
        return Decision, (self.question, self._target)

    @property
    def hardware(self) -> Hashable:
        """What identifies the kind of hardware that it is about."""
        return hardware(self._target)

    @property
    def fits(self) -> frozenset[str]:
        """The references of all variants that fit."""
        return self._index.references(self._fitting)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every variant with every rule's result: those that fit by rank, then the others, nearest first."""
        candidates = [
            Candidate(variant=variant, rank=None, rules=results(self._target, variant))
            for variant in self.catalog.variants
        ]
        candidates.sort(key=self._place)
        built = {
            without(result.rule, candidate.variant): candidate.reference
            for candidate in reversed(candidates)
            for result in candidate.rules
            if result.ok
        }
        return tuple(
            replace(candidate, rules=tuple(_cured(candidate, result, built) for result in candidate.rules))
            if candidate.failing
            else replace(candidate, rank=place)
            for place, candidate in enumerate(candidates, 1)
        )

    @cached_property
    def doubt(self) -> tuple[str, str] | None:
        """Why the question leaves several variants that fit, and how to decide; None if it does not."""
        if self.variant or not self._leading:
            return None
        name = f"{self.catalog.image}:{self.catalog.version}"
        if self.differing:
            open_axes = [
                f"{axis} ({', '.join(value or 'not told' for value in values)})"
                for axis, values in self.differing.items()
            ]
            such = [
                f"--where {axis}={value}" for axis, value in self._leading[-1].axes if axis in self.differing
            ]
            return (
                f"variants of {name} that fit this host differ in {', '.join(open_axes)}",
                f"say which, such as {' '.join(such)}; in matrix.yaml an image may state `defaults`",
            )
        references = ", ".join([one.reference for one in self._leading[:SHOWN]])
        references += f" and {len(self._leading) - SHOWN} more" if len(self._leading) > SHOWN else ""
        return f"nothing tells these variants of {name} apart: {references}", "name the one to take"

    @cached_property
    def miss(self) -> Miss | None:
        """Why nothing is selected, and what would change it; None if something is."""
        if self.variant:
            return None
        if self.doubt:
            why, fix = self.doubt
            return Miss(why=why, fix=fix)
        miss = self._nearest()
        others = self.question.left_out
        fitting = others.fitting(self._sample)
        if not fitting:
            return miss
        other = others.best(self._sample, fitting)
        return replace(
            miss,
            why=f"{miss.why}; {other.reference} fits, which was not asked for",
            fix=self.question.remedy(other),
        )

    def _nearest(self) -> Miss:
        name = f"{self.catalog.image}:{self.catalog.version}"
        if not self.catalog.variants:
            return Miss(why=f"{name} has no variants{self.question.words}", fix=None)
        variant = self._index.nearest(self._sample)
        failing = tuple(result for result in results(self._target, variant) if not result.ok)
        number = len(self.catalog.variants)
        why = f"none of the {number} variants of {name}{self.question.words} fits this host"
        served = self._served()
        if served:
            labels = ", ".join(gpu.label for gpu in served)
            why += f" with all the GPUs passed; one fits {labels}"
            fix: str | None = f"pass --gpus {spec(served)}"
        else:
            why += f"; the nearest is {variant.reference}, but {failing[0].why}"
            fix = failing[0].fix
        return Miss(why=why, fix=fix, nearest=variant.reference, rules=failing)

    def _place(self, candidate: Candidate) -> tuple[Any, ...]:
        failing = candidate.failing
        foreign = any(result.rule == "platform" for result in failing)
        mistaken = bool(failing and bool(self._target.gpus) is not candidate.variant.gpu)
        return (
            bool(failing),
            foreign,
            mistaken,
            len(failing),
            distances(self._sample, candidate.variant),
            *key(self._index.criteria, self._sample, candidate.variant),
        )

    def _served(self) -> tuple[Gpu, ...]:
        """Return GPUs that one variant would fit, where none fits all: the most numerous kinds first."""
        together = self._index.everything
        served = set()
        examples = {kind(gpu): gpu for gpu in self._target.gpus}
        for which, _ in Counter(map(kind, self._target.gpus)).most_common():
            fitting = together & self._index.fitting(replace(self._target, gpus=(examples[which],)))
            if fitting:
                together = fitting
                served.add(which)
        return tuple(gpu for gpu in self._target.gpus if kind(gpu) in served)


def _cured(candidate: Candidate, result: RuleResult, built: Mapping[Hashable, str]) -> RuleResult:
    """Return a result whose cure names the variant that differs in this alone, where the catalog has it."""
    there = None if result.ok else built.get(without(result.rule, candidate.variant))
    return replace(result, fix=f"{there} is the same but for this") if there else result


def _alike(leading: list[Variant]) -> list[Variant]:
    """Return those of some variants that say the same of themselves as the first.

    No two cells of a matrix do, unless their images were built when labels lacked the image's own axes.
    """
    first, *others = leading
    content = _content(first)
    return [first, *(one for one in others if _content(one) == content)]
