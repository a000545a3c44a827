"""The GPUs of a host, joined from the PCI bus, the kernel module and NVML, each of which may be silent."""

from __future__ import annotations

from imagematrix.probe import pci
from imagematrix.probe.host import Gpu
from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.probe.host import MigDevice
    from imagematrix.probe.nvidia import Information, Kernel
    from imagematrix.probe.nvml import Nvml, NvmlGpu
    from imagematrix.probe.pci import PciGpu

__all__ = ["join", "remarks"]

NVIDIA = "nvidia"  # the kernel driver's name in /sys/bus/pci/drivers
DENIED = frozenset({4, 17})  # NVML_ERROR_NO_PERMISSION, _OPERATING_SYSTEM: a cgroup or the node's mode
VGPU_MODES = frozenset({2, 3, 4})  # nvmlGpuVirtualizationMode_t: a guest's vGPU, hosts that give them out
SILENT = frozenset({"excluded", "lost", "no-permission", "no-module"})  # states in which facts are missing

SENTENCES = {
    "excluded": "excluded in the driver's configuration (NVreg_ExcludedGpus); to use it, take it off that "
    "list and reload the nvidia module",
    "lost": "it does not answer (fallen off the bus, or waiting for a reset); `nvidia-smi --gpu-reset` or a "
    "reboot may bring it back",
    "no-permission": "NVML may not open it; allow its device node to this user and cgroup",
    "vgpu": "it is a vGPU, or gives out vGPUs; it needs the user-mode driver of its vGPU release, which an "
    "image with a data-centre driver does not carry",
    "mig-empty": "MIG is on but there is no MIG device; create some with `nvidia-smi mig -cgi PROFILE -C`, "
    "or turn MIG off with `nvidia-smi -mig 0`",
}


class _Sources(Record):
    """What each source tells of one GPU."""

    pci: PciGpu | None = None
    information: Information | None = None
    nvml: NvmlGpu | None = None


def join(kernel: Kernel, nodes: tuple[str, ...] | None, answer: Nvml | None) -> tuple[Gpu, ...]:
    """Return the GPUs in PCI bus order.

    `nodes` are the device nodes, None where they are not known; `answer` is NVML's, None where it was not
    asked.
    """
    found = _match(kernel, answer.gpus if answer else ())
    return tuple(_gpu(index, bus_id, sources, kernel, nodes) for index, (bus_id, sources) in enumerate(found))


def remarks(gpus: tuple[Gpu, ...], kernel: Kernel, *, complete: bool) -> list[str]:
    """Return a sentence for each thing that is wrong or unknown, with the GPUs it holds for.

    `complete` says that a source was heard which tells brand and memory.
    """
    groups: dict[str, list[str]] = {}
    bound = {gpu.bus_id: gpu.driver for gpu in kernel.pci}
    for gpu in gpus:
        for sentence in _sentences(gpu, bound, complete=complete):
            groups.setdefault(sentence, []).append(gpu.label)
    return [f"{', '.join(labels)}: {sentence}" for sentence, labels in groups.items()]


def _match(kernel: Kernel, answers: tuple[NvmlGpu, ...]) -> list[tuple[str | None, _Sources]]:
    on_bus = {gpu.bus_id: gpu for gpu in kernel.pci}
    informed = {gpu.bus_id: gpu for gpu in kernel.information if gpu.bus_id}
    answered = {gpu.bus_id: gpu for gpu in answers if gpu.bus_id}
    buses = sorted(on_bus.keys() | informed.keys() | answered.keys(), key=pci.order)
    # NVML does not tell the address of a GPU that it can't reach. Its order is that of the bus, so those
    # are, in turn, the GPUs that it told nothing of.
    nameless = [gpu for gpu in answers if not gpu.bus_id]
    found: list[tuple[str | None, _Sources]] = []
    for bus_id in buses:
        information, nvml = informed.get(bus_id), answered.get(bus_id)
        in_use = not information.excluded if information else not informed
        if nvml is None and nameless and in_use:
            nvml = nameless.pop(0)
        found.append((bus_id, _Sources(pci=on_bus.get(bus_id), information=information, nvml=nvml)))
    return found + [(None, _Sources(nvml=gpu)) for gpu in nameless]


def _gpu(
    index: int, bus_id: str | None, sources: _Sources, kernel: Kernel, nodes: tuple[str, ...] | None
) -> Gpu:
    from imagematrix.facts import gpus

    nvml, information = sources.nvml, sources.information
    device_id = sources.pci.device_id if sources.pci else nvml.device_id if nvml else None
    product = gpus.product(device_id) if device_id else None
    minor = information.minor if information else None
    if minor is None and nvml is not None:
        minor = nvml.minor
    mig = nvml.mig if nvml else None
    if mig is None and minor is not None:
        mig = kernel.mig.get(minor)
    name = (nvml and nvml.name) or (information and information.name) or (product and product.name) or None
    return Gpu(
        index=index,
        minor=minor,
        uuid=(nvml and nvml.uuid) or (information and information.uuid) or None,
        name=name,
        pci_bus_id=bus_id,
        pci_device_id=device_id,
        compute=(nvml and nvml.compute) or (product and product.compute) or None,
        brand=nvml.brand if nvml else gpus.brand(name),
        memory_mib=nvml.memory_mib if nvml else None,
        mig=mig,
        state=_state(sources, kernel, minor, mig, nodes),
    )


def _state(
    sources: _Sources,
    kernel: Kernel,
    minor: int | None,
    mig: tuple[MigDevice, ...] | None,
    nodes: tuple[str, ...] | None,
) -> str:
    nvml = sources.nvml
    lost = nvml is not None and not nvml.reached
    # The first that holds is the one to tell: a GPU that is excluded has no device node either.
    states = (
        ("excluded", sources.information is not None and sources.information.excluded),
        ("no-permission", nvml is not None and lost and nvml.errors.get("handle") in DENIED),
        ("lost", lost),
        ("no-module", not kernel.loaded and nvml is None),
        ("no-module", sources.pci is not None and sources.pci.driver not in {None, NVIDIA}),
        ("no-node", nodes is not None and minor is not None and f"/dev/nvidia{minor}" not in nodes),
        ("no-node", minor is None and bool(kernel.information)),
        ("vgpu", nvml is not None and nvml.virtualization in VGPU_MODES),
        ("mig-empty", mig == ()),
    )
    return next((state for state, holds in states if holds), "ok")


def _sentences(gpu: Gpu, bound: Mapping[str, str | None], *, complete: bool) -> Iterator[str]:
    driver = bound.get(gpu.pci_bus_id or "")
    if gpu.state == "no-module" and driver not in {None, NVIDIA}:
        yield f"bound to {driver}, not to the nvidia module; bind it to that to use it"
    elif gpu.state == "no-module":
        yield "no NVIDIA kernel module is loaded; install the driver, or load it with `modprobe nvidia`"
    elif gpu.state == "no-node" and gpu.minor is None:
        yield "the nvidia module does not list it (in a container it lists only those passed in)"
    elif gpu.state == "no-node":
        yield f"/dev/nvidia{gpu.minor} is missing; `nvidia-modprobe -c {gpu.minor}` makes it"
    elif gpu.state in SENTENCES:
        yield SENTENCES[gpu.state]
    if gpu.compute is None:
        yield (
            f"the compute capability of PCI device 10de:{gpu.pci_device_id or '????'} is not known "
            f"to this release, and NVML did not tell it"
        )
    if gpu.state not in SILENT and (unknown := list(_unknown(gpu, complete=complete))):
        yield f"{', '.join(unknown)} could not be read"


def _unknown(gpu: Gpu, *, complete: bool) -> Iterator[str]:
    if gpu.minor is None:
        yield "the device minor"
    if gpu.uuid is None:
        yield "the UUID (known once something has opened the GPU)"
    if gpu.name is None:
        yield "the name"
    if complete and gpu.brand is None:
        yield "the brand"
    if complete and gpu.memory_mib is None:
        yield "the memory"
