"""What the kernel reports about a node, read from a simulated tree."""

import os
from pathlib import Path

import pytest

from imagematrix.hardware.host.host import Cpu, Gpu, Host
from imagematrix.launcher.doctor import kernel
from imagematrix.launcher.doctor.kernel import KernelFacts, read_kernel_facts

CPU = Cpu(vendor=None, model=None, flags=frozenset(), level=None)
ADDRESS = "0000:41:00.0"
NODE = Host(
    arch="x86_64",
    cpu=CPU,
    gpus=(Gpu(index=0, minor=3, pci_bus_id=ADDRESS), Gpu(index=1)),
    devices=("/dev/nvidia3", "/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap1", "/dev/other"),
)
XID = "NVRM: Xid (PCI:0000:41:00): {}, pid=7, name=train, GPU has fallen off the bus."
LOG = [
    "usb 1-1: new device",
    XID.format(79),
    XID.format(79),
    XID.format(31),
    'audit: type=1400 apparmor="DENIED" operation="open" profile="docker-default" name="/dev/nvidia0" pid=9',
    'audit: type=1400 avc:  denied  { read } for  pid=9 comm="x" path="/dev/nvidiactl" dev="devtmpfs"',
    'audit: type=1400 avc:  denied  { write } for  pid=9 name="nvidia1" tclass=chr_file permissive=0',
    'audit: type=1400 avc:  denied  { open } for  pid=9 name="nvidia-cap12" dev="devtmpfs" tclass=chr_file',
    'audit: type=1400 avc:  denied  { search } for  pid=9 name="nvidia" dev="proc" tclass=dir',
    'audit: type=1400 avc:  denied  { read } for  pid=9 name="nvidia2" dev="sda1" tclass=file',
    'audit: type=1400 avc:  denied  { read } for  pid=9 name="nvidia3" tclass=chr_file permissive=1',
    "Loading of unsigned module is rejected",
]


@pytest.fixture
def put(tmp_path):
    def make(path, text=""):
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)

    return make


def test_unreadable_files_give_empty_facts(tmp_path):
    assert read_kernel_facts(NODE, str(tmp_path)) == KernelFacts()


def test_kernel_log_is_parsed(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel, "_read_log", lambda _: iter(LOG))
    result = read_kernel_facts(NODE, str(tmp_path))
    assert result.xids == {("0000:41:00", 79): 2, ("0000:41:00", 31): 1}
    assert result.denied_nodes == (
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia1",
        "/dev/nvidia-caps/nvidia-cap12",
    )
    assert result.refusal == "Loading of unsigned module is rejected"


@pytest.mark.parametrize(
    ("enforce", "use_devices", "denies"),
    [("1", "0 0", True), ("0", "0 0", False), ("1", "1 1", False), ("1", None, False)],
)
def test_selinux_denies_devices_only_if_it_enforces(put, tmp_path, enforce, use_devices, denies):
    put("sys/fs/selinux/enforce", enforce)
    if use_devices:
        put("sys/fs/selinux/booleans/container_use_devices", use_devices)
    assert read_kernel_facts(NODE, str(tmp_path)).selinux == denies


@pytest.mark.parametrize(
    "message",
    [
        "Loading of unsigned module is rejected",
        "Loading of module with unavailable key is rejected",
        "Loading of module with unsupported crypto is rejected",
        "Lockdown: insmod: unsigned module loading is restricted; see man kernel_lockdown.7",
    ],
)
def test_messages_about_rejected_modules(message):
    assert kernel.REFUSED.search(message)


def test_overwritten_messages_are_skipped(monkeypatch):
    reading, writing = os.pipe()
    answers: list[bytes | Exception] = [
        b"6,1,2,-;one\n SUBSYSTEM=pci\n",
        BrokenPipeError(),
        b"4,2,3,-;two \xff\n",
        BlockingIOError(),
    ]
    messages = iter(answers)

    def next_one(*_):
        one = next(messages)
        if isinstance(one, bytes):
            return one
        raise one

    monkeypatch.setattr(os, "open", lambda *_: reading)
    monkeypatch.setattr(os, "read", next_one)
    assert list(kernel._read_log(Path("kmsg"))) == ["one", "two \N{REPLACEMENT CHARACTER}"]
    os.close(writing)


def test_log_that_ends_is_read(put, tmp_path):
    put("kmsg")
    assert list(kernel._read_log(tmp_path / "kmsg")) == []


def test_other_kernel_facts_are_read(put, tmp_path):
    functions = tmp_path / "sys/bus/pci/devices"
    for name, vendor, kind in (
        ("0000:41:00.0", "10de", "030200"),
        ("0000:c1:00.0", "10de", "068000"),
        ("0000:c2:00.0", "8086", "068000"),
    ):
        put(f"sys/bus/pci/devices/{name}/vendor", f"0x{vendor}\n")
        put(f"sys/bus/pci/devices/{name}/class", f"0x{kind}\n")
    (functions / ADDRESS / "driver").symlink_to("../../../bus/pci/drivers/nouveau")
    put(kernel.SECURE_BOOT.lstrip("/"), b"\6\0\0\0\1")
    put("sys/fs/selinux/booleans/container_use_devices", "0 0")
    put("sys/fs/selinux/enforce", "1")
    put("proc/2/comm", "kthreadd\n")
    put("proc/77/comm", "nv-fabricmanage\n")
    put("proc/driver/nvidia/capabilities/gpu3/mig/gi1/access")
    put("proc/driver/nvidia/capabilities/gpu3/mig/gi2/ci0/access")
    result = read_kernel_facts(NODE, str(tmp_path))
    assert result.drivers == {ADDRESS: "nouveau"}
    assert result.switches == ("0000:c1:00.0",)
    assert (result.secure_boot, result.selinux, result.fabric_manager) == (True, True, True)
    assert result.empty_instances == {3: (1,)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_stale_nodes_of_an_earlier_driver_are_found(put, tmp_path):
    put(
        "proc/devices",
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n510 nvidia-uvm\n\nBlock devices:\n",
    )
    (tmp_path / "dev").mkdir()
    for name, major, minor in (("nvidia3", 195, 3), ("nvidia-uvm", 511, 0)):
        try:
            os.mknod(tmp_path / "dev" / name, 0o20600, os.makedev(major, minor))
        except PermissionError:
            pytest.skip("this container may not make device nodes")
    assert read_kernel_facts(NODE, str(tmp_path)).stale_nodes == ("/dev/nvidia-uvm",)
