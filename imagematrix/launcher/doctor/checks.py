"""The checks: pure functions of the facts that return findings, with a remedy for each problem.

An "error" stops a launch with all of the node's GPUs. A "warning" does not, but makes it slow or fail later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.common.settings import DOCKER
from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.hardware.host import device, fabric
from imagematrix.hardware.host.emulators import FOLDER, format_registration
from imagematrix.hardware.host.gpus import MISSING, describe_state
from imagematrix.hardware.host.nvidia import RELOAD, describe_mismatch
from imagematrix.hardware.host.nvml import MISMATCH, NO_LIBRARY, explain_failure, match_readings
from imagematrix.hardware.host.other_accelerators import IGNORED
from imagematrix.images.catalog.warm_up import check_cache_folder
from imagematrix.images.engine.releases import ZSTD_LAYERS, ZSTD_REMEDY
from imagematrix.images.warm.tools import ROOT, load_tools
from imagematrix.launcher.docker.plan import SELECTED
from imagematrix.launcher.doctor.pulls import list_pull_settings
from imagematrix.launcher.gpu_claims import pods

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.hardware.host.nvml import NvmlGpu
    from imagematrix.launcher.doctor.kernel import KernelFacts
    from imagematrix.launcher.doctor.node_facts import NodeFacts
    from imagematrix.launcher.doctor.pulls import PullSetting

    Verdict = tuple[str, str, str | None]  # severity, observation, remedy
    Verdicts = Iterator[Verdict]

SCHEMA = "imagematrix.doctor/v1"
DRIVER_FILE = re.compile(r"/lib(cuda|nvidia-[a-z-]+|nvcuvid)\.so", re.ASCII)
DRIVER_FOLDERS = ("/usr", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")

OF_A_SAVED_HOST = frozenset({"module", "gpus", "accelerators", "device-nodes", "probe", "image", "caches"})
XIDS = "https://docs.nvidia.com/deploy/xid-errors/"
MODULE_KEY = "mokutil --import the module's signing key, reboot and enrol it, then: modprobe nvidia"

DISPLAY = frozenset({"nouveau", "nvidiafb"})  # drivers for screens, which NVIDIA's takes the place of
# NVIDIA's modules, each before those that it uses.
MODULES = (
    *("nvidia_vgpu_vfio", "nvidia_peermem", "nvidia_fs", "gdrdrv"),
    *("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia"),
)

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
        if facts.is_live or name in OF_A_SAVED_HOST
        for severity, saw, remedy in check(facts)
    )


def make_doctor_document(
    findings: Iterable[Finding], settings: Iterable[PullSetting] = ()
) -> dict[str, object]:
    """Return the Doctor document, with the settings by which engines pull."""
    all_findings = list(findings)
    return {
        "schema": SCHEMA,
        "launches": all(finding.severity != ERROR for finding in all_findings),
        "findings": [finding.to_json() for finding in all_findings],
        "pulls": [setting.to_json() for setting in settings],
    }


def _make_ok(saw: str) -> Verdict:
    return OK, saw, None


def _make_warning(saw: str, remedy: str) -> Verdict:
    return WARNING, saw, remedy


def _make_error(saw: str, remedy: str | None) -> Verdict:
    return ERROR, saw, remedy


def _check_module(facts: NodeFacts) -> Verdicts:
    driver, gpus = facts.host.driver, facts.host.gpus
    if driver:
        yield _make_ok(f"kernel module {driver.version} loaded")
    elif gpus:
        kernel = facts.kernel
        bound = sorted({*kernel.drivers.values()} - {"nvidia"}, key=lambda name: (name not in DISPLAY, name))
        saw = f"{len(gpus)} NVIDIA GPUs, but NVIDIA's kernel module is not loaded"
        remedy = "modprobe nvidia"
        # The message about a rejected module does not name it, so it counts less than a driver for screens.
        if kernel.refusal and not DISPLAY & {*bound}:
            saw, remedy = f"{saw}: the kernel rejected it: {kernel.refusal}", MODULE_KEY
        elif bound:
            saw, remedy = f"{saw}: {bound[0]} is bound to them", _advise_on_driver(bound[0])
        elif kernel.secure_boot:
            saw, remedy = f"{saw}; Secure Boot rejects unsigned modules", f"modprobe nvidia; or {MODULE_KEY}"
        yield _make_error(saw, remedy)
    elif not facts.host.accelerators:
        yield _make_ok("no NVIDIA GPU and no kernel module: CPU-only images")


def _advise_on_driver(bound: str) -> str:
    if bound not in DISPLAY:
        return f"if no virtual machine needs them, unbind them from {bound}, then: modprobe nvidia"
    # Of Debian and of Fedora; where there is neither, nothing is started again.
    renew = "{ update-initramfs -u || dracut -f; }"
    return f"echo blacklist {bound} > /etc/modprobe.d/imagematrix-{bound}.conf && {renew} && reboot"


def _check_library(facts: NodeFacts) -> Verdicts:
    nvml, driver = facts.nvml, facts.host.driver
    if nvml is None or driver is None:
        return
    if nvml.error == MISMATCH or driver.user_mode_differs:
        library = driver.user_mode or nvml.library
        yield _make_warning(
            f"{describe_mismatch(library, driver.version)}: "
            "NVML and images without a driver (driver: host) fail",
            _advise_on_mismatch(facts.modules or ()),
        )
    elif nvml.error == NO_LIBRARY:
        yield _make_warning(
            "NVML not found: memory, MIG mode and processes of the GPUs are unknown",
            "install the package with libnvidia-ml.so.1 of this driver, such as libnvidia-ml1",
        )
    elif nvml.message:
        yield _make_warning(f"NVML query failed: {nvml.message}", "nvidia-smi")
    else:
        yield _make_ok(f"NVML works, driver {nvml.driver}")


def _advise_on_mismatch(modules: Collection[str]) -> str:
    loaded = [name for name in MODULES if name in modules]
    if not loaded:
        return "reboot"
    # rmmod goes on after a module that is in use, and then fails: whatever it removed has to come back.
    return f"reboot, or: rmmod {' '.join(loaded)}; modprobe -a {' '.join(reversed(loaded))}"


def _check_uvm(facts: NodeFacts) -> Verdicts:
    if facts.host.driver is None or not facts.host.gpus or facts.modules is None:
        return
    if "nvidia_uvm" in facts.modules:
        yield _make_ok("module nvidia-uvm loaded")
    else:
        yield _make_error("module nvidia-uvm not loaded: CUDA cannot start without it", "modprobe nvidia-uvm")


def _check_states(facts: NodeFacts) -> Verdicts:
    if facts.environment:
        yield _make_error(str(facts.environment), facts.environment.remedy)
    for gpu in facts.host.gpus:
        if gpu.state == "vgpu":
            yield _make_warning(
                f"{gpu.label} is a vGPU: images with their own driver do not fit it",
                "build the image without a driver (driver: host)",
            )
        elif gpu.state != "ok" and facts.host.driver:
            yield _make_error(f"{gpu.label} is in state {gpu.state}", _advise_on_state(gpu, facts.kernel))


def _check_accelerators(facts: NodeFacts) -> Verdicts:
    for accelerator in facts.host.accelerators:
        yield _make_warning(
            f"accelerator that images do not support: {accelerator.label}",
            "`imagematrix run --gpus none IMAGE` runs an image without it",
        )


def _check_nodes(facts: NodeFacts) -> Verdicts:
    # Without a driver, no node can work, which is a finding of `_check_module`.
    for saw, remedy in facts.problems if facts.host.driver else ():
        yield _make_error(saw, remedy)
    for saw, remedy in facts.doubts if facts.host.driver else ():
        yield _make_warning(f"{saw}; the engine may still have access", remedy)
    for path in facts.kernel.stale_nodes:
        yield _make_error(
            f"{path} has the major number of another driver: it dates from an earlier load of the module",
            f"`rm {quote_word(path)}`; {device.explain_creation(path)}",
        )
    if facts.host.driver and facts.host.gpus and not (facts.problems or facts.doubts):
        yield _make_ok(f"device nodes {'work' if facts.is_live else 'exist'}")


def _check_fabric(facts: NodeFacts) -> Verdicts:
    gpus = _list_readings(facts)
    count, managed = len(facts.kernel.switches), facts.kernel.fabric_manager
    problem = (
        fabric.find_fabric_problem(count, gpus, managed=managed)
        if facts.host.driver and facts.host.gpus
        else None
    )
    if problem:
        yield _make_error(problem, fabric.REMEDY)
    elif count and managed and fabric.READY not in {gpu.fabric for gpu in gpus}:
        yield _make_ok(f"{count} NVSwitches, fabric manager running")


def _list_readings(facts: NodeFacts) -> tuple[NvmlGpu, ...]:
    return match_readings(facts.nvml.gpus, facts.host.gpus) if facts.nvml else ()


def _check_xids(facts: NodeFacts) -> Verdicts:
    # Warnings only: it may be long ago, and programs can cause some of these errors.
    for (address, number), count in sorted(facts.kernel.xids.items()):
        times = f", {count} times" if count > 1 else ""
        yield _make_warning(f"kernel log: Xid {number} of the GPU at {address}{times}", f"see {XIDS}")


def _check_security(facts: NodeFacts) -> Verdicts:
    for path in facts.kernel.denied_nodes:
        yield _make_warning(
            f"kernel log: SELinux or AppArmor denied a process access to {path}",
            "find the profile in the log (dmesg | grep -i denied), and allow the device in it",
        )
    if facts.engine.selinux and facts.kernel.selinux and facts.host.gpus:
        yield _make_error(
            "the engine labels containers for SELinux, which denies them device nodes",
            "setsebool -P container_use_devices 1",
        )


def _check_probe(facts: NodeFacts) -> Verdicts:
    live = "selections do without what `imagematrix probe` does not know"
    for warning in facts.host.warnings:
        # A screen's GPU beside no other is nothing to mend.
        if not (warning.endswith(IGNORED) or _is_told_elsewhere(warning, facts)):
            yield _make_warning(warning, live if facts.is_live else "run `imagematrix doctor` on that node")


def _is_told_elsewhere(warning: str, facts: NodeFacts) -> bool:
    """Whether another check reports what a warning of the probe says."""
    host, nvml, bound = facts.host, facts.nvml, facts.kernel.drivers
    states = (describe_state(gpu, bound.get(gpu.pci_bus_id or "")) for gpu in host.gpus)
    if warning.endswith(tuple(f": {state}" for state in states if state)):
        return True
    if warning.startswith(MISSING):
        return bool(facts.problems)
    if fabric.list_fabric_warnings([warning]):
        return facts.is_live
    return nvml is not None and (
        warning.endswith(RELOAD) or bool(nvml.message and warning == explain_failure(nvml, host.driver))
    )


def _check_persistence(facts: NodeFacts) -> Verdicts:
    indices = [str(gpu.index) for gpu in _list_readings(facts) if gpu.persistence == 0]
    if indices:
        yield _make_warning(
            f"persistence mode off for GPU {', '.join(indices)}: the first use of an idle GPU takes seconds",
            "systemctl enable --now nvidia-persistenced, or: nvidia-smi -pm 1",
        )


def _check_command(facts: NodeFacts) -> Verdicts:
    if facts.daemonless.engine != DOCKER:
        return
    if facts.docker:
        yield _make_ok(f"`docker` is {facts.docker}")
    else:
        yield _judge_absent_docker(facts, "`docker` not found on PATH", "apt-get install docker-cli")


def _check_engine(facts: NodeFacts) -> Verdicts:
    engine = facts.engine
    if facts.daemonless.engine != DOCKER:
        return
    if engine.error:
        yield _judge_absent_docker(facts, engine.error, engine.remedy)
        return
    name = f"podman {engine.version}" if engine.podman else engine.version
    if engine.machine and engine.machine != facts.machine and facts.host.gpus:
        yield _make_error(
            f"the engine at {engine.address} runs on {engine.machine}, this is {facts.machine}: the probed "
            f"GPUs are not the engine's",
            "run `env -u DOCKER_HOST DOCKER_CONTEXT=default imagematrix doctor`",
        )
    elif not engine.podman and not ZSTD_LAYERS.is_in(engine.version):
        yield _make_warning(
            f"the engine at {engine.address} is Docker {name}: it cannot unpack layers compressed with zstd, "
            f"which builds write by default",
            ZSTD_REMEDY,
        )
    elif not engine.devices and facts.host.gpus:
        yield _make_error(
            f"the engine at {engine.address} is {name}, to which `docker` passes no devices, because it does "
            f"not report its system",
            "install podman 5, or run the output of `imagematrix run --dry-run IMAGE` with podman",
        )
    else:
        yield _make_ok(f"the engine at {engine.address} is {name}")


def _judge_absent_docker(facts: NodeFacts, saw: str, remedy: str | None) -> Verdict:
    """Return the verdict for a node on which Docker starts no containers, but other engines may."""
    if facts.daemonless.runtime is None or facts.daemonless.errors:
        return _make_error(saw, remedy)
    return _make_warning(saw, f"{remedy}; or launch with --engine oci, which needs no daemon")


def _check_daemonless(facts: NodeFacts) -> Verdicts:
    daemonless = facts.daemonless
    # On a node with Docker nothing is wrong if containers cannot start without it.
    severity, lesser = (OK, OK) if daemonless.engine == DOCKER else (ERROR, WARNING)
    for error in daemonless.errors:
        yield severity, f"no containers without a daemon: {error}", error.remedy
    if daemonless.runtime and not daemonless.errors:
        yield _make_ok(
            f"containers can start without a daemon: {daemonless.runtime}, images in {daemonless.store}"
        )
    if daemonless.squashfs:
        yield lesser, f"without a daemon: {daemonless.squashfs}", daemonless.squashfs.remedy
    if daemonless.driver_setting:
        yield _make_warning(
            f"{daemonless.driver_setting}: the command `apptainer` mounts the node's driver over that of an "
            "image; launches of imagematrix do not",
            "set it to no, or start images that have a driver with `apptainer exec --no-nv --no-rocm`",
        )


def _check_cgroup(facts: NodeFacts) -> Verdicts:
    # https://github.com/NVIDIA/nvidia-container-toolkit/issues/48
    if not facts.host.gpus or facts.engine.cgroup_driver != "systemd":
        return
    if facts.unlinked:
        links = "; ".join(f"ln -s {path} {link}" for path, link in facts.unlinked)
        yield _make_warning(
            "systemd manages the containers' cgroups but does not find the GPUs' device nodes by number: "
            "`systemctl daemon-reload` would remove the GPUs from running containers",
            f"at every boot: {links}",
        )
    else:
        yield _make_ok("systemd manages the containers' cgroups and finds the GPUs' device nodes")


def _check_kubelet(facts: NodeFacts) -> Verdicts:
    if facts.kubelet is None or not facts.host.gpus:
        return
    if not facts.kubelet:
        yield _make_warning(pods.format_denied(), "run `imagematrix gpus` and launches as root")
    elif facts.kubelet_error:
        yield _make_error(str(facts.kubelet_error), facts.kubelet_error.remedy)
    else:
        yield _make_ok("kubelet lists the GPUs of pods")


def _check_locks(facts: NodeFacts) -> Verdicts:
    if not facts.host.gpus:
        return
    if facts.locks_error:
        yield _make_error(str(facts.locks_error), facts.locks_error.remedy)
    elif facts.engine.tasks_locks not in (None, facts.locks):
        yield _make_error(
            f"tasks of Swarm use the GPU locks in {facts.engine.tasks_locks}, launches those in "
            f"{facts.locks}: a GPU can be given out twice",
            f"run `IMAGEMATRIX_LOCKS={quote_word(facts.locks)} imagematrix swarm node-config`, "
            "or unset IMAGEMATRIX_LOCKS",
        )
    elif facts.locks.startswith("/run/user/"):
        yield _make_warning(
            f"locks in {facts.locks}: launches of other users do not see them",
            "as root: mkdir -m 1777 /run/lock/imagematrix; and add a line for it to /etc/tmpfiles.d",
        )
    else:
        yield _make_ok(f"locks in {facts.locks}")


def _check_image(facts: NodeFacts) -> Verdicts:
    image = facts.image
    if image is None:
        return
    if image.selected is None:
        yield _make_error(
            image.error or "", image.remedy or f"run `imagematrix explain {quote_word(image.name)}`"
        )
        return
    remedy = f"docker run --rm --entrypoint find {image.selected} / -xdev -name 'libcuda.so.*'"
    if image.libcudas is None:
        yield _make_ok(f"{image.selected} fits this node; its files were not examined")
    elif image.mode in ("exact", "compat") and len(image.libcudas) != 1:
        present = ", ".join(image.libcudas) or "no libcuda"
        yield _make_error(
            f"{image.selected} should have exactly one user-mode driver, but has {present}", remedy
        )
    elif image.mode == "host" and image.libcudas:
        present = ", ".join(image.libcudas)
        yield _make_error(f"{image.selected} should leave the driver to the host, but has {present}", remedy)
    else:
        yield _make_ok(f"{image.selected} fits this node")


def _check_caches(facts: NodeFacts) -> Verdicts:
    """Yield which tools of an image keep what they compile where a warm image has it, and which cannot."""
    environment = facts.image.environment if facts.image else ()
    variables = dict(variable.partition("=")[::2] for variable in environment)
    set_here = [(tool, name) for tool in load_tools() for name in tool.variables if variables.get(name)]
    warm = [tool.name for tool, name in set_here if variables[name].startswith(f"{ROOT}/")]
    if warm:
        yield _make_ok(f"in {ROOT}: {', '.join(dict.fromkeys(warm))}")
    for _, name in set_here:
        try:
            check_cache_folder(name, variables[name])
        except UsageError as error:
            yield _make_warning(str(error), error.remedy or "")


def _check_mounts(facts: NodeFacts) -> Verdicts:
    for container in facts.engine.containers:
        if SELECTED not in container.labels:
            continue
        for mount in container.mounts:
            target = mount.target.rstrip("/")
            if target in DRIVER_FOLDERS or DRIVER_FILE.search(target):
                yield _make_warning(
                    f"in container {container.name}, {mount.source} of the host hides the image's driver at "
                    f"{target}",
                    f"start {container.name} again without -v …:{target}",
                )


def _advise_on_state(gpu: Gpu, kernel: KernelFacts) -> str:
    address = gpu.pci_bus_id or str(gpu.index)
    node = None if gpu.minor is None else f"/dev/nvidia{gpu.minor}"
    instances = kernel.empty_instances.get(-1 if gpu.minor is None else gpu.minor)
    if gpu.state == "mig-empty" and instances:
        return f"nvidia-smi mig -i {address} -gi {','.join(map(str, instances))} -cci"
    return {
        "lost": f"nvidia-smi --gpu-reset -i {address}, or reboot",
        "no-permission": f"grant this user's group or cgroup access to {node or 'its device node'}",
        "no-node": device.explain_creation(node) if node else "nvidia-smi",
        "no-module": f"unbind it from its driver, then: echo {address} > /sys/bus/pci/drivers_probe",
        "excluded": "remove it from NVreg_ExcludedGpus in /etc/modprobe.d, then reload the module",
        "failed": f"dmesg | grep -e RmInitAdapter; nvidia-smi --gpu-reset -i {address}, or reboot",
        "unconfirmed": "install the package with libnvidia-ml.so.1 of this driver, such as libnvidia-ml1",
        "vgpu-host": "pass another GPU with --gpus: this one serves virtual machines",
        "mig-empty": f"nvidia-smi mig -i {address} -cgi PROFILE -C, or: nvidia-smi -i {address} -mig 0",
    }.get(gpu.state, "nvidia-smi")


def _check_emulators(facts: NodeFacts) -> Verdicts:
    """Only builds depend on them: `run` and `select` never choose another architecture."""
    if facts.emulators is None:
        return
    foreign = [one for one in facts.emulators if one.arch != facts.host.arch]
    for emulator in foreign:
        what = f"{emulator.name} for {emulator.platform}"
        register_again = f"echo -1 > {FOLDER}/{emulator.name} && {format_registration(emulator.platform)}"
        if not emulator.works_in_containers:
            yield _make_warning(
                f"{what} lacks the flag F: builds and containers do not find {emulator.interpreter}",
                register_again,
            )
        elif emulator.keeps_credentials:
            yield _make_warning(
                f"{what} has the flag C: set-uid programs of images get the credentials of their owners",
                register_again,
            )
        else:
            yield _make_ok(f"builds for {emulator.platform} can run its programs, by {emulator.name}")
    if not foreign:
        yield _make_ok("none: builds for another architecture have to be cross builds, or run elsewhere")


def _check_pulls(facts: NodeFacts) -> Verdicts:
    """Yield the settings of each way to pull in a line, and those to change in lines of their own."""
    ways: dict[str, list[PullSetting]] = {}
    for setting in list_pull_settings(facts.pulls):
        file = f" ({setting.file})" if setting.file else ""
        ways.setdefault(f"{setting.path}, {setting.engine} {setting.version}{file}", []).append(setting)
    for way, settings in ways.items():
        known = [one for one in settings if one.acts and one.value is not None]
        acting = ", ".join(f"{one.name} = {one.value}" for one in known)
        ignored = ", ".join(f"{one.name} ({one.remark})" for one in settings if not one.acts)
        said = [acting, f"no effect: {ignored}" if ignored else ""]
        yield _make_ok(f"{way}: {'; '.join(filter(None, said)) or 'its settings were not found'}")
        for one in settings:
            if one.remark and one.acts:
                command = f"imagematrix doctor --drop-in {quote_word(one.engine)}"
                drop_in = f"{command}; it sets {one.name} = {one.advised}"
                yield _make_warning(
                    f"{way}: {one.name} = {one.value}: {one.remark}",
                    one.remedy or drop_in,
                )


CHECKS: dict[str, Callable[[NodeFacts], Verdicts]] = {
    "module": _check_module,
    "library": _check_library,
    "nvidia-uvm": _check_uvm,
    "gpus": _check_states,
    "accelerators": _check_accelerators,
    "device-nodes": _check_nodes,
    "fabric": _check_fabric,
    "xid": _check_xids,
    "security": _check_security,
    "probe": _check_probe,
    "persistence": _check_persistence,
    "docker-command": _check_command,
    "engine": _check_engine,
    "without-daemon": _check_daemonless,
    "cgroup": _check_cgroup,
    "kubelet": _check_kubelet,
    "locks": _check_locks,
    "image": _check_image,
    "caches": _check_caches,
    "mounts": _check_mounts,
    "emulators": _check_emulators,
    "pulls": _check_pulls,
}
