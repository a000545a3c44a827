"""The GPUs of a host, joined from the PCI bus, the kernel module and NVML, each of which may be silent."""

from __future__ import annotations

import errno
import re

from imagematrix.node import nvidia, pci
from imagematrix.node.host import Gpu
from imagematrix.record import Record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from imagematrix.node.host import MigDevice
    from imagematrix.node.nvidia import Information, Kernel
    from imagematrix.node.nvml import Nvml, NvmlGpu
    from imagematrix.node.pci import Function
    from imagematrix.node.tree import Tree

__all__ = ["join", "remarks"]

NVIDIA = "nvidia"  # the kernel driver's name in /sys/bus/pci/drivers
DENIED = frozenset({4, 17})  # NVML_ERROR_NO_PERMISSION, _OPERATING_SYSTEM: a cgroup or the node's mode
# nvmlGpuVirtualizationMode_t: a vGPU in a guest; hosts that give out vGPUs, and shared graphics (vSGA).
GUEST, HOSTS = 2, frozenset({3, 4})
SILENT = frozenset({"excluded", "lost", "no-permission", "no-module"})  # states in which facts are missing

SENTENCES = {
    "excluded": "excluded in the driver's configuration (NVreg_ExcludedGpus); to use it, take it off that "
    "list and reload the nvidia module",
    "lost": "it does not answer (fallen off the bus, or waiting for a reset); `nvidia-smi --gpu-reset` or a "
    "reboot may bring it back",
    "no-permission": "NVML may not open it; allow its device node to this user and cgroup",
    "vgpu": "it is a vGPU, which needs the user-mode driver of its vGPU release: the node's own, and not one "
    "in an image",
    "vgpu-host": "it gives out vGPUs, or shared graphics, to virtual machines; use it inside of one",
    "failed": "NVML leaves it out: the driver could not set it up; see the kernel's log (RmInitAdapter), and "
    "reset it with `nvidia-smi --gpu-reset` or reboot",
    "unconfirmed": "neither /proc/driver/nvidia/gpus nor NVML confirms that the driver has it; install NVML "
    "(libnvidia-ml.so.1), or see the kernel's log",
    "mig-empty": "MIG is on but there is no MIG device; create some with `nvidia-smi mig -cgi PROFILE -C`, "
    "or turn MIG off with `nvidia-smi -mig 0`",
}


class _Sources(Record):
    """What each source tells of the GPU at one address, or of one whose address nobody tells.

    `listed` says that NVML gave a list of GPUs. `refusal` is the error number with which the device node of
    one that it did not reach refuses to be opened, or 0.
    """

    bus_id: str | None
    pci: Function | None = None
    information: Information | None = None
    nvml: NvmlGpu | None = None
    listed: bool = False
    refusal: int = 0

    @property
    def minor(self) -> int | None:
        """The number of its device node."""
        if self.information is not None and self.information.minor is not None:
            return self.information.minor
        return self.nvml.minor if self.nvml else None

    @property
    def node(self) -> str | None:
        """Its device node, whether that is there or not."""
        return None if self.minor is None else f"/dev/nvidia{self.minor}"

    @property
    def reached(self) -> bool:
        """Whether NVML reached it."""
        return self.nvml is not None and self.nvml.reached

    @property
    def given(self) -> bool:
        """Whether no cgroup forbids its device node."""
        return self.refusal != errno.EPERM


def join(
    tree: Tree, kernel: Kernel, nodes: tuple[str, ...] | None, answer: Nvml | None
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs in PCI bus order, and the addresses of those that this process was not given.

    `nodes` are the device nodes, None where they are not known; `answer` is NVML's, None where it was not
    asked.
    """
    found = _match(kernel, answer.gpus if answer else ())
    if answer is not None and not answer.message:
        found = [replace(one, listed=True, refusal=_refusal(tree, one)) for one in found]
    withheld = _withheld(tree, found, kernel, nodes) if nodes else ()
    given = (one for one in found if one.bus_id not in withheld)
    return tuple(_gpu(index, one, kernel, nodes) for index, one in enumerate(given)), withheld


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


def _match(kernel: Kernel, answers: tuple[NvmlGpu, ...]) -> list[_Sources]:
    on_bus = {gpu.bus_id: gpu for gpu in kernel.pci}
    informed = {gpu.bus_id: gpu for gpu in kernel.information if gpu.bus_id}
    answered = {gpu.bus_id: gpu for gpu in answers if gpu.bus_id}
    buses = sorted(on_bus.keys() | informed.keys() | answered.keys(), key=pci.order)
    # NVML does not tell the address of a GPU that it can't reach. Its order is that of the bus, so those
    # are, in turn, the GPUs that it told nothing of.
    nameless = [gpu for gpu in answers if not gpu.bus_id]
    found: list[_Sources] = []
    for bus_id in buses:
        information, nvml = informed.get(bus_id), answered.get(bus_id)
        in_use = not information.excluded if information else not informed
        if nvml is None and nameless and in_use:
            nvml = nameless.pop(0)
        found.append(_Sources(bus_id=bus_id, pci=on_bus.get(bus_id), information=information, nvml=nvml))
    return found + [_Sources(bus_id=None, nvml=gpu) for gpu in nameless]


def _withheld(tree: Tree, found: list[_Sources], kernel: Kernel, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses of the GPUs that this process was not given, where it was given others.

    /sys shows all GPUs of a machine to every container. Those that it can't use are not reached by NVML; and
    a cgroup forbids their device node, or they have none, and either /dev is the container's own, or NVIDIA's
    runtime has hidden them in /proc/driver/nvidia: on the machine itself each GPU is listed there that the
    module has. A GPU that fails on the machine itself keeps its node, or the module does not have it.
    """
    if not any(one.given and one.node in nodes for one in found):
        return ()
    spare = _numbered(nodes) - {one.node for one in found}
    absent = [one for one in found if not (one.reached or (one.node in nodes if one.node else spare))]
    hidden = [one for one in absent if one.pci and one.pci.driver == NVIDIA and not one.information]
    withheld = absent if absent and nvidia.has_own_nodes(tree) else hidden if kernel.information else []
    return tuple(one.bus_id for one in found if one.bus_id and (one in withheld or not one.given))


def _refusal(tree: Tree, one: _Sources) -> int:
    return tree.refusal(one.node) if one.node and not one.reached else 0


def _gpu(index: int, sources: _Sources, kernel: Kernel, nodes: tuple[str, ...] | None) -> Gpu:
    from imagematrix.facts import gpus

    nvml, information = sources.nvml, sources.information
    device_id = sources.pci.device_id if sources.pci else nvml.device_id if nvml else None
    product = gpus.product(device_id) if device_id else None
    minor = sources.minor
    mig = nvml.mig if nvml else None
    if mig is None and minor is not None:
        mig = kernel.mig.get(minor)
    name = (nvml and nvml.name) or (information and information.name) or (product and product.name) or None
    return Gpu(
        index=index,
        minor=minor,
        uuid=(nvml and nvml.uuid) or (information and information.uuid) or None,
        name=name,
        pci_bus_id=sources.bus_id,
        pci_device_id=device_id,
        compute=(nvml and nvml.compute) or (product and product.compute) or None,
        brand=nvml.brand if nvml else gpus.brand(name),
        memory_mib=nvml.memory_mib if nvml else None,
        mig=mig,
        state=_state(sources, kernel, nodes) or _kind_of_use(nvml, name, mig),
    )


def _state(sources: _Sources, kernel: Kernel, nodes: tuple[str, ...] | None) -> str | None:
    """Return what is wrong with a GPU, or None."""
    nvml, node, information = sources.nvml, sources.node, sources.information
    lost = nvml is not None and not nvml.reached
    # The first that holds is the one to tell: a GPU that is excluded has no device node either.
    states = (
        ("excluded", information is not None and information.excluded),
        ("no-permission", nvml is not None and lost and nvml.errors.get("handle") in DENIED),
        ("no-permission", sources.refusal in {errno.EPERM, errno.EACCES}),
        ("lost", lost),
        ("no-module", not kernel.loaded and nvml is None),
        ("no-module", sources.pci is not None and sources.pci.driver not in {None, NVIDIA}),
        ("no-node", nodes is not None and node is not None and node not in nodes),
        ("no-node", node is None and (bool(kernel.information) or not (nodes is None or _numbered(nodes)))),
        # Somebody has to confirm a GPU: NVML, or the module where NVML can't be asked.
        ("failed", sources.listed and nvml is None),
        ("unconfirmed", nvml is None and information is None),
    )
    return next((state for state, holds in states if holds), None)


def _kind_of_use(nvml: NvmlGpu | None, name: str | None, mig: tuple[MigDevice, ...] | None) -> str:
    from imagematrix.facts import gpus

    if nvml is not None and nvml.virtualization in HOSTS:
        return "vgpu-host"
    if (nvml is not None and nvml.virtualization == GUEST) or gpus.is_vgpu(name):
        return "vgpu"
    return "mig-empty" if mig == () else "ok"


def _numbered(nodes: Iterable[str]) -> set[str]:
    """Return those of the device nodes that are each a GPU's own."""
    return {node for node in nodes if re.fullmatch(r"/dev/nvidia\d+", node, re.ASCII)}


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
