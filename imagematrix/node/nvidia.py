"""What the kernel tells of NVIDIA's driver without any library: its version, GPUs and device nodes.

The files are those of the open kernel modules (kernel-open/nvidia/nv-procfs.c, nv-caps.c); the proprietary
ones write the same, but for the words before the version.
"""

from __future__ import annotations

import re
from types import MappingProxyType

from imagematrix.facts.versions import DRIVER
from imagematrix.node import pci
from imagematrix.node.host import Driver, MigDevice
from imagematrix.record import Record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.node.host import Gpu
    from imagematrix.node.pci import Function
    from imagematrix.node.tree import Tree

__all__ = [
    "Information",
    "Kernel",
    "has_own_nodes",
    "is_version",
    "nodes",
    "parse_information",
    "parse_version",
    "read",
    "with_capabilities",
]

PROC = "/proc/driver/nvidia"
MIG = PROC + "/capabilities/gpu{}/mig"  # of the GPU with a minor number
MODULE = "/sys/module/nvidia"
# Open:        NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (...)
# Proprietary: NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jun ...
BANNER = re.compile(
    rf"NVRM version:[^\n]*?(Open )?Kernel Module(?: for \S+)?[ \t]+({DRIVER.pattern})(?!\S)", re.ASCII
)
# In the file `access` of a capability (MIG user guide, "Device nodes and capabilities").
CAPABILITY = re.compile(r"^DeviceFileMinor:[ \t]*(\d{1,7})$", re.ASCII | re.MULTILINE)


class Information(Record):
    """What the driver tells of one GPU in /proc/driver/nvidia/gpus/ADDRESS/information.

    The UUID is unknown until something has opened the GPU once.
    """

    bus_id: str | None = None
    minor: int | None = None
    uuid: str | None = None
    name: str | None = None
    excluded: bool = False


class Kernel(Record):
    """What the kernel tells of NVIDIA: whether a module is loaded, which, and the GPUs.

    `mig` has the MIG devices of the GPUs that have GPU instances, by minor number. Without instances
    nothing here tells whether MIG is on.
    """

    loaded: bool = False
    driver: Driver | None = None
    pci: tuple[Function, ...] = ()
    information: tuple[Information, ...] = ()
    mig: Mapping[int, tuple[MigDevice, ...]] = MappingProxyType({})


def is_version(text: str) -> bool:
    """Whether `text` is a driver version such as 550.163.01."""
    return DRIVER.fullmatch(text) is not None


def parse_version(text: str) -> Driver | None:
    """Return the driver that the text of /proc/driver/nvidia/version names, or None."""
    match = BANNER.search(text)
    if match is None:
        return None
    return Driver(
        version=match[2], kind="open" if match[1] else "proprietary", source="/proc/driver/nvidia/version"
    )


def parse_information(text: str) -> Information:
    """Return what the text of one GPU's information file tells."""
    fields = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        # "??" and "N/A" stand for what the driver does not know yet.
        if (value := value.strip()) and "??" not in value and value != "N/A":
            fields[key.strip().lower()] = value
    minor = fields.get("device minor", "")
    # "Blacklisted" is what drivers before branch 460 wrote.
    excluded = fields.get("gpu excluded") or fields.get("gpu blacklisted") or fields.get("blacklisted") or ""
    return Information(
        bus_id=pci.canonical(fields.get("bus location", "")),
        minor=int(minor) if re.fullmatch(r"\d{1,7}", minor, re.ASCII) else None,
        uuid=fields.get("gpu uuid"),
        name=fields.get("model"),
        excluded=excluded.lower() == "yes",
    )


def read(tree: Tree, functions: Iterable[Function] = ()) -> Kernel:
    """Return what the kernel tells of NVIDIA in `tree`; `functions` are those on the PCI bus."""
    found = tuple(function for function in functions if function.gpu)
    entries = tree.names(PROC)
    loaded = bool(entries) or tree.has_folder(MODULE)
    if not loaded:
        return Kernel(pci=found)
    information = _information(tree)
    mig = {}
    for gpu in information:
        if gpu.minor is not None and (devices := _mig(tree, gpu.minor)) is not None:
            mig[gpu.minor] = devices
    return Kernel(loaded=True, driver=_driver(tree), pci=found, information=information, mig=mig)


def nodes(tree: Tree) -> tuple[str, ...] | None:
    """Return the device nodes of NVIDIA's driver, sorted; None where a captured tree has no dev folder."""
    if not tree.has_folder("/dev"):
        return None
    found = [f"/dev/{name}" for name in tree.names("/dev") if name.startswith("nvidia")]
    if "/dev/nvidia-caps" in found:
        found += [f"/dev/nvidia-caps/{name}" for name in tree.names("/dev/nvidia-caps")]
    plain = (path for path in found if re.fullmatch(r"[\w/-]+", path, re.ASCII))
    return tuple(sorted(path for path in plain if tree.has_node(path)))


def has_own_nodes(tree: Tree) -> bool:
    """Whether /dev is a container's own, with what that was given, and not the kernel's (devtmpfs).

    In /proc/self/mountinfo a line has the place as its fifth field, and the type after a dash (proc(5)); of
    several mounts on one place the last counts.
    """
    kinds = [
        line.partition(" - ")[2].split(" ")[0]
        for line in (tree.text("/proc/self/mountinfo") or "").splitlines()
        if line.split(" ")[4:5] == ["/dev"]
    ]
    return kinds[-1:] == ["tmpfs"]


def with_capabilities(tree: Tree, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return `gpus` with the numbers of their MIG devices' own nodes."""
    return tuple(
        replace(gpu, mig=tuple(replace(one, capabilities=_capabilities(tree, gpu, one)) for one in gpu.mig))
        if gpu.mig
        else gpu
        for gpu in gpus
    )


def _capabilities(tree: Tree, gpu: Gpu, device: MigDevice) -> tuple[int, ...] | None:
    instance = f"{MIG.format(gpu.minor)}/gi{device.gpu_instance}"
    texts = (tree.text(f"{part}/access") for part in (instance, f"{instance}/ci{device.compute_instance}"))
    found = [CAPABILITY.search(text or "") for text in texts]
    return None if None in found else tuple(int(match[1]) for match in found if match)


def _driver(tree: Tree) -> Driver | None:
    text = tree.text(f"{PROC}/version")
    if text is not None and (driver := parse_version(text)) is not None:
        return driver
    version = (tree.text(f"{MODULE}/version") or "").strip()
    if is_version(version):
        return Driver(version=version, kind=None, source=f"{MODULE}/version")
    tree.warnings.append(
        f"the nvidia module is loaded, but neither {PROC}/version nor {MODULE}/version tells its version"
    )
    return None


def _information(tree: Tree) -> tuple[Information, ...]:
    found = []
    for name in tree.names(f"{PROC}/gpus"):
        text = tree.text(f"{PROC}/gpus/{name}/information")
        gpu = parse_information(text or "")
        bus_id = pci.canonical(name) or gpu.bus_id
        if bus_id is not None:
            found.append(
                Information(
                    bus_id=bus_id, minor=gpu.minor, uuid=gpu.uuid, name=gpu.name, excluded=gpu.excluded
                )
            )
    return tuple(found)


def _mig(tree: Tree, minor: int) -> tuple[MigDevice, ...] | None:
    # The folder is named by minor number, and is there, empty, on every GPU that could do MIG.
    folder = MIG.format(minor)
    instances = _numbers(tree.names(folder), "gi")
    if not instances:
        return None
    return tuple(
        MigDevice(uuid=None, profile=None, gpu_instance=gpu, compute_instance=compute)
        for gpu in instances
        for compute in _numbers(tree.names(f"{folder}/gi{gpu}"), "ci")
    )


def _numbers(names: list[str], prefix: str) -> list[int]:
    matches = (re.fullmatch(rf"{prefix}(\d{{1,3}})", name, re.ASCII) for name in names)
    return sorted(int(match[1]) for match in matches if match)
