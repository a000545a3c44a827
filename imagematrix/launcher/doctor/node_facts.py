"""The facts about node, engine and image that the checks examine, and how to gather them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from imagematrix.common.programs import find_program
from imagematrix.common.settings import DOCKER
from imagematrix.errors import EngineError, ProbeError
from imagematrix.hardware.host import emulators
from imagematrix.images.engine import containers, endpoint, system
from imagematrix.launcher.docker import devices
from imagematrix.launcher.doctor import daemonless, kernel
from imagematrix.launcher.doctor.daemonless import DaemonlessFacts
from imagematrix.launcher.doctor.kernel import KernelFacts
from imagematrix.launcher.doctor.pull_facts import gather_pull_facts
from imagematrix.launcher.doctor.pulls import DockerFacts, PullFacts
from imagematrix.launcher.gpu_claims import locks, pods
from imagematrix.launcher.gpu_claims.lock_folder import require_shared
from imagematrix.selection.selection import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from imagematrix.errors import UsageError
    from imagematrix.hardware.host.emulators import Emulator
    from imagematrix.hardware.host.host import Host
    from imagematrix.hardware.host.nvml import Nvml
    from imagematrix.images.engine.containers import RunningContainer

    Remedies = tuple[tuple[str, str], ...]  # problems, each with its remedy

MODULES = "/proc/modules"
CONTAINERD_STORE = "io.containerd.snapshotter.v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine at `address`: its version, the name of its machine, and its running containers.

    `cgroup_driver` manages their cgroups: "systemd" or "cgroupfs". `podman` is true for Podman, `devices` if
    docker's command can pass devices to the engine, `selinux` if the engine labels containers,
    `containerd_store` if images are in containerd's store. `tasks_locks` is the lock folder of Swarm's tasks,
    None without our runtime. If the engine does not respond, `error` and `remedy` are set and the rest is
    empty.
    """

    address: str = ""
    version: str = ""
    machine: str = ""
    cgroup_driver: str = ""
    podman: bool = False
    devices: bool = True
    selinux: bool = False
    containerd_store: bool = False
    tasks_locks: str | None = None
    containers: tuple[RunningContainer, ...] = ()
    error: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The image to check: the selected variant, or `error` and `remedy` if none could be selected.

    `mode` is the driver mode of the variant; `libcudas` are the paths of all user-mode drivers in it, None if
    they were not examined: no engine of this machine has it, or only a saved host is checked. `environment`
    has the variables that it sets, as "NAME=value". `code` is the exit code of the error.
    """

    name: str
    selected: str | None = None
    mode: str | None = None
    libcudas: tuple[str, ...] | None = ()
    environment: tuple[str, ...] = ()
    error: str | None = None
    remedy: str | None = None
    code: int = NothingFits.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """All facts that the checks examine.

    `modules` are the loaded kernel modules, None if unknown. `problems` are the problems of the device nodes
    that a launch with all GPUs passes, each with its remedy, and `doubts` those that only this user has;
    `unlinked` are the nodes without a link in /dev/char, each with the name of the missing link.
    `environment` is set if a variable names a GPU that does not exist, `locks_error` if GPUs cannot be
    locked. `daemonless` is what a launch without a daemon would find. `emulators` are those for other
    architectures, None if unknown, `pulls` the engines that pull images. `kubelet` states whether this user
    may query the node's kubelet, None if there is no kubelet, and `kubelet_error` is set if kubelet does not
    answer. `kernel` has further facts of the kernel. For a saved host `is_live` is false, and only host and
    image are set.
    """

    host: Host
    nvml: Nvml | None
    modules: frozenset[str] | None
    problems: tuple[tuple[str, str], ...]
    unlinked: tuple[tuple[str, str], ...]
    machine: str
    docker: str | None
    engine: EngineFacts
    doubts: tuple[tuple[str, str], ...] = ()
    environment: UsageError | None = None
    kubelet: bool | None = None
    kubelet_error: EngineError | None = None
    locks: str = ""
    locks_error: ProbeError | None = None
    image: ImageFacts | None = None
    kernel: KernelFacts = field(default_factory=KernelFacts)
    daemonless: DaemonlessFacts = field(default_factory=DaemonlessFacts)
    emulators: tuple[Emulator, ...] | None = None
    pulls: PullFacts = field(default_factory=PullFacts)
    is_live: bool = True


def make_saved_facts(host: Host, image: ImageFacts | None = None) -> NodeFacts:
    """Return the facts about a saved host, without facts about this machine."""
    return NodeFacts(
        host=host,
        nvml=None,
        modules=None,
        problems=_check_nodes(
            host, lambda paths: devices.find_absent_nodes(path for path in paths if path not in host.devices)
        )[0],
        unlinked=(),
        machine="",
        docker=None,
        engine=EngineFacts(),
        image=image,
        is_live=False,
    )


def gather_facts(
    host: Host,
    nvml: Nvml | None,
    image: ImageFacts | None = None,
    *,
    environment: UsageError | None = None,
    tasks: Callable[[Mapping[str, Any]], str | None] = lambda _: None,
) -> NodeFacts:
    """Return the facts about this node, given its Host and NVML's reading, and about an image.

    `environment` is the error in variables that name GPUs, if there is one. `tasks` returns the lock folder
    that tasks of Swarm use, given the engine's information.
    """
    problems, doubts = _check_nodes(host, devices.check_device_nodes)
    daemonless_facts = daemonless.gather_daemonless_facts()
    modules = None
    with contextlib.suppress(OSError), open(MODULES, encoding="ascii", errors="replace") as file:  # noqa: PTH123
        modules = frozenset(line.split()[0] for line in file)
    kubelet_error = None
    try:
        pods.compute_pod_usage(host.gpus)
    except EngineError as error:
        kubelet_error = error
    engine = _gather_engine_facts(tasks)
    return NodeFacts(
        host=host,
        nvml=nvml,
        modules=modules,
        problems=problems,
        doubts=doubts,
        unlinked=_find_unlinked(host.devices),
        machine=os.uname().nodename,
        docker=find_program("docker"),
        engine=engine,
        environment=environment,
        kubelet=pods.check_access(),
        kubelet_error=kubelet_error,
        locks=locks.locate_locks(),
        locks_error=_find_locks_error(daemonless_facts.engine) if host.gpus else None,
        image=image,
        kernel=kernel.read_kernel_facts(host),
        daemonless=daemonless_facts,
        emulators=emulators.list_emulators(),
        pulls=_gather_pulls(engine),
    )


def gather_engine_pulls() -> PullFacts:
    """Return only the facts about how the engines of this machine pull."""
    return _gather_pulls(_gather_engine_facts(lambda _: None))


def _gather_pulls(engine: EngineFacts) -> PullFacts:
    if engine.error or engine.podman:
        return gather_pull_facts(None)
    return gather_pull_facts(DockerFacts(version=engine.version, containerd_store=engine.containerd_store))


def _find_locks_error(engine: str) -> ProbeError | None:
    """Return why a launch by this user's default engine could not claim GPUs."""
    try:
        with locks.Locks(
            locks.locate_locks(), endpoint.get_socket_group() if engine == DOCKER else None
        ) as opened:
            opened.require_writable()
        require_shared(locks.locate_locks())
    except EngineError:  # a finding of its own
        return None
    except ProbeError as error:
        return error
    return None


def _check_nodes(
    host: Host, check: Callable[[Iterable[str]], tuple[devices.DeviceProblem, ...]]
) -> tuple[Remedies, Remedies]:
    """Return the problems of device nodes that stop a launch, and the doubts that do not, with remedies."""
    usable = tuple(gpu for gpu in host.gpus if gpu.usable)
    try:
        problems = check(devices.list_device_nodes(host, usable))
    except ProbeError as error:
        return ((str(error), error.remedy or ""),), ()
    certain, doubts = (
        tuple((str(problem), problem.remedy) for problem in problems if problem.doubt == doubt)
        for doubt in (False, True)
    )
    return certain, doubts


def _find_unlinked(paths: Iterable[str], root: str = "") -> tuple[tuple[str, str], ...]:
    """Return the device nodes without the link by number that systemd needs to find them."""
    unlinked = []
    for path in paths:
        with contextlib.suppress(OSError):
            device = Path(root + path).stat().st_rdev
            link = f"/dev/char/{os.major(device)}:{os.minor(device)}"
            if not os.path.lexists(root + link):
                unlinked.append((path, link))
    return tuple(unlinked)


def _gather_engine_facts(tasks: Callable[[Mapping[str, Any]], str | None]) -> EngineFacts:
    try:
        info = system.get_info()
        return EngineFacts(
            address=endpoint.find_address(),
            version=str(info.get("ServerVersion") or ""),
            machine=str(info.get("Name") or ""),
            cgroup_driver=str(info.get("CgroupDriver") or ""),
            podman=system.is_podman(),
            devices=system.reports_system(),
            containerd_store=any(CONTAINERD_STORE in row for row in info.get("DriverStatus") or ()),
            selinux=any("name=selinux" in str(option) for option in info.get("SecurityOptions") or ()),
            containers=tuple(containers.list_running()),
            tasks_locks=tasks(info),
        )
    except EngineError as error:
        return EngineFacts(error=str(error), remedy=error.remedy)
