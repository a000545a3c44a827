"""Facts of the kernel that the probe does not read: log, bound drivers, Secure Boot, NVSwitches, SELinux."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from imagematrix.hardware.host import accelerator_hints, fabric, pci
from imagematrix.hardware.host.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.hardware.host.host import Host

KMSG = "dev/kmsg"
LOG_LIMIT = 100_000  # messages; a kernel's buffer seldom has a tenth of this
MESSAGE = 8192  # bytes, the maximum of one read of /dev/kmsg
# https://docs.nvidia.com/deploy/xid-errors/
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d{1,4})")
# Messages about a module without a trusted signature: kernel/module/signing.c and security/lockdown.
REFUSED = re.compile(
    r"Loading of (?:unsigned module|module with un\S+ \w+) is rejected|unsigned module loading is restricted"
)
# SELinux shows only the last part of a path if it denies access to an inode.
DENIED = re.compile(
    r"(?:apparmor=\"DENIED\"|avc: +denied).*(?:name|path)=\"(/dev/nvidia[^\"]*)\""
    r"|avc: +denied.* name=\"(nvidia(?:\d+|ctl|-[\w-]+))\".* tclass=chr_file"
)
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
PERMISSIVE = " permissive=1"  # at the end of SELinux's messages about what it let pass
SELINUX = "/sys/fs/selinux"
USE_DEVICES = f"{SELINUX}/booleans/container_use_devices"
DEVICE = re.compile(r"^ *(\d{1,9}) (\S+)$", re.MULTILINE)
# For device nodes: the names of their driver in /proc/devices.
MAJORS = (
    (re.compile(r"/dev/nvidia(\d+|ctl|-modeset)"), {"nvidia", "nvidia-frontend"}),
    (re.compile(r"/dev/nvidia-uvm(-tools)?"), {"nvidia-uvm"}),
    (re.compile(r"/dev/nvidia-caps/.*"), {"nvidia-caps"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """The kernel's facts.

    `drivers` are those bound to GPUs, by bus address. `secure_boot` states whether the firmware verifies
    signatures, `refusal` is the message about a rejected module. `xids` counts errors by bus address and
    number, `denied_nodes` are device nodes to which a security module denied access; these three are empty if
    the log cannot be read. `stale_nodes` are device nodes whose major number is not their driver's.
    `switches` are the NVSwitches, `fabric_manager` states whether the fabric manager runs, None if the node's
    processes are hidden. `empty_instances` are the MIG GPU instances without a compute instance, by the GPU's
    minor. `selinux` states that SELinux denies device nodes to the containers that the engine labels.
    """

    drivers: Mapping[str, str] = field(default_factory=dict)
    secure_boot: bool = False
    refusal: str | None = None
    xids: Mapping[tuple[str, int], int] = field(default_factory=dict)
    denied_nodes: tuple[str, ...] = ()
    stale_nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    fabric_manager: bool | None = None
    empty_instances: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    selinux: bool = False


def read_kernel_facts(host: Host, root: str = "/") -> KernelFacts:
    """Return the facts of this machine's kernel about `host`'s GPUs, without those that cannot be read."""
    top, tree = Path(root), Tree(root)
    functions = accelerator_hints.find_hints(tree).functions
    log = list(_read_log(top / KMSG))
    xids: dict[tuple[str, int], int] = {}
    denied_nodes: dict[str, None] = {}
    for message in log:
        if match := XID.search(message):
            key = match[1].lower(), int(match[2])
            xids[key] = xids.get(key, 0) + 1
        if PERMISSIVE not in message and (match := DENIED.search(message)):
            path, name = match[1], match[2]
            if name:
                path = f"/dev/nvidia-caps/{name}" if name.startswith("nvidia-cap") else f"/dev/{name}"
            denied_nodes[path] = None
    drivers = {}
    for gpu in host.gpus:
        if gpu.pci_bus_id:
            with contextlib.suppress(OSError):
                link = top / pci.PCI_DEVICES.lstrip("/") / gpu.pci_bus_id / "driver"
                drivers[gpu.pci_bus_id] = link.readlink().name
    return KernelFacts(
        drivers=drivers,
        secure_boot=(tree.read_bytes(SECURE_BOOT) or b"")[-1:] == b"\1",
        refusal=next((message for message in log if REFUSED.search(message)), None),
        xids=xids,
        denied_nodes=tuple(filter(None, denied_nodes)),
        stale_nodes=tuple(_find_stale_nodes(host, tree, top)),
        switches=tuple(
            function.bus_id for function in pci.list_functions(tree, functions) if function.is_switch
        ),
        fabric_manager=fabric.is_managed(tree),
        empty_instances={
            gpu.minor: instances
            for gpu in host.gpus
            if gpu.minor is not None and (instances := _find_empty_instances(gpu.minor, top))
        },
        selinux=_denies_devices(tree),
    )


def _read_log(path: Path) -> Iterator[str]:
    """Yield the messages in the kernel's buffer; none if this user may not read them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for _ in range(LOG_LIMIT):
            try:
                raw = os.read(descriptor, MESSAGE)
            except BrokenPipeError:  # the message was overwritten meanwhile; read the next one
                continue
            except OSError:  # EAGAIN: no more messages
                return
            if not raw:
                return
            # "6,1234,5678,-;TEXT", then lines about the device (Documentation/ABI/testing/dev-kmsg)
            yield raw.decode("utf-8", "replace").partition("\n")[0].partition(";")[2]
    finally:
        os.close(descriptor)


def _find_stale_nodes(host: Host, tree: Tree, top: Path) -> Iterator[str]:
    """Yield device nodes from an earlier load of the driver, whose major number belongs to another driver."""
    majors = {name: int(number) for number, name in DEVICE.findall(tree.read_text("/proc/devices") or "")}
    for path in host.devices:
        names: set[str] = next((names for form, names in MAJORS if form.fullmatch(path)), set())
        expected = {majors[name] for name in names & majors.keys()}
        with contextlib.suppress(OSError):
            node = (top / path.lstrip("/")).stat()
            if expected and stat.S_ISCHR(node.st_mode) and os.major(node.st_rdev) not in expected:
                yield path


def _find_empty_instances(minor: int, top: Path) -> tuple[int, ...]:
    instances = (top / f"proc/driver/nvidia/capabilities/gpu{minor}/mig").glob("gi[0-9]*")
    return tuple(
        sorted(
            int(instance.name[2:])
            for instance in instances
            if instance.name[2:].isdecimal() and not list(instance.glob("ci[0-9]*"))
        )
    )


def _denies_devices(tree: Tree) -> bool:
    """Whether SELinux enforces its policy, by which confined containers may not use devices."""
    enforces, allows = (tree.read_text(path) or "" for path in (f"{SELINUX}/enforce", USE_DEVICES))
    return enforces.startswith("1") and allows.startswith("0")
