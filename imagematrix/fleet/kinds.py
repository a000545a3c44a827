"""The kinds of hardware in a fleet: what is decided once, for all the hosts that are alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.fleet.unserved import Miss
from imagematrix.gpus.spec import NONE, choose
from imagematrix.selection.node import Node, hardware, kinds
from imagematrix.selection.question import asked
from imagematrix.selection.rules import results
from imagematrix.selection.select import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.node.host import Gpu, Host
    from imagematrix.selection.question import Where
    from imagematrix.selection.selection import Selection

__all__ = ["Judge", "Kind"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """The hosts of one hardware, and what a catalog has for them.

    `hosts` are their names, sorted; `sample` is the first of them. `answer` is what `explain` returns or
    raises for it, `fits` are the references of all variants that fit.
    """

    hosts: tuple[str, ...]
    sample: Host
    answer: Selection | UsageError
    fits: frozenset[str]

    @property
    def selected(self) -> str | None:
        """The reference of the variant that the hosts get, or None where nothing fits."""
        return None if isinstance(self.answer, UsageError) else self.answer.selected

    @property
    def gpus(self) -> str:
        """The hosts' GPUs in words."""
        counts = Counter(_gpu(gpu) for gpu in self.sample.gpus)
        others = [accelerator.where for accelerator in self.sample.accelerators]
        return ", ".join([*(f"{count} x {gpu}" for gpu, count in counts.items()), *others]) or "no GPU"

    @property
    def driver(self) -> str:
        """The hosts' driver in words."""
        return f"driver {self.sample.driver.version}" if self.sample.driver else "no NVIDIA driver"

    @property
    def cpu(self) -> str:
        """The name of the hosts' processors."""
        return self.sample.cpu.model or "unknown CPU"

    @property
    def level(self) -> str:
        """The psABI level of the hosts' processors, or their architecture where it has none."""
        return self.sample.cpu.level or self.sample.arch


class Judge:
    """Says what one catalog has for hosts of which the same GPUs are passed.

    `catalog` has those of its variants that are asked for.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        gpus: str | None = None,
        allow_cpu: bool = False,
        where: Where | None = None,
    ) -> None:
        self._selector = Selector(catalog, asked(where))
        self.catalog = self._selector.question.catalog
        self._index = self._selector.question.index
        self._references = sorted(variant.reference for variant in self.catalog.variants)
        self._sets: dict[int, frozenset[str]] = {}
        self._gpus = gpus
        self._allow_cpu = allow_cpu or gpus == NONE

    def kinds(self, hosts: Mapping[str, Host]) -> tuple[Kind, ...]:
        """Return the kinds of hardware among `hosts`, in the order of their first hosts' names."""
        groups: dict[Hashable, list[str]] = {}
        for name in sorted(hosts):
            groups.setdefault(self._hardware(hosts[name]), []).append(name)
        return tuple(self._kind(hosts[names[0]], names) for names in groups.values())

    def answer(self, host: Host) -> Selection | UsageError:
        """Return what `explain` returns for `host`, or raises where it has no such GPUs."""
        try:
            return self._selector.explain(host, gpus=self._gpus, allow_cpu=self._allow_cpu)
        except UsageError as error:
            return error

    def miss(self, answer: Selection | UsageError) -> Miss:
        """Return why nothing fits the host of `answer`."""
        if isinstance(answer, UsageError):
            return Miss(nearest=None, why=str(answer), fix=answer.remedy)
        doubt = answer.decision.doubt
        why, fix = doubt or answer.decision.refusal
        if doubt or not self._references:
            return Miss(nearest=None, why=why, fix=fix)
        # What the answer's candidates begin with, without the reasons of all the others.
        sample = self._node(answer, kinds(answer.chosen_gpus))
        nearest = self._index.nearest(sample)
        told = results(self._node(answer, answer.chosen_gpus), nearest)
        failing = tuple(result for result in told if not result.ok)
        return Miss(nearest=nearest.reference, why=why, fix=fix, rules=failing)

    def _kind(self, sample: Host, names: list[str]) -> Kind:
        answer = self.answer(sample)
        if isinstance(answer, UsageError):
            fits = frozenset[str]()
        else:
            fits = self._named(self._index.fitting(self._node(answer, kinds(answer.chosen_gpus))))
        return Kind(hosts=tuple(names), sample=sample, answer=answer, fits=fits)

    def _node(self, answer: Selection, gpus: tuple[Gpu, ...]) -> Node:
        return Node(host=answer.host, gpus=gpus, allow_cpu=self._allow_cpu)

    def _hardware(self, host: Host) -> Hashable:
        try:
            gpus = choose(host, self._gpus)
        except UsageError as error:
            return str(error), error.remedy, host.driver and host.driver.version
        return hardware(host, gpus, allow_cpu=self._allow_cpu)

    def _named(self, some: int) -> frozenset[str]:
        """Return the references of a set of the index; the same object for the same set."""
        found = self._sets.get(some)
        if found is None:
            found = frozenset(name for number, name in enumerate(self._references) if some >> number & 1)
            self._sets[some] = found
        return found


def _gpu(gpu: Gpu) -> str:
    state = "" if gpu.state == "ok" else f", {gpu.state}"
    return f"{gpu.name or 'unknown GPU'} ({gpu.compute or 'compute unknown'}{state})"
