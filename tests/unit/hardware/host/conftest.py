"""Fixtures for the tests of the probe: captured trees, and a libnvidia-ml that simulates a host."""

import ctypes
import json
from pathlib import Path

import gpu_node
import pytest

HERE = Path(__file__).parent
HOSTS = HERE.parents[2] / "hosts"

X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu lm sse sse2\n\n"
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release Build  (a@b)  Tue Apr  8\n"
)


@pytest.fixture(scope="session")
def hosts():
    """The generator of the host profiles, with its nodes."""
    return gpu_node.profiles()


@pytest.fixture
def captured(tmp_path):
    """Writes a captured tree: `captured({"proc/cpuinfo": text, ...})`."""

    def write(files, root=tmp_path / "captured"):
        root.mkdir(exist_ok=True)
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                (root / path).write_bytes(content)
            else:
                (root / path).write_text(content)
        return root

    return write


@pytest.fixture
def gpu():
    """The files of a working node with a driver and one L40S at 41:00.0, minor 3."""

    def files(bus="0000:41:00.0", minor=3, excluded="No", uuid=None):
        uuid = uuid or f"GPU-{minor - 2}"
        return {
            "proc/cpuinfo": X86,
            "proc/driver/nvidia/version": OPEN,
            f"proc/driver/nvidia/gpus/{bus}/information": (
                f"Model: \t\t NVIDIA L40S\nIRQ:   \t\t 185\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
                f"Device Minor: \t {minor}\nGPU Excluded:\t {excluded}\n"
            ),
            f"sys/bus/pci/devices/{bus}/vendor": "0x10de\n",
            f"sys/bus/pci/devices/{bus}/class": "0x030200\n",
            f"sys/bus/pci/devices/{bus}/device": "0x26b9\n",
            f"dev/nvidia{minor}": "",
            "dev/nvidiactl": "",
            "dev/nvidia-uvm": "",
        }

    return files


@pytest.fixture
def dumps():
    """The folder of nvidia-smi dumps."""
    return HERE / "dumps"


@pytest.fixture
def load():
    """Reads one of the host profiles as plain JSON."""
    return lambda name: json.loads((HOSTS / f"{name}.json").read_text())


@pytest.fixture
def pynvml(nvml_stub, monkeypatch):
    """The real pynvml in this process, over the stub."""
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(nvml_stub / "libnvidia-ml.so.1")))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return pynvml
