"""Accelerators that images do not support, and ignored devices, on real kinds of nodes."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from imagematrix.hardware.host import accelerator_hints
from imagematrix.hardware.host.nvml import Nvml
from imagematrix.hardware.host.probe import assemble_host, probe
from imagematrix.hardware.host.tree import Tree
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selector import select

CPUINFO = "vendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: fpu lm sse sse2\n"
ARM = "Features\t: fp asimd\nCPU implementer\t: 0x41\n"
GIB = 2**30
L4T = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {}  Release Build  (b@c)  Tue Jan 1\n"


def function(ids, kind, memory=16 * 2**20, bus="0000:03:00.0", *, driver=None):
    """Return the files of a function on the PCI bus that maps memory; None leaves out the size."""
    vendor, device = ids.split(":")
    folder = f"sys/bus/pci/devices/{bus}"
    files = {"vendor": f"0x{vendor}\n", "device": f"0x{device}\n", "class": f"0x{kind}00\n"}
    if memory is not None:
        files["resource"] = f"0x0 0x0 0x0\n0x4000000000 {0x4000000000 + memory - 1:#x} 0x14220c\n"
    if driver:
        files["driver"] = driver
    return {f"{folder}/{name}": text for name, text in files.items()}


def listed(files):
    """Return the files without the memory sizes, which the list of all functions has instead."""
    lines: dict[str, dict[str, str]] = {}
    for path, text in files.items():
        if path.startswith("sys/bus/pci/devices/"):
            *_, bus, name = path.split("/")
            lines.setdefault(bus, {})[name] = text
    text = ""
    for bus, facts in lines.items():
        _, number, rest = bus.split(":")
        slot, _, part = rest.partition(".")
        memory = 0
        if "resource" in facts:
            start, end = (int(word, 16) for word in facts["resource"].splitlines()[1].split()[:2])
            memory = end - start + 1
        place = f"{number}{int(slot, 16) << 3 | int(part):02x}"
        sizes = "\t".join(f"{size:16x}" for size in [*[0] * 8, memory, *[0] * 5])
        text += f"{place}\t{facts['vendor'][2:6]}{facts['device'][2:6]}\t0\t{sizes}\t\n"
    kept = {path: text for path, text in files.items() if not path.endswith("/resource")}
    return kept | {"proc/bus/pci/devices": text} if lines else files


NODES = "sys/class/kfd/kfd/topology/nodes"


def topology(location, memory, node=1, domain=0, heap=1, processors=0):
    """Return the files of KFD about a GPU at a location (bus, device and function) with local memory."""
    facts = {"cpu_cores_count": processors, "simd_count": 192, "location_id": location, "domain": domain}
    bank = {"heap_type": heap, "size_in_bytes": memory, "flags": 0}
    return {
        f"{NODES}/0/properties": "cpu_cores_count 16\nsimd_count 0\nlocation_id 0\n",
        f"{NODES}/0/mem_banks/0/properties": f"heap_type 0\nsize_in_bytes {512 * GIB}\n",
        f"{NODES}/{node}/properties": "".join(f"{name} {number}\n" for name, number in facts.items()),
        f"{NODES}/{node}/mem_banks/0/properties": "".join(
            f"{name} {number}\n" for name, number in bank.items()
        ),
    }


X86 = {"proc/cpuinfo": CPUINFO, "dev/null": ""}
JETSON = {
    "proc/cpuinfo": ARM,
    "proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0000\0nvidia,tegra234\0",
    "dev/nvmap": "",
}
# A Ryzen AI Max: its display adapter, and its security processor in the same slot.
APU = function("1002:1586", "0300", 256 * 2**20, "0000:c1:00.0") | function(
    "1022:17e0", "1080", 2**20, "0000:c1:00.2"
)
ASPEED = function("1a03:2000", "0300", 64 * 2**20, "0000:02:00.0")

# Signs that rule out a CPU-only image: files of the node, and kind and location of each sign.
STOPPED = {
    "jetson-orin": (
        JETSON
        | {
            "proc/driver/nvidia/version": L4T.format("540.4.0"),
            "dev/nvidia0": "",
            "dev/nvidiactl": "",
            "dev/nvhost-gpu": "",
        },
        [
            ("tegra", "/dev/nvhost-gpu"),
            ("tegra", "/dev/nvmap"),
            ("tegra", "/proc/device-tree/compatible"),
            ("module", "nvidia"),
            ("device", "/dev/nvidia0"),
        ],
    ),
    "jetson-xavier": (
        JETSON | {"sys/module/nvgpu/refcnt": "1\n"},
        [("tegra", "/dev/nvmap"), ("tegra", "/proc/device-tree/compatible"), ("module", "nvgpu")],
    ),
    "xavier-by-its-modules": (
        {"proc/cpuinfo": ARM, "proc/modules": "nvgpu 2662400 24 - Live 0x0000000000000000\n"},
        [("module", "nvgpu")],
    ),
    "wsl": (X86 | {"dev/dxg": ""}, [("wsl", "/dev/dxg")]),
    "mi300x": (
        X86 | ASPEED | function("1002:74a1", "1200", 256 * GIB) | {"dev/kfd": ""},
        [("pci", "0000:03:00.0 (1002:74a1, class 1200)")],
    ),
    "mi250": (
        X86 | function("1002:740c", "0380", 128 * GIB),
        [("pci", "0000:03:00.0 (1002:740c, class 0380)")],
    ),
    "mi300x-whose-bus-is-hidden": (X86 | {"dev/kfd": ""}, [("device", "/dev/kfd")]),
    "intel-max": (
        X86 | function("8086:0bd5", "0380", 64 * GIB),
        [("pci", "0000:03:00.0 (8086:0bd5, class 0380)")],
    ),
    "intel-flex-unread": (
        X86 | function("8086:56c0", "0380", None),
        [("pci", "0000:03:00.0 (8086:56c0, class 0380)")],
    ),
    "gaudi": (
        X86 | function("1da3:1060", "1200", 128 * GIB),
        [("pci", "0000:03:00.0 (1da3:1060, class 1200)")],
    ),
    "fpga": (X86 | function("10ee:5020", "1200"), [("pci", "0000:03:00.0 (10ee:5020, class 1200)")]),
    "another-3d-controller": (
        X86 | function("1e3e:0001", "0302"),
        [("pci", "0000:03:00.0 (1e3e:0001, class 0302)")],
    ),
    "nvidia-of-a-new-class": (
        X86 | function("10de:ffff", "1200"),
        [("pci", "0000:03:00.0 (10de:ffff, class 1200)")],
    ),
    "radeon-pro-w7900": (
        X86 | ASPEED | function("1002:7448", "0300", 64 * GIB) | {"dev/kfd": ""},
        [("pci", "0000:03:00.0 (1002:7448, class 0300)")],
    ),
    "radeon-rx-7900-without-resizable-bar": (
        X86 | function("1002:744c", "0300", 256 * 2**20) | topology(0x300, 24 * GIB) | {"dev/kfd": ""},
        [("pci", "0000:03:00.0 (1002:744c, class 0300)")],
    ),
    "radeon-beside-an-apu": (
        X86
        | APU
        | topology(0xC100, 96 * GIB, node=1)
        | function("1002:744c", "0300", 256 * 2**20, "0001:03:00.0")
        | topology(0x300, 24 * GIB, node=2, domain=1, heap=2),
        [("pci", "0001:03:00.0 (1002:744c, class 0300)")],
    ),
    "arc": (
        X86 | function("8086:56a0", "0300", 16 * GIB),
        [("pci", "0000:03:00.0 (8086:56a0, class 0300)")],
    ),
    "radeon-unread": (
        X86 | function("1002:744c", "0300", None),
        [("pci", "0000:03:00.0 (1002:744c, class 0300)")],
    ),
    "neuron": (X86 | {"dev/neuron0": ""}, [("device", "/dev/neuron0")]),
    "tpu": (X86 | {"dev/accel0": ""}, [("device", "/dev/accel0")]),
    "module-alone": (X86 | {"sys/module/nvidia/version": "550.163.01\n"}, [("module", "nvidia")]),
    "nodes-alone": (
        X86 | {"dev/nvidia0": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""},
        [("device", "/dev/nvidia-uvm"), ("device", "/dev/nvidia0")],
    ),
}
# Ignored devices: a laptop, a virtual machine or a server with a display adapter runs the CPU image.
LEFT_ALONE = {
    "laptop-with-an-apu": X86 | function("1002:1638", "0300", 256 * 2**20, "0000:05:00.0") | {"dev/kfd": ""},
    "laptop-with-a-display-controller": X86 | function("1002:164e", "0380", 256 * 2**20, "0000:05:00.0"),
    "laptop-of-intel": X86
    | function("8086:46a6", "0300", 256 * 2**20, "0000:00:02.0")
    | function("8086:7d1d", "1200", 128 * 2**20, "0000:00:0b.0"),  # its NPU
    "apu-with-a-large-carve-out": X86 | APU | topology(0xC100, 96 * GIB),
    "apu-that-maps-its-memory": X86
    | function("1002:1586", "0300", 96 * GIB, "0000:c1:00.0")
    | function("1022:17e0", "1080", 2**20, "0000:c1:00.2"),
    "apu-in-one-node-with-its-processors": X86
    | function("1002:1309", "0300", 256 * 2**20, "0000:00:01.0")
    | topology(0x8, 8 * GIB, processors=4),
    "radeon-with-little-memory": X86 | function("1002:67df", "0300") | topology(0x300, 2 * GIB),
    "radeon-with-memory-of-the-host": X86 | function("1002:67df", "0300") | topology(0x300, 8 * GIB, heap=0),
    "radeon-whose-topology-is-damaged": X86
    | function("1002:67df", "0300")
    | {f"{NODES}/1/properties": "simd_count 9\nlocation_id -1\ndomain x\n\n", f"{NODES}/2/x": ""},
    "kvm-virtio": X86 | function("1af4:1050", "0380", 8 * 2**20),
    "kvm-qxl": X86 | function("1b36:0100", "0300", 64 * 2**20),
    "kvm-bochs": X86 | function("1234:1111", "0300"),
    "vmware": X86 | function("15ad:0405", "0300"),
    "bmc": X86 | ASPEED,
}


@pytest.fixture
def catalog():
    """A variant for CPUs and one for GPUs, for both architectures."""
    driver = UserModeDriver(mode="exact", version="550.163.01")
    made = []
    for arch in ("amd64", "arm64"):
        common: dict[str, Any] = {"digest": None, "platform": f"linux/{arch}"}
        made.append(Variant(reference=f"t:cpu-{arch}", **common))
        made.append(Variant(reference=f"t:gpu-{arch}", cuda="12.4", cubins=("89",), driver=driver, **common))
    return Catalog(image="t", version="v1", variants=tuple(made))


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, dict) for name in STOPPED] + [(name, listed) for name in STOPPED if not name.endswith("-unread")],
)
def test_accelerators_that_rule_out_a_cpu_image(captured, catalog, name, form):
    files, signs = STOPPED[name]
    host = probe(captured(form(files)))
    assert [(one.kind, one.where) for one in host.accelerators] == signs
    assert all(one.why for one in host.accelerators)
    with pytest.raises(NothingFits) as caught:
        select(host, catalog)
    assert caught.value.exit_code == 3
    assert host.accelerators[0].label in str(caught.value)
    assert "allow_cpu=True" in caught.value.remedy
    for wish in ({"gpus": "none"}, {"allow_cpu": True}):
        assert not select(host, catalog, **wish).variant.gpu


@pytest.mark.parametrize("form", [dict, listed])
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_devices_that_are_ignored(captured, catalog, name, form):
    host = probe(captured(form(LEFT_ALONE[name])))
    assert (host.accelerators, host.gpus) == ((), ())
    (warning,) = host.warnings
    assert warning.endswith(": ignored, integrated or for display only")
    assert ("/dev/kfd" in warning) is (name == "laptop-with-an-apu")
    assert not select(host, catalog).variant.gpu


def test_the_control_node_alone_proves_nothing(captured, catalog):
    host = probe(captured(X86 | {"dev/nvidiactl": ""}))
    assert (host.accelerators, host.warnings) == ((), ())
    assert not select(host, catalog).variant.gpu


def test_a_node_whose_name_cannot_be_printed(captured):
    root = captured(X86)
    (root / "dev/nvidia\udcff").touch()
    (root / "dev/nvhost-\x1b[2J").touch()
    assert probe(root).accelerators == ()


def test_a_virtual_function_next_to_its_physical_one(captured):
    root = captured(X86 | function("1002:74b5", "1200", GIB))
    (root / "sys/bus/pci/devices/0000:03:00.0/physfn").symlink_to("../0000:01:00.0")
    assert probe(root).accelerators == ()


def test_an_nvidia_function_of_unknown_class(captured):
    files = X86 | function("10de:26b9", "0302")
    del files["sys/bus/pci/devices/0000:03:00.0/class"]
    (sign,) = probe(captured(files)).accelerators
    assert (sign.where, sign.why) == (
        "0000:03:00.0 (10de:26b9, class unknown)",
        "could not read its class",
    )


def test_traces_of_the_driver_do_not_count_next_to_its_gpus(captured, gpu):
    host = probe(captured(gpu() | ASPEED))
    assert len(host.gpus) == 1
    assert host.accelerators == ()
    assert not any("1a03" in warning for warning in host.warnings)


def test_another_accelerator_next_to_nvidia_gpus(captured, gpu):
    host = probe(captured(gpu() | function("1da3:1060", "1200", 128 * GIB)))
    assert [one.where for one in host.accelerators] == ["0000:03:00.0 (1da3:1060, class 1200)"]
    assert host.gpus[0].state == "ok"


def test_a_sandbox_without_any_trace_of_the_driver(captured):
    silent = Nvml(error=12, message="NVML Shared Library Not Found")
    tree = Tree(str(captured(X86 | {"dev/nvidia0": "", "dev/nvidiactl": ""})))
    host = assemble_host(tree, query=lambda: silent)
    assert (host.driver, host.gpus) == (None, ())
    assert [one.where for one in host.accelerators] == ["/dev/nvidia0"]
    assert "libnvidia-ml.so.1" in host.warnings[0]


def test_the_page_about_captures_copies_every_node_that_the_probe_reads():
    page = (Path(__file__).parents[4] / "docs/how-to/capture-a-node.md").read_text()
    (patterns,) = re.findall(r"^for path in (/dev/.*); do if \[ -c", page, re.MULTILINE)
    for node in accelerator_hints.NODES.pattern.split("|"):
        name = node.replace(r"[\w-]*", "x").replace(r"\d+", "0")
        assert accelerator_hints.NODES.fullmatch(name)
        assert any(fnmatch(f"/dev/{name}", pattern) for pattern in patterns.split()), name
