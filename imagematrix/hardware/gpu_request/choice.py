"""A Choice: a number of GPUs, any of a set. A MIG device is represented as its GPU with only it in `mig`."""

from __future__ import annotations

from imagematrix.common.record import Record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Gpu, MigDevice


class Choice(Record):
    """Any `count` of `gpus`, which are in order of preference.

    A GPU may occur several times, each time with another of its MIG devices.
    """

    gpus: tuple[Gpu, ...]
    count: int

    @property
    def first(self) -> tuple[Gpu, ...]:
        """The first `count`, with each GPU once: what to take if all are free."""
        return merge_gpus(self.gpus[: self.count])

    @property
    def enough(self) -> bool:
        """Whether there are `count` GPUs at all."""
        return len(self.gpus) >= self.count

    def with_memory(self, mib: int) -> Choice:
        """Return the choice among the GPUs that are not known to have less memory."""
        return replace(self, gpus=tuple(gpu for gpu in self.gpus if (get_memory_mib(gpu) or mib) >= mib))


def merge_gpus(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """Return `gpus` with each GPU once, with all MIG devices of its occurrences."""
    by_index: dict[int, Gpu] = {}
    for gpu in gpus:
        known = by_index.setdefault(gpu.index, gpu)
        if known.mig is not None and gpu.mig is not None:
            by_index[gpu.index] = replace(known, mig=tuple(dict.fromkeys(known.mig + gpu.mig)))
    return tuple(by_index.values())


def list_mig_devices(gpu: Gpu) -> tuple[Gpu, ...]:
    """Return the MIG devices of a GPU."""
    return tuple(replace(gpu, mig=(device,)) for device in gpu.mig or ())


def list_units(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """Return the GPUs without MIG, then the MIG devices, by UUID; those with an unknown one are left out."""
    whole = [gpu for gpu in gpus if gpu.mig is None]
    parts = [part for gpu in gpus for part in list_mig_devices(gpu)]
    by_uuid = {unit.mig[0].uuid if unit.mig else unit.uuid: unit for unit in (*whole, *parts)}
    return {uuid: unit for uuid, unit in by_uuid.items() if uuid}


def name_mig_device(gpu: Gpu, device: MigDevice) -> str:
    """Return the name of a MIG device by numbers: GPU:INSTANCE:COMPUTE-INSTANCE."""
    return f"{gpu.index}:{device.gpu_instance}:{device.compute_instance}"


def make_label(gpu: Gpu) -> str:
    """Return the name of a GPU, or of its only MIG device, for messages."""
    if len(gpu.mig or ()) != 1:
        return gpu.label
    (device,) = gpu.mig or ()
    return f"{gpu.label}:{device.gpu_instance}:{device.compute_instance}"


def get_memory_mib(gpu: Gpu) -> int | None:
    """Return the MiB of a GPU, or of its only MIG device; None if unknown.

    It is None for several MIG devices too: each has its own memory, and they share none.
    """
    if not gpu.mig:
        return gpu.memory_mib
    return gpu.mig[0].memory_mib if len(gpu.mig) == 1 else None
