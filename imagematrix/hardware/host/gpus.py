"""NVIDIA's driver, GPUs and device nodes, merged from the PCI bus, the kernel module and NVML or a dump.

Each of these sources may be missing.
"""

from __future__ import annotations

import errno
import re

from imagematrix.common.record import Record, replace
from imagematrix.hardware.host import device, fabric, nvidia, pci
from imagematrix.hardware.host.host import Driver, Gpu, find_duplicate, list_identities

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from imagematrix.hardware.host.host import MigDevice
    from imagematrix.hardware.host.nvidia import Information, Kernel
    from imagematrix.hardware.host.nvml import Nvml, NvmlGpu
    from imagematrix.hardware.host.pci import Function
    from imagematrix.hardware.host.tree import Tree

Dump = tuple["Driver | None", "tuple[Gpu, ...]", "tuple[str, ...]"]
Result = tuple["Driver | None", "tuple[Gpu, ...]", "tuple[str, ...]", "list[str]"]

NEEDED = ("/dev/nvidiactl", "/dev/nvidia-uvm")  # CUDA needs these besides each GPU's own node
MISSING = "missing device nodes, which CUDA needs"
SANDBOX = (
    "NVIDIA kernel module not visible, as in a sandbox (gVisor): driver and GPUs are known from NVML only"
)
NOT_QUERIED = (
    "NVML was not queried: memory and MIG mode of the GPUs are unknown, and the brand except of data-centre "
    "parts; a dump of `nvidia-smi -q -x` has them"
)
MEMINFO, KIB = "/proc/meminfo", 1024
TOTAL = re.compile(r"^MemTotal: +(\d{1,15}) kB$", re.MULTILINE | re.ASCII)
NVIDIA = "nvidia"  # the kernel driver's name in /sys/bus/pci/drivers
DENIED = frozenset({4, 17})  # NVML_ERROR_NO_PERMISSION, _OPERATING_SYSTEM: a cgroup or the node's mode
# nvmlGpuVirtualizationMode_t: a vGPU in a guest; hosts that provide vGPUs or shared graphics (vSGA).
GUEST, HOSTS = 2, frozenset({3, 4})
INCOMPLETE = frozenset({"excluded", "lost", "no-permission", "no-module"})  # states that hide facts

MESSAGES = {
    "excluded": "excluded in the driver's configuration (NVreg_ExcludedGpus); to use it, remove it from that "
    "list and reload the nvidia module",
    "lost": "not responding (fallen off the bus, or waiting for a reset); run `nvidia-smi --gpu-reset` or "
    "reboot",
    "no-permission": "permission denied for NVML; grant this user and cgroup access to its device node",
    "vgpu": "a vGPU, which needs the user-mode driver of its vGPU release: the node's, not one in an image",
    "vgpu-host": "provides vGPUs or shared graphics to virtual machines; use it inside of one",
    "failed": "not listed by NVML: the driver could not initialise it; check the kernel log (RmInitAdapter), "
    "and run `nvidia-smi --gpu-reset` or reboot",
    "unconfirmed": "confirmed neither by /proc/driver/nvidia/gpus nor by NVML; install NVML "
    "(libnvidia-ml.so.1), or check the kernel log",
    "mig-empty": "MIG is enabled without any MIG device; create some with `nvidia-smi mig -cgi PROFILE -C`, "
    "or disable MIG with `nvidia-smi -mig 0`",
}


class _GpuSources(Record):
    """The facts of each source about one GPU; `bus_id` is None if its address is unknown.

    `listed` states that NVML returned a list of GPUs. `refusal` is the error number of access to its device
    node if NVML did not reach the GPU, else 0.
    """

    bus_id: str | None
    pci: Function | None = None
    information: Information | None = None
    nvml: NvmlGpu | None = None
    listed: bool = False
    refusal: int = 0

    @property
    def minor(self) -> int | None:
        """The minor number of its device node."""
        if self.information is not None and self.information.minor is not None:
            return self.information.minor
        return self.nvml.minor if self.nvml else None

    @property
    def node(self) -> str | None:
        """The path of its device node, whether the node exists or not."""
        return None if self.minor is None else f"/dev/nvidia{self.minor}"

    @property
    def is_reached(self) -> bool:
        """Whether NVML reached it."""
        return self.nvml is not None and self.nvml.is_reached

    @property
    def is_permitted(self) -> bool:
        """Whether no cgroup denies its device node."""
        return self.refusal != errno.EPERM


def find_gpus(
    tree: Tree, functions: tuple[Function, ...], dump: Dump | None, query: Callable[[], Nvml] | None
) -> Result:
    """Return the driver, the GPUs, the device nodes, and warnings about problems and unknown facts.

    `functions` are those on the PCI bus. At most one of `dump` and `query` is not None (see
    `imagematrix.hardware.host.probe.assemble_host`).
    """
    kernel = nvidia.read_nvidia(tree, functions)
    if dump is not None:
        driver, merged, remarks = dump
        driver, mismatch = _compare_dump(driver, kernel)
        merged = _add_shared_memory(tree, merged)
        warnings = [*remarks, *mismatch, *_describe_problems(merged, kernel, complete=True)]
        return driver, merged, nvidia.list_nodes(tree) or (), warnings

    nvml = query() if query else None
    nodes = nvidia.list_nodes(tree)  # after the query: NVML creates missing ones
    driver, warnings = _choose_driver(kernel, nvml)
    if driver is not None:
        # Only where no dump replaces the driver: the library is this tree's, and a dump may be of another
        # node.
        driver = replace(driver, user_mode=nvidia.read_user_mode(tree))
    merged, withheld = _merge_sources(tree, kernel, nodes, nvml)
    merged = _add_shared_memory(tree, merged)

    if withheld:
        warnings.append(f"{', '.join(withheld)}: not assigned to this container or job, ignored")
    if nvml is not None and nvml.message:
        from imagematrix.hardware.host.nvml import explain_failure

        warnings.append(explain_failure(nvml, driver))
    elif driver is not None and driver.user_mode_differs:
        warnings.append(f"{nvidia.describe_mismatch(driver.user_mode, driver.version)}; {nvidia.RELOAD}")
    if nvml is None and kernel.loaded and merged:
        warnings.append(NOT_QUERIED)
    complete = nvml is not None and not nvml.message
    warnings += _describe_problems(merged, kernel, complete=complete)
    if driver is not None and not kernel.loaded:
        warnings.append(SANDBOX)
    if driver is not None:
        warnings += _describe_fabric(tree, functions, merged, nvml)
    if driver is not None or kernel.loaded:
        warnings += _describe_missing(merged, nodes)
    return driver, merged, nodes or (), warnings


def _describe_fabric(
    tree: Tree, functions: tuple[Function, ...], gpus: tuple[Gpu, ...], nvml: Nvml | None
) -> list[str]:
    readings: tuple[NvmlGpu, ...] = ()
    if nvml is not None:
        from imagematrix.hardware.host.nvml import match_readings

        readings = match_readings(nvml.gpus, gpus)
    switches = sum(function.is_switch for function in functions)
    managed = fabric.is_managed(tree) if switches else None
    problem = fabric.find_fabric_problem(switches, readings, managed=managed)
    return [f"{problem}; {fabric.REMEDY}"] if problem else []


def _add_shared_memory(tree: Tree, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return `gpus`; those that share the CPUs' memory with all of it, as far as the kernel can give it."""
    if not any(gpu.memory_shared for gpu in gpus):
        return gpus
    total = TOTAL.search(tree.read_text(MEMINFO) or "")
    mib = int(total[1]) // KIB if total else None
    return tuple(replace(gpu, memory_mib=mib) if gpu.memory_shared else gpu for gpu in gpus)


def _merge_sources(
    tree: Tree, kernel: Kernel, nodes: tuple[str, ...] | None, nvml: Nvml | None
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs in PCI bus order, and the addresses of those that are withheld from this process.

    `nodes` are the device nodes, None if unknown; `nvml` is None if NVML was not queried.
    """
    sources = _match_sources(kernel, nvml.gpus if nvml else ())
    if nvml is not None and not nvml.message:
        sources = [
            replace(
                gpu,
                listed=True,
                refusal=tree.get_refusal(gpu.node) if gpu.node and not gpu.is_reached else 0,
            )
            for gpu in sources
        ]
    withheld = _find_withheld(tree, sources, kernel, nodes) if nodes else ()
    remaining = (gpu for gpu in sources if gpu.bus_id not in withheld)
    gpus = tuple(_make_gpu(index, gpu, kernel, nodes) for index, gpu in enumerate(remaining))
    return _drop_duplicate_identities(tree, gpus), withheld


def _drop_duplicate_identities(tree: Tree, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return `gpus`; those with a fact that identifies another one, too, without identity, and not usable."""
    # `Host.from_json` rejects such a document, so the probe must not write one.
    duplicate = find_duplicate(gpus)
    if duplicate is None:
        return gpus
    from collections import Counter

    tree.warnings.append(f"the sources of the GPUs' facts contradict each other: {duplicate}")
    counts = Counter(identity for gpu in gpus for identity in list_identities(gpu))
    return tuple(
        replace(gpu, minor=None, uuid=None, mig=None, state="unconfirmed")
        if any(counts[identity] > 1 for identity in list_identities(gpu))
        else gpu
        for gpu in gpus
    )


def _describe_problems(gpus: tuple[Gpu, ...], kernel: Kernel, *, complete: bool) -> list[str]:
    """Return a warning for each problem or unknown fact, with the GPUs that it applies to.

    `complete` states that a source with brand and memory answered.
    """
    groups: dict[str, list[str]] = {}
    drivers = {gpu.bus_id: gpu.driver for gpu in kernel.pci}
    for gpu in gpus:
        for message in _list_messages(gpu, drivers, complete=complete):
            groups.setdefault(message, []).append(gpu.label)
    return [f"{', '.join(labels)}: {message}" for message, labels in groups.items()]


def _match_sources(kernel: Kernel, readings: tuple[NvmlGpu, ...]) -> list[_GpuSources]:
    on_bus = {gpu.bus_id: gpu for gpu in kernel.pci}
    by_module = {gpu.bus_id: gpu for gpu in kernel.information if gpu.bus_id}
    by_nvml = {gpu.bus_id: gpu for gpu in readings if gpu.bus_id}
    buses = sorted(on_bus.keys() | by_module.keys() | by_nvml.keys(), key=pci.make_sort_key)
    # NVML has no address for a GPU that it cannot reach. It lists GPUs in the order of the bus, so readings
    # without an address belong, in order, to the GPUs that have no reading.
    unaddressed = [gpu for gpu in readings if not gpu.bus_id]
    sources: list[_GpuSources] = []
    for bus_id in buses:
        information, nvml = by_module.get(bus_id), by_nvml.get(bus_id)
        # NVML leaves out GPUs that the module excludes or does not drive. Without the module's list, any may
        # be meant.
        in_use = not information.excluded if information else not by_module
        if nvml is None and unaddressed and in_use:
            nvml = unaddressed.pop(0)
        sources.append(_GpuSources(bus_id=bus_id, pci=on_bus.get(bus_id), information=information, nvml=nvml))
    return sources + [_GpuSources(bus_id=None, nvml=gpu) for gpu in unaddressed]


def _find_withheld(
    tree: Tree, gpus: list[_GpuSources], kernel: Kernel, nodes: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the addresses of the GPUs that are withheld from this process, if it has others.

    /sys shows all GPUs of a machine to every container. A GPU counts as withheld if NVML does not reach it
    and one of these holds: a cgroup denies access to its device node; it has no node and /dev is the
    container's own; it has no node and NVIDIA's runtime hides it in /proc/driver/nvidia, where the machine
    itself lists every GPU of the module. A GPU that fails on the machine itself keeps its node, or is not
    bound to the module.
    """
    if not any(gpu.is_permitted and gpu.node in nodes for gpu in gpus):
        return ()
    # Nodes that may belong to a GPU whose minor no source has.
    spare = _select_gpu_nodes(nodes) - {gpu.node for gpu in gpus}
    absent = [gpu for gpu in gpus if not (gpu.is_reached or (gpu.node in nodes if gpu.node else spare))]
    hidden = [gpu for gpu in absent if gpu.pci and gpu.pci.driver == NVIDIA and not gpu.information]
    withheld = absent if absent and nvidia.has_own_nodes(tree) else hidden if kernel.information else []
    return tuple(gpu.bus_id for gpu in gpus if gpu.bus_id and (gpu in withheld or not gpu.is_permitted))


def _make_gpu(index: int, sources: _GpuSources, kernel: Kernel, nodes: tuple[str, ...] | None) -> Gpu:
    from imagematrix.hardware.vendors import gpus

    nvml, information = sources.nvml, sources.information
    device_id = sources.pci.device_id if sources.pci else nvml.device_id if nvml else None
    product = gpus.get_product(device_id) if device_id else None
    minor = sources.minor
    mig = nvml.mig if nvml else None
    if mig is None and minor is not None:
        mig = kernel.mig.get(minor)
    # The table of products comes last: boards with one device id are sold under several names.
    name = (nvml and nvml.name) or (information and information.name) or (product and product.name) or None
    return Gpu(
        index=index,
        minor=minor,
        uuid=(nvml and nvml.uuid) or (information and information.uuid) or None,
        name=name,
        pci_bus_id=sources.bus_id,
        pci_device_id=device_id,
        compute=(nvml and nvml.compute) or (product and product.compute) or None,
        brand=nvml.brand if nvml else gpus.get_brand(name),
        memory_mib=nvml.memory_mib if nvml else None,
        mig=mig,
        state=_find_problem(sources, kernel, nodes) or _get_mode(nvml, name, mig),
        memory_shared=nvml is not None and nvml.shares_memory,
    )


def _find_problem(sources: _GpuSources, kernel: Kernel, nodes: tuple[str, ...] | None) -> str | None:
    """Return the state of a GPU with a problem, or None."""
    nvml, node, information = sources.nvml, sources.node, sources.information
    lost = nvml is not None and not nvml.is_reached
    # The first state that holds is reported: an excluded GPU, for example, has no device node either.
    states = (
        ("excluded", information is not None and information.excluded),
        ("no-permission", nvml is not None and lost and nvml.errors.get("handle") in DENIED),
        ("no-permission", sources.refusal in {errno.EPERM, errno.EACCES}),
        ("lost", lost),
        ("no-module", not kernel.loaded and nvml is None),
        ("no-module", sources.pci is not None and sources.pci.driver not in {None, NVIDIA}),
        ("no-node", nodes is not None and node is not None and node not in nodes),
        (
            "no-node",
            node is None and (bool(kernel.information) or not (nodes is None or _select_gpu_nodes(nodes))),
        ),
        # A GPU must be confirmed by NVML, or by the module if NVML is not available.
        ("failed", sources.listed and nvml is None),
        ("unconfirmed", nvml is None and information is None),
    )
    return next((state for state, holds in states if holds), None)


def _get_mode(nvml: NvmlGpu | None, name: str | None, mig: tuple[MigDevice, ...] | None) -> str:
    from imagematrix.hardware.vendors import gpus

    if nvml is not None and nvml.virtualization in HOSTS:
        return "vgpu-host"
    if (nvml is not None and nvml.virtualization == GUEST) or gpus.is_vgpu(name):
        return "vgpu"
    return "mig-empty" if mig == () else "ok"


def _select_gpu_nodes(nodes: Iterable[str]) -> set[str]:
    """Return the device nodes of individual GPUs."""
    return {node for node in nodes if re.fullmatch(r"/dev/nvidia\d+", node, re.ASCII)}


def describe_state(gpu: Gpu, driver: str | None) -> str | None:
    """Return the message about the state of a GPU to which `driver` is bound; None if nothing is wrong."""
    if gpu.state == "no-module" and driver not in {None, NVIDIA}:
        return f"bound to {driver} instead of the nvidia module; to use it, bind it to nvidia"
    if gpu.state == "no-module":
        return "NVIDIA kernel module not loaded; install the driver, or run `modprobe nvidia`"
    if gpu.state == "no-node" and gpu.minor is None:
        return "not listed by the nvidia module (in a container it lists only the GPUs passed in)"
    if gpu.state == "no-node":
        return f"/dev/nvidia{gpu.minor} not found; {device.explain_creation(f'/dev/nvidia{gpu.minor}')}"
    return MESSAGES.get(gpu.state)


def _list_messages(gpu: Gpu, drivers: Mapping[str, str | None], *, complete: bool) -> Iterator[str]:
    """Yield what is wrong with a GPU or unknown; `drivers` are bound to functions, by their addresses."""
    if problem := describe_state(gpu, drivers.get(gpu.pci_bus_id or "")):
        yield problem
    if gpu.compute is None:
        yield (
            f"compute capability unknown: PCI device 10de:{gpu.pci_device_id or '????'} is unknown to "
            f"this release, and NVML did not report it"
        )
    if gpu.state in INCOMPLETE:
        return
    facts = {
        "device minor": gpu.minor,
        "UUID (known once a process has opened the GPU)": gpu.uuid,
        "name": gpu.name,
    }
    if complete:
        facts |= {"brand": gpu.brand, "memory size": gpu.memory_mib}
    unknown = [name for name, value in facts.items() if value is None]
    if unknown:
        yield f"could not read {', '.join(unknown)}"


def _compare_dump(driver: Driver | None, kernel: Kernel) -> tuple[Driver | None, list[str]]:
    """Return the driver of a dump, and a warning if the kernel has another one."""
    if kernel.driver is None or driver is None:
        return driver, []
    if kernel.driver.version == driver.version:
        return kernel.driver, []  # the kernel also shows the kind of module
    mismatch = (
        f"driver mismatch: {driver.version} in the nvidia-smi dump, {kernel.driver.version} in "
        f"{kernel.driver.source}; the dump's is used, and the CPU may be another host's"
    )
    return driver, [mismatch]


def _choose_driver(kernel: Kernel, nvml: Nvml | None) -> tuple[Driver | None, list[str]]:
    """Return the driver, and a warning if the kernel and NVML disagree."""
    version = nvml.driver if nvml and nvidia.is_version(nvml.driver or "") else None
    if kernel.driver is None:
        # In a sandbox (gVisor), the kernel does not show the module, and NVML works.
        return Driver(version=version, kind=None, source="NVML") if version else None, []
    # The rules compare images with the kernel's module, whatever library NVML came from.
    if not version or version == kernel.driver.version:
        return kernel.driver, []
    mismatch = (
        f"driver mismatch: {version} from NVML, {kernel.driver.version} in {kernel.driver.source}; "
        f"the latter is used"
    )
    return kernel.driver, [mismatch]


def _describe_missing(gpus: tuple[Gpu, ...], nodes: tuple[str, ...] | None) -> list[str]:
    if not gpus:
        return ["the nvidia module is loaded, but no GPU was found on the PCI bus or by the module"]
    if nodes is None:
        return ["device nodes unknown: the captured tree has no dev folder"]
    missing = [node for node in NEEDED if node not in nodes]
    if not missing:
        return []
    remedies = "; ".join(map(device.explain_creation, missing))
    return [f"{MISSING}: {', '.join(missing)}; {remedies}"]
