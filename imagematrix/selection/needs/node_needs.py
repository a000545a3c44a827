"""What a variant needs from a node, as separate conditions that a scheduler can check.

The conditions are derived from the selection's rules, not written a second time: each rule is evaluated on
sample hosts, one for each combination of values that rules tell apart. One GPU per sample is enough, because
every rule holds for several GPUs if it holds for each of them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from imagematrix.errors import UsageError
from imagematrix.selection.needs.alternatives import find_alternatives
from imagematrix.selection.needs.flags import combine_conditions, find_flag_conditions
from imagematrix.selection.needs.verdicts import (
    ARCH,
    FLAGS,
    Scope,
    UnsupportedConditionError,
    find_applied_rules,
)
from imagematrix.selection.rules import RULES
from imagematrix.selection.selection_target import ARCHITECTURES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.needs.equivalence import Vocabulary
    from imagematrix.selection.needs.need import Need


def derive_needs(
    variant: Variant, vocabulary: Vocabulary, *, allow_cpu: bool = False, listed: bool = False
) -> tuple[Need, ...]:
    """Return the ways for a node to fit a variant with all its GPUs; empty if there is no way.

    A node fits if one of the ways holds. With `allow_cpu`, an image without device code may leave GPUs
    unused. Some nodes that fit match no way: nodes with different GPUs, if a GPU fits only with certain
    combinations of values (such as the brands and capabilities in NVIDIA_REQUIRE_*). Where rules compare
    drivers, a Tegra driver matches only by its exact version.

    With `listed`, the ways are about nodes whose GPUs NVIDIA's software lists. The loaded kernel modules
    drive such GPUs, and the node's own user-mode driver has the version of these modules.

    Raises UsageError if the vocabulary cannot express what a rule compares for this variant.
    """
    try:
        return tuple(_derive_needs(variant, vocabulary, allow_cpu=allow_cpu, listed=listed))
    except UnsupportedConditionError as error:
        raise UsageError(
            f"{variant.reference}: {error}",
            remedy="leave this variant out with --where, or let its node choose: `imagematrix run IMAGE`",
        ) from None


def _derive_needs(
    variant: Variant, vocabulary: Vocabulary, *, allow_cpu: bool, listed: bool
) -> Iterator[Need]:
    rules = find_applied_rules(RULES, variant, vocabulary)
    about_flags = [rule for rule in rules if FLAGS in rule.compared]
    about_facts = tuple(rule for rule in rules if FLAGS not in rule.compared)
    for arch in sorted({str(arch) for rule in rules for arch in rule.compared.get(ARCH, ())}):
        scope = Scope(arch=arch, allow_cpu=allow_cpu, vocabulary=vocabulary)
        alternatives = find_alternatives(about_facts, scope, listed=listed)
        conditions = combine_conditions(
            find_flag_conditions(rule, scope) for rule in about_flags if alternatives
        )
        platform = ARCHITECTURES.get(arch, arch)
        for need, flags in product(alternatives, conditions):
            yield replace(need, arch=platform, flags=flags.present, without=flags.absent)
