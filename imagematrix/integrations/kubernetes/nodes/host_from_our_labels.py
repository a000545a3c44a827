"""The Host that our own labels describe: the inverse of `labels.facts`."""

from __future__ import annotations

import re

from imagematrix.common.json_documents import parse_natural
from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host, get_machine_name
from imagematrix.hardware.vendors import marches
from imagematrix.hardware.vendors.versions import CAPABILITY, DRIVER
from imagematrix.integrations.kubernetes.nodes import labels as own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCE = "labels"
ANOTHER = "another version"  # of the user-mode driver: the label does not have it
GPUS = 1_024  # limit for the GPUs of one node; greater counts in labels are cut to it
FIELDS = 6  # in the value of a label for a kind of GPU


def read_our_labels(labels: Mapping[str, str]) -> Host:
    """Return the Host of a node with these labels.

    A fact without a label is null. Missing CPU flags and GPUs have warnings. `labels.facts` always writes the
    numbers of GPUs and of accelerators, so that "none" is read and never inferred: without a valid number
    there is one more unknown GPU, or a sign of an accelerator.
    """
    arch = get_machine_name(labels[own.ARCH])
    flags = frozenset(key.removeprefix(own.FLAG) for key in labels if key.startswith(own.FLAG))
    warnings = [] if flags else ["no labels for CPU flags found"]
    gpus = tuple(_read_gpus(labels, warnings))
    return Host(
        arch=arch,
        cpu=Cpu(
            vendor=labels.get(own.VENDOR),
            model=own.restore_spaces(labels[own.MODEL]) if own.MODEL in labels else None,
            flags=flags & own.get_flag_vocabulary(arch),
            level=marches.get_level(flags) if arch == "x86_64" else None,
        ),
        driver=_read_driver(labels),
        gpus=gpus,
        accelerators=tuple(_read_accelerators(labels)),
        warnings=tuple(warnings),
    )


def _read_driver(labels: Mapping[str, str]) -> Driver | None:
    version = labels.get(own.DRIVER, "")
    if not DRIVER.fullmatch(version):
        return None
    user_mode = {own.SAME: version, own.DIFFERS: ANOTHER}.get(labels.get(own.USER_MODE, ""))
    return Driver(version=version, kind=labels.get(own.MODULES), source=SOURCE, user_mode=user_mode)


def _read_accelerators(labels: Mapping[str, str]) -> Iterator[Accelerator]:
    count = _parse_count(labels.get(own.ACCELERATORS))
    for _ in range(1 if count is None else count):
        why = "missing or invalid" if count is None else None
        yield Accelerator(kind="label", where=own.ACCELERATORS, why=why)


def _read_gpus(labels: Mapping[str, str], warnings: list[str]) -> Iterator[Gpu]:
    """Yield the GPUs of each kind, then an unknown GPU for each that no label describes."""
    index, stated = 0, _parse_count(labels.get(own.COUNT))
    count = GPUS if stated is None else stated
    for kind in range(own.KINDS):
        values = labels.get(f"{own.KIND}{kind}", "").split("_")
        if len(values) == FIELDS:
            name = labels.get(f"{own.NAME}{kind}", "")
            for _ in range(min(_parse_count(values[0]) or 0, count - index)):
                yield _read_gpu(index, name, values)
                index += 1
    if stated is None:
        warnings.append(f"label {own.COUNT} missing or invalid: the number of GPUs is unknown")
        count = index + 1
    elif index < count:
        warnings.append(f"labels describe {index} of {count} GPUs")
    for further in range(index, count):
        yield Gpu(index=further, state="unconfirmed")


def _read_gpu(index: int, name: str, values: list[str]) -> Gpu:
    _, compute, brand, device, state, memory = values
    return Gpu(
        index=index,
        name=own.restore_spaces(name) or None,
        pci_device_id=device if re.fullmatch("[0-9a-f]{4}", device, re.ASCII) else None,
        compute=compute if CAPABILITY.fullmatch(compute) else None,
        brand=None if brand == own.NONE else brand,
        memory_mib=parse_natural(memory),
        state=state,
    )


def _parse_count(text: str | None) -> int | None:
    count = parse_natural(text or "")
    return None if count is None else min(count, GPUS)
