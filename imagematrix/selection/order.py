"""Which of several variants is best for a target: a total order."""

from __future__ import annotations

from operator import attrgetter

from imagematrix.common.record import Record
from imagematrix.hardware.vendors import marches, versions
from imagematrix.images.catalog.catalog import CRITERIA, UNKNOWN
from imagematrix.selection import drivers
from imagematrix.selection.rules import cpu, device_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Any

    from imagematrix.images.catalog.catalog import DefaultOrder, Variant
    from imagematrix.selection.selection_target import Target

FIRST = "gpu"
MODES = {"exact": 0, "compat": 1, "host": 2}


class Criterion(Record):
    """One criterion by which variants are compared: the lower the score, the better.

    `facts` are all facts of a host that the score reads, named as in a Rule. `need` returns everything that
    it reads in a variant: variants with equal needs have the same score on a target. The score is None if
    what it compares is absent or unknown.
    """

    facts: tuple[str, ...]
    need: Callable[[Variant], Hashable]
    score: Callable[[Target, Variant], Any]

    def rate(self, target: Target, variant: Variant) -> tuple[bool, Any]:
        """Return the score in a form that compares: None is worse than every score."""
        score = self.score(target, variant)
        return score is None, score


def order_criteria(prefer: Sequence[str] = (), default_order: DefaultOrder = ()) -> tuple[Criterion, ...]:
    """Return the criteria: the order of defaults, "gpu", those in `prefer`, the others in their usual order.

    No preference puts an image that leaves GPUs unused before one that uses them.
    """
    criteria = [BY_NAME[name] for name in dict.fromkeys((FIRST, *prefer, *CRITERIA))]
    if default_order:
        criteria.insert(0, _make_default_criterion(default_order))
    return tuple(criteria)


def rank_default_values(default_order: DefaultOrder, variant: Variant) -> tuple[int, ...]:
    """Return the places of a variant's values in the order of defaults, axis by axis; others come last."""
    axes = dict(variant.axes)
    return tuple(
        [
            values.index(axes[axis]) if axes.get(axis) in values else len(values)
            for axis, values in default_order
        ]
    )


def _make_default_criterion(default_order: DefaultOrder) -> Criterion:
    return Criterion(
        facts=(),
        need=attrgetter("axes"),
        score=lambda _, variant: rank_default_values(default_order, variant),
    )


def make_sort_key(criteria: Sequence[Criterion], target: Target, variant: Variant) -> tuple[Any, ...]:
    """Return the sort key of a variant on a target: criterion by criterion, then its reference.

    No two variants of a catalog have the same reference, so that no two have the same key.
    """
    return (*(criterion.rate(target, variant) for criterion in criteria), variant.reference)


def _score_device_code(target: Target, variant: Variant) -> tuple[int, int, bool] | None:
    driver = drivers.get_effective_driver(target, variant)
    matches = [device_code.rate_code(variant, gpu, driver) for gpu in target.gpus]
    worst = None if None in matches else max(filter(None, matches), default=None)
    if worst is None:
        return None
    return (*worst, any(device_code.has_partial_code(variant, gpu, driver) for gpu in target.gpus))


def _score_driver_mode(_: Target, variant: Variant) -> int | None:
    mode = drivers.get_driver_mode(variant)
    return MODES[mode] if mode else None


def _score_cuda(_: Target, variant: Variant) -> tuple[int, ...] | None:
    return tuple(-part for part in versions.make_sort_key(variant.cuda)) if variant.cuda else None


def _has_unknown_flags(variant: Variant) -> bool:
    """Whether the flags that the code needs are not all known; some may be."""
    return variant.source("cpu_flags") == UNKNOWN


def _score_cpu_level(_: Target, variant: Variant) -> int | None:
    if _has_unknown_flags(variant):
        return None
    return -marches.get_level_rank(marches.get_level(variant.cpu_flags))


def _score_cpu_vendor(target: Target, variant: Variant) -> int:
    if variant.vendor in (None, "generic"):
        return 1
    return 0 if variant.vendor == marches.get_host_vendor(target.host.cpu.vendor) else 2


def _score_cpu_flags(_: Target, variant: Variant) -> int | None:
    return None if _has_unknown_flags(variant) else -len(cpu.get_needed_flags(variant))


# What says which flags the code needs: also where they come from, because they may be unknown.
_get_cpu_need = attrgetter("facts", "cpu_flags", "signed_returns", "platform")

# By name; CRITERIA has the usual order.
BY_NAME = {
    # GPU variants before CPU-only ones
    "gpu": Criterion(facts=(), need=attrgetter("gpu"), score=lambda _, variant: not variant.gpu),
    # a native cubin, then the nearest lower minor, then PTX, each with all parts before some; the worst match
    # among the GPUs decides
    "device-code": Criterion(
        facts=("driver.version", "gpus.compute", "gpus.state"),
        need=device_code.need,
        score=_score_device_code,
    ),
    # the exact driver, then cuda-compat, then the host's
    "driver": Criterion(facts=(), need=drivers.get_driver_mode, score=_score_driver_mode),
    # the newest CUDA release
    "cuda": Criterion(facts=(), need=attrgetter("cuda"), score=_score_cuda),
    # the highest psABI level among the flags that the code needs
    "cpu-level": Criterion(facts=(), need=_get_cpu_need, score=_score_cpu_level),
    # tuned for the host's CPU vendor, then generic, then tuned for another vendor
    "cpu-vendor": Criterion(facts=("cpu.vendor",), need=attrgetter("vendor"), score=_score_cpu_vendor),
    # the most flags that the code needs
    "cpu-flags": Criterion(facts=(), need=_get_cpu_need, score=_score_cpu_flags),
}
