"""Conditions on GPUs, such as "memory>=40G", which `--gpus` accepts besides counts and names."""

from __future__ import annotations

import re

from imagematrix.common import units
from imagematrix.common.record import Record
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors.versions import CAPABILITY, COMPARISONS, make_sort_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.hardware.host.host import Gpu

FORM = re.compile(r"([a-z]+)\s*(>=|<=|!=|=|>|<)\s*(.+)", re.ASCII)
# NVML's names: 1g.10gb, 1c.3g.40gb (one compute slice of three), 1g.10gb+me (with media engines).
PROFILE = re.compile(r"(\d+c\.)?\d+g\.\d+gb([+-][a-z.]+)*", re.ASCII)
MIB = 1024 * 1024


class GpuCondition(Record):
    """A condition: a fact of a GPU, a comparison, and the value to compare with."""

    fact: str
    comparison: str
    value: Any

    def is_met(self, gpu: Gpu) -> bool:
        """Whether `gpu` meets the condition; a GPU whose fact is unknown does not.

        A condition on the profile is met by a GPU whose `mig` is a single MIG device of that profile.
        """
        if self.fact == "profile":
            return [device.profile for device in gpu.mig or ()] == [self.value]
        if self.fact == "name":
            if gpu.name is None:
                return False
            # The words follow each other in the name: "NVIDIA L40S" does not contain L4.
            name, words = _split_words(gpu.name), _split_words(self.value)
            contains = any(name[start : start + len(words)] == words for start in range(len(name)))
            return contains is (self.comparison == "=")
        compare = COMPARISONS[self.comparison]
        if self.fact == "compute":
            return gpu.compute is not None and compare(make_sort_key(gpu.compute), self.value)
        return gpu.memory_mib is not None and compare(gpu.memory_mib * MIB, self.value)


def parse_condition(text: str) -> GpuCondition:
    """Return the condition that `text` states; raise UsageError if it is invalid."""
    match = FORM.fullmatch(text)
    fact, comparison, value = match.groups() if match else ("", "", "")
    if fact == "name" and comparison in ("=", "!=") and _split_words(value):
        return GpuCondition(fact=fact, comparison=comparison, value=value)
    if fact == "profile" and comparison == "=":
        return GpuCondition(fact=fact, comparison=comparison, value=value)
    if fact == "compute" and CAPABILITY.fullmatch(value):
        return GpuCondition(fact=fact, comparison=comparison, value=make_sort_key(value))
    amount = units.parse_size(value) if fact == "memory" else None
    if amount is not None:
        return GpuCondition(fact=fact, comparison=comparison, value=amount)
    raise UsageError(
        f"invalid condition {text!r} on GPUs",
        remedy="use conditions such as compute>=8.0, memory>=40G (or < > = !=), name=L40S (or name!=) or "
        "profile=1g.10gb",
    )


def is_profile(text: str) -> bool:
    """Whether `text` has the form of a MIG profile's name."""
    return PROFILE.fullmatch(text) is not None


def _split_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower(), re.ASCII)
