"""A machine with NVIDIA GPUs, simulated at its lowest level: files of the kernel, device nodes, libraries.

It is a mount namespace: only its processes see the driver in /proc, GPUs on the PCI bus and nodes in /dev. In
their LD_LIBRARY_PATH are an NVML, and a libcuda that runs kernels on the CPU; in their PATH are an nvidia-smi
and an nvcc.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

DOUBLES = Path(__file__).parent
ROOT = DOUBLES.parents[1]
# Devices that simulate GPUs, by their names in /proc/misc: all users may open them, and no container has them
# unless they are passed in. There are several because podman identifies a device by its number.
GPUS = ("fuse", "loop-control", "tun", "btrfs-control", "autofs", "kvm", "userfaultfd", "vsock")
MISC = 10  # their major number
CONTROL = {"nvidiactl": "null", "nvidia-uvm": "zero", "nvidia-uvm-tools": "full", "nvidia-modeset": "urandom"}

MOUNT = """\
set -eu
own=$1; shift
mount -t tmpfs -o mode=755 dev "$own/dev"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/ptmx \
    /dev/fd /dev/stdin /dev/stdout /dev/stderr "$own/dev"
mkdir "$own/dev/pts" "$own/dev/shm" "$own/dev/nvidia-caps"
mount --rbind /dev/pts "$own/dev/pts"
mount --bind /dev/shm "$own/dev/shm"
while read -r name major minor; do mknod -m 666 "$own/dev/$name" c "$major" "$minor"; done < "$own/nodes"
mount --rbind "$own/dev" /dev
[ -e "$own/sandboxed" ] || {
    mount --bind "$own/proc/driver" /proc/driver
    mount --bind "$own/pci" /proc/bus/pci/devices
    mount --bind "$own/sys/bus/pci/devices" /sys/bus/pci/devices
}
exec "$@"
"""
NVCC = """\
#!/bin/sh
# There is no GPU to run a cubin, so this compiles none.
case "$*" in
    --version) echo "Cuda compilation tools, release 12.4, V12.4.131" ;;
    *) while [ "$1" != -o ]; do shift; done; printf '\\177ELF' > "$2" ;;
esac
"""


class GpuNode:
    """The node `name` of the profiles in the module `hosts`, laid out in `folder`.

    If it is `sandboxed`, its kernel shows neither the driver nor the PCI bus.
    """

    def __init__(self, folder: Path, name: str, hosts: Any, *, sandboxed: bool = False) -> None:
        self.folder = folder
        node, answer = hosts.NODES[name], hosts.answer(name)
        hosts.capture(folder, name)
        capabilities = [f"nvidia-caps/{path.name}" for path in (folder / "dev/nvidia-caps").glob("*")]
        shutil.rmtree(folder / "dev")
        (folder / "dev").mkdir()
        gpus = cycle(_registered() or [_number("null")])
        nodes = {f"nvidia{card.minor}": device for card, device in zip(node.cards, gpus, strict=False)}
        nodes |= {name: _number(device) for name, device in CONTROL.items()}
        nodes |= dict.fromkeys(capabilities, _number("random"))
        (folder / "nodes").write_text("".join(f"{name} {number}\n" for name, number in nodes.items()))
        (folder / "pci").write_text("".join(map(pci_line, answer.gpus)))
        _libraries(folder / "lib", node.version, hosts.PRODUCTS[node.cards[0].product])
        _programs(folder / "bin")
        if sandboxed:
            (folder / "sandboxed").touch()
        self.libcuda = folder / "lib" / f"libcuda.so.{node.version}"
        # The words that start a command on it, in a mount namespace of its own.
        self.inside = ["sh", "-c", MOUNT, "gpu-node", str(folder)]
        self.environment = {
            **os.environ,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{folder}/lib",
            "STUB_DRIVER": node.version,
            "STUB_GPUS": ";".join(map(_information, answer.gpus)),
        }


def profiles() -> Any:
    """Return the generator of the host profiles, with its nodes."""
    name = "tests_hosts_generate"
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests/hosts/generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _registered():
    """Return the minors of those of GPUS that this kernel has, whether /dev has them or not."""
    listed = dict(line.split()[::-1] for line in Path("/proc/misc").read_text().splitlines())
    return [f"{MISC} {listed[name]}" for name in GPUS if name in listed]


def _number(name):
    number = (Path("/dev") / name).stat().st_rdev
    return f"{os.major(number)} {os.minor(number)}"


def pci_line(gpu):
    """Return the line of a GPU in /proc/bus/pci/devices."""
    _, bus, rest = gpu.bus_id.split(":")
    device, _, function = rest.partition(".")
    place = f"{bus}{int(device, 16) << 3 | int(function):02x}"
    return "\t".join([place, f"10de{gpu.device_id}", *["0"] * 15, "nvidia"]) + "\n"


def _information(gpu):
    parts = (
        f"{one.gpu_instance}:{one.compute_instance}:{one.memory_mib}:{one.profile}" for one in gpu.mig or ()
    )
    mig = f",mig=1,migs={'/'.join(parts)}" if gpu.mig else ""
    return (
        f"bus={gpu.bus_id},dev={gpu.device_id},uuid={gpu.uuid},minor={gpu.minor},name={gpu.name},"
        f"cc={gpu.compute},mib={gpu.memory_mib},used=4,kept=600,procs=open,each=512"
        f"{mig}"
    )


def _libraries(folder, version, product):
    folder.mkdir()
    major, _, minor = product.compute.partition(".")
    definitions = [f'-DDEVICE="{product.name}"', f"-DMAJOR={major}", f"-DMINOR={minor}", "-DNODES"]
    common = ["-O2", "-shared", "-fPIC", "-static-libgcc", "-o"]
    cuda, nvml = folder / f"libcuda.so.{version}", folder / f"libnvidia-ml.so.{version}"
    cxx = ["g++", "-std=c++17", "-static-libstdc++", f"-I{ROOT}/templates/training", *definitions]
    subprocess.run([*cxx, *common, cuda, DOUBLES / "fake_cuda.cpp"], check=True)
    subprocess.run(
        ["gcc", "-Wl,-soname,libnvidia-ml.so.1", *common, nvml, DOUBLES / "nvml_stub.c"], check=True
    )
    for library in (cuda, nvml):
        library.with_name(f"{library.name.removesuffix(version)}1").symlink_to(library.name)


def _programs(folder):
    folder.mkdir()
    smi = f"#!{sys.executable}\n{(DOUBLES / 'nvidia_smi.py').read_text()}"
    for name, text in (("nvidia-smi", smi), ("nvcc", NVCC)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
