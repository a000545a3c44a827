"""A statement about nodes for a system that knows only some facts of them.

Every node that meets the statement, and for which the assumptions hold, fits the variant. The statement is
derived like all needs, with a vocabulary that has what the system knows: see `knowledge`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import cuda, device_code, gpus, marches, versions
from imagematrix.selection.needs.equivalence import find_version_before
from imagematrix.selection.needs.knowledge import (
    ARCH,
    ASSUMED,
    CPU_FLAGS,
    CPU_LEVEL,
    CUDA,
    DRIVER,
    GPU_COMPUTE,
    GPU_NAME,
    list_words,
    make_word,
)
from imagematrix.selection.needs.node_needs import derive_needs
from imagematrix.selection.needs.verdicts import FLAGS, GPUS, VERSION, find_applied_rules
from imagematrix.selection.rules import RULES
from imagematrix.selection.selection_target import MACHINES, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.needs.knowledge import GpuKind, Knowledge
    from imagematrix.selection.needs.need import Need
    from imagematrix.selection.needs.verdicts import AppliedRule

MOST_MISSING = 3  # facts that a system may lack at once
OTHER_BRAND = "geforce"  # of a sample that is no data-centre part


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One way for a node to fit: all of its conditions hold, and every GPU has one of these names, if any."""

    need: Need
    gpu_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """What has to be true of a node besides a statement: about one fact, named by its word."""

    fact: str
    text: str


def derive_statement(
    variant: Variant, knowledge: Knowledge, *, allow_cpu: bool = False
) -> tuple[Alternative, ...]:
    """Return the alternatives of which a node has to meet one; none if no statement proves that it fits.

    CPU flags are those of the code, whether the system knows any: `split_flags` says which of them it does.
    Raises UsageError if a rule compares what no statement can express.
    """
    kinds_by_need: dict[Need, list[GpuKind]] = {}
    for kind in knowledge.gpu_kinds if variant.gpu else (None,):
        for need in derive_needs(variant, knowledge.make_vocabulary(kind), allow_cpu=allow_cpu):
            kinds_by_need.setdefault(need, []).extend([kind] if kind else [])
    return tuple(
        Alternative(
            need=replace(need, computes=_list_codes(kinds) or need.computes),
            gpu_names=tuple(sorted({name for kind in kinds for name in kind.names})),
        )
        for need, kinds in kinds_by_need.items()
    )


def _list_codes(kinds: list[GpuKind]) -> tuple[int, ...]:
    return tuple(sorted(int(device_code.make_target(kind.compute)) for kind in kinds if kind.compute))


def split_flags(need: Need, knowledge: Knowledge | None) -> tuple[str | None, frozenset[str], frozenset[str]]:
    """Return the psABI level and the further flags of a statement, and the flags that have to be assumed.

    The level is None if the system knows none, or if the code needs none. Without `knowledge`, all facts are
    known.
    """
    words = knowledge.words if knowledge else {CPU_FLAGS}
    level = need.cpu_level if words & {CPU_FLAGS, CPU_LEVEL} else None
    further = need.flags - marches.get_level_flags(level)
    return (level, further, frozenset()) if CPU_FLAGS in words else (level, frozenset(), further)


def list_assumptions(
    variant: Variant, knowledge: Knowledge, alternatives: tuple[Alternative, ...]
) -> tuple[Assumption, ...]:
    """Return what a variant's statement takes for true, because the system does not know it."""
    return tuple(_list_assumptions(variant, knowledge, alternatives))


def _list_assumptions(
    variant: Variant, knowledge: Knowledge, alternatives: tuple[Alternative, ...]
) -> Iterator[Assumption]:
    words = knowledge.words
    applied = find_applied_rules(RULES, variant, knowledge.vocabulary)
    compared = {fact for rule in applied for fact in rule.compared}
    if ARCH not in words:
        yield Assumption(fact=ARCH, text=f"the node runs images for {variant.platform}")
    needs = {alternative.need.flags: alternative.need for alternative in alternatives}
    for need in needs.values():
        _, _, assumed = split_flags(need, knowledge)
        if assumed:
            text = f"the CPUs have {_describe_flags(replace(need, flags=assumed))}"
            yield Assumption(fact=CPU_FLAGS, text=text)
    for fact, (_, text) in ASSUMED.items():
        if fact in compared and make_word(fact) not in words:
            yield Assumption(fact=make_word(fact), text=text)
    if VERSION in compared and CUDA in words and DRIVER not in words:
        text = "a driver says that it supports a CUDA release only if NVIDIA lists it for that release"
        yield Assumption(fact=DRIVER, text=text)
    known = GPU_NAME if GPU_NAME in words else GPU_COMPUTE
    if known in words and any(fact.startswith(GPUS) for fact in compared):
        what = "name" if known == GPU_NAME else "capability"
        yield Assumption(
            fact=known,
            text=f"a GPU is a product that had this {what} by {gpus.get_date()}, and its driver supports it",
        )


def _describe_flags(need: Need) -> str:
    """Return the CPU flags of a need in words, those of a psABI level by its name."""
    level, further, _ = split_flags(need, None)
    return " ".join([*([level] if level else []), *sorted(further)])


def find_missing_facts(
    variant: Variant, knowledge: Knowledge, *, allow_cpu: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Return the smallest sets of facts with which there would be a statement, by their words; or none."""
    applied = find_applied_rules(RULES, variant, knowledge.vocabulary)
    # A statement takes CPU flags for true, so that variants which differ in them only lack the same facts.
    judged = tuple(rule for rule in applied if rule.compared.keys() - {FLAGS})
    return _find_missing_facts(judged, knowledge, allow_cpu=allow_cpu) if judged else ()


@lru_cache(maxsize=1024)
def _find_missing_facts(
    applied: tuple[AppliedRule, ...], knowledge: Knowledge, *, allow_cpu: bool
) -> tuple[tuple[str, ...], ...]:
    follows = {make_word(fact) for fact in ASSUMED} | {ARCH, CPU_FLAGS, CPU_LEVEL}
    told = [{fact for fact, _ in kind.values} for kind in knowledge.gpu_kinds]
    follows.update(map(make_word, set.intersection(*told)))
    if GPU_NAME not in knowledge.words:
        follows.discard(GPU_COMPUTE)

    # Only what a rule compares can help, or the release or the name that tells of it.
    compared = {fact for rule in applied for fact in rule.compared}
    helpful = {make_word(fact) for fact in compared}
    helpful |= {CUDA} if VERSION in compared else set()
    helpful |= {GPU_NAME} if any(fact.startswith(GPUS) for fact in compared) else set()
    lacking = [
        word
        for word in list_words(knowledge.vocabulary)
        if word in helpful and word not in knowledge.words and word not in follows
    ]
    variant = applied[0].variant
    for size in range(1, MOST_MISSING + 1):
        found = tuple(
            further
            for further in combinations(lacking, size)
            if _has_statement(
                variant, replace(knowledge, words=knowledge.words.union(further)), allow_cpu=allow_cpu
            )
        )
        if found:
            return found
    return ()


def _has_statement(variant: Variant, knowledge: Knowledge, *, allow_cpu: bool) -> bool:
    """Whether `derive_statement` returns any: found with the first kind of GPU that has one."""
    return any(
        derive_needs(variant, knowledge.make_vocabulary(kind), allow_cpu=allow_cpu)
        for kind in (knowledge.gpu_kinds if variant.gpu else (None,))
    )


def find_limiting_rules(variant: Variant, alternative: Alternative) -> tuple[str, ...]:
    """Return the rules that set the oldest driver: those that refuse the version before it.

    Where a system knows only the CUDA release, that version may fit, but not all of the release before.
    """
    oldest = alternative.need.oldest
    if oldest is None:
        return ()
    firsts = map(versions.make_sort_key, cuda.list_first_drivers().values())
    earlier = [find_version_before(oldest), *sorted(first for first in firsts if first < oldest)[-1:]]
    for version in earlier:
        names = _list_refusing_rules(variant, alternative, ".".join(map(str, version)))
        if names:
            return names
    return ()


def _list_refusing_rules(variant: Variant, alternative: Alternative, driver: str) -> tuple[str, ...]:
    targets = [_make_target(alternative.need, driver, gpu) for gpu in _make_sample_gpus(alternative)]
    return tuple(
        rule.name
        for rule in RULES
        if rule.need(variant) is not None
        and VERSION in rule.thresholds(variant)
        and not all(rule.is_satisfied(target, variant) for target in targets)
    )


def _make_sample_gpus(alternative: Alternative) -> Iterator[Gpu]:
    """Yield GPUs of the least and of the greatest capability that an alternative admits."""
    need = alternative.need
    computes = [f"{code // 10}.{code % 10}" for code in need.computes or () if code >= 0]
    for name in alternative.gpu_names:
        computes += [product.compute for product in gpus.find_products(name) if product.compute]
    computes.sort(key=versions.make_sort_key)
    brand = "tesla" if need.data_centre else (need.brands or (OTHER_BRAND,))[0]
    for compute in {computes[0], computes[-1]} if computes else ():
        yield Gpu(index=0, compute=compute, brand=brand, state=(need.states or ("ok",))[0])


def _make_target(need: Need, version: str, gpu: Gpu) -> Target:
    host = Host(
        arch=MACHINES.get(need.arch, need.arch),
        cpu=Cpu(vendor=None, model=None, flags=need.flags, level=None),
        driver=Driver(version=version, kind=None, source="sample"),
        gpus=(gpu,),
    )
    return Target(host=host, gpus=host.gpus)
