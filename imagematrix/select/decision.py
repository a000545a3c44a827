"""The Decision: what a catalog has for one kind of hardware, and on demand every reason."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from imagematrix.record import replace
from imagematrix.select.gpus import spec
from imagematrix.select.node import kind, kinds
from imagematrix.select.order import key
from imagematrix.select.rules import results
from imagematrix.select.selection import Candidate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.probe.host import Gpu
    from imagematrix.select.index import Index
    from imagematrix.select.node import Node

__all__ = ["Decision"]


class Decision:
    """The variant that fits a node best, and what there is to say about the others.

    It holds for every host of the same hardware, so that its reasons are worked out once for all of them.
    """

    def __init__(self, catalog: Catalog, index: Index, node: Node) -> None:
        self.catalog = catalog
        self._index = index
        self._node = node
        self._sample = replace(node, gpus=kinds(node.gpus))
        fitting = index.fitting(self._sample)
        self.variant = index.best(self._sample, fitting) if fitting else None

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every variant with every rule's result: those that fit by rank, then the others, nearest first."""
        told = [
            Candidate(variant=variant, rank=None, rules=results(self._node, variant))
            for variant in self.catalog.variants
        ]
        told.sort(key=self._place)
        return tuple(
            candidate if candidate.failing else replace(candidate, rank=place)
            for place, candidate in enumerate(told, 1)
        )

    @cached_property
    def refusal(self) -> tuple[str, str | None]:
        """What to tell where nothing fits: a sentence with the nearest miss, and what would change it."""
        name = f"{self.catalog.image}:{self.catalog.version}"
        if not self.catalog.variants:
            return f"{name} has no variants", None
        variant = self._index.best(self._sample, self._index.nearest(self._sample))
        failing = next(result for result in results(self._node, variant) if not result.ok)
        message = f"none of the {len(self.catalog.variants)} variants of {name} fits this host"
        served = self._served()
        if served:
            labels = ", ".join(gpu.label for gpu in served)
            return f"{message} with all the GPUs passed; one fits {labels}", f"pass --gpus {spec(served)}"
        return f"{message}; the nearest is {variant.reference}, but {failing.why}", failing.fix

    def _place(self, candidate: Candidate) -> tuple[Any, ...]:
        failing = candidate.failing
        foreign = any(result.rule == "platform" for result in failing)
        wasteful = bool(failing and self._node.gpus and not candidate.variant.gpu)
        return (
            bool(failing),
            foreign,
            wasteful,
            len(failing),
            *key(self._index.criteria, self._sample, candidate.variant),
        )

    def _served(self) -> tuple[Gpu, ...]:
        """Return GPUs that one variant would fit, where none fits all: the most numerous kinds first."""
        together = self._index.everything
        served = set()
        examples = {kind(gpu): gpu for gpu in self._node.gpus}
        for which, _ in Counter(map(kind, self._node.gpus)).most_common():
            fitting = together & self._index.fitting(replace(self._node, gpus=(examples[which],)))
            if fitting:
                together = fitting
                served.add(which)
        return tuple(gpu for gpu in self._node.gpus if kind(gpu) in served)
