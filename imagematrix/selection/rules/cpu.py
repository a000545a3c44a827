"""`cpu`: the host's CPUs have every flag that the code needs. Otherwise it ends with SIGILL (exit code 132).

A flag that the code probably needs counts as one that it is proven to need.

Source: https://gcc.gnu.org/onlinedocs/gcc/x86-Options.html.
"""

from __future__ import annotations

from functools import lru_cache

from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog.catalog import PROBABLE
from imagematrix.selection.rule import Rule
from imagematrix.selection.selection_target import get_machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target

NONE = "none"  # in place of a list of flags on the command line
KEPT = 1024  # sets of needed flags: a catalog has one for each march


def need(variant: Variant) -> Hashable:
    """Return the flags, whether those for signing return addresses count, and the platform."""
    return variant.cpu_flags, variant.partial_flags, variant.signed_returns, variant.platform


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether no flag is missing. Flags are compared, never names."""
    return get_needed_flags(variant) <= target.host.cpu.flags


def get_needed_flags(variant: Variant) -> frozenset[str]:
    """Return the flags that the code needs, without those that user code never depends on.

    Labels list the flags for signing return addresses for every march that has them: they count only if a
    label says that the code does sign.
    """
    return _compute_needed_flags(variant.cpu_flags, variant.platform, variant.signed_returns)


# Cached by the three values, because hashing a variant takes longer than computing its flags.
@lru_cache(maxsize=KEPT)
def _compute_needed_flags(flags: frozenset[str], platform: str, signed: bool) -> frozenset[str]:  # noqa: FBT001 - a key
    needed = flags - marches.IGNORED.get(get_machine(platform), frozenset())
    return needed | marches.SIGNING if signed else needed


def thresholds(variant: Variant) -> Thresholds:
    """Return the flags that the code needs."""
    return {"cpu.flags": get_needed_flags(variant)}


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    wanted = " ".join(sorted(get_needed_flags(variant))) or "no flags"
    if ok:
        return wanted, "all of them", "the CPUs have every flag that the code needs", None
    flags = target.host.cpu.flags
    if not flags:
        return wanted, None, "the flags of the host's CPUs could not be read", "probe the host again"
    missing = " ".join(sorted(get_needed_flags(variant) - flags))
    why = f"the host's CPUs lack {missing}, {_describe_source(target, variant)}"
    return wanted, f"all but {missing}", why, f"build a variant that needs no {missing}"


def distance(target: Target, variant: Variant) -> Distance:
    """Return how many flags the host lacks."""
    return (len(get_needed_flags(variant) - target.host.cpu.flags),)


def warn(target: Target, variant: Variant) -> Iterator[str]:
    """Yield that the host lacks flags for which a large part of the code is compiled."""
    missing = sorted(_find_partial_flags(variant) - target.host.cpu.flags)
    if missing:
        yield (
            f"the host's CPUs lack {' '.join(missing)}, for which much of a program or library is "
            "compiled: if it does not ask for the CPU before it runs that code, it ends with SIGILL"
        )


def warn_thresholds(variant: Variant) -> Thresholds:
    """Return the flags for which a large part of the code is compiled."""
    return {"cpu.flags": _find_partial_flags(variant)}


def _find_partial_flags(variant: Variant) -> frozenset[str]:
    return variant.partial_flags - marches.IGNORED.get(get_machine(variant.platform), frozenset())


def _describe_source(target: Target, variant: Variant) -> str:
    """Return how the code needs the flags that are missing; if only probably, with how to overrule it."""
    if variant.source("cpu_flags") != PROBABLE:
        return "which the code needs"
    remaining = ",".join(sorted(get_needed_flags(variant) & target.host.cpu.flags)) or NONE
    overrule = (
        f"adopt the image with --cpu-flags {remaining}"
        if variant.march is None
        else "state `cpu_code: claim` at the image in matrix.yaml"
    )
    return (
        "which the code probably needs, because most of a program or library is compiled for it; "
        f"if it asks for the CPU before it runs that code, {overrule}"
    )


RULE = Rule(
    name="cpu",
    facts=("cpu.flags",),
    parts=("cpu_flags", "signed_returns"),
    fact="cpu_flags",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
    warn=warn,
    warn_thresholds=warn_thresholds,
)
