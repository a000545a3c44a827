"""The Miss: why no variant fits a host, and which is nearest."""

from __future__ import annotations

from collections import Counter

from imagematrix.common.record import replace
from imagematrix.common.text import quote_word
from imagematrix.hardware.gpu_request.spec import make_spec
from imagematrix.selection.candidate import evaluate_rules
from imagematrix.selection.hardware_key import get_gpu_kind, keep_distinct_gpus
from imagematrix.selection.remedy import Remedies, find_failing_rules
from imagematrix.selection.rule import Refusal, Remedy, select_relevant, suggest_arguments
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
        """The rules to show; see `select_relevant`."""
        return tuple(select_relevant(self.rules))

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


def explain_miss(query: Query, target: Target) -> Miss:
    """Return why no variant that `query` allows fits `target`."""
    miss, sampled = _explain_nearest(query, target), keep_distinct_gpus(target)
    fitting = query.excluded.find_fitting(sampled)
    if not fitting:
        return miss
    excluded = query.excluded.get_best(sampled, fitting)
    why = f"{miss.why}; {excluded.reference} fits, but was not requested"
    return replace(miss, why=why, remedy=query.suggest_remedy(excluded))


def _explain_nearest(query: Query, target: Target) -> Miss:
    """Return why not even the nearest of the requested variants fits."""
    catalog, index = query.catalog, query.index
    name = f"{catalog.image}:{catalog.version}"
    if not catalog.variants:
        return Miss(why=f"{name} has no variants{query.words}", remedy=None)
    variant = index.find_nearest(keep_distinct_gpus(target))
    remedies = Remedies(target)
    failing = tuple(result for result in evaluate_rules(target, variant, remedies) if not result.ok)
    if len(catalog.variants) == 1:  # of its version, or the one that was named
        why, which, but = f"{variant.reference} does not fit this host", "it", ":"
    else:
        why = f"none of the {len(catalog.variants)} variants of {name}{query.words} fits this host"
        which, but = "one", f"; the nearest is {variant.reference}, but"
    served_gpus = _find_served_gpus(index, target)
    if served_gpus:
        why += f" with all the GPUs passed; {which} fits {', '.join(gpu.label for gpu in served_gpus)}"
        spec = make_spec(served_gpus)
        remedy: Remedy | None = suggest_arguments("pass {}", f"--gpus {spec}", gpus=spec)
    else:
        remedy, remaining = _find_remedy(index, remedies, variant, failing)
        remedy = remedy or Remedy(
            words=f"see with `imagematrix explain {quote_word(name)}` what each rule needs"
        )
        whys = [failing[0].why, *(result.why for result in failing[1:] if result.rule in remaining)]
        why += f"{but} {', and '.join(dict.fromkeys(whys))}"
    return Miss(why=why, remedy=remedy, nearest=variant.reference, rules=failing)


def _find_remedy(
    index: VariantIndex, remedies: Remedies, variant: Variant, failing: tuple[RuleResult, ...]
) -> tuple[Remedy | None, frozenset[str]]:
    """Return what ends the refusal of the nearest variant, and the rules that still refuse it afterwards.

    If no change ends every refusal, it is a change that ends one of them and causes no new one for the
    variant that is nearest afterwards. The caller then names the rules that remain.
    """
    failed = frozenset([result.rule for result in failing])
    changes = [change for change in remedies.find_nearest_changes(variant, failed).values() if change]
    sufficient = next((change for change in changes if not change.remaining), None)
    sufficient = sufficient or remedies.find_single_change(variant, failed)
    if sufficient:
        return sufficient.remedy, sufficient.remaining
    for change in changes:
        # A build is nearer than all other variants. After another change, another variant may be.
        changed = change.target and keep_distinct_gpus(change.target)
        if changed is None or find_failing_rules(changed, index.find_nearest(changed)) <= failed:
            return change.remedy, change.remaining
    # Without a GPU that can be used, advice on the driver is pointless.
    ordered = sorted(failing, key=lambda result: result.rule != device_code.RULE.name)
    advice = next((result.remedy for result in ordered if result.remedy and not result.remedy.change), None)
    return advice, failed


def _find_served_gpus(index: VariantIndex, target: Target) -> tuple[Gpu, ...]:
    """Return GPUs that a single variant would fit, if none fits all: the most numerous kinds first."""
    variants = index.everything
    served_kinds = set()
    examples = {get_gpu_kind(gpu): gpu for gpu in target.gpus}
    for kind, _ in Counter(map(get_gpu_kind, target.gpus)).most_common():
        fitting = variants & index.find_fitting(replace(target, gpus=(examples[kind],)))
        if fitting:
            variants = fitting
            served_kinds.add(kind)
    return tuple(gpu for gpu in target.gpus if get_gpu_kind(gpu) in served_kinds)
