"""The Decision: what a catalog has for one kind of hardware, and on demand every reason."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from imagematrix.gpus.spec import spec
from imagematrix.record import replace
from imagematrix.selection import needs
from imagematrix.selection.node import kind, kinds
from imagematrix.selection.order import key
from imagematrix.selection.rules import apart, results, without
from imagematrix.selection.selection import Candidate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from typing import Any

    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Gpu
    from imagematrix.selection.node import Node
    from imagematrix.selection.question import Question
    from imagematrix.selection.selection import RuleResult

__all__ = ["Decision"]

SHOWN = 8  # variants that nothing tells apart which are named


class Decision:
    """The variant that fits a node best, and what there is to say about the others.

    It holds for every host of the same hardware, and is kept for the next. What is said about the others is
    worked out each time it is asked for: of a thousand variants it takes two megabytes.
    """

    def __init__(self, question: Question, node: Node) -> None:
        self.catalog = question.catalog
        self.question = question
        self._index = question.index
        self._node = node
        self._sample = replace(node, gpus=kinds(node.gpus))
        fitting = self._index.fitting(self._sample)
        self.differing = self._index.differing(fitting)
        self._leading = _alike(self._index.leading(self._sample, fitting)) if fitting else []
        self.variant = self._leading[0] if len(self._leading) == 1 and not self.differing else None

    def __reduce__(self) -> tuple[Callable[[Question, Node], Decision], tuple[Question, Node]]:
        return Decision, (self.question, self._node)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every variant with every rule's result: those that fit by rank, then the others, nearest first."""
        told = [
            Candidate(variant=variant, rank=None, rules=results(self._node, variant))
            for variant in self.catalog.variants
        ]
        told.sort(key=self._place)
        built = {
            without(result.rule, candidate.variant): candidate.reference
            for candidate in reversed(told)
            for result in candidate.rules
            if result.ok
        }
        return tuple(
            replace(candidate, rules=tuple(_cured(candidate, result, built) for result in candidate.rules))
            if candidate.failing
            else replace(candidate, rank=place)
            for place, candidate in enumerate(told, 1)
        )

    @cached_property
    def doubt(self) -> tuple[str, str] | None:
        """What to tell where several variants fit that only the question can decide among, and how it can."""
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
    def refusal(self) -> tuple[str, str | None]:
        """What to tell where nothing fits: a sentence with the nearest miss, and what would change it."""
        name = f"{self.catalog.image}:{self.catalog.version}"
        message, remedy = self._refusal(name)
        others = self.question.left_out
        fitting = others.fitting(self._sample)
        if not fitting:
            return message, remedy
        other = others.best(self._sample, fitting)
        return f"{message}; {other.reference} fits, which was not asked for", self.question.remedy(other)

    def _refusal(self, name: str) -> tuple[str, str | None]:
        if not self.catalog.variants:
            return f"{name} has no variants{self.question.words}", None
        variant = self._index.nearest(self._sample)
        failing = next(result for result in results(self._node, variant) if not result.ok)
        number = len(self.catalog.variants)
        message = f"none of the {number} variants of {name}{self.question.words} fits this host"
        served = self._served()
        if served:
            labels = ", ".join(gpu.label for gpu in served)
            return f"{message} with all the GPUs passed; one fits {labels}", f"pass --gpus {spec(served)}"
        return f"{message}; the nearest is {variant.reference}, but {failing.why}", failing.fix

    def _place(self, candidate: Candidate) -> tuple[Any, ...]:
        failing = candidate.failing
        foreign = any(result.rule == "platform" for result in failing)
        mistaken = bool(failing and bool(self._node.gpus) is not candidate.variant.gpu)
        return (
            bool(failing),
            foreign,
            mistaken,
            len(failing),
            apart(self._sample, candidate.variant),
            *key(self._index.criteria, self._sample, candidate.variant),
        )

    def _served(self) -> tuple[Gpu, ...]:
        """Return GPUs that one variant would fit, where none fits all: the most numerous kinds first."""
        together = self._index.everything
        served = set()
        examples = {kind(gpu): gpu for gpu in self._node.gpus}
        for which, _ in Counter(map(kind, self._node.gpus)).most_common():
            fitting = together & self._index.fitting(replace(self._node, gpus=(examples[which],)))
            if fitting:
                together = fitting
                served.add(which)
        return tuple(gpu for gpu in self._node.gpus if kind(gpu) in served)


def _cured(candidate: Candidate, result: RuleResult, built: Mapping[Hashable, str]) -> RuleResult:
    """Return a result whose cure names the variant that differs in this alone, where the catalog has it."""
    there = None if result.ok else built.get(without(result.rule, candidate.variant))
    return replace(result, fix=f"{there} is the same but for this") if there else result


def _alike(leading: list[Variant]) -> list[Variant]:
    """Return those of some variants that say the same of themselves as the first.

    No two cells of a matrix do, unless their images were built when labels lacked the image's own axes.
    """
    first, *others = leading
    said = needs.everything(first)
    return [first, *(one for one in others if needs.everything(one) == said)]
