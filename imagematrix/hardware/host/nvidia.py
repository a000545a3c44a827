"""NVIDIA's driver as files show it, without any library: version, GPUs, device nodes and user-mode driver.

The formats are those of the open kernel modules (kernel-open/nvidia/nv-procfs.c, nv-caps.c). The proprietary
modules differ only in the words before the version.
"""

from __future__ import annotations

import os
import re
from types import MappingProxyType

from imagematrix.common.record import Record, replace
from imagematrix.hardware.host import pci
from imagematrix.hardware.host.host import Driver, MigDevice
from imagematrix.hardware.host.nvml_library import FOLDERS
from imagematrix.hardware.ld_cache import CACHE, LoaderCache
from imagematrix.hardware.vendors.versions import DRIVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.hardware.host.pci import Function
    from imagematrix.hardware.host.tree import Tree

PROC = "/proc/driver/nvidia"
MIG = PROC + "/capabilities/gpu{}/mig"  # of the GPU with a minor number
MODULE = "/sys/module/nvidia"
# Open:        NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (...)
# Proprietary: NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jun ...
BANNER = re.compile(
    rf"^NVRM version:[^\n]*?(Open )?Kernel Module(?: for \S+)?[ \t]+({DRIVER.pattern})(?!\S)",
    re.ASCII | re.MULTILINE,
)
# In the file `access` of a capability (MIG user guide, "Device nodes and capabilities").
CAPABILITY = re.compile(r"^DeviceFileMinor:[ \t]*(\d{1,7})$", re.ASCII | re.MULTILINE)
USER_MODE = "libcuda.so.1"
CACHE_LIMIT = 16 * 1024 * 1024  # bytes; 100,000 libraries
ROOTS = ("/run/nvidia/driver",)  # root folders of driver containers (NVIDIA's GPU Operator)
# Folders of libraries that are not the node's driver: for linking, and for forward compatibility.
OTHERS = re.compile("/(?:stubs|compat)/")


RELOAD = (
    "reboot or reload the nvidia module to complete the driver upgrade (images have their own user-mode "
    "driver, which must match it)"
)


class Information(Record):
    """The driver's facts about one GPU, from /proc/driver/nvidia/gpus/ADDRESS/information.

    The UUID is unknown until a process has opened the GPU once.
    """

    bus_id: str | None = None
    minor: int | None = None
    uuid: str | None = None
    name: str | None = None
    excluded: bool = False


class Kernel(Record):
    """The kernel's facts about NVIDIA: whether a module is loaded, its driver, and the GPUs.

    `mig` maps the minor number of a GPU with GPU instances to its MIG devices. Without instances, the kernel
    does not show whether MIG is enabled.
    """

    loaded: bool = False
    driver: Driver | None = None
    pci: tuple[Function, ...] = ()
    information: tuple[Information, ...] = ()
    mig: Mapping[int, tuple[MigDevice, ...]] = MappingProxyType({})


def is_version(text: str) -> bool:
    """Whether `text` is a driver version such as 550.163.01."""
    return DRIVER.fullmatch(text) is not None


def describe_mismatch(user_mode: str | None, kernel: str) -> str:
    """Return the sentence that the host's user-mode driver is not that of its kernel module."""
    return (
        f"driver mismatch: the host's user-mode driver is {user_mode or 'another version'}, "
        f"the kernel module is {kernel}"
    )


def parse_version(text: str) -> Driver | None:
    """Return the driver in the text of /proc/driver/nvidia/version, or None."""
    match = BANNER.search(text)
    if match is None:
        return None
    return Driver(
        version=match[2], kind="open" if match[1] else "proprietary", source="/proc/driver/nvidia/version"
    )


def parse_information(text: str) -> Information:
    """Return the facts in the text of a GPU's information file."""
    fields = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        # "??" and "N/A" stand for facts that the driver does not know yet.
        if (value := value.strip()) and "??" not in value and value != "N/A":
            fields[key.strip().lower()] = value
    minor = fields.get("device minor", "")
    # Drivers before branch 460 wrote "Blacklisted".
    excluded = fields.get("gpu excluded") or fields.get("gpu blacklisted") or fields.get("blacklisted") or ""
    return Information(
        bus_id=pci.normalize_address(fields.get("bus location", "")),
        minor=int(minor) if re.fullmatch(r"\d{1,7}", minor, re.ASCII) else None,
        uuid=fields.get("gpu uuid"),
        name=fields.get("model"),
        excluded=excluded.lower() == "yes",
    )


def read_nvidia(tree: Tree, functions: Iterable[Function] = ()) -> Kernel:
    """Return the kernel's facts about NVIDIA in `tree`; `functions` are those on the PCI bus."""
    gpus = tuple(function for function in functions if function.is_gpu)
    entries = tree.list_names(PROC)
    loaded = bool(entries) or tree.has_folder(MODULE)
    if not loaded:
        return Kernel(pci=gpus)
    information = _read_information(tree)
    mig = {}
    for gpu in information:
        if gpu.minor is not None and (devices := _list_mig_devices(tree, gpu.minor)) is not None:
            mig[gpu.minor] = devices
    return Kernel(loaded=True, driver=_read_driver(tree), pci=gpus, information=information, mig=mig)


def list_nodes(tree: Tree) -> tuple[str, ...] | None:
    """Return the device nodes of NVIDIA's driver, sorted; None if a captured tree has no dev folder."""
    if not tree.has_folder("/dev"):
        return None
    paths = [f"/dev/{name}" for name in tree.list_names("/dev") if name.startswith("nvidia")]
    if "/dev/nvidia-caps" in paths:
        paths += [f"/dev/nvidia-caps/{name}" for name in tree.list_names("/dev/nvidia-caps")]
    plain = (path for path in paths if re.fullmatch(r"[\w/-]+", path, re.ASCII))
    return tuple(sorted(path for path in plain if tree.has_node(path)))


def has_own_nodes(tree: Tree) -> bool:
    """Whether /dev belongs to a container and has only its nodes, instead of the kernel's devtmpfs.

    A line of /proc/self/mountinfo has the mount point as its fifth field, and the type after a dash
    (proc(5)); of several mounts on one point the last counts.
    """
    kinds = [
        line.partition(" - ")[2].split(" ")[0]
        for line in (tree.read_text("/proc/self/mountinfo") or "").splitlines()
        if line.split(" ")[4:5] == ["/dev"]
    ]
    return kinds[-1:] == ["tmpfs"]


def read_user_mode(tree: Tree) -> str | None:
    """Return the version of the node's own user-mode driver; None if there is none, or it is unknown.

    It is that of the file which programs on the node would load. The file is read, never loaded: loading
    libcuda starts the driver. LD_LIBRARY_PATH does not matter, because NVIDIA's runtime, which gives the
    node's driver to containers, looks into the loader's cache.
    """
    roots = (tree, *(folder for root in ROOTS if (folder := tree.open_folder(root)) is not None))
    for root in roots:
        # The loader's choice comes first.
        cached = LoaderCache(root.read_bytes(CACHE, limit=CACHE_LIMIT) or b"").list_paths(USER_MODE)
        paths = [path for path in cached if path.startswith("/") and not OTHERS.search(path)]
        for path in (*paths, *(f"{folder}/{USER_MODE}" for folder in FOLDERS)):
            if file := root.resolve_file(path):
                return _read_version(file)
    return None


def with_capabilities(tree: Tree, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return `gpus` with the capability numbers of their MIG devices."""
    changed = []
    for gpu in gpus:
        devices = []
        for device in gpu.mig or ():
            instance = f"{MIG.format(gpu.minor)}/gi{device.gpu_instance}"
            paths = (f"{instance}/access", f"{instance}/ci{device.compute_instance}/access")
            matches = [CAPABILITY.search(tree.read_text(path) or "") for path in paths]
            numbers = tuple(int(match[1]) for match in matches if match)
            devices.append(replace(device, capabilities=numbers if len(numbers) == len(paths) else None))
        changed.append(replace(gpu, mig=tuple(devices)) if gpu.mig else gpu)
    return tuple(changed)


def _read_driver(tree: Tree) -> Driver | None:
    text = tree.read_text(f"{PROC}/version")
    if text is not None and (driver := parse_version(text)) is not None:
        return driver
    version = (tree.read_text(f"{MODULE}/version") or "").strip()
    if is_version(version):
        return Driver(version=version, kind=None, source=f"{MODULE}/version")
    tree.warnings.append(
        f"driver version unknown: nvidia is loaded, but neither {PROC}/version nor {MODULE}/version has it"
    )
    return None


def _read_information(tree: Tree) -> tuple[Information, ...]:
    gpus = []
    for name in tree.list_names(f"{PROC}/gpus"):
        text = tree.read_text(f"{PROC}/gpus/{name}/information")
        gpu = parse_information(text or "")
        bus_id = pci.normalize_address(name) or gpu.bus_id
        if bus_id is not None:
            gpus.append(
                Information(
                    bus_id=bus_id, minor=gpu.minor, uuid=gpu.uuid, name=gpu.name, excluded=gpu.excluded
                )
            )
    return tuple(gpus)


def _list_mig_devices(tree: Tree, minor: int) -> tuple[MigDevice, ...] | None:
    # The folder is named by minor number, and exists, empty, for every GPU that supports MIG.
    folder = MIG.format(minor)
    instances = _parse_numbers(tree.list_names(folder), "gi")
    if not instances:
        return None
    return tuple(
        MigDevice(uuid=None, profile=None, gpu_instance=gpu, compute_instance=compute)
        for gpu in instances
        for compute in _parse_numbers(tree.list_names(f"{folder}/gi{gpu}"), "ci")
    )


def _parse_numbers(names: list[str], prefix: str) -> list[int]:
    matches = (re.fullmatch(rf"{prefix}(\d{{1,3}})", name, re.ASCII) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def _read_version(file: str) -> str | None:
    from imagematrix.hardware.vendors import user_mode as libraries

    _, version = libraries.parse_file_name(file) or ("", None)
    if version is None:  # a copy, without the links that the driver's installer makes
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            version = libraries.read_version(size, lambda offset, count: os.pread(descriptor, count, offset))
        except OSError:
            return None
        finally:
            os.close(descriptor)
    return version if version and DRIVER.fullmatch(version) else None
