import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.hardware.host import accelerator_hints, nvidia, pci
from imagematrix.hardware.host.host import Gpu, MigDevice
from imagematrix.hardware.host.tree import Tree

GCC = "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"


@pytest.mark.parametrize(
    ("line", "version", "kind"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  384.81  Wed Aug 17 22:24:07 PDT 2016", "384.81", "proprietary"),
        ("NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jun 2025", "535.261.03", "proprietary"),
        ("NVIDIA UNIX aarch64 Kernel Module  535.261.03  Tue Jun 2025", "535.261.03", "proprietary"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  555.42.06  Release Build  (a@b)", "555.42.06", "open"),
        ("NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build  (a@b)", "540.4.0", "open"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.65.06", "580.65.06", "open"),
        ("NVIDIA UNIX\tx86_64\tKernel Module\t\t595.80\tFri\r", "595.80", "proprietary"),
    ],
)
def test_version(line, version, kind):
    driver = nvidia.parse_version(f"NVRM version: {line}\n{GCC}")
    assert (driver.version, driver.kind) == (version, kind)
    assert driver.source == "/proc/driver/nvidia/version"


@pytest.mark.parametrize(
    "text",
    [
        "",
        GCC,
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module\n" + GCC,
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550\n",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01-custom\n",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01.2.3\n",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  99999999.1\n",
        "NVRM version: NVIDIA UNIX Kernel Module  \u0665\u0665\u0660.\u0661\u0666\u0663.\u0660\u0661\n",
        "NVRM version: NVIDIA UNIX x86_64\nKernel Module  550.163.01\n",
        "nvrm: Kernel Module  550.163.01",
        "not NVRM version: Kernel Module  550.163.01",
    ],
)
def test_no_version(text):
    assert nvidia.parse_version(text) is None


def test_a_long_text_without_a_version_is_read_once():
    """Where any place may begin a banner, this takes half a minute."""
    assert nvidia.parse_version("NVRM version:" * 8000) is None


@given(st.text())
def test_any_text_is_read(text):
    for prefix in ("", "NVRM version: Kernel Module  "):
        driver = nvidia.parse_version(prefix + text)
        assert driver is None or nvidia.is_version(driver.version)
    nvidia.parse_information(text)
    nvidia.parse_information(f"Device Minor: {text}\nBus Location: {text}")
    accelerator_hints.parse_slots(text)
    accelerator_hints.parse_slots(f"0008\t10de26b9\t{text}")
    result = pci.normalize_address(text)
    assert result is None or pci.make_sort_key(result)


def test_information():
    gpu = nvidia.parse_information(
        "Model: \t\t NVIDIA H100 80GB HBM3\r\nGPU UUID: \t GPU-9221d5d1\r\nBus Location: \t 0000:62:00.0\r\n"
        "Device Minor: \t 5\r\nGPU Firmware: \t 535.129.03\r\nGPU Excluded:\t No\r\n"
    )
    assert gpu == nvidia.Information(
        bus_id="0000:62:00.0", minor=5, uuid="GPU-9221d5d1", name="NVIDIA H100 80GB HBM3", excluded=False
    )


@pytest.mark.parametrize("word", ["GPU Excluded", "GPU Blacklisted", "Blacklisted"])
def test_excluded_by_any_name(word):
    assert nvidia.parse_information(f"{word}:\t Yes\n").excluded


@pytest.mark.parametrize("minor", ["", "-1", "x", "12345678", "\u0663", "N/A", "1 2"])
def test_odd_minors(minor):
    assert nvidia.parse_information(f"Device Minor: {minor}\n").minor is None


def test_an_unknown_uuid():
    text = "GPU UUID: \t GPU-????????-????-????-????-????????????\nVideo BIOS: \t ??.??.??.??.??\n"
    assert nvidia.parse_information(text).uuid is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0000:41:00.0", "0000:41:00.0"),
        ("00000000:41:00.0", "0000:41:00.0"),
        (" 0000:C1:00.0\n", "0000:c1:00.0"),
        ("0000000F:01:00.0", "000f:01:00.0"),
        ("10000:E1:00.0", "10000:e1:00.0"),
        ("41:00.0", None),
        ("0000:41:00", "0000:41:00.0"),
        ("0:1:2", "0000:01:02.0"),
        ("0000:041:00.0", None),
        ("0000:41:00.8", None),
        ("0000:41:00.0/../x", None),
        ("", None),
    ],
)
def test_addresses(address, expected):
    assert pci.normalize_address(address) == expected


def test_bus_order():
    addresses = ["10000:01:00.0", "0000:c1:00.0", "0000:41:00.1", "0000:41:00.0", "0009:01:00.0"]
    assert sorted(addresses, key=pci.make_sort_key) == [
        "0000:41:00.0",
        "0000:41:00.1",
        "0000:c1:00.0",
        "0009:01:00.0",
        "10000:01:00.0",
    ]


def device(bus, vendor="0x10de", kind="0x030200", number="0x26b9"):
    return {
        f"sys/bus/pci/devices/{bus}/{name}": f"{text}\n"
        for name, text in (("vendor", vendor), ("class", kind), ("device", number))
        if text
    }


def test_scan(captured):
    files = (
        device("0000:c1:00.0", number="0x2236")
        | device("0000:41:00.0")
        | device("0000:41:00.1", kind="0x040300", number="0x228b")  # the sound of its HDMI
        | device("0000:42:00.0", kind="0x068000", number="0x22a3")  # an NVSwitch
        | device("0000:47:00.0", kind="0x068000", number="0x0269")  # a bridge of an nForce chipset
        | device("0000:48:00.0", kind="0x068000", vendor="0x8086")
        | device("0000:43:00.0", vendor="0x1002")
        | device("0000:45:00.0", vendor="", number="")  # /sys shows only its class
        | device("0000:46:00.0", vendor="0x8086", kind="")
        | device("0000:44:00.0", kind="0x030000", number="0x1eb8")
        | {"sys/bus/pci/devices/junk/vendor": "0x10de"}
    )
    files |= device("0000:c1:00.4", number="0x2236")  # a virtual function of the second
    root = captured(files)
    (root / "sys/bus/pci/devices/0000:c1:00.4/physfn").symlink_to("../0000:c1:00.0")
    (root / "sys/bus/pci/devices/0000:44:00.0/driver").symlink_to("../../../../bus/pci/drivers/nouveau")
    (root / "sys/bus/pci/devices/0000:47:00.0/driver").symlink_to("../../../../bus/pci/drivers/forcedeth")
    result = pci.list_functions(Tree(str(root)), None)
    assert [one.bus_id for one in result if one.is_switch] == ["0000:42:00.0"]
    assert [(one.bus_id, one.device_id, one.driver, one.is_gpu) for one in result] == [
        ("0000:41:00.0", "26b9", None, True),
        ("0000:42:00.0", "22a3", None, False),
        ("0000:43:00.0", "26b9", None, False),
        ("0000:44:00.0", "1eb8", "nouveau", True),
        ("0000:45:00.0", None, None, False),
        ("0000:c1:00.0", "2236", None, True),
    ]
    assert result[4].label == "0000:45:00.0 (????:????, class 0302)"


def test_the_list_of_devices_limits_the_scan(captured):
    def line(place, vendor, *sizes):
        regions = (f"{size:16x}" for size in [0] * 7 + [*sizes, *[0] * 7][:7])
        return "\t".join([place, f"{vendor}26b9", "1f", *regions, "driver"]) + "\n"

    places = ["0000:41:00.0", "0000:c1:02.1", "0000:05:00.0", "0001:05:00.0", "0000:06:00.0"]
    files: dict[str, str] = {}
    for place in places:
        files |= device(place, vendor="0x8086")
    listing = (
        line("4100", "8086", 2**19)
        + line("c111", "10de")
        + line("0500", "8086", 0, 2**20)
        + line("0500", "8086", 2**34)
        + line("0600", "8086", 0, 0, 0, 0, 0, 0, 2**24)  # a ROM
        + "junk\nzzzz\t10de26b9\n"
    )
    root = captured(files | {"proc/bus/pci/devices": listing})
    seen = accelerator_hints.find_hints(Tree(str(root))).functions
    assert seen == {"c1:02.1": 0, "05:00.0": 2**34}
    assert [one.bus_id for one in pci.list_functions(Tree(str(root)), seen)] == [
        "0000:05:00.0",
        "0000:c1:02.1",
        "0001:05:00.0",
    ]
    assert pci.list_functions(Tree(str(root)), {}) == ()


def test_memory_by_the_file_of_a_function(captured):
    regions = "0xfb000000 0xfbffffff 0x00040200\n0x1000 0x1fff 0x00040101\njunk\n"
    lines = f"{regions}0x20000000000 0x27fffffffff 0x0014220c\n"
    root = captured(device("0000:41:00.0") | {"sys/bus/pci/devices/0000:41:00.0/resource": lines})
    (one,) = pci.list_functions(Tree(str(root)), None)
    assert one.memory == 2**39


def test_the_modules_own_version_is_the_fallback(captured, gpu):
    files = gpu() | {
        "proc/driver/nvidia/version": "something else\n",
        "sys/module/nvidia/version": "580.65.06\n",
    }
    driver = nvidia.read_nvidia(Tree(str(captured(files)))).driver
    assert (driver.version, driver.kind, driver.source) == ("580.65.06", None, "/sys/module/nvidia/version")


def test_a_module_of_unknown_version(captured):
    tree = Tree(str(captured({"sys/module/nvidia/version": "junk", "sys/module/nvidia/x": ""})))
    kernel = nvidia.read_nvidia(tree)
    assert kernel.loaded
    assert kernel.driver is None
    assert "neither" in tree.warnings[0]


def test_information_takes_the_address_of_its_folder(captured):
    folder = "proc/driver/nvidia/gpus"
    files = {
        f"{folder}/0000:C1:00.0/information": "Device Minor: 1\n",
        f"{folder}/x/information": "Device Minor: 2\nBus Location: 0000:41:00.0\n",
        f"{folder}/y/information": "Device Minor: 3\n",
        f"{folder}/0000:42:00.0/other": "",
    }
    result = nvidia.read_nvidia(Tree(str(captured(files)))).information
    assert [(gpu.bus_id, gpu.minor) for gpu in result] == [
        ("0000:42:00.0", None),
        ("0000:c1:00.0", 1),
        ("0000:41:00.0", 2),
    ]


def test_mig_devices_by_their_capabilities(captured, gpu):
    folder = "proc/driver/nvidia/capabilities/gpu3/mig"
    paths = [
        "gi2/access",
        "gi2/ci0/access",
        "gi10/access",
        "gi10/ci1/access",
        "gi10/ci0/access",
        "gix/ci0/access",
    ]
    files = gpu() | {f"{folder}/{path}": "" for path in paths}
    mig = nvidia.read_nvidia(Tree(str(captured(files)))).mig[3]
    assert [(device.gpu_instance, device.compute_instance) for device in mig] == [(2, 0), (10, 0), (10, 1)]


def test_mig_devices_have_their_own_nodes(captured, gpu):
    folder = "proc/driver/nvidia/capabilities/gpu3/mig"
    numbers = {"gi2": 21, "gi2/ci0": 22, "gi9": 84, "gi9/ci0": None}
    files = {
        f"{folder}/{name}/access": f"DeviceFileMinor: {number}\nDeviceFileMode: 292\n"
        for name, number in numbers.items()
    }
    tree = Tree(str(captured(gpu() | files)))
    devices = [
        MigDevice(uuid=None, profile=None, gpu_instance=instance, compute_instance=0)
        for instance in (2, 9, 5)
    ]
    plain = Gpu(index=1)
    with_mig, without = nvidia.with_capabilities(tree, (Gpu(index=0, minor=3, mig=tuple(devices)), plain))
    assert [one.capabilities for one in with_mig.mig] == [(21, 22), None, None]
    assert without is plain
    assert not tree.warnings


def test_mig_without_compute_instances_and_without_instances(captured, gpu):
    folder = "proc/driver/nvidia/capabilities/gpu3/mig"
    root = captured(gpu() | {f"{folder}/gi1/access": ""})
    assert nvidia.read_nvidia(Tree(str(root))).mig == {3: ()}
    (root / folder / "gi1/access").unlink()
    (root / folder / "gi1").rmdir()
    assert nvidia.read_nvidia(Tree(str(root))).mig == {}


def test_nodes(captured):
    root = captured(
        {
            "dev/nvidia0": "",
            "dev/nvidiactl": "",
            "dev/nvidia-uvm": "",
            "dev/nvidia-caps/nvidia-cap21": "",
            "dev/nvidia-caps-imex-channels/channel0": "",
            "dev/nvidia bad name": "",
            "dev/nvme0": "",
        }
    )
    assert nvidia.list_nodes(Tree(str(root))) == (
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-uvm",
        "/dev/nvidia0",
        "/dev/nvidiactl",
    )


def test_a_tree_without_nodes(captured):
    assert nvidia.list_nodes(Tree(str(captured({"proc/cpuinfo": ""})))) is None
