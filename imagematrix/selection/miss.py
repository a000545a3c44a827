"""The Miss: why no variant fits a host, and which is nearest."""

from __future__ import annotations

from collections import Counter

from imagematrix.common.record import replace
from imagematrix.common.text import quote_word
from imagematrix.hardware.gpu_request.spec import make_spec
from imagematrix.selection.candidate import evaluate_rules
from imagematrix.selection.hardware_key import keep_distinct_gpus, kind
from imagematrix.selection.remedy import Remedies, find_failing_rules
from imagematrix.selection.rule import Refusal, Remedy, suggest_arguments
from imagematrix.selection.rules import device_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.query import Query
    from imagematrix.selection.rule import RuleResult
    from imagematrix.selection.selection_target import Target
    from imagematrix.selection.variant_index import VariantIndex


class Miss(Refusal):
    """Why a host gets no image.

    `why` is the reason in one sentence, `remedy` what to do, or None. `nearest` is the reference of the
    variant that is nearest to fitting, and `rules` are the rules that it fails.
    """

    why: str
    remedy: Remedy | None
    nearest: str | None = None
    rules: tuple[RuleResult, ...] = ()

    @property
    def relevant(self) -> tuple[RuleResult, ...]:
        """The rules to show: if an image is for another architecture, its other rules are irrelevant."""
        foreign = tuple(rule for rule in self.rules if rule.rule == "platform")
        return foreign or self.rules

    @property
    def told(self) -> bool:
        """Whether the rules to show say all that `why` and `fix` say."""
        return bool(self.relevant) and self.relevant[0].why in self.why and self.fix == self.relevant[0].fix

    def to_json(self) -> dict[str, object]:
        """Return its part of the Coverage document."""
        return {
            "nearest": self.nearest,
            "why": self.why,
            "fix": self.shown,
            "change": self.change,
            "rules": [rule.to_json() for rule in self.rules],
        }


def explain_miss(question: Query, target: Target) -> Miss:
    """Return why no variant that `question` allows fits `target`."""
    nearest, sampled = _find_nearest(question, target), keep_distinct_gpus(target)
    others = question.left_out
    fitting = others.fitting(sampled)
    if not fitting:
        return nearest
    other = others.best(sampled, fitting)
    why = f"{nearest.why}; {other.reference} fits, but was not requested"
    return replace(nearest, why=why, remedy=question.remedy(other))


def _find_nearest(question: Query, target: Target) -> Miss:
    catalog, index = question.catalog, question.index
    name = f"{catalog.image}:{catalog.version}"
    if not catalog.variants:
        return Miss(why=f"{name} has no variants{question.words}", remedy=None)
    variant = index.nearest(keep_distinct_gpus(target))
    remedies = Remedies(target)
    failing = tuple(result for result in evaluate_rules(target, variant, remedies) if not result.ok)
    if len(catalog.variants) == 1:  # of its version, or the one that was named
        why, which, but = f"{variant.reference} does not fit this host", "it", ":"
    else:
        why = f"none of the {len(catalog.variants)} variants of {name}{question.words} fits this host"
        which, but = "one", f"; the nearest is {variant.reference}, but"
    served = _find_served_gpus(index, target)
    if served:
        why += f" with all the GPUs passed; {which} fits {', '.join(gpu.label for gpu in served)}"
        named = make_spec(served)
        remedy: Remedy | None = suggest_arguments("pass {}", f"--gpus {named}", gpus=named)
    else:
        remedy, left = _find_remedy(index, remedies, variant, failing)
        remedy = remedy or Remedy(
            words=f"see with `imagematrix explain {quote_word(name)}` what each rule needs"
        )
        whys = [failing[0].why, *(result.why for result in failing[1:] if result.rule in left)]
        why += f"{but} {', and '.join(dict.fromkeys(whys))}"
    return Miss(why=why, remedy=remedy, nearest=variant.reference, rules=failing)


def _find_remedy(
    index: VariantIndex, remedies: Remedies, variant: Variant, failing: tuple[RuleResult, ...]
) -> tuple[Remedy | None, frozenset[str]]:
    """Return what ends the refusal of the nearest variant, and the rules that refuse it still.

    If no change ends every refusal, it is one that ends one. The others have to be named, and no variant may
    be refused by yet another.
    """
    failed = frozenset([result.rule for result in failing])
    ending = [tried for tried in remedies.find_nearest_changes(variant, failed).values() if tried]
    whole = next((tried for tried in ending if not tried.left), None) or remedies.find_single_change(
        variant, failed
    )
    if whole:
        return whole.remedy, whole.left
    for tried in ending:
        # A build is nearer than all other variants. After another change, another variant may be.
        changed = tried.target and keep_distinct_gpus(tried.target)
        if changed is None or find_failing_rules(changed, index.nearest(changed)) <= failed:
            return tried.remedy, tried.left
    # Without a GPU that can be used, advice on the driver is pointless.
    ordered = sorted(failing, key=lambda result: result.rule != device_code.RULE.name)
    advice = next((result.remedy for result in ordered if result.remedy and not result.remedy.change), None)
    return advice, failed


def _find_served_gpus(index: VariantIndex, target: Target) -> tuple[Gpu, ...]:
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
