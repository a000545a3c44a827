"""A configured node with GPUs, and a container that Swarm created on it."""

import json

import pytest

from imagematrix.hardware.host.host import Cpu, Gpu, Host, MigDevice

CPU = Cpu(vendor="AuthenticAMD", model="EPYC", flags=frozenset({"avx2"}), level="x86-64-v3")


@pytest.fixture(scope="session")
def host():
    """Make a host with GPUs of this many MiB: GPU-a, GPU-b and so on, with the minors 0, 1 and so on."""

    def make(*sizes, **facts):
        gpus = [
            Gpu(
                index=index,
                minor=index,
                uuid=f"GPU-{'abcdefgh'[index]}",
                name="NVIDIA L40S",
                pci_bus_id=f"0000:{index + 1:02x}:00.0",
                compute="8.9",
                memory_mib=mib,
            )
            for index, mib in enumerate(sizes)
        ]
        return Host(arch="x86_64", cpu=CPU, gpus=tuple(gpus), **facts)

    return make


@pytest.fixture(scope="session")
def mig():
    """A GPU in MIG mode with two devices."""
    devices = tuple(
        MigDevice(
            uuid=f"MIG-{name}",
            profile="1g.10gb",
            gpu_instance=number,
            compute_instance=0,
            memory_mib=9728,
            capabilities=(30 + number, 40 + number),
        )
        for number, name in enumerate("ab", 7)
    )
    return Gpu(index=0, minor=0, uuid="GPU-m", name="NVIDIA H100", memory_mib=81559, mig=devices)


@pytest.fixture
def record(tmp_path):
    """Write the engine's record of a container below `tmp_path`, and return its id."""

    def write(*environment, managed=True, container="c1", **facts):
        folder = tmp_path / "containers" / container
        folder.mkdir(parents=True, exist_ok=True)
        config = {"Image": "training:v1", "Env": list(environment)}
        document = {"Name": "/train.1.x7", "Image": "sha256:0", "Config": config, "Managed": managed}
        (folder / "config.v2.json").write_text(json.dumps(document | facts))
        return container

    return write
