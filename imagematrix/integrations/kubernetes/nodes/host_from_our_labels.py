"""The Host that our own labels describe: the inverse of `labels.make_labels`."""

from __future__ import annotations

import re

from imagematrix.common.json_documents import parse_natural
from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host, get_machine_name
from imagematrix.hardware.vendors import marches
from imagematrix.hardware.vendors.versions import CAPABILITY, DRIVER
from imagematrix.integrations.kubernetes.nodes import labels as our_labels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE = "labels"
ANOTHER = "another version"  # of the user-mode driver: the label does not have it
GPUS = 1_024  # limit for the GPUs of one node; greater counts in labels are cut to it
FIELDS = 6  # in the value of a label for a kind of GPU


def read_our_labels(labels: Mapping[str, str]) -> Host:
    """Return the Host of a node with these labels.

    A fact without a label is null. Missing CPU flags and GPUs have warnings. `labels.make_labels` always
    writes the numbers of GPUs and of accelerators, so that "none" is read and never inferred: without a valid
    number there is one more unknown GPU, or a sign of an accelerator.
    """
    arch = get_machine_name(labels[our_labels.ARCH])
    flags = frozenset(key.removeprefix(our_labels.FLAG) for key in labels if key.startswith(our_labels.FLAG))
    flag_warnings = () if flags else ("no labels for CPU flags found",)
    gpus, gpu_warnings = _read_gpus(labels)
    count = _parse_count(labels.get(our_labels.ACCELERATORS))
    problem = "missing or invalid" if count is None else None
    accelerator = Accelerator(kind="label", where=our_labels.ACCELERATORS, why=problem)
    return Host(
        arch=arch,
        cpu=Cpu(
            vendor=labels.get(our_labels.VENDOR),
            model=our_labels.restore_spaces(labels[our_labels.MODEL]) if our_labels.MODEL in labels else None,
            flags=flags & our_labels.get_flag_vocabulary(arch),
            level=marches.get_level(flags) if arch == "x86_64" else None,
        ),
        driver=_read_driver(labels),
        gpus=gpus,
        accelerators=(accelerator,) * (1 if count is None else count),
        warnings=flag_warnings + gpu_warnings,
    )


def _read_driver(labels: Mapping[str, str]) -> Driver | None:
    version = labels.get(our_labels.DRIVER, "")
    if not DRIVER.fullmatch(version):
        return None
    user_mode = {our_labels.SAME: version, our_labels.DIFFERS: ANOTHER}.get(
        labels.get(our_labels.USER_MODE, "")
    )
    return Driver(version=version, kind=labels.get(our_labels.MODULES), source=SOURCE, user_mode=user_mode)


def _read_gpus(labels: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs of each kind, then an unknown GPU for each that no label describes; and warnings."""
    gpus: list[Gpu] = []
    stated = _parse_count(labels.get(our_labels.COUNT))
    count = GPUS if stated is None else stated
    for kind in range(our_labels.KINDS):
        values = labels.get(f"{our_labels.KIND}{kind}", "").split("_")
        if len(values) == FIELDS:
            name = labels.get(f"{our_labels.NAME}{kind}", "")
            number, compute, brand, device, state, memory = values
            described = min(_parse_count(number) or 0, count - len(gpus))
            gpus += [
                Gpu(
                    index=index,
                    name=our_labels.restore_spaces(name) or None,
                    pci_device_id=device if re.fullmatch("[0-9a-f]{4}", device, re.ASCII) else None,
                    compute=compute if CAPABILITY.fullmatch(compute) else None,
                    brand=None if brand == our_labels.NONE else brand,
                    memory_mib=parse_natural(memory),
                    state=state,
                )
                for index in range(len(gpus), len(gpus) + described)
            ]
    warnings: tuple[str, ...] = ()
    if stated is None:
        warnings = (f"label {our_labels.COUNT} missing or invalid: the number of GPUs is unknown",)
        count = len(gpus) + 1
    elif len(gpus) < count:
        warnings = (f"labels describe {len(gpus)} of {count} GPUs",)
    gpus += [Gpu(index=index, state="unconfirmed") for index in range(len(gpus), count)]
    return tuple(gpus), warnings


def _parse_count(text: str | None) -> int | None:
    count = parse_natural(text or "")
    return None if count is None else min(count, GPUS)
