"""`cpu`: the host's CPUs have every flag that the code needs. Otherwise it ends with SIGILL (exit code 132).

Source: https://gcc.gnu.org/onlinedocs/gcc/x86-Options.html.
"""

from __future__ import annotations

from imagematrix.facts import marches
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from imagematrix.catalog.catalog import Variant
    from imagematrix.selection.rule import Gap, Reason
    from imagematrix.selection.target import Target

__all__ = ["RULE", "need", "needed_flags"]


def need(variant: Variant) -> Hashable:
    """Return the flags, and whether those for signing return addresses count."""
    return variant.cpu_flags, variant.signed_returns


def holds(target: Target, variant: Variant) -> bool:
    """Whether no flag is missing. Flags are compared, never names."""
    return needed_flags(target, variant) <= target.host.cpu.flags


def needed_flags(target: Target, variant: Variant) -> frozenset[str]:
    """Return the flags that the code needs, without those that user code never depends on.

    Labels list the flags for signing return addresses for every march that has them: they count only if a
    label says that the code does sign.
    """
    needed = variant.cpu_flags - marches.IGNORED.get(target.host.arch, frozenset())
    return needed | marches.SIGNING if variant.signed_returns else needed


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and fix."""
    wanted = " ".join(sorted(needed_flags(target, variant))) or "no flags"
    if ok:
        return wanted, "all of them", "the CPUs have every flag that the code needs", None
    flags = target.host.cpu.flags
    if not flags:
        return wanted, None, "the flags of the host's CPUs could not be read", "probe the host again"
    missing = " ".join(_missing(target, variant))
    level = marches.level(flags)
    fix = f"build a variant for march {level}" if level else f"build a variant that needs no {missing}"
    return wanted, f"all but {missing}", f"the host's CPUs lack {missing}, which the code needs", fix


def gap(target: Target, variant: Variant) -> Gap:
    """Return how many flags the host lacks."""
    return (len(_missing(target, variant)),)


def _missing(target: Target, variant: Variant) -> list[str]:
    return sorted(needed_flags(target, variant) - target.host.cpu.flags)


RULE = Rule(
    name="cpu",
    facts=("arch", "cpu.flags"),
    parts=("cpu_flags", "signed_returns"),
    fact="cpu_flags",
    need=need,
    holds=holds,
    reason=reason,
    gap=gap,
)
