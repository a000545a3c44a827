"""The verdicts of the selection's rules on sample hosts, for one variant.

What the rules state that they compare decides which samples there are. A sample has only the facts that its
rule states: a rule that reads another one cannot be expressed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial, reduce
from itertools import product
from operator import and_

from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.selection.selection_target import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.needs.equivalence import ValueClass, Vocabulary
    from imagematrix.selection.needs.grid import Grid
    from imagematrix.selection.rule import Rule

    Representatives = tuple[
        tuple[str, tuple[Hashable, ...]], ...
    ]  # facts, each with the values that stand for all

ARCH, FLAGS, VERSION = "arch", "cpu.flags", "driver.version"
# Each divides all drivers once more, and the rule is judged for each part. NVIDIA's images name a dozen.
MOST_VERSIONS = 48
CPU, DRIVER, GPUS = "cpu.", "driver.", "gpus."


class UnsupportedConditionError(Exception):
    """A vocabulary cannot express a rule; the text says why, without naming the variant."""


class _Sample:
    """A record of which only some facts are known. Properties are those of the record."""

    def __init__(self, kind: type, owner: str, facts: Mapping[str, object]) -> None:
        known = {fact.removeprefix(owner): value for fact, value in facts.items() if fact.startswith(owner)}
        self.__dict__.update(known, _kind=kind, _owner=owner)

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._kind, name, None)
        if isinstance(attribute, property) and attribute.fget:
            return attribute.fget(self)
        raise _UnstatedError(f"{self._owner}{name}")


class _UnstatedError(Exception):
    """A rule read a fact that its sample lacks; the text is the fact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRule:
    """A rule that applies to a variant; variants with equal needs are judged alike."""

    rule: Rule
    need: Hashable
    variant: Variant = field(compare=False)

    @property
    def compared(self) -> Mapping[str, frozenset[Hashable]]:
        """The values of facts that the rule compares, as it states them."""
        return _collect_thresholds(self)


# Cached for equal needs, which are what an AppliedRule is compared by.
@lru_cache(maxsize=4096)
def _collect_thresholds(applied: AppliedRule) -> Mapping[str, frozenset[Hashable]]:
    return {fact: frozenset(values) for fact, values in applied.rule.thresholds(applied.variant).items()}


def find_applied_rules(
    rules: Iterable[Rule], variant: Variant, vocabulary: Vocabulary
) -> tuple[AppliedRule, ...]:
    """Return the rules that apply.

    Raises UnsupportedConditionError if one compares facts that the vocabulary does not have, or too many
    driver versions, as an image's NVIDIA_REQUIRE_* may.
    """
    needs = ((rule, rule.need(variant)) for rule in rules)
    applying = tuple(
        AppliedRule(rule=rule, need=need, variant=variant) for rule, need in needs if need is not None
    )
    for applied in applying:
        for fact in applied.compared:
            if not _is_known_fact(vocabulary, fact):
                raise UnsupportedConditionError(_describe_missing_fact(applied.rule, fact, vocabulary))
        compared = len(applied.compared.get(VERSION, ()))
        if compared > MOST_VERSIONS:
            what = f"the rule {applied.rule.name} compares {compared} driver versions"
            raise UnsupportedConditionError(f"{what}, more than the {MOST_VERSIONS} that are judged")
    return applying


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The nodes to judge, apart from what rules compare: their architecture, and what is told of them."""

    arch: str
    allow_cpu: bool
    vocabulary: Vocabulary


class Judge:
    """One rule's verdicts for one variant, and for all others with equal needs."""

    def __init__(self, applied: AppliedRule, scope: Scope) -> None:
        self.compared = applied.compared
        self._applied, self._scope = applied, scope
        # Evaluating rules takes most of the time, and most nodes and GPUs look alike to one rule.
        self._hosts: dict[Representatives, list[_Sample]] = {}
        self._gpus: dict[Representatives, list[tuple[_Sample]]] = {}
        self._verdicts: dict[tuple[Representatives, Representatives | None], bool] = {}

    def judge_node(self, node: Representatives, gpu: Representatives | None) -> bool:
        """Return the verdict on all nodes that look like this to the rule, with a GPU or without one."""
        fits = self._verdicts.get((node, gpu))
        if fits is None:
            if node not in self._hosts:
                self._hosts[node] = [self._make_host(facts) for facts in _iterate_choices(node)]
            if gpu is not None and gpu not in self._gpus:
                self._gpus[gpu] = [(_Sample(Gpu, GPUS, facts),) for facts in _iterate_choices(gpu)]
            passed = [()] if gpu is None else self._gpus[gpu]
            fits = all(self._is_satisfied(host, gpus) for host in self._hosts[node] for gpus in passed)
            self._verdicts[node, gpu] = fits
        return fits

    def judge_flags(self, flags: frozenset[str]) -> bool:
        """Return the verdict on nodes that have, of the CPU flags that the rule compares, only these."""
        # With and without a GPU that has no facts, so that a rule which also reads GPUs is found out.
        host = self._make_host({FLAGS: flags})
        return all(self._is_satisfied(host, gpus) for gpus in ((), (_Sample(Gpu, GPUS, {}),)))

    def find_representatives(self, fact: str, value_class: ValueClass) -> tuple[Hashable, ...]:
        """Return the representatives of a value class in this rule's comparisons."""
        scale, compared = self._scope.vocabulary.scales[fact], self.compared[fact]
        samples = value_class.samples
        values = (value for sample in samples for value in scale.find_representatives(compared, sample))
        return tuple(dict.fromkeys(values))

    def _is_satisfied(self, host: Any, gpus: tuple[Any, ...]) -> bool:
        rule, variant = self._applied.rule, self._applied.variant
        try:
            return rule.is_satisfied(Target(host=host, gpus=gpus, allow_cpu=self._scope.allow_cpu), variant)
        except _UnstatedError as error:
            raise UnsupportedConditionError(
                _describe_missing_fact(rule, str(error), self._scope.vocabulary)
            ) from None

    def _make_host(self, facts: Mapping[str, object]) -> _Sample:
        """Return a host with these facts, and those that are the same for all nodes."""
        known = {fact: value for fact, value in facts.items() if "." not in fact}
        if ARCH in self.compared:
            known[ARCH] = self._scope.arch
        if any(fact.startswith(DRIVER) for fact in self.compared):
            loaded = any(fact.startswith(DRIVER) for fact in facts)
            known["driver"] = _Sample(Driver, DRIVER, facts) if loaded else None
        if FLAGS in facts:
            known["cpu"] = _Sample(Cpu, CPU, facts)
        return _Sample(Host, "", known)


# A statement judges each rule for each kind of GPUs in the table of products.
@lru_cache(maxsize=1024)
def get_judge(applied: AppliedRule, scope: Scope) -> Judge:
    """Return the judge of a rule, which all variants with equal needs share."""
    return Judge(applied, scope)


class JudgedGrid:
    """One rule's verdicts on a grid of facts of GPUs: the combinations with which a node fits.

    The bit after the last combination is the verdict on a node without GPUs.
    """

    def __init__(self, judge: Judge, grid: Grid) -> None:
        self._judge, self._grid = judge, grid
        self._about_node = [fact for fact in judge.compared if not fact.startswith(GPUS)]
        self._find_representatives = cache(judge.find_representatives)
        self._fitting: dict[Representatives, int] = {}

    def find_fitting(self, node: Mapping[str, ValueClass]) -> int:
        """Return the combinations with which a node fits, of which these facts are known.

        Without a driver, it has no facts of one.
        """
        judge, represent = self._judge, self._find_representatives
        facts = tuple([(fact, represent(fact, node[fact])) for fact in self._about_node if fact in node])
        fits = self._fitting.get(facts)
        if fits is None:
            fits = self._grid.everything + 1 if judge.judge_node(facts, None) else 0
            for gpu, members in self._gpus:
                if judge.judge_node(facts, gpu):
                    fits |= members
            self._fitting[facts] = fits
        return fits

    @cached_property
    def _gpus(self) -> list[tuple[Representatives, int]]:
        """The combinations that the rule does not tell apart, with how it sees them."""
        facts = [fact for fact in self._grid.value_classes if fact in self._judge.compared]
        sets = [
            self._grid.group_by(fact, partial(self._judge.find_representatives, fact)).items()
            for fact in facts
        ]
        return [
            (
                tuple(zip(facts, (values for values, _ in combination), strict=True)),
                reduce(and_, (members for _, members in combination), self._grid.everything),
            )
            for combination in product(*sets)
        ]


def _iterate_choices(representatives: Representatives) -> Iterator[dict[str, Hashable]]:
    """Yield all choices of one value for each fact."""
    facts = [fact for fact, _ in representatives]
    for choice in product(*(values for _, values in representatives)):
        yield dict(zip(facts, choice, strict=True))


def _is_known_fact(vocabulary: Vocabulary, fact: str) -> bool:
    return fact in {ARCH, FLAGS} or fact in vocabulary.scales


def _describe_missing_fact(rule: Rule, fact: str, vocabulary: Vocabulary) -> str:
    if _is_known_fact(vocabulary, fact):
        return f"the rule {rule.name} reads {fact} without stating the values that it compares"
    return f"the rule {rule.name} compares {fact}, which {vocabulary.carrier} do not have"
