"""The checks: pure functions of the facts that return findings, with a remedy for each problem.

An "error" stops a launch with all of the node's GPUs. A "warning" does not, but makes it slow or fail later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.common.settings import DOCKER
from imagematrix.common.text import quote_word
from imagematrix.hardware.host import fabric
from imagematrix.hardware.host.nvidia import describe_mismatch
from imagematrix.hardware.host.nvml import MISMATCH, NO_LIBRARY
from imagematrix.images.engine.releases import ZSTD_LAYERS, ZSTD_REMEDY
from imagematrix.launcher.docker.plan import SELECTED
from imagematrix.launcher.gpu_claims import pods

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.launcher.doctor.kernel import KernelFacts
    from imagematrix.launcher.doctor.node_facts import NodeFacts

    Verdict = tuple[str, str, str | None]  # severity, observation, remedy
    Verdicts = Iterator[Verdict]

SCHEMA = "imagematrix.doctor/v1"
DRIVER_FILE = re.compile(r"/lib(cuda|nvidia-[a-z-]+|nvcuvid)\.so", re.ASCII)
DRIVER_FOLDERS = ("/usr", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")

OF_A_SAVED_HOST = frozenset({"module", "gpus", "accelerators", "device-nodes", "probe", "image"})
XIDS = "https://docs.nvidia.com/deploy/xid-errors/"
MODULE_KEY = "mokutil --import the module's signing key, reboot and enrol it, then: modprobe nvidia"

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The observation of one check: "ok", a "warning" or an "error", with the remedy."""

    check: str
    severity: str
    saw: str
    remedy: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return one element of the Doctor document's `findings`."""
        return {"check": self.check, "severity": self.severity, "saw": self.saw, "remedy": self.remedy}


def run_checks(facts: NodeFacts) -> tuple[Finding, ...]:
    """Return the findings of all checks, in order."""
    return tuple(
        Finding(check=name, severity=severity, saw=saw, remedy=remedy)
        for name, check in CHECKS.items()
        if facts.live or name in OF_A_SAVED_HOST
        for severity, saw, remedy in check(facts)
    )


def make_doctor_document(findings: Iterable[Finding]) -> dict[str, object]:
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


def _module(facts: NodeFacts) -> Verdicts:
    driver, gpus = facts.host.driver, facts.host.gpus
    if driver:
        yield _ok(f"kernel module {driver.version} loaded")
    elif gpus:
        yield _error(*_unloaded(facts))
    elif not facts.host.accelerators:
        yield _ok("no NVIDIA GPU and no kernel module: CPU-only images")


def _unloaded(facts: NodeFacts) -> tuple[str, str]:
    """Return why NVIDIA's module is not loaded, and the remedy."""
    kernel = facts.kernel
    saw = f"{len(facts.host.gpus)} NVIDIA GPUs, but NVIDIA's kernel module is not loaded"
    if kernel.refused:
        return f"{saw}: the kernel rejected it: {kernel.refused}", MODULE_KEY
    for driver in sorted({*kernel.drivers.values()} - {"nvidia"}):
        blacklist = f"echo blacklist {driver} > /etc/modprobe.d/{driver}.conf; update-initramfs -u; reboot"
        return f"{saw}: {driver} is bound to them", blacklist
    if kernel.secure_boot:
        return f"{saw}; Secure Boot rejects unsigned modules", f"modprobe nvidia; or {MODULE_KEY}"
    return saw, "modprobe nvidia"


def _library(facts: NodeFacts) -> Verdicts:
    nvml, driver = facts.nvml, facts.host.driver
    if nvml is None or driver is None:
        return
    if nvml.error == MISMATCH or driver.user_mode_differs:
        library = driver.user_mode or nvml.library
        yield _warning(
            f"{describe_mismatch(library, driver.version)}: "
            "NVML and images without a driver (driver: host) fail",
            "reboot, or: rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia",
        )
    elif nvml.error == NO_LIBRARY:
        yield _warning(
            "NVML not found: memory, MIG mode and processes of the GPUs are unknown",
            "install the package with libnvidia-ml.so.1 of this driver, such as libnvidia-ml1",
        )
    elif nvml.message:
        yield _warning(f"NVML query failed: {nvml.message}", "nvidia-smi")
    else:
        yield _ok(f"NVML works, driver {nvml.driver}")


def _uvm(facts: NodeFacts) -> Verdicts:
    if facts.host.driver is None or not facts.host.gpus or facts.modules is None:
        return
    if "nvidia_uvm" in facts.modules:
        yield _ok("module nvidia-uvm loaded")
    else:
        yield _error("module nvidia-uvm not loaded: CUDA cannot start without it", "modprobe nvidia-uvm")


def _states(facts: NodeFacts) -> Verdicts:
    if facts.environment:
        yield _error(str(facts.environment), facts.environment.remedy)
    for gpu in facts.host.gpus:
        if gpu.state == "vgpu":
            yield _warning(
                f"{gpu.label} is a vGPU: images with their own driver do not fit it",
                "build the image without a driver (driver: host)",
            )
        elif gpu.state != "ok" and facts.host.driver:
            yield _error(f"{gpu.label} is in state {gpu.state}", _state_remedy(gpu, facts.kernel))


def _accelerators(facts: NodeFacts) -> Verdicts:
    for accelerator in facts.host.accelerators:
        yield _warning(
            f"accelerator that images do not support: {accelerator.label}",
            "`imagematrix run --gpus none IMAGE` runs an image without it",
        )


def _nodes(facts: NodeFacts) -> Verdicts:
    # Without a driver, no node can work, and `_module` has said so.
    for saw, remedy in facts.problems if facts.host.driver else ():
        yield _error(saw, remedy)
    for saw, remedy in facts.doubts if facts.host.driver else ():
        yield _warning(f"{saw}; the engine may still have access", remedy)
    for path, remedy in facts.kernel.stale:
        yield _error(
            f"{path} has the major number of another driver: it dates from an earlier load of the module",
            f"rm {path}; {remedy}",
        )
    if facts.host.driver and facts.host.gpus and not (facts.problems or facts.doubts):
        yield _ok(f"device nodes {'work' if facts.live else 'exist'}")


def _fabric(facts: NodeFacts) -> Verdicts:
    gpus = facts.nvml.gpus if facts.nvml else ()
    count, managed = len(facts.kernel.switches), facts.kernel.fabric_manager
    problem = (
        fabric.find_fabric_problem(count, gpus, managed=managed)
        if facts.host.driver and facts.host.gpus
        else None
    )
    if problem:
        yield _error(problem, fabric.REMEDY)
    elif count and managed and fabric.READY not in {gpu.fabric for gpu in gpus}:
        yield _ok(f"{count} NVSwitches, fabric manager running")


def _xids(facts: NodeFacts) -> Verdicts:
    # Warnings only: it may be long ago, and programs can cause some of these errors.
    for (address, number), count in sorted(facts.kernel.xids.items()):
        times = f", {count} times" if count > 1 else ""
        yield _warning(f"kernel log: Xid {number} of the GPU at {address}{times}", f"see {XIDS}")


def _security(facts: NodeFacts) -> Verdicts:
    for path in facts.kernel.denied:
        yield _warning(
            f"kernel log: SELinux or AppArmor denied a process access to {path}",
            "find the profile in the log (dmesg | grep -i denied), and allow the device in it",
        )
    if facts.engine.selinux and facts.kernel.selinux and facts.host.gpus:
        yield _error(
            "the engine labels containers for SELinux, which denies them device nodes",
            "setsebool -P container_use_devices 1",
        )


def _probe(facts: NodeFacts) -> Verdicts:
    for warning in () if facts.live else facts.host.warnings:
        yield _warning(warning, "run `imagematrix doctor` on that node")


def _persistence(facts: NodeFacts) -> Verdicts:
    off = [str(gpu.index) for gpu in (facts.nvml.gpus if facts.nvml else ()) if gpu.persistence == 0]
    if off:
        yield _warning(
            f"persistence mode off for GPU {', '.join(off)}: the first use of an idle GPU takes seconds",
            "systemctl enable --now nvidia-persistenced, or: nvidia-smi -pm 1",
        )


def _command(facts: NodeFacts) -> Verdicts:
    if facts.daemonless.engine != DOCKER:
        return
    if facts.docker:
        yield _ok(f"`docker` is {facts.docker}")
    else:
        yield _without_docker(facts, "`docker` not found on PATH", "apt-get install docker-cli")


def _engine(facts: NodeFacts) -> Verdicts:
    engine = facts.engine
    if facts.daemonless.engine != DOCKER:
        return
    if engine.error:
        yield _without_docker(facts, engine.error, engine.remedy)
        return
    name = f"podman {engine.version}" if engine.podman else engine.version
    if engine.machine and engine.machine != facts.machine and facts.host.gpus:
        yield _error(
            f"the engine at {engine.address} runs on {engine.machine}, this is {facts.machine}: the probed "
            f"GPUs are not the engine's",
            "run `env -u DOCKER_HOST DOCKER_CONTEXT=default imagematrix doctor`",
        )
    elif not engine.podman and not ZSTD_LAYERS.is_in(engine.version):
        yield _warning(
            f"the engine at {engine.address} is Docker {name}: it cannot unpack layers compressed with zstd, "
            f"which builds write by default",
            ZSTD_REMEDY,
        )
    elif not engine.devices and facts.host.gpus:
        yield _error(
            f"the engine at {engine.address} is {name}, to which `docker` passes no devices, because it does "
            f"not report its system",
            "install podman 5, or run the output of `imagematrix run --dry-run IMAGE` with podman",
        )
    else:
        yield _ok(f"the engine at {engine.address} is {name}")


def _without_docker(facts: NodeFacts, saw: str, remedy: str | None) -> Verdict:
    """Return the verdict for a node on which Docker starts no containers: others may."""
    if facts.daemonless.runtime is None or facts.daemonless.errors:
        return _error(saw, remedy)
    return _warning(saw, f"{remedy}; or launch with --engine oci, which needs no daemon")


def _daemonless(facts: NodeFacts) -> Verdicts:
    found = facts.daemonless
    # On a node with Docker nothing is wrong if containers cannot start without it.
    severity, lesser = (OK, OK) if found.engine == DOCKER else (ERROR, WARNING)
    for error in found.errors:
        yield severity, f"no containers without a daemon: {error}", error.remedy
    if found.runtime and not found.errors:
        yield _ok(f"containers can start without a daemon: {found.runtime}, images in {found.store}")
    if found.squashfs:
        yield lesser, f"without a daemon: {found.squashfs}", found.squashfs.remedy
    if found.driver_added:
        yield _warning(
            f"{found.driver_added}: the command `apptainer` mounts the node's driver over that of an image; "
            "launches of imagematrix do not",
            "set it to no, or start images that have a driver with `apptainer exec --no-nv --no-rocm`",
        )


def _cgroup(facts: NodeFacts) -> Verdicts:
    # https://github.com/NVIDIA/nvidia-container-toolkit/issues/48
    if not facts.host.gpus or facts.engine.cgroup_driver != "systemd":
        return
    if facts.unlinked:
        links = "; ".join(f"ln -s {path} {link}" for path, link in facts.unlinked)
        yield _warning(
            "systemd manages the containers' cgroups but does not find the GPUs' device nodes by number: "
            "`systemctl daemon-reload` would remove the GPUs from running containers",
            f"at every boot: {links}",
        )
    else:
        yield _ok("systemd manages the containers' cgroups and finds the GPUs' device nodes")


def _kubelet(facts: NodeFacts) -> Verdicts:
    if facts.kubelet is None or not facts.host.gpus:
        return
    if not facts.kubelet:
        yield _warning(pods.format_denied(), "run `imagematrix gpus` and launches as root")
    elif facts.kubelet_error:
        yield _error(str(facts.kubelet_error), facts.kubelet_error.remedy)
    else:
        yield _ok("kubelet lists the GPUs of pods")


def _locks(facts: NodeFacts) -> Verdicts:
    if not facts.host.gpus:
        return
    if facts.locks_error:
        yield _error(str(facts.locks_error), facts.locks_error.remedy)
    elif facts.engine.tasks_locks not in (None, facts.locks):
        yield _error(
            f"tasks of Swarm use the GPU locks in {facts.engine.tasks_locks}, launches those in "
            f"{facts.locks}: a GPU can be given out twice",
            f"run `IMAGEMATRIX_LOCKS={quote_word(facts.locks)} imagematrix swarm node-config`, "
            "or unset IMAGEMATRIX_LOCKS",
        )
    elif facts.locks.startswith("/run/user/"):
        yield _warning(
            f"locks in {facts.locks}: launches of other users do not see them",
            "as root: mkdir -m 1777 /run/lock/imagematrix; and add a line for it to /etc/tmpfiles.d",
        )
    else:
        yield _ok(f"locks in {facts.locks}")


def _image(facts: NodeFacts) -> Verdicts:
    image = facts.image
    if image is None:
        return
    if image.selected is None:
        yield _error(image.error or "", image.remedy or f"run `imagematrix explain {quote_word(image.name)}`")
        return
    look = f"docker run --rm {image.selected} find / -xdev -name 'libcuda.so.*'"
    if image.libcudas is None:
        yield _ok(f"{image.selected} fits this node; not in the engine yet")
    elif image.mode in ("exact", "compat") and len(image.libcudas) != 1:
        present = ", ".join(image.libcudas) or "no libcuda"
        yield _error(f"{image.selected} should have exactly one user-mode driver, but has {present}", look)
    elif image.mode == "host" and image.libcudas:
        present = ", ".join(image.libcudas)
        yield _error(f"{image.selected} should leave the driver to the host, but has {present}", look)
    else:
        yield _ok(f"{image.selected} fits this node")


def _mounts(facts: NodeFacts) -> Verdicts:
    for container in facts.engine.containers:
        if SELECTED not in ((container.get("Config") or {}).get("Labels") or {}):
            continue
        name = str(container.get("Name")).lstrip("/")
        for mount in container.get("Mounts") or ():
            target = str(mount.get("Destination")).rstrip("/")
            if target in DRIVER_FOLDERS or DRIVER_FILE.search(target):
                yield _warning(
                    f"in container {name}, {mount.get('Source')} of the host hides the image's driver at "
                    f"{target}",
                    f"start {name} again without -v …:{target}",
                )


def _state_remedy(gpu: Gpu, kernel: KernelFacts) -> str:
    address = gpu.pci_bus_id or str(gpu.index)
    instances = kernel.uncomputed.get(-1 if gpu.minor is None else gpu.minor)
    if gpu.state == "mig-empty" and instances:
        return f"nvidia-smi mig -i {address} -gi {','.join(map(str, instances))} -cci"
    return {
        "lost": f"nvidia-smi --gpu-reset -i {address}, or reboot",
        "no-permission": f"chmod 0666 /dev/nvidia{gpu.minor}, or grant this user's group or cgroup access",
        "no-node": "nvidia-smi" if gpu.minor is None else f"nvidia-modprobe -c {gpu.minor}",
        "no-module": f"unbind it from its driver, then: echo {address} > /sys/bus/pci/drivers_probe",
        "excluded": "remove it from NVreg_ExcludedGpus in /etc/modprobe.d, then reload the module",
        "failed": f"dmesg | grep -e RmInitAdapter; nvidia-smi --gpu-reset -i {address}, or reboot",
        "unconfirmed": "install the package with libnvidia-ml.so.1 of this driver, such as libnvidia-ml1",
        "vgpu-host": "pass another GPU with --gpus: this one serves virtual machines",
        "mig-empty": f"nvidia-smi mig -i {address} -cgi PROFILE -C, or: nvidia-smi -i {address} -mig 0",
    }.get(gpu.state, "nvidia-smi")


CHECKS: dict[str, Callable[[NodeFacts], Verdicts]] = {
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
    "without-daemon": _daemonless,
    "cgroup": _cgroup,
    "kubelet": _kubelet,
    "locks": _locks,
    "image": _image,
    "mounts": _mounts,
}
