"""The kinds of hardware in a fleet: each is decided on once, for all its hosts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.selection.hardware_key import make_hardware_key
from imagematrix.selection.miss import Miss
from imagematrix.selection.rule import Remedy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.selection import Selection

    Answer = Selection | UsageError  # what `explain` returns or raises


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HardwareKind:
    """Hosts with equal hardware, and their result.

    `hosts` are their names, sorted; `sample` is the first of them. `answer` is what `explain` returns for it,
    or the error it raises if the host lacks the requested GPUs.
    """

    hosts: tuple[str, ...]
    sample: Host
    answer: Answer

    @property
    def variant(self) -> Variant | None:
        """The variant that the hosts get, or None if nothing fits."""
        return None if isinstance(self.answer, UsageError) else self.answer.variant

    @property
    def selected(self) -> str | None:
        """The variant's reference."""
        return None if isinstance(self.answer, UsageError) else self.answer.selected

    @property
    def fits(self) -> frozenset[str]:
        """The references of all variants that fit."""
        return frozenset() if isinstance(self.answer, UsageError) else self.answer.fits

    @property
    def gpus(self) -> str:
        """A description of the hosts' GPUs."""
        counts = Counter(_describe_gpu(gpu) for gpu in self.sample.gpus)
        words = [f"{count} x {gpu}" for gpu, count in counts.items()]
        return ", ".join([*words, *self._other_accelerators]) or "no GPU"

    @property
    def models(self) -> str:
        """The description of the hosts' GPUs without their number."""
        models = {*map(_describe_gpu, self.sample.gpus), *self._other_accelerators}
        return ", ".join(sorted(models)) or "no GPU"

    @property
    def driver(self) -> str:
        """A description of the hosts' driver."""
        return f"driver {self.sample.driver.version}" if self.sample.driver else "no NVIDIA driver"

    @property
    def cpu(self) -> str:
        """The name of the hosts' processors."""
        return self.sample.cpu.model or "unknown CPU"

    @property
    def level(self) -> str:
        """The psABI level of the hosts' processors, or their architecture if it has none."""
        return self.sample.cpu.level or self.sample.arch

    def require_unambiguous(self) -> None:
        """Raise UsageError if variants that fit differ in one of the image's own axes."""
        if not isinstance(self.answer, UsageError) and self.answer.decision.ambiguity:
            why, remedy = self.answer.decision.ambiguity
            raise UsageError(f"{self.hosts[0]}: {why}", remedy=remedy.shown)

    @property
    def _other_accelerators(self) -> list[str]:
        return [accelerator.where for accelerator in self.sample.accelerators]


def group_by_hardware(
    hosts: Mapping[str, Host], explain: Callable[[Host], Answer]
) -> tuple[HardwareKind, ...]:
    """Return the kinds of hardware among `hosts`, in the order of their first hosts' names."""
    groups: dict[Hashable, tuple[Host, Answer, list[str]]] = {}
    for name in sorted(hosts):
        host = hosts[name]
        answer = explain(host)
        if isinstance(answer, UsageError):
            key: Hashable = (str(answer), answer.remedy, host.driver and host.driver.version)
        elif answer.chosen_gpus in ((), host.gpus):
            key = answer.decision.hardware
        else:
            # Which of its GPUs serve a count depends on all of them, also after an upgrade.
            key = answer.decision.hardware, make_hardware_key(host, host.gpus, allow_cpu=False)
        groups.setdefault(key, (host, answer, []))[2].append(name)
    return tuple(
        HardwareKind(hosts=tuple(names), sample=sample, answer=answer)
        for sample, answer, names in groups.values()
    )


def get_miss(answer: Answer) -> Miss | None:
    """Return why a host gets no image, or None if it gets one."""
    if isinstance(answer, UsageError):
        remedy = Remedy(words=answer.remedy, shown=answer.shown) if answer.remedy else None
        return Miss(why=str(answer), remedy=remedy)
    return answer.miss


def _describe_gpu(gpu: Gpu) -> str:
    state = "" if gpu.state == "ok" else f", {gpu.state}"
    return f"{gpu.name or 'unknown GPU'} ({gpu.compute or 'compute unknown'}{state})"
