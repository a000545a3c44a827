"""The checks: each a pure function of the facts, which says what it saw and what cures it where it is bad.

An "error" stops a launch with all of the node's GPUs. A "warning" does not, and makes it slow or fail later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.launcher.plan import SELECTED
from imagematrix.node.nvml import MISMATCH, NO_LIBRARY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from imagematrix.doctor.facts import Facts
    from imagematrix.doctor.kernel import Kernel
    from imagematrix.node.host import Gpu

    Verdict = tuple[str, str, str | None]  # severity, what was seen, remedy
    Seen = Iterator[Verdict]

__all__ = ["CHECKS", "SCHEMA", "Finding", "examine", "to_json"]

SCHEMA = "imagematrix.doctor/v1"
OLDEST_ENGINE = (20, 10)  # from which on select and run work
DRIVER_FILE = re.compile(r"/lib(cuda|nvidia-[a-z-]+|nvcuvid)\.so", re.ASCII)
DRIVER_FOLDERS = ("/usr", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")

OF_A_SAVED_HOST = frozenset({"module", "gpus", "accelerators", "device-nodes", "probe", "image"})
XIDS = "https://docs.nvidia.com/deploy/xid-errors/"
FABRIC_READY = 3
FABRIC = {1: "not started", 2: "in progress"}  # nvmlGpuFabricState_t
MODULE_KEY = (
    "mokutil --import the key that the module is signed with, reboot and enrol it, then: modprobe nvidia"
)

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check saw: "ok", a "warning" or an "error", with the command that cures it."""

    check: str
    severity: str
    saw: str
    remedy: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return one element of the Doctor document's `findings`."""
        return {"check": self.check, "severity": self.severity, "saw": self.saw, "remedy": self.remedy}


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Return what all checks find, in their order."""
    return tuple(
        Finding(check=name, severity=severity, saw=saw, remedy=remedy)
        for name, check in CHECKS.items()
        if facts.live or name in OF_A_SAVED_HOST
        for severity, saw, remedy in check(facts)
    )


def to_json(findings: Iterable[Finding]) -> dict[str, object]:
    """Return the Doctor document."""
    listed = list(findings)
    return {
        "schema": SCHEMA,
        "launches": all(finding.severity != ERROR for finding in listed),
        "findings": [finding.to_json() for finding in listed],
    }


def _ok(saw: str) -> Verdict:
    return OK, saw, None


def _warning(saw: str, remedy: str) -> Verdict:
    return WARNING, saw, remedy


def _error(saw: str, remedy: str | None) -> Verdict:
    return ERROR, saw, remedy


def _module(facts: Facts) -> Seen:
    driver, gpus = facts.host.driver, facts.host.gpus
    if driver:
        yield _ok(f"the kernel module is {driver.version}")
    elif gpus:
        yield _error(*_unloaded(facts))
    elif not facts.host.accelerators:
        yield _ok("no NVIDIA GPU and no kernel module: images for CPUs only")


def _unloaded(facts: Facts) -> tuple[str, str]:
    """Return why no module of NVIDIA's is loaded, and what loads one."""
    kernel = facts.kernel
    saw = f"{len(facts.host.gpus)} NVIDIA GPUs, and no kernel module of NVIDIA's is loaded"
    if kernel.refused:
        return f"{saw}: the kernel refused one: {kernel.refused}", MODULE_KEY
    for other in sorted({*kernel.drivers.values()} - {"nvidia"}):
        away = f"echo blacklist {other} > /etc/modprobe.d/{other}.conf; update-initramfs -u; reboot"
        return f"{saw}: {other} has them", away
    if kernel.secure_boot:
        return f"{saw}; Secure Boot refuses one that is not signed", f"modprobe nvidia; or {MODULE_KEY}"
    return saw, "modprobe nvidia"


def _library(facts: Facts) -> Seen:
    answer, driver = facts.nvml, facts.host.driver
    if answer is None or driver is None:
        return
    if answer.error == MISMATCH:
        yield _warning(
            f"the host's own user-mode driver is {answer.library or 'of another version'}, the kernel module "
            f"{driver.version}: NVML refuses, and so do images without a driver (driver: host)",
            "reboot, or: rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia",
        )
    elif answer.error == NO_LIBRARY:
        yield _warning(
            "NVML is not installed: memory, MIG mode and processes of the GPUs are not known",
            "install the package with libnvidia-ml.so.1 of this driver, such as libnvidia-ml1",
        )
    elif answer.message:
        yield _warning(f"NVML gives no answer: {answer.message}", "nvidia-smi")
    else:
        yield _ok(f"NVML answers, and says that the driver is {answer.driver}")


def _uvm(facts: Facts) -> Seen:
    if facts.host.driver is None or not facts.host.gpus or facts.modules is None:
        return
    if "nvidia_uvm" in facts.modules:
        yield _ok("the module nvidia-uvm is loaded")
    else:
        yield _error(
            "the module nvidia-uvm is not loaded, and CUDA can't start without it",
            "modprobe nvidia-uvm",
        )


def _states(facts: Facts) -> Seen:
    for gpu in facts.host.gpus:
        if gpu.state == "vgpu":
            yield _warning(
                f"{gpu.label} is a vGPU, and images with a driver of their own do not fit it",
                "build the image without a driver of its own (driver: host)",
            )
        elif gpu.state != "ok" and facts.host.driver:
            yield _error(f"{gpu.label} is in the state {gpu.state}", _cure(gpu, facts.kernel))


def _accelerators(facts: Facts) -> Seen:
    for accelerator in facts.host.accelerators:
        yield _warning(
            f"an accelerator that images can't use, {accelerator.label}",
            "imagematrix run --gpus none, to leave it idle",
        )


def _nodes(facts: Facts) -> Seen:
    for saw, remedy in facts.problems if facts.host.driver else ():
        yield _error(saw, remedy)
    for path, remedy in facts.kernel.stale:
        yield _error(
            f"{path} has the number of another driver: an earlier load of NVIDIA's module left it",
            f"rm {path}; {remedy}",
        )
    if facts.host.driver and facts.host.gpus and not facts.problems:
        yield _ok(f"the device nodes {'can be opened' if facts.live else 'are there'}")


def _fabric(facts: Facts) -> Seen:
    # https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/
    states = {gpu.index: gpu.fabric for gpu in (facts.nvml.gpus if facts.nvml else ())}
    waiting = [f"GPU {index} ({FABRIC[state]})" for index, state in states.items() if state in FABRIC]
    remedy = "systemctl enable --now nvidia-fabricmanager, of the driver's version"
    count = len(facts.kernel.switches)
    if waiting:
        yield _error(
            f"NVLink's fabric is not ready, and CUDA ends with error 802: {', '.join(waiting)}", remedy
        )
    elif count and facts.host.driver and facts.host.gpus and FABRIC_READY not in states.values():
        if facts.kernel.fabric_manager:
            yield _ok(f"{count} NVSwitches, and the fabric manager runs")
        else:
            yield _error(f"{count} NVSwitches, and no fabric manager: CUDA ends with error 802", remedy)


def _xids(facts: Facts) -> Seen:
    for (address, number), count in sorted(facts.kernel.xids.items()):
        times = f", {count} times" if count > 1 else ""
        yield _warning(f"the kernel's log has Xid {number} of the GPU at {address}{times}", f"see {XIDS}")


def _security(facts: Facts) -> Seen:
    for path in facts.kernel.denied:
        yield _warning(
            f"SELinux or AppArmor kept {path} from a process, as the kernel's log says",
            "find the profile in the log (dmesg | grep -i denied), and allow it the device",
        )
    if facts.engine.selinux and facts.kernel.selinux and facts.host.gpus:
        yield _error(
            "the engine labels containers for SELinux, which keeps device nodes from them",
            "setsebool -P container_use_devices 1",
        )


def _probe(facts: Facts) -> Seen:
    for warning in () if facts.live else facts.host.warnings:
        yield _warning(warning, "imagematrix doctor, on that node")


def _persistence(facts: Facts) -> Seen:
    off = [str(gpu.index) for gpu in (facts.nvml.gpus if facts.nvml else ()) if gpu.persistence == 0]
    if off:
        yield _warning(
            f"persistence mode is off for GPU {', '.join(off)}: each first use of an idle GPU takes seconds",
            "systemctl enable --now nvidia-persistenced, or: nvidia-smi -pm 1",
        )


def _command(facts: Facts) -> Seen:
    if facts.docker:
        yield _ok(f"docker's command is {facts.docker}")
    else:
        yield _error("docker's command is not on PATH", "apt-get install docker-cli")


def _engine(facts: Facts) -> Seen:
    found = facts.engine
    if found.error:
        yield _error(found.error, found.remedy)
        return
    version = re.match(r"(\d+)\.(\d+)", found.version, re.ASCII)
    name = f"podman {found.version}" if found.podman else found.version
    if not found.podman and version and tuple(map(int, version.groups())) < OLDEST_ENGINE:
        yield _error(
            f"the engine is {found.version}; selecting and running need 20.10 or newer",
            "apt-get install --only-upgrade docker.io",
        )
    elif found.machine and found.machine != facts.machine and facts.host.gpus:
        yield _error(
            f"the engine at {found.address} runs on {found.machine}, and this is {facts.machine}: the GPUs "
            f"that were probed are not the ones it has",
            "env -u DOCKER_HOST DOCKER_CONTEXT=default imagematrix doctor",
        )
    elif not found.devices and facts.host.gpus:
        yield _error(
            f"the engine at {found.address} is {name}, and docker's command passes no devices to it, because "
            f"it does not tell its system",
            "install podman 5, or start with podman's own command what `imagematrix run --dry-run` prints",
        )
    else:
        yield _ok(f"the engine at {found.address} is {name}")


def _cgroup(facts: Facts) -> Seen:
    # https://github.com/NVIDIA/nvidia-container-toolkit/issues/48
    if not facts.host.gpus or facts.engine.cgroup_driver != "systemd":
        return
    if facts.unlinked:
        links = "; ".join(f"ln -s {path} {link}" for path, link in facts.unlinked)
        yield _warning(
            "systemd manages the containers' cgroups and does not find the GPUs' device nodes by number: "
            "`systemctl daemon-reload` would take the GPUs from running containers",
            f"at each start of the machine: {links}",
        )
    else:
        yield _ok("systemd manages the containers' cgroups, and finds the GPUs' device nodes")


def _locks(facts: Facts) -> Seen:
    if not facts.host.gpus:
        return
    if facts.locks_error:
        yield _error(facts.locks_error, facts.locks_remedy)
    elif facts.locks.startswith("/run/user/"):
        yield _warning(
            f"the locks are in {facts.locks}, so that other users' launches do not see them",
            "mkdir -m 1777 /run/lock/imagematrix, as root; and a line for it in /etc/tmpfiles.d",
        )
    else:
        yield _ok(f"the locks are in {facts.locks}")


def _image(facts: Facts) -> Seen:
    image = facts.image
    if image is None:
        return
    if image.selected is None:
        yield _error(image.error or "", image.remedy or f"imagematrix explain {image.name}")
        return
    look = f"docker run --rm {image.selected} find / -xdev -name 'libcuda.so.*'"
    if image.libcudas is None:
        yield _ok(f"{image.selected} fits this node; it is not in the engine yet")
    elif image.mode in ("exact", "compat") and len(image.libcudas) != 1:
        there = ", ".join(image.libcudas) or "no libcuda"
        yield _error(f"{image.selected} shall have one user-mode driver, and has {there}", look)
    elif image.mode == "host" and image.libcudas:
        there = ", ".join(image.libcudas)
        yield _error(f"{image.selected} leaves the driver to the host, and has {there}", look)
    else:
        yield _ok(f"{image.selected} fits this node")


def _mounts(facts: Facts) -> Seen:
    for container in facts.engine.containers:
        if SELECTED not in ((container.get("Config") or {}).get("Labels") or {}):
            continue
        name = str(container.get("Name")).lstrip("/")
        for mount in container.get("Mounts") or ():
            place = str(mount.get("Destination")).rstrip("/")
            if place in DRIVER_FOLDERS or DRIVER_FILE.search(place):
                yield _warning(
                    f"in the container {name}, {mount.get('Source')} of the host lies over the driver in the "
                    f"image, at {place}",
                    f"start {name} again without -v …:{place}",
                )


def _cure(gpu: Gpu, kernel: Kernel) -> str:
    address = gpu.pci_bus_id or str(gpu.index)
    instances = kernel.uncomputed.get(-1 if gpu.minor is None else gpu.minor)
    if gpu.state == "mig-empty" and instances:
        return f"nvidia-smi mig -i {address} -gi {','.join(map(str, instances))} -cci"
    return {
        "lost": f"nvidia-smi --gpu-reset -i {address}, or reboot",
        "no-permission": f"chmod 0666 /dev/nvidia{gpu.minor}, or allow it to this user's group or cgroup",
        "no-node": "nvidia-smi" if gpu.minor is None else f"nvidia-modprobe -c {gpu.minor}",
        "no-module": f"unbind it from its driver, then: echo {address} > /sys/bus/pci/drivers_probe",
        "excluded": "take it off NVreg_ExcludedGpus in /etc/modprobe.d, then reload the module",
        "failed": f"dmesg | grep -e RmInitAdapter; nvidia-smi --gpu-reset -i {address}, or reboot",
        "unconfirmed": "install the package with libnvidia-ml.so.1 of this driver, such as libnvidia-ml1",
        "vgpu-host": "pass another GPU with --gpus: this one is given out to virtual machines",
        "mig-empty": f"nvidia-smi mig -i {address} -cgi PROFILE -C, or: nvidia-smi -i {address} -mig 0",
    }.get(gpu.state, "nvidia-smi")


CHECKS: dict[str, Callable[[Facts], Seen]] = {
    "module": _module,
    "library": _library,
    "nvidia-uvm": _uvm,
    "gpus": _states,
    "accelerators": _accelerators,
    "device-nodes": _nodes,
    "fabric": _fabric,
    "xid": _xids,
    "security": _security,
    "probe": _probe,
    "persistence": _persistence,
    "docker-command": _command,
    "engine": _engine,
    "cgroup": _cgroup,
    "locks": _locks,
    "image": _image,
    "mounts": _mounts,
}
