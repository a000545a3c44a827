"""The Miss: why no variant fits a host, and which is nearest."""

from __future__ import annotations

from collections import Counter

from imagematrix.gpus.spec import spec
from imagematrix.record import Record, replace
from imagematrix.selection.candidate import results
from imagematrix.selection.hardware import kind, sample

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.node.host import Gpu
    from imagematrix.selection.index import Index
    from imagematrix.selection.question import Question
    from imagematrix.selection.rule import RuleResult
    from imagematrix.selection.target import Target

__all__ = ["Miss", "miss"]


class Miss(Record):
    """Why a host gets no image.

    `why` is the reason in one sentence, and `fix` the remedy, or None. `nearest` is the reference of the
    variant that is nearest to fitting, and `rules` are the rules that it fails.
    """

    why: str
    fix: str | None
    nearest: str | None = None
    rules: tuple[RuleResult, ...] = ()

    @property
    def relevant(self) -> tuple[RuleResult, ...]:
        """The rules to show: if an image is for another architecture, its other rules are irrelevant."""
        foreign = tuple(rule for rule in self.rules if rule.rule == "platform")
        return foreign or self.rules

    def to_json(self) -> dict[str, object]:
        """Return its part of the Coverage document."""
        return {
            "nearest": self.nearest,
            "why": self.why,
            "fix": self.fix,
            "rules": [rule.to_json() for rule in self.rules],
        }


def miss(question: Question, target: Target) -> Miss:
    """Return why no variant that `question` allows fits `target`."""
    nearest, one_of_each = _nearest(question, target), sample(target)
    others = question.left_out
    fitting = others.fitting(one_of_each)
    if not fitting:
        return nearest
    other = others.best(one_of_each, fitting)
    why = f"{nearest.why}; {other.reference} fits, but was not requested"
    return replace(nearest, why=why, fix=question.remedy(other))


def _nearest(question: Question, target: Target) -> Miss:
    catalog, index = question.catalog, question.index
    name = f"{catalog.image}:{catalog.version}"
    if not catalog.variants:
        return Miss(why=f"{name} has no variants{question.words}", fix=None)
    variant = index.nearest(sample(target))
    failing = tuple(result for result in results(target, variant) if not result.ok)
    if len(catalog.variants) == 1:  # of its version, or the one that was named
        why, which, but = f"{variant.reference} does not fit this host", "it", ":"
    else:
        why = f"none of the {len(catalog.variants)} variants of {name}{question.words} fits this host"
        which, but = "one", f"; the nearest is {variant.reference}, but"
    served = _served(index, target)
    if served:
        why += f" with all the GPUs passed; {which} fits {', '.join(gpu.label for gpu in served)}"
        fix: str | None = f"pass --gpus {spec(served)}"
    else:
        why += f"{but} {failing[0].why}"
        fix = failing[0].fix
    return Miss(why=why, fix=fix, nearest=variant.reference, rules=failing)


def _served(index: Index, target: Target) -> tuple[Gpu, ...]:
    """Return GPUs that a single variant would fit, if none fits all: the most numerous kinds first."""
    together = index.everything
    served = set()
    examples = {kind(gpu): gpu for gpu in target.gpus}
    for which, _ in Counter(map(kind, target.gpus)).most_common():
        fitting = together & index.fitting(replace(target, gpus=(examples[which],)))
        if fitting:
            together = fitting
            served.add(which)
    return tuple(gpu for gpu in target.gpus if kind(gpu) in served)
