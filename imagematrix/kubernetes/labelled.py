"""The Host that our own labels describe: the inverse of `labels.facts`."""

from __future__ import annotations

import re

from imagematrix.documents import natural
from imagematrix.facts import marches
from imagematrix.facts.versions import CAPABILITY, DRIVER
from imagematrix.kubernetes import labels as own
from imagematrix.node.host import Accelerator, Cpu, Driver, Gpu, Host, machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["GPUS", "labelled"]

SOURCE = "labels"
GPUS = 1_024  # limit for the GPUs of one node; greater counts in labels are cut to it
FIELDS = 6  # in the value of a label for a kind of GPU


def labelled(labels: Mapping[str, str]) -> Host:
    """Return the Host of a node with these labels.

    A fact without a label is null. Missing CPU flags and GPUs have warnings.
    """
    arch = machine(labels[own.ARCH])
    flags = frozenset(key.removeprefix(own.FLAG) for key in labels if key.startswith(own.FLAG))
    warnings = [] if flags else ["no labels for CPU flags found"]
    gpus = tuple(_gpus(labels, warnings))
    return Host(
        arch=arch,
        cpu=Cpu(
            vendor=labels.get(own.VENDOR),
            model=own.spaced(labels[own.MODEL]) if own.MODEL in labels else None,
            flags=flags & own.vocabulary(arch),
            level=marches.level(flags) if arch == "x86_64" else None,
        ),
        driver=_driver(labels),
        gpus=gpus,
        accelerators=tuple(
            Accelerator(kind="label", where=own.ACCELERATORS)
            for _ in range(_count(labels.get(own.ACCELERATORS, "0")))
        ),
        warnings=tuple(warnings),
    )


def _driver(labels: Mapping[str, str]) -> Driver | None:
    version = labels.get(own.DRIVER, "")
    if not DRIVER.fullmatch(version):
        return None
    return Driver(version=version, kind=labels.get(own.MODULES), source=SOURCE)


def _gpus(labels: Mapping[str, str], warnings: list[str]) -> Iterator[Gpu]:
    """Yield the GPUs of each kind, then an unknown GPU for each that no label describes."""
    index, count = 0, _count(labels.get(own.COUNT, "0"))
    for number in range(own.KINDS):
        values = labels.get(f"{own.KIND}{number}", "").split("_")
        if len(values) == FIELDS:
            name = labels.get(f"{own.NAME}{number}", "")
            for _ in range(min(_count(values[0]), count - index)):
                yield _gpu(index, name, values)
                index += 1
    if index < count:
        warnings.append(f"labels describe {index} of {count} GPUs")
    for further in range(index, count):
        yield Gpu(index=further, state="unconfirmed")


def _gpu(index: int, name: str, values: list[str]) -> Gpu:
    _, compute, brand, device, state, memory = values
    return Gpu(
        index=index,
        name=own.spaced(name) or None,
        pci_device_id=device if re.fullmatch("[0-9a-f]{4}", device, re.ASCII) else None,
        compute=compute if CAPABILITY.fullmatch(compute) else None,
        brand=None if brand == own.NONE else brand,
        memory_mib=natural(memory),
        state=state,
    )


def _count(text: str) -> int:
    return min(natural(text) or 0, GPUS)
