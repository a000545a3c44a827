import errno
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagematrix.errors import ImagematrixError, ProbeError, UsageError
from imagematrix.hardware.host import cpu, fabric, nvml
from imagematrix.hardware.host.device import explain_creation
from imagematrix.hardware.host.gpus import NOT_QUERIED, SANDBOX
from imagematrix.hardware.host.host import Cpu, Host
from imagematrix.hardware.host.nvml import Nvml, NvmlGpu
from imagematrix.hardware.host.probe import assemble_host, probe, probe_hardware
from imagematrix.hardware.host.tree import Tree

CPUINFO = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu lm sse sse2\n\n"
)
BUS = "0000:41:00.0"
L40S = NvmlGpu(
    index=0,
    bus_id=BUS,
    device_id="26b9",
    minor=3,
    uuid="GPU-1",
    name="NVIDIA L40S",
    compute="8.9",
    brand="nvidia",
    memory_mib=46068,
    virtualization=0,
)
GOOD = Nvml(driver="550.163.01", library="550.163.01", gpus=(L40S,))


def only(host):
    (gpu,) = host.gpus
    return gpu


def asked(root, answer, **options):
    return assemble_host(Tree(str(root)), query=lambda: answer, **options)


def without(files, *starts):
    return {path: text for path, text in files.items() if not path.startswith(starts)}


def test_a_good_node(captured, gpu):
    host = asked(captured(gpu()), GOOD)
    assert host.warnings == ()
    assert host.arch == "x86_64"
    assert host.cpu.model == "AMD EPYC 9654"
    assert (host.driver.version, host.driver.kind) == ("550.163.01", "open")
    image = only(host)
    assert (image.index, image.minor, image.uuid, image.pci_bus_id) == (0, 3, "GPU-1", BUS)
    assert (image.pci_device_id, image.compute, image.brand, image.memory_mib) == (
        "26b9",
        "8.9",
        "nvidia",
        46068,
    )
    assert image.state == "ok"
    assert host.devices == ("/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidiactl")
    assert Host.from_json(host.to_json()) == host


SWITCH = {
    "sys/bus/pci/devices/0000:c1:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:c1:00.0/class": "0x068000\n",
}
KTHREADD, MANAGER = {"proc/2/comm": "kthreadd\n"}, {"proc/7/comm": "nv-fabricmanage\n"}


@pytest.mark.parametrize(
    ("files", "state", "warned"),
    [
        (SWITCH | KTHREADD, None, "1 NVSwitches, but no fabric manager"),
        (SWITCH | KTHREADD, 0, "1 NVSwitches, but no fabric manager"),
        (SWITCH | KTHREADD, 3, None),
        (SWITCH | KTHREADD | MANAGER, None, None),
        (SWITCH | KTHREADD | MANAGER | {"proc/7/status": "Name:\tx\nUid:\t0\t0\n"}, None, None),
        (
            SWITCH | KTHREADD | MANAGER | {"proc/7/status": "Name:\tx\nUid:\t1000\t0\n"},
            None,
            "no fabric manager",
        ),
        (SWITCH, None, None),  # the node's processes are hidden
        (KTHREADD, None, None),
        ({}, 1, "GPU 0 (not started)"),
        (SWITCH | KTHREADD | MANAGER, 2, "GPU 0 (in progress)"),
    ],
)
def test_the_fabric_manager_of_nvswitch_nodes(captured, gpu, files, state, warned):
    readings = replace(GOOD, gpus=(replace(L40S, fabric=state),))
    host = asked(captured(gpu() | files), readings)
    assert host.accelerators == ()
    assert only(host).state == "ok"
    if warned is None:
        assert host.warnings == ()
    else:
        (warning,) = host.warnings
        assert warned in warning
        assert "802" in warning
        assert "nvidia-fabricmanager" in warning
        assert fabric.list_fabric_warnings(["another", warning]) == [warning]


def test_a_captured_tree_is_read_without_nvml(captured, gpu, monkeypatch):
    monkeypatch.setattr(nvml, "read_nvml", lambda: pytest.fail("NVML was asked"))
    host = probe(captured(gpu()))
    image = only(host)
    assert (image.name, image.compute, image.uuid, image.state) == ("NVIDIA L40S", "8.9", "GPU-1", "ok")
    assert (image.brand, image.memory_mib, image.mig) == ("nvidia", None, None)
    assert host.warnings == (NOT_QUERIED,)


def test_a_cpu_only_node(captured):
    host = probe(str(captured({"proc/cpuinfo": CPUINFO, "dev/nvidiactl": ""})))
    assert (host.driver, host.gpus, host.warnings) == (None, (), ())
    assert host.devices == ("/dev/nvidiactl",)  # it proves nothing


def test_pci_without_a_module(captured, gpu):
    files = without(gpu(), "proc/driver", "dev/") | {"dev/null": ""}
    host = probe(captured(files))
    assert host.driver is None
    assert (only(host).state, only(host).compute, only(host).minor) == ("no-module", "8.9", None)
    (warning,) = host.warnings
    assert warning.startswith("GPU 0 (")
    assert warning.endswith("or run `modprobe nvidia`")


def test_pci_bound_to_another_driver(captured, gpu):
    root = captured(without(gpu(), "proc/driver"))
    (root / f"sys/bus/pci/devices/{BUS}/driver").symlink_to("../../drivers/vfio-pci")
    host = probe(root)
    assert only(host).state == "no-module"
    assert "bound to vfio-pci" in host.warnings[0]


def test_one_of_two_bound_to_another_driver(captured, gpu):
    second = without(gpu(bus="0000:42:00.0", minor=4), "proc/driver", "dev/")
    root = captured(gpu() | second)
    (root / "sys/bus/pci/devices/0000:42:00.0/driver").symlink_to("../../drivers/nouveau")
    host = asked(root, GOOD)
    assert [gpu.state for gpu in host.gpus] == ["ok", "no-module"]
    assert "bound to nouveau" in host.warnings[0]


def test_a_gpu_that_the_module_does_not_list(captured, gpu):
    second = without(gpu(bus="0000:42:00.0", minor=4), "proc/driver", "dev/")
    host = asked(captured(gpu() | second), GOOD)
    assert [gpu.state for gpu in host.gpus] == ["ok", "no-node"]
    assert "not listed by the nvidia module" in host.warnings[0]


def test_a_module_without_device_nodes(captured, gpu):
    files = without(gpu(), "dev/") | {"dev/null": ""}
    host = asked(captured(files), GOOD)
    assert only(host).state == "no-node"
    assert host.devices == ()
    assert host.warnings == (
        f"GPU 0 (NVIDIA L40S): /dev/nvidia3 not found; {explain_creation('/dev/nvidia3')}",
        (
            "missing device nodes, which CUDA needs: /dev/nvidiactl, /dev/nvidia-uvm; "
            f"{explain_creation('/dev/nvidiactl')}; {explain_creation('/dev/nvidia-uvm')}"
        ),
    )


def test_uvm_alone_is_missing(captured, gpu):
    host = asked(captured(without(gpu(), "dev/nvidia-uvm")), GOOD)
    assert only(host).state == "ok"
    assert "missing device nodes, which CUDA needs: /dev/nvidia-uvm;" in host.warnings[0]


def test_a_tree_without_dev(captured, gpu):
    host = asked(captured(without(gpu(), "dev/")), GOOD)
    assert only(host).state == "ok"
    assert host.warnings == ("device nodes unknown: the captured tree has no dev folder",)


def test_a_module_without_gpus(captured, gpu):
    files = without(gpu(), "sys/", "proc/driver/nvidia/gpus")
    host = probe(captured(files))
    assert host.gpus == ()
    assert host.driver.version == "550.163.01"
    assert "no GPU was found" in host.warnings[0]


def test_a_node_without_information_files(captured, gpu):
    files = without(gpu(), "proc/driver/nvidia/gpus")
    host = probe(captured(files))
    assert only(host).state == "unconfirmed"
    assert "confirmed neither by /proc/driver/nvidia/gpus nor by NVML" in host.warnings[1]
    assert "device minor, UUID" in host.warnings[2]
    image = only(asked(captured(files), GOOD))
    assert (image.minor, image.state) == (3, "ok")
    silent = Nvml(error=18, message="mismatch")
    assert only(asked(captured(files), silent)).state == "unconfirmed"


@pytest.mark.parametrize("listed", [(), (1,)])
def test_a_gpu_that_nvml_does_not_list(captured, gpu, listed):
    files = gpu() | gpu(bus="0000:42:00.0", minor=4)
    others = tuple(replace(L40S, bus_id="0000:42:00.0", minor=4, uuid="GPU-2") for _ in listed)
    host = asked(captured(files), replace(GOOD, gpus=others))
    assert host.gpus[0].state == "failed"
    assert [gpu.state for gpu in host.gpus[1:]] == ["ok" if listed else "failed"]
    assert "RmInitAdapter" in host.warnings[0]


def granted(gpu, *minors):
    """Return the files of a container that has some of eight GPUs, and NVML's readings."""
    files: dict[str, str] = {}
    answers: list[NvmlGpu] = []
    for minor in range(8):
        bus = f"0000:{minor + 0x41:02x}:00.0"
        own = gpu(bus=bus, minor=minor)
        files |= own if minor in minors else without(own, "proc/driver/nvidia/gpus", f"dev/nvidia{minor}")
        if minor in minors:
            answers.append(replace(L40S, index=len(answers), bus_id=bus, minor=minor))
    return files, replace(GOOD, gpus=tuple(answers))


def bound(root):
    for folder in (root / "sys/bus/pci/devices").iterdir():
        (folder / "driver").symlink_to("../../drivers/nvidia")
    return root


def test_a_container_with_one_of_eight(captured, gpu):
    files, answer = granted(gpu, 5)
    host = asked(bound(captured(files)), answer)
    image = only(host)
    assert (image.index, image.minor, image.state) == (0, 5, "ok")
    assert host.accelerators == ()
    (warning,) = host.warnings
    assert warning.startswith("0000:41:00.0, 0000:42:00.0,")
    assert warning.endswith(": not assigned to this container or job, ignored")


MOUNTS = "20 1 0:30 / / rw - overlay overlay rw\n21 20 0:31 / /dev rw,nosuid - {} {} rw,size=65536k\n"


@pytest.mark.parametrize(("kind", "states"), [("tmpfs", ["ok"]), ("devtmpfs", ["ok", "no-node"])])
@pytest.mark.parametrize("listed", [True, False])
def test_devices_passed_individually(captured, gpu, kind, states, listed):
    # docker run --device hides nothing; only the nodes of the other GPUs are missing.
    second = without(gpu(bus="0000:42:00.0", minor=4), "dev/")
    files = gpu() | second | {"proc/self/mountinfo": MOUNTS.format(kind, kind)}
    answer = GOOD if listed else Nvml(error=12, message="none")
    host = asked(bound(captured(files)), answer)
    assert [gpu.state for gpu in host.gpus] == states


def test_a_sandbox_with_one_of_two_on_the_bus(captured, gpu):
    files = gpu() | gpu(bus="0000:42:00.0", minor=4) | {"proc/self/mountinfo": MOUNTS.format("tmpfs", "x")}
    host = asked(captured(without(files, "proc/driver", "dev/nvidia4")), GOOD)
    assert [gpu.pci_bus_id for gpu in host.gpus] == [BUS]


def test_a_broken_gpu_of_a_bare_node_is_reported(captured, gpu):
    # The module has it, so that it is listed and has a node; NVML can't have it.
    files = gpu() | gpu(bus="0000:42:00.0", minor=4)
    host = asked(bound(captured(files)), GOOD)
    assert [gpu.state for gpu in host.gpus] == ["ok", "failed"]
    # The module does not have it.
    root = bound(
        captured(without(files, "proc/driver/nvidia/gpus/0000:42", "dev/nvidia4"), captured({}).parent / "b")
    )
    (root / "sys/bus/pci/devices/0000:42:00.0/driver").unlink()
    host = asked(root, GOOD)
    assert [gpu.state for gpu in host.gpus] == ["ok", "no-node"]


@pytest.mark.parametrize(
    ("error", "states"),
    [
        (errno.EPERM, ["ok"]),  # a job's cgroup forbids it
        (errno.EACCES, ["no-permission", "ok"]),
        (errno.EIO, ["failed", "ok"]),  # the driver can't set it up
        (0, ["failed", "ok"]),
    ],
)
@pytest.mark.parametrize("code", [None, 4])
def test_a_node_without_access(captured, gpu, monkeypatch, error, states, code):
    monkeypatch.setattr(Tree, "get_refusal", lambda _, path: error if path == "/dev/nvidia3" else 0)
    files = gpu() | gpu(bus="0000:42:00.0", minor=4)
    reached = replace(L40S, bus_id="0000:42:00.0", minor=4, uuid="GPU-2")
    unreached = () if code is None else (NvmlGpu(index=0, errors={"handle": code}),)
    host = asked(captured(files), replace(GOOD, gpus=(*unreached, reached)))
    if code:
        states = ["no-permission", "ok"] if error != errno.EPERM else states
    assert [gpu.state for gpu in host.gpus] == states
    monkeypatch.setattr(Tree, "get_refusal", lambda *_: error)
    host = asked(captured(files), replace(GOOD, gpus=()))
    denied = error in {errno.EPERM, errno.EACCES}
    assert [gpu.state for gpu in host.gpus] == ["no-permission" if denied else "failed"] * 2


def test_a_container_with_none_of_two(captured, gpu):
    files, answer = granted(gpu)
    host = asked(bound(captured(files | {"proc/self/mountinfo": MOUNTS.format("tmpfs", "x")})), answer)
    assert [gpu.usable for gpu in host.gpus] == [False] * 8


def test_the_lost_gpu_is_the_one_without_readings(captured, gpu):
    files = gpu() | gpu(bus="0000:42:00.0", minor=4) | gpu(bus="0000:c1:00.0", minor=5, excluded="Yes")
    answer = Nvml(
        driver="550.163.01",
        gpus=(NvmlGpu(index=0, errors={"handle": 15}), replace(L40S, bus_id="0000:42:00.0", uuid="GPU-2")),
    )
    host = asked(captured(files), answer)
    assert [gpu.state for gpu in host.gpus] == ["lost", "ok", "excluded"]
    assert [gpu.pci_bus_id for gpu in host.gpus] == [BUS, "0000:42:00.0", "0000:c1:00.0"]
    assert host.gpus[0].label == "GPU 0 (NVIDIA L40S)"
    assert "not responding" in host.warnings[0]


def test_lost_if_the_module_lists_nothing(captured, gpu):
    files = without(gpu(), "proc/driver/nvidia/gpus")
    assert only(asked(captured(files), Nvml(gpus=(NvmlGpu(index=0, errors={"handle": 15}),)))).state == "lost"


def test_lost_and_gone_from_the_bus(captured):
    files = {"proc/cpuinfo": CPUINFO, "sys/module/nvidia/version": "550.163.01"}
    host = asked(captured(files), Nvml(gpus=(NvmlGpu(index=0, errors={"handle": 15}),)))
    assert (only(host).state, only(host).pci_bus_id) == ("lost", None)


@pytest.mark.parametrize(
    ("reading", "state", "warned"),
    [
        (NvmlGpu(index=0, errors={"handle": 4}), "no-permission", ""),
        (NvmlGpu(index=0, errors={"handle": 17}), "no-permission", ""),
        (NvmlGpu(index=0, errors={"handle": 16}), "lost", ""),
        (NvmlGpu(index=0, errors={"handle": 999}), "lost", ""),
        (replace(L40S, uuid=None, errors={"uuid": 15}), "lost", ""),
        (replace(L40S, virtualization=1), "ok", None),  # passed through, which is like bare metal
        (replace(L40S, virtualization=2), "vgpu", "vGPU"),
        (replace(L40S, virtualization=3), "vgpu-host", "vGPU"),
        (replace(L40S, virtualization=4), "vgpu-host", "vGPU"),
        (replace(L40S, mig=()), "mig-empty", "nvidia-smi mig -cgi"),
    ],
)
def test_the_state_of_a_gpu_by_its_readings(captured, gpu, reading, state, warned):
    host = asked(captured(gpu()), Nvml(gpus=(reading,)))
    assert only(host).state == state
    assert only(host).usable is (state in {"ok", "vgpu"})
    assert [warned in warning for warning in host.warnings] == ([] if warned is None else [True])


def test_excluded(captured, gpu):
    host = asked(captured(gpu(excluded="Yes")), Nvml(driver="550.163.01"))
    assert only(host).state == "excluded"
    (warning,) = host.warnings
    assert "NVreg_ExcludedGpus" in warning


@pytest.mark.parametrize("name", ["NVIDIA A10-24Q", "GRID V100D-16Q", "GRID T4-1B4", "NVIDIA A100-1-5CME"])
def test_vgpu_by_name(captured, gpu, name):
    information = f"proc/driver/nvidia/gpus/{BUS}/information"
    files = gpu() | {information: gpu()[information].replace("NVIDIA L40S", name)}
    assert only(probe(captured(files))).state == "vgpu"


def test_mig_without_nvml(captured, gpu):
    folder = "proc/driver/nvidia/capabilities/gpu3/mig"
    host = probe(captured(gpu() | {f"{folder}/gi2/ci0/access": "", f"{folder}/gi9/ci0/access": ""}))
    assert [(device.gpu_instance, device.compute_instance) for device in only(host).mig] == [(2, 0), (9, 0)]
    assert Host.from_json(host.to_json()) == host


def test_mismatch(captured, gpu):
    host = asked(captured(gpu()), Nvml(error=18, message="mismatch", library="550.144.03"))
    assert host.driver.version == "550.163.01"
    assert (only(host).state, only(host).compute) == ("ok", "8.9")
    (warning,) = host.warnings
    assert "550.144.03" in warning
    assert "550.163.01" in warning


def test_nvml_that_hangs(captured, gpu, configure_nvml):
    configure_nvml(sleep=60, gpus="bus=00000000:41:00.0")
    host = assemble_host(Tree(str(captured(gpu()))), query=lambda: nvml.read_nvml(0.2))
    assert only(host).compute == "8.9"
    assert "no response within 0.2 seconds" in host.warnings[0]


def test_nvml_in_a_separate_process(captured, gpu, configure_nvml):
    configure_nvml(gpus="bus=00000000:41:00.0,dev=26b9,minor=3,cc=8.9,mib=46068,name=NVIDIA L40S,uuid=GPU-7")
    host = assemble_host(Tree(str(captured(gpu(uuid="GPU-????????")))), query=nvml.read_nvml)
    assert (only(host).uuid, only(host).memory_mib) == ("GPU-7", 46068)
    assert host.warnings == ()


def test_nvml_reports_another_driver(captured, gpu):
    host = asked(captured(gpu()), replace(GOOD, driver="550.144.03"))
    assert host.driver.version == "550.163.01"
    assert "550.144.03" in host.warnings[0]


def test_the_driver_comes_from_nvml_if_the_kernel_hides_it(captured, gpu):
    files = without(gpu(), "proc/driver")
    bare = without(files, "dev/") | {"dev/nvidiactl": ""}
    assert asked(captured(bare), GOOD).driver is None  # nothing shows a driver, so NVML is not even queried
    host = asked(captured(files), GOOD)
    assert (host.driver.version, host.driver.source) == ("550.163.01", "NVML")
    assert only(host).state == "ok"


def test_a_sandbox_with_nodes_and_nvml_only(captured, gpu):
    files = without(gpu(), "proc/driver", "sys/")
    host = asked(captured(files), GOOD)
    assert (host.driver.version, host.driver.source) == ("550.163.01", "NVML")
    image = only(host)
    assert (image.pci_bus_id, image.pci_device_id, image.minor, image.state) == (BUS, "26b9", 3, "ok")
    assert host.devices == ("/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidiactl")
    assert host.warnings == (SANDBOX,)


def test_a_sandbox_without_a_node(captured, gpu):
    files = without(gpu(), "proc/driver", "sys/", "dev/nvidia3") | {"dev/nvidia4": ""}
    host = asked(captured(without(files, "dev/nvidia-uvm")), GOOD)
    assert only(host).state == "no-node"
    assert (
        host.warnings[0] == f"GPU 0 (NVIDIA L40S): /dev/nvidia3 not found; {explain_creation('/dev/nvidia3')}"
    )
    assert host.warnings[1] == SANDBOX
    assert "missing device nodes, which CUDA needs: /dev/nvidia-uvm" in host.warnings[2]


def test_nvml_is_not_queried_without_a_module(captured):
    tree = Tree(str(captured({"proc/cpuinfo": CPUINFO})))
    assert assemble_host(tree, query=lambda: pytest.fail("asked")).gpus == ()


def test_facts_that_nvml_does_not_report(captured, gpu):
    host = asked(
        captured(gpu(uuid="??")), Nvml(gpus=(replace(L40S, uuid=None, brand=None, memory_mib=None),))
    )
    (warning,) = host.warnings
    assert warning.endswith(
        "could not read UUID (known once a process has opened the GPU), brand, memory size"
    )


def test_an_unknown_product(captured, gpu):
    files = gpu() | {f"sys/bus/pci/devices/{BUS}/device": "0xffff\n"}
    files[f"proc/driver/nvidia/gpus/{BUS}/information"] = "Device Minor: 3\nGPU UUID: GPU-1\n"
    host = probe(captured(files))
    assert (only(host).compute, only(host).name) == (None, None)
    assert "PCI device 10de:ffff is unknown to this release" in host.warnings[1]
    assert "could not read name" in host.warnings[2]


def test_equal_problems_are_reported_once(captured, gpu):
    files: dict[str, str] = {}
    for minor in range(4):
        files |= gpu(bus=f"0000:4{minor}:00.0", minor=minor)
    host = probe(captured(without(files, "proc/driver")))
    assert len(host.gpus) == 4
    (warning,) = host.warnings
    assert warning.count("GPU ") == 4


def test_gpus_are_in_bus_order_whatever_the_minors(captured, gpu):
    files = (
        gpu(bus="0000:c1:00.0", minor=0) | gpu(bus="0000:41:00.0", minor=1) | gpu(bus="0001:01:00.0", minor=2)
    )
    host = probe(captured(files))
    assert [(gpu.index, gpu.minor) for gpu in host.gpus] == [(0, 1), (1, 0), (2, 2)]


def test_a_dump_gives_the_gpus(captured, gpu, dumps):
    host = probe(captured(gpu()), smi=dumps / "550-lost.xml")
    assert (host.driver.version, host.driver.kind) == ("550.163.01", "open")
    assert [gpu.state for gpu in host.gpus] == ["ok", "lost", "vgpu"]
    assert host.devices == ("/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidiactl")
    assert len(host.warnings) == 2
    assert Host.from_json(host.to_json()) == host


def test_a_dump_of_another_driver(captured, gpu, dumps):
    host = probe(captured(gpu()), smi=dumps / "535-rtx4090.xml")
    assert (host.driver.version, host.driver.source) == ("535.129.03", "nvidia-smi -q -x")
    assert "another host" in host.warnings[0]


def test_a_dump_on_a_host_without_a_driver(captured, dumps):
    host = probe(captured({"proc/cpuinfo": CPUINFO}), smi=str(dumps / "615-gb10.xml"))
    assert host.driver.version == "615.23"
    assert host.warnings == ("GPU 0 (NVIDIA GB10): could not read memory size",)
    assert (only(host).memory_mib, only(host).memory_shared) == (None, True)


MEMINFO = "MemTotal:       127600748 kB\nMemFree:        99999999 kB\n"


def test_a_gpu_that_shares_the_cpus_memory_has_all_of_it(captured, gpu, dumps):
    dumped = probe(captured({"proc/cpuinfo": CPUINFO, "proc/meminfo": MEMINFO}), smi=dumps / "615-gb10.xml")
    refused = replace(L40S, memory_mib=None, errors={"memory": 3})
    asked_ = asked(captured(gpu() | {"proc/meminfo": MEMINFO}), replace(GOOD, gpus=(refused,)))
    for host in (dumped, asked_):
        assert host.warnings == ()
        assert (only(host).memory_mib, only(host).memory_shared) == (124610, True)
        assert only(host).to_json()["memory_shared"] is True
        assert Host.from_json(host.to_json()) == host


@pytest.mark.parametrize(
    "change",
    [
        {"memory_mib": 46068},
        {"memory_mib": None, "errors": {"memory": 4}},  # no permission
        {"memory_mib": None, "errors": {"memory": 3}, "mig": ()},  # a MIG device has memory of its own
    ],
)
def test_other_gpus_share_no_memory(captured, gpu, change):
    files = gpu() | {"proc/meminfo": MEMINFO}
    host = asked(captured(files), replace(GOOD, gpus=(replace(L40S, **change),)))
    assert (only(host).memory_mib, only(host).memory_shared) == (change["memory_mib"], False)
    assert "memory_shared" not in only(host).to_json()


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "MemTotal: 1", "\0" * 100])
def test_memory_that_the_kernel_does_not_tell_is_unknown(captured, dumps, text):
    tree = captured({"proc/cpuinfo": CPUINFO, "proc/meminfo": text})
    host = probe(tree, smi=dumps / "615-gb10.xml")
    assert (only(host).memory_mib, only(host).memory_shared) == (None, True)
    assert host.warnings == ("GPU 0 (NVIDIA GB10): could not read memory size",)


def test_contradictory_options(captured, dumps):
    with pytest.raises(UsageError, match="mutually exclusive"):
        probe(nvml=True, smi=dumps / "615-gb10.xml")
    with pytest.raises(UsageError, match="captured tree"):
        probe(captured({"proc/cpuinfo": CPUINFO}), nvml=True)


def test_a_tree_without_a_host(captured, tmp_path):
    with pytest.raises(ProbeError) as caught:
        probe(tmp_path / "nowhere")
    assert caught.value.exit_code == 5
    with pytest.raises(ProbeError, match="not a captured host: proc/cpuinfo not found"):
        probe(captured({"etc/passwd": ""}))
    (tmp_path / "captured/proc").mkdir()
    (tmp_path / "captured/proc/cpuinfo").symlink_to("cpuinfo")
    with pytest.raises(ProbeError, match="symbolic links"):
        probe(tmp_path / "captured")


def test_architectures(captured):
    assert probe(captured({"proc/cpuinfo": "flags : lm"})).arch == "x86_64"
    assert probe(captured({"proc/cpuinfo": "Features : fp asimd"})).arch == "aarch64"
    root = captured({"proc/cpuinfo": "cpu : POWER9\n", "proc/sys/kernel/arch": "ppc64le\n"})
    assert probe(root).arch == "ppc64le"
    (root / "proc/sys/kernel/arch").write_text("../x")
    with pytest.raises(ProbeError, match="architecture") as caught:
        probe(root)
    assert "uname -m" in caught.value.remedy


@pytest.mark.parametrize(
    ("machine", "features"),
    [("aarch64", "flags : fpu lm avx2 avx_vnni"), ("x86_64", "Features : fp asimd atomics")],
)
def test_an_emulated_host_that_shows_another_cpu_proves_no_flag(captured, machine, features):
    host = probe(captured({"proc/cpuinfo": f"vendor_id : A\n{features}\n", "proc/sys/kernel/arch": machine}))
    assert (host.arch, host.cpu) == (machine, Cpu(vendor=None, model=None, flags=frozenset(), level=None))
    (warning,) = (text for text in host.warnings if "CPU unknown" in text)
    assert f"which is probably emulated, is {machine}" in warning


@pytest.mark.parametrize("machine", ["i686", "ppc64le"])
def test_a_host_of_another_machine_name_keeps_its_flags(captured, machine):
    host = probe(captured({"proc/cpuinfo": "flags : lm avx2", "proc/sys/kernel/arch": machine}))
    assert host.cpu.flags == {"lm", "avx2"}


def test_the_running_host():
    host = probe(nvml=False)
    assert host.arch == os.uname().machine
    assert host.cpu.flags
    assert Host.from_json(host.to_json()) == host


def test_nvml_of_the_running_host_is_optional(monkeypatch):
    calls = []
    monkeypatch.setattr(nvml, "read_nvml", lambda: calls.append(1) or Nvml(error=12, message="none"))
    probe(nvml=False)
    assert calls == []
    host = probe(nvml=True)
    assert calls == [1]
    assert any("libnvidia-ml.so.1" in warning for warning in host.warnings)


def test_a_system_without_cpuinfo(monkeypatch):
    other = Cpu(vendor="Apple", model="M3", flags=frozenset({"asimd"}), level=None)
    monkeypatch.setattr(cpu, "read_from_library", lambda: (other, ("slow",)))
    monkeypatch.setattr(Tree, "read_text", lambda *_, **__: None)
    host = probe_hardware(nvml=False)
    assert host.cpu == other
    assert "slow" in host.warnings


def test_only_what_is_needed_is_imported():
    program = (
        "import sys; before = set(sys.modules); from imagematrix.hardware.host.probe import probe; "
        "probe(nvml=False); print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"pathlib", "subprocess", "pyexpat", "pynvml", "ctypes", "cpuinfo"}
    assert heavy.isdisjoint(done.stdout.split())


CONTENT = st.binary(max_size=60) | st.sampled_from(
    [
        CPUINFO.encode(),
        b"0x10de\n",
        b"0x030200",
        b"0x26b9",
        b"Device Minor: 3\nGPU UUID: x\n",
        b"580.65.06",
        b"0x120000",
        b"4118\t10de26b9\t1f\t" + b"\t".join([b" 40000000000"] * 14),
        b"nvgpu 1 0",
        b"nvidia,tegra234",
    ]
)
PATHS = [
    "proc/cpuinfo",
    "proc/sys/kernel/arch",
    "proc/bus/pci/devices",
    "proc/driver/nvidia/version",
    f"proc/driver/nvidia/gpus/{BUS}/information",
    "proc/driver/nvidia/capabilities/gpu3/mig/gi1/ci0/access",
    "sys/module/nvidia/version",
    f"sys/bus/pci/devices/{BUS}/vendor",
    f"sys/bus/pci/devices/{BUS}/class",
    f"sys/bus/pci/devices/{BUS}/device",
    f"sys/bus/pci/devices/{BUS}/resource",
    "sys/bus/pci/devices/0000:03:00.0/class",
    "proc/modules",
    "proc/self/mountinfo",
    "proc/device-tree/compatible",
    "dev/nvidia3",
    "dev/nvhost-gpu",
    "dev/dxg",
]


@given(st.dictionaries(st.sampled_from(PATHS), CONTENT))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_is_a_host_or_an_error(captured, tmp_path_factory, files):
    root = captured(files, tmp_path_factory.mktemp("any") / "tree")
    try:
        host = probe(root)
    except ImagematrixError:
        return
    assert Host.from_json(host.to_json()) == host


def test_gpus_that_cannot_be_told_apart_are_not_usable(captured, gpu):
    other = "0000:c1:00.0"
    for clash in ({"minor": 3, "uuid": "GPU-2"}, {"minor": 4, "uuid": "GPU-1"}):
        root = captured(gpu() | gpu(bus=other, **clash))
        host = probe(root)
        assert [(one.pci_bus_id, one.state, one.minor, one.uuid) for one in host.gpus] == [
            ("0000:41:00.0", "unconfirmed", None, None),
            (other, "unconfirmed", None, None),
        ]
        assert "the sources of the GPUs' facts contradict each other: duplicate" in host.warnings[0]
        assert Host.from_json(host.to_json()) == host
    host = probe(captured(gpu(bus=other, minor=4, uuid="GPU-2")))
    assert [one.state for one in host.gpus] == ["ok", "ok"]


def test_mig_devices_that_cannot_be_told_apart_are_not_usable(captured, gpu):
    folder = "proc/driver/nvidia/capabilities/gpu3/mig"
    host = probe(captured(gpu() | {f"{folder}/gi2/ci0/access": "", f"{folder}/gi02/ci0/access": ""}))
    assert (only(host).state, only(host).mig) == ("unconfirmed", None)
    assert Host.from_json(host.to_json()) == host
