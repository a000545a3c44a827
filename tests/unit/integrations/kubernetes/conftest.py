"""Nodes as a cluster lists them, with the labels that Node Feature Discovery and NVIDIA would give them."""

from __future__ import annotations

import pytest

from imagematrix.hardware.host.host import Host
from imagematrix.hardware.vendors import gpus, versions
from imagematrix.integrations.kubernetes.nodes import cpuid, host_from_nfd_labels
from imagematrix.integrations.kubernetes.nodes.labels import make_label_value, make_labels
from imagematrix.selection import drivers
from imagematrix.selection.selection_target import ARCHITECTURES, Target


class Cluster:
    """Makes Node objects."""

    @staticmethod
    def arch(host):
        return ARCHITECTURES.get(host.arch, host.arch)

    @classmethod
    def node(cls, name, labels, *, arch="amd64", **capacity):
        return {
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/arch": arch, **labels}},
            "status": {
                "nodeInfo": {"architecture": arch},
                "capacity": {key.replace("_", "/"): str(value) for key, value in capacity.items()},
            },
        }

    @classmethod
    def own(cls, host):
        """Return the labels of a node with our own."""
        return {"kubernetes.io/arch": cls.arch(host), "kubernetes.io/os": "linux", **make_labels(host)}

    @classmethod
    def foreign(cls, host):
        """Return the labels that NFD and GFD, as they come, give a node with GPUs of one model."""
        labels = {"kubernetes.io/arch": cls.arch(host)}
        names = cpuid.get_nfd_names(host.arch)
        labels |= {
            f"{host_from_nfd_labels.CPUID}{names[flag]}": "true" for flag in host.cpu.flags & names.keys()
        }
        vendors = {value: name for name, value in host_from_nfd_labels.VENDORS.items()}
        if host.cpu.vendor in vendors:
            labels[host_from_nfd_labels.VENDOR] = vendors[host.cpu.vendor]
        driver = host.driver
        seen = [gpu for gpu in host.gpus if driver and cls.listed(host, gpu)]
        if not seen or versions.is_tegra(driver.version):
            return labels
        parts = (*driver.version.split("."), "")[:3]
        keys = (
            host_from_nfd_labels.DRIVER_MAJOR,
            host_from_nfd_labels.DRIVER_MINOR,
            host_from_nfd_labels.DRIVER_REVISION,
        )
        labels |= dict(zip(keys, parts, strict=True)) | {host_from_nfd_labels.DRIVER_FULL: driver.version}
        gpu = seen[0]
        labels |= {
            host_from_nfd_labels.PRODUCT: make_label_value(gpu.name or "unknown"),
            host_from_nfd_labels.GPU_COUNT: str(len(seen)),
            host_from_nfd_labels.MEMORY: str(gpu.memory_mib or 0),
            host_from_nfd_labels.VGPU: str(gpu.state == "vgpu").lower(),
        }
        if any(one.mig is not None for one in seen):
            labels[host_from_nfd_labels.STRATEGY] = host_from_nfd_labels.MIXED
        if gpu.compute:
            major, minor = gpu.compute.split(".")
            labels |= {host_from_nfd_labels.MAJOR: major, host_from_nfd_labels.MINOR: minor}
        return labels

    @staticmethod
    def listed(host, gpu):
        """Whether NVML lists a GPU: the modules drive it, and have the version of the user-mode driver."""
        return (
            gpu.usable
            and not host.driver.user_mode_differs
            and gpus.is_supported(host.driver.kind, gpu.compute)
            and not drivers.find_gpus_dropped_by(Target(host=host, gpus=(gpu,)), host.driver.version)
        )


@pytest.fixture(scope="session")
def cluster():
    return Cluster()


@pytest.fixture(scope="session")
def hosts(profiles):
    """The host profiles by name."""
    return {name: Host.load(path) for name, path in profiles.items()}


@pytest.fixture(scope="session")
def host(hosts):
    """A node with eight H200."""
    return hosts["genoa-h200"]
