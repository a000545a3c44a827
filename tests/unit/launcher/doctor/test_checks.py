"""The doctor's findings on healthy and broken nodes."""

import re
from dataclasses import replace
from typing import Any

import pytest

from imagematrix.common.record import replace as replace_record
from imagematrix.errors import EngineError, ProbeError
from imagematrix.hardware.host.emulators import Emulator, format_registration
from imagematrix.hardware.host.fabric import REMEDY as FABRIC
from imagematrix.hardware.host.gpus import MESSAGES, MISSING
from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host
from imagematrix.hardware.host.nvidia import RELOAD
from imagematrix.hardware.host.nvml import Nvml, NvmlGpu, explain_failure
from imagematrix.hardware.host.other_accelerators import IGNORED
from imagematrix.images.engine.containers import ContainerMount, PassedDevices, RunningContainer
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.doctor.checks import CHECKS, make_doctor_document, run_checks
from imagematrix.launcher.doctor.kernel import KernelFacts
from imagematrix.launcher.doctor.node_facts import EngineFacts, ImageFacts, NodeFacts

CPU = Cpu(vendor=None, model=None, flags=frozenset(), level=None)
DRIVER = Driver(version="550.163.01", kind=None, source="test")
GOOD = NodeFacts(
    host=Host(arch="x86_64", cpu=CPU, driver=DRIVER, gpus=(Gpu(index=0, minor=3, name="L40S"),)),
    nvml=Nvml(driver="550.163.01", gpus=(NvmlGpu(index=0, persistence=1),)),
    modules=frozenset({"nvidia", "nvidia_uvm"}),
    problems=(),
    unlinked=(),
    machine="node7",
    docker="/usr/bin/docker",
    engine=EngineFacts(address="unix:///run/docker.sock", version="26.1.5+dfsg1", machine="node7"),
    locks="/run/lock/imagematrix",
)


def host(**facts):
    given: dict[str, Any] = {"arch": "x86_64", "cpu": CPU, "driver": DRIVER, "gpus": (Gpu(index=0, minor=3),)}
    return Host(**(given | facts))


def mounted(*places, labels=None):
    return RunningContainer(
        container_id="c1",
        name="job",
        image="t",
        devices=PassedDevices(),
        labels={"io.imagematrix.selected": "t"} if labels is None else labels,
        mounts=tuple(ContainerMount(target=place, source="/opt/x") for place in places),
    )


def bad(facts):
    """Return the problems: check, severity, observation, remedy."""
    return [
        (one.check, one.severity, one.saw, one.remedy) for one in run_checks(facts) if one.severity != "ok"
    ]


def test_healthy_node_has_no_problems(conforms):
    findings = run_checks(GOOD)
    assert {finding.severity for finding in findings} == {"ok"}
    assert [finding.check for finding in findings] == [
        "module", "library", "nvidia-uvm", "device-nodes", "docker-command", "engine", "locks",
    ]  # fmt: skip
    document = make_doctor_document(findings)
    conforms(document)
    assert document["launches"] is True


def test_systemd_needs_links_to_device_nodes_by_number():
    by_systemd = replace(GOOD, engine=replace(GOOD.engine, cgroup_driver="systemd"))
    assert bad(by_systemd) == []
    assert "finds the GPUs' device nodes" in [one.saw for one in run_checks(by_systemd)][-2]
    unlinked = (("/dev/nvidia3", "/dev/char/195:3"), ("/dev/nvidiactl", "/dev/char/195:255"))
    ((check, severity, saw, remedy),) = bad(replace(by_systemd, unlinked=unlinked))
    assert (check, severity) == ("cgroup", "warning")
    assert "systemctl daemon-reload" in saw
    assert remedy.endswith("ln -s /dev/nvidia3 /dev/char/195:3; ln -s /dev/nvidiactl /dev/char/195:255")
    assert bad(replace(GOOD, unlinked=unlinked)) == []  # cgroupfs needs no links
    assert bad(replace(by_systemd, unlinked=unlinked, host=host(driver=None, gpus=()))) == []


def test_a_node_without_gpus_runs_cpu_images():
    plain = replace(GOOD, host=host(driver=None, gpus=()), nvml=None, modules=None)
    assert bad(plain) == []
    assert [finding.check for finding in run_checks(plain)] == ["module", "docker-command", "engine"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"host": host(driver=None)}, "module error: kernel module is not loaded -> modprobe nvidia"),
        (
            {"nvml": Nvml(error=18, message="x", library="550.144.03")},
            "library warning: 550.144.03 -> reboot",
        ),
        ({"nvml": Nvml(error=12, message="x")}, "library warning: NVML not found -> libnvidia-ml"),
        ({"nvml": Nvml(error=4, message="denied")}, "library warning: denied -> nvidia-smi"),
        ({"nvml": Nvml(message="it gave no answer")}, "library warning: no answer -> nvidia-smi"),
        ({"modules": frozenset({"nvidia"})}, "nvidia-uvm error: not loaded -> modprobe nvidia-uvm"),
        (
            {"problems": (("/dev/nvidia3: not found", "nvidia-modprobe -c 3"),)},
            "device-nodes error: /dev/nvidia3 -> nvidia-modprobe -c 3",
        ),
        (
            {"doubts": (("/dev/nvidia3: permission denied", "grant access"),)},
            (
                "device-nodes warning: /dev/nvidia3: permission denied; the engine may still have access"
                " -> grant access"
            ),
        ),
        (
            {"nvml": Nvml(gpus=(NvmlGpu(index=0, persistence=0),))},
            "persistence warning: GPU 0 -> nvidia-smi -pm 1",
        ),
        ({"docker": None}, "docker-command error: not found on PATH -> apt-get install docker-cli"),
        (
            {"engine": EngineFacts(error="no engine", remedy="systemctl start docker")},
            "engine error: no engine -> systemctl start docker",
        ),
        (
            {"engine": EngineFacts(version="20.10.24", machine="node7")},
            (
                "engine warning: is Docker 20.10.24: it cannot unpack layers compressed with zstd"
                " -> build the image with `compression: gzip`"
            ),
        ),
        ({"engine": EngineFacts(version="26.1.5", machine="far")}, "engine error: runs on far -> default"),
        (
            {"engine": EngineFacts(version="4.3.1", machine="node7", podman=True, devices=False)},
            "engine error: podman 4.3.1, to which `docker` passes no devices -> podman 5",
        ),
        (
            {"kubelet": True, "kubelet_error": EngineError("no answer", remedy="systemctl")},
            "kubelet error: no answer -> systemctl",
        ),
        ({"kubelet": False}, "kubelet warning: usage by pods unknown -> as root"),
        ({"locks_error": ProbeError("no", remedy="mkdir")}, "locks error: no -> mkdir"),
        ({"locks": "/run/user/7/imagematrix"}, "locks warning: other users -> tmpfiles.d"),
        (
            {"engine": replace(GOOD.engine, tasks_locks="/srv/locks")},
            (
                "locks error: tasks of Swarm use the GPU locks in /srv/locks, launches those in "
                "/run/lock/imagematrix -> "
                "IMAGEMATRIX_LOCKS=/run/lock/imagematrix imagematrix swarm node-config"
            ),
        ),
        (
            {"image": ImageFacts(name="t:v1", error="nothing fits")},
            "image error: nothing fits -> imagematrix explain t:v1",
        ),
        ({"image": ImageFacts(name="t:v1", error="none", remedy="pass")}, "image error: none -> pass"),
        (
            {"image": ImageFacts(name="t:v1", selected="t:x", mode="exact", libcudas=("/a", "/b"))},
            "image error: has /a, /b -> docker run --rm --entrypoint find t:x / -xdev",
        ),
        ({"image": ImageFacts(name="t:v1", selected="t:x", mode="compat")}, "image error: no libcuda -> t:x"),
        (
            {"image": ImageFacts(name="t:v1", selected="t:x", mode="host", libcudas=("/a",))},
            "image error: should leave the driver to the host -> t:x",
        ),
        (
            {"image": ImageFacts(name="t", selected="t:x", environment=("NUMBA_CACHE_DIR=/root/numba",))},
            "caches warning: NUMBA_CACHE_DIR: a cache in /root/numba breaks -> debian.warm_caches()",
        ),
        (
            {"image": ImageFacts(name="t", selected="t:x", environment=("TRITON_CACHE_DIR=cache",))},
            "caches warning: TRITON_CACHE_DIR: 'cache' is not an absolute path -> debian.warm_caches()",
        ),
        (
            {"engine": EngineFacts(machine="node7", containers=(mounted("/usr/lib/x86_64-linux-gnu/"),))},
            "mounts warning: in container job, /opt/x -> start job again",
        ),
        (
            {"engine": EngineFacts(machine="node7", containers=(mounted("/x/libcuda.so.1"),))},
            "mounts warning: /x/libcuda.so.1 -> -v",
        ),
    ],
)
def test_problems_are_reported_with_a_remedy(changes, told, conforms):
    """As "CHECK SEVERITY: what was seen -> the remedy"."""
    check, severity, saw, remedy = re.fullmatch(r"(\S+) (\S+): (.+) -> (.+)", told).groups()
    findings = run_checks(replace(GOOD, **changes))
    (result,) = [finding for finding in findings if finding.severity != "ok"]
    assert (result.check, result.severity) == (check, severity)
    assert saw in result.saw
    assert remedy in result.remedy
    document = make_doctor_document(findings)
    conforms(document)
    assert document["launches"] is (severity == "warning")


@pytest.mark.parametrize(
    "changes",
    [
        {"image": ImageFacts(name="t:v1", selected="t:x", mode="exact", libcudas=("/a",))},
        {"image": ImageFacts(name="t:v1", selected="t:x", mode="exact", libcudas=None)},
        {"image": ImageFacts(name="t:v1", selected="t:x", mode="host")},
        {"image": ImageFacts(name="t:v1", selected="t:x")},
        {"image": ImageFacts(name="t", selected="t:x", environment=("JAX_COMPILATION_CACHE_DIR=", "X"))},
        {"image": ImageFacts(name="t", selected="t:x", environment=("CUDA_CACHE_PATH=/opt/cache",))},
        {"engine": EngineFacts(machine="node7", containers=(mounted("/data", "/usr/local"),))},
        {"engine": EngineFacts(machine="node7", containers=(mounted("/usr/lib", labels={}),))},
        {"engine": EngineFacts(machine="node7", version="29.0.0")},
        {"engine": EngineFacts(machine="node7", version="dev")},
        {"engine": EngineFacts(machine="node7", version="5.4.2", podman=True)},
        {"kubelet": True},
        {"kubelet": False, "host": host(driver=None, gpus=())},
        {"nvml": None},
        {"modules": None},
    ],
)
def test_conditions_that_are_not_problems(changes):
    assert bad(replace(GOOD, **changes)) == []


def test_tools_whose_caches_can_be_warm_are_listed():
    environment = (
        f"NUMBA_CACHE_DIR={ROOT}/numba",
        f"TRITON_CACHE_DIR={ROOT}/t",
        "HOME=/root",
        "CUDA_CACHE_PATH=/x",
    )
    image = ImageFacts(name="t", selected="t:x", environment=environment)
    findings = [finding for finding in run_checks(replace(GOOD, image=image)) if finding.check == "caches"]
    assert [finding.saw for finding in findings] == ["in /var/cache/warm: triton, numba"]
    assert [finding for finding in run_checks(GOOD) if finding.check == "caches"] == []


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ("lost", "nvidia-smi --gpu-reset -i 0000:41:00.0"),
        ("no-permission", "access to /dev/nvidia3"),
        ("no-node", "nvidia-modprobe -c 3"),
        ("no-module", "drivers_probe"),
        ("excluded", "NVreg_ExcludedGpus"),
        ("failed", "RmInitAdapter"),
        ("unconfirmed", "libnvidia-ml1"),
        ("vgpu-host", "--gpus"),
        ("mig-empty", "nvidia-smi mig -i 0000:41:00.0 -cgi"),
        ("new", "nvidia-smi"),
    ],
)
def test_unusable_gpus_are_errors(state, remedy):
    gpu = Gpu(index=0, minor=3, name="L40S", pci_bus_id="0000:41:00.0", state=state)
    ((check, severity, saw, cure),) = bad(replace(GOOD, host=host(gpus=(gpu,))))
    assert (check, severity) == ("gpus", "error")
    assert saw == f"GPU 0 (L40S) is in state {state}"
    assert remedy in cure


def test_a_node_of_unknown_minor_has_a_generic_remedy():
    remedies = []
    for state in ("no-node", "no-permission"):
        gpu = Gpu(index=5, name="L40S", state=state)
        ((_, _, _, cure),) = bad(replace(GOOD, host=host(gpus=(gpu,))))
        remedies.append(cure)
    assert remedies == ["nvidia-smi", "grant this user's group or cgroup access to its device node"]


def test_a_vgpu_takes_images_without_a_driver():
    gpu = Gpu(index=0, minor=3, name="NVIDIA A10-24Q", state="vgpu")
    ((check, severity, _, cure),) = bad(replace(GOOD, host=host(gpus=(gpu,))))
    assert (check, severity) == ("gpus", "warning")
    assert "driver: host" in cure


def test_unusable_accelerators_are_warnings():
    sign = Accelerator(kind="wsl", where="/dev/dxg", why="they are behind it")
    node = host(driver=None, gpus=(), accelerators=(sign,))
    ((check, severity, saw, cure),) = bad(replace(GOOD, host=node))
    assert (check, severity) == ("accelerators", "warning")
    assert "/dev/dxg: they are behind it" in saw
    assert "--gpus none" in cure


LOST = Gpu(index=0, minor=3, pci_bus_id="0000:41:00.0", state="lost")
HOSTED = replace_record(LOST, state="no-module")
UNANSWERED = Nvml(error=4, message="denied")
DIFFERS = replace_record(DRIVER, user_mode="550.144.03")


@pytest.mark.parametrize("is_live", [True, False])
def test_warnings_of_the_probe_are_reported(is_live):
    warnings = ("CPU flags unknown", "GPU 0: could not read memory size", f"{MISSING}: /dev/nvidia-uvm; load")
    told = bad(replace(GOOD, host=host(warnings=warnings), is_live=is_live))
    assert [(check, severity, saw) for check, severity, saw, _ in told] == [
        ("probe", "warning", warning) for warning in warnings
    ]
    assert {remedy.partition(" ")[0] for *_, remedy in told} == {"selections" if is_live else "run"}


def test_a_gpu_for_a_screen_is_nothing_to_mend():
    assert bad(replace(GOOD, host=host(warnings=(f"PCI device 8086:9a49: {IGNORED}",)))) == []


@pytest.mark.parametrize(
    ("warning", "check", "changes"),
    [
        (f"GPU 0: {MESSAGES['lost']}", "gpus", {"host": host(gpus=(LOST,))}),
        (
            "GPU 0: bound to vfio-pci instead of the nvidia module; to use it, bind it to nvidia",
            "gpus",
            {
                "host": host(gpus=(HOSTED,)),
                "kernel": KernelFacts(drivers={"0000:41:00.0": "vfio-pci"}),
            },
        ),
        (f"{MISSING}: /dev/nvidia-uvm; load", "device-nodes", {"problems": (("/dev/nvidia-uvm: no", "x"),)}),
        (explain_failure(UNANSWERED, DRIVER), "library", {"nvml": UNANSWERED}),
        (f"driver mismatch: x; {RELOAD}", "library", {"host": host(driver=DIFFERS)}),
        (
            f"no fabric manager running; {FABRIC}",
            "fabric",
            {"kernel": KernelFacts(switches=("0000:c1:00.0",), fabric_manager=False)},
        ),
    ],
)
def test_a_warning_of_the_probe_that_another_check_reports_is_not_told_twice(warning, check, changes):
    facts = replace(GOOD, **changes)
    assert [name for name, *_ in bad(facts)] == [check]
    warned = replace(facts, host=replace_record(facts.host, warnings=(warning,)))
    assert bad(warned) == bad(facts)


def test_every_check_has_a_name():
    assert all(name == name.lower() for name in CHECKS)


ADDRESS = "0000:41:00.0"


def kernel(**facts):
    return replace(GOOD, kernel=KernelFacts(**facts))


def test_reasons_for_a_missing_module_are_reported():
    idle = {"host": host(driver=None), "nvml": None}

    def reported(**facts):
        ((check, severity, saw, remedy),) = bad(replace(kernel(**facts), **idle))
        assert (check, severity) == ("module", "error")
        return saw, remedy

    saw, remedy = reported(drivers={ADDRESS: "nouveau"})
    assert saw.endswith("is not loaded: nouveau is bound to them")
    assert remedy.startswith("echo blacklist nouveau > /etc/modprobe.d/imagematrix-nouveau.conf && ")
    assert remedy.endswith(" && reboot")
    saw, remedy = reported(refusal="Loading of unsigned module is rejected", secure_boot=True)
    assert saw.endswith("the kernel rejected it: Loading of unsigned module is rejected")
    assert remedy.startswith("mokutil --import")
    saw, remedy = reported(secure_boot=True)
    assert "Secure Boot rejects" in saw
    assert remedy.startswith("modprobe nvidia; or mokutil")
    assert reported(drivers={ADDRESS: "nvidia"})[1] == "modprobe nvidia"


def test_gpus_of_virtual_machines_are_not_taken_from_them():
    (finding,) = bad(replace(kernel(drivers={ADDRESS: "vfio-pci"}), host=host(driver=None), nvml=None))
    assert finding[2].endswith("is not loaded: vfio-pci is bound to them")
    assert finding[3] == "if no virtual machine needs them, unbind them from vfio-pci, then: modprobe nvidia"


def test_a_driver_for_screens_is_told_before_other_reasons():
    """A rejected module may be another one: the message does not name it."""
    facts = kernel(drivers={"0": "abc", "1": "nouveau"}, refusal="Loading of unsigned module is rejected")
    ((_, _, saw, _),) = bad(replace(facts, host=host(driver=None), nvml=None))
    assert saw.endswith(": nouveau is bound to them")


@pytest.mark.parametrize(
    ("modules", "remedy"),
    [
        (None, "reboot"),
        (["nvidia", "nvidia_uvm"], "reboot, or: rmmod nvidia_uvm nvidia; modprobe -a nvidia nvidia_uvm"),
        (
            ["nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia_uvm", "ext4"],
            (
                "reboot, or: rmmod nvidia_peermem nvidia_uvm nvidia_drm nvidia_modeset nvidia; "
                "modprobe -a nvidia nvidia_modeset nvidia_drm nvidia_uvm nvidia_peermem"
            ),
        ),
    ],
)
def test_after_a_mismatch_the_modules_that_were_loaded_are_loaded_again(modules, remedy):
    loaded = modules and frozenset(modules)
    differs = replace(GOOD, nvml=Nvml(error=18, message="x", library="550.144.03"), modules=loaded)
    ((check, _, _, told),) = bad(differs)
    assert (check, told) == ("library", remedy)


def test_gpu_instance_without_a_compute_instance_is_reported():
    parted = host(gpus=(Gpu(index=0, minor=3, pci_bus_id=ADDRESS, state="mig-empty", mig=()),))
    remedies = [
        bad(replace(kernel(empty_instances=some), host=parted))[0][3] for some in ({}, {3: (1, 2)}, {0: (1,)})
    ]
    make = f"nvidia-smi mig -i {ADDRESS} -cgi PROFILE -C, or: nvidia-smi -i {ADDRESS} -mig 0"
    assert remedies == [make, f"nvidia-smi mig -i {ADDRESS} -gi 1,2 -cci", make]


@pytest.mark.parametrize(
    ("fabric", "switches", "manager", "severity"),
    [
        (1, (), False, "error"),
        (2, (), True, "error"),
        (3, ("0000:c1:00.0",), False, None),
        (0, (), False, None),
        (None, (), False, None),
        (None, ("0000:c1:00.0",), False, "error"),
        (0, ("0000:c1:00.0",), False, "error"),
        (None, ("0000:c1:00.0",), True, "ok"),
        (None, ("0000:c1:00.0",), None, None),
    ],
)
def test_nvlink_fabric_state_is_checked(fabric, switches, manager, severity):
    facts = kernel(switches=switches, fabric_manager=manager)
    facts = replace(facts, nvml=Nvml(driver="550.163.01", gpus=(NvmlGpu(index=0, fabric=fabric),)))
    result = [one for one in run_checks(facts) if one.check == "fabric"]
    assert [one.severity for one in result] == ([severity] if severity else [])
    if severity == "error":
        assert "802" in result[0].saw
        assert "nvidia-fabricmanager" in result[0].remedy


def test_gpus_that_nvml_counts_have_the_host_s_numbers():
    """NVML leaves out a GPU that another driver has."""
    gpus = (
        Gpu(index=0, minor=None, pci_bus_id=ADDRESS, state="no-module"),
        Gpu(index=1, minor=0, pci_bus_id="0000:c1:00.0"),
    )
    readings = (
        NvmlGpu(index=0, bus_id="0000:c1:00.0", persistence=0, fabric=1),
        NvmlGpu(index=1, bus_id="0000:d1:00.0", persistence=0),  # withheld
    )
    told = bad(replace(GOOD, host=host(gpus=gpus), nvml=Nvml(driver="550.163.01", gpus=readings)))
    saws = {check: saw for check, _, saw, _ in told}
    assert saws["persistence"].startswith("persistence mode off for GPU 1:")
    assert saws["fabric"].endswith(": GPU 1 (not started)")


def test_kernel_log_findings_are_reported():
    result = bad(kernel(xids={("0000:41:00", 79): 2, ("0000:41:00", 31): 1}, denied_nodes=("/dev/nvidia0",)))
    assert [saw for _, _, saw, _ in result] == [
        "kernel log: Xid 31 of the GPU at 0000:41:00",
        "kernel log: Xid 79 of the GPU at 0000:41:00, 2 times",
        "kernel log: SELinux or AppArmor denied a process access to /dev/nvidia0",
    ]


def test_stale_nodes_and_selinux_are_reported():
    ((check, severity, saw, remedy),) = bad(kernel(stale_nodes=("/dev/nvidia3",)))
    assert (check, severity) == ("device-nodes", "error")
    assert saw.startswith("/dev/nvidia3 has the major number of another driver")
    assert remedy.startswith("`rm /dev/nvidia3`; ")
    assert remedy.endswith("`nvidia-modprobe -c 3`")
    labelled = replace(kernel(selinux=True), engine=replace(GOOD.engine, selinux=True))
    assert bad(labelled)[0][3] == "setsebool -P container_use_devices 1"
    assert bad(kernel(selinux=True)) == []


def emulated(flags, platform="linux/arm64"):
    emulator = Emulator(name="qemu", platform=platform, interpreter="/usr/bin/qemu", flags=flags)
    return [one for one in run_checks(replace(GOOD, emulators=(emulator,))) if one.check == "emulators"]


def test_emulators_that_builds_can_use():
    (finding,) = emulated("F")
    assert (finding.severity, finding.saw) == ("ok", "builds for linux/arm64 can run its programs, by qemu")
    (none,) = [one for one in run_checks(replace(GOOD, emulators=())) if one.check == "emulators"]
    assert (none.severity, none.saw.partition(":")[0]) == ("ok", "none")
    (own,) = emulated("F", "linux/amd64")
    assert own.saw == none.saw


@pytest.mark.parametrize(
    ("flags", "saw"),
    [("OP", "do not find /usr/bin/qemu"), ("CF", "get the credentials of their owners")],
)
def test_emulators_with_other_flags_are_warned_of(flags, saw):
    (finding,) = emulated(flags)
    assert finding.severity == "warning"
    assert saw in finding.saw
    remove, _, register = finding.remedy.partition(" && ")
    assert remove == "echo -1 > /proc/sys/fs/binfmt_misc/qemu"
    assert register == format_registration("linux/arm64")
