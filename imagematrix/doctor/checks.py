"""The checks: each a pure function of the facts, which says what it saw and what cures it where it is bad.

An "error" stops a launch with all of the node's GPUs. A "warning" does not, and makes it slow or fail later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.launch.plan import SELECTED
from imagematrix.probe.nvml import MISMATCH, NO_LIBRARY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from imagematrix.doctor.facts import Facts
    from imagematrix.probe.host import Gpu

    Verdict = tuple[str, str, str | None]  # severity, what was seen, remedy
    Seen = Iterator[Verdict]

__all__ = ["CHECKS", "SCHEMA", "Finding", "examine", "to_json"]

SCHEMA = "imagematrix.doctor/v1"
OLDEST_ENGINE = (20, 10)  # from which on select and run work
DRIVER_FILE = re.compile(r"/lib(cuda|nvidia-[a-z-]+|nvcuvid)\.so", re.ASCII)
DRIVER_FOLDERS = ("/usr", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")

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
        yield _error(
            f"{len(gpus)} NVIDIA GPUs, and no kernel module of NVIDIA's is loaded", "modprobe nvidia"
        )
    else:
        yield _ok("no NVIDIA GPU and no kernel module: images for CPUs only")


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
        if gpu.state != "ok" and facts.host.driver:
            yield _error(f"{gpu.label} is in the state {gpu.state}", _cure(gpu))


def _nodes(facts: Facts) -> Seen:
    for saw, remedy in facts.problems if facts.host.driver else ():
        yield _error(saw, remedy)
    if facts.host.driver and facts.host.gpus and not facts.problems:
        yield _ok("the device nodes can be opened")


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


def _cure(gpu: Gpu) -> str:
    address = gpu.pci_bus_id or str(gpu.index)
    return {
        "lost": f"nvidia-smi --gpu-reset -i {address}, or reboot",
        "no-permission": f"chmod 0666 /dev/nvidia{gpu.minor}, or allow it to this user's group or cgroup",
        "no-node": f"nvidia-modprobe -c {gpu.minor if gpu.minor is not None else gpu.index}",
        "no-module": f"unbind it from its driver, then: echo {address} > /sys/bus/pci/drivers_probe",
        "excluded": "take it off NVreg_ExcludedGpus in /etc/modprobe.d, then reload the module",
        "vgpu": "pass another GPU with --gpus: a vGPU needs the driver of its own release",
        "mig-empty": f"nvidia-smi mig -i {address} -cgi PROFILE -C, or: nvidia-smi -i {address} -mig 0",
    }.get(gpu.state, "nvidia-smi")


CHECKS: dict[str, Callable[[Facts], Seen]] = {
    "module": _module,
    "library": _library,
    "nvidia-uvm": _uvm,
    "gpus": _states,
    "device-nodes": _nodes,
    "persistence": _persistence,
    "docker-command": _command,
    "engine": _engine,
    "cgroup": _cgroup,
    "locks": _locks,
    "image": _image,
    "mounts": _mounts,
}
