"""Which of several variants is best: a total order of the variants, for a node and by nothing else."""

from __future__ import annotations

from operator import attrgetter

from imagematrix.catalog.catalog import CRITERIA
from imagematrix.facts import marches, versions
from imagematrix.record import Record
from imagematrix.selection import needs, verdicts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Any

    from imagematrix.catalog.catalog import Variant
    from imagematrix.selection.node import Node

__all__ = ["Criterion", "key", "order"]

MODES = {"exact": 0, "compat": 1, "host": 2, None: 3}
NO_CODE = (2, 0)


class Criterion(Record):
    """One thing by which variants are compared: the less its score, the better.

    `needs` returns all that it looks at in a variant: variants with equal needs have one score on a node.
    """

    needs: Callable[[Variant], Hashable]
    score: Callable[[Node, Variant], Any]


def order(prefer: Sequence[str] = ()) -> tuple[Criterion, ...]:
    """Return the criteria, those that a catalog prefers first and the others in their usual order."""
    return tuple(BY_NAME[name] for name in dict.fromkeys((*prefer, *CRITERIA)))


def key(criteria: Sequence[Criterion], node: Node, variant: Variant) -> tuple[Any, ...]:
    """Return the sort key of a variant on a node: criterion by criterion, and its reference at last.

    No two variants of a catalog have the same reference, so that no two have the same key.
    """
    return (*(criterion.score(node, variant) for criterion in criteria), variant.reference)


def _cpu_only(_: Node, variant: Variant) -> bool:
    return not variant.gpu


def _device_code(node: Node, variant: Variant) -> tuple[int, int]:
    driver = verdicts.effective_driver(node, variant)
    return max((verdicts.code(variant, gpu, driver) or NO_CODE for gpu in node.gpus), default=NO_CODE)


def _driver_mode(_: Node, variant: Variant) -> int:
    return MODES[needs.mode(variant)]


def _cuda(_: Node, variant: Variant) -> tuple[int, ...]:
    return tuple(-part for part in versions.order(variant.cuda)) if variant.cuda else ()


def _cpu_level(_: Node, variant: Variant) -> int:
    return -marches.level_rank(marches.level(variant.cpu_flags))


def _cpu_vendor(node: Node, variant: Variant) -> int:
    if variant.vendor in (None, "generic"):
        return 1
    return 0 if variant.vendor == marches.host_vendor(node.host.cpu.vendor) else 2


def _cpu_flags(node: Node, variant: Variant) -> int:
    return -len(verdicts.needed_flags(node, variant))


# By their names in CRITERIA, which has their usual order.
BY_NAME = {
    # GPU variants before CPU-only ones
    "gpu": Criterion(needs=attrgetter("gpu"), score=_cpu_only),
    # a native cubin, then the nearest lower minor, then PTX; of several GPUs the worst served decides
    "device-code": Criterion(needs=needs.code, score=_device_code),
    # the exact driver, then cuda-compat, then the host's
    "driver": Criterion(needs=needs.mode, score=_driver_mode),
    # the newest CUDA release
    "cuda": Criterion(needs=attrgetter("cuda"), score=_cuda),
    # the highest psABI level among the flags that the code needs
    "cpu-level": Criterion(needs=needs.cpu, score=_cpu_level),
    # tuned for the host's CPU vendor, then for none, then for another
    "cpu-vendor": Criterion(needs=attrgetter("vendor"), score=_cpu_vendor),
    # the most flags that the code needs
    "cpu-flags": Criterion(needs=needs.cpu, score=_cpu_flags),
}
