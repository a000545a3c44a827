"""The Host that labels of Node Feature Discovery and of NVIDIA's GPU feature discovery describe.

Sources: https://kubernetes-sigs.github.io/node-feature-discovery, and internal/lm of
https://github.com/NVIDIA/k8s-device-plugin. The labels do not contain the kind of the kernel modules, a GPU's
PCI device id, brand and state, or whether a node has GPUs of several models.
"""

from __future__ import annotations

import re

from imagematrix.common.json_documents import parse_natural
from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host, get_machine_name
from imagematrix.hardware.vendors import gpus as products
from imagematrix.hardware.vendors import marches, versions
from imagematrix.integrations.kubernetes.nodes import cpuid
from imagematrix.integrations.kubernetes.nodes import labels as our_labels
from imagematrix.integrations.kubernetes.nodes.host_from_our_labels import GPUS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ARCH, SYSTEM = "kubernetes.io/arch", "kubernetes.io/os"
CPUID = "feature.node.kubernetes.io/cpu-cpuid."
VENDOR = "feature.node.kubernetes.io/cpu-model.vendor_id"
# NFD names functions by class and vendor: here those of `accelerator_hints.VENDORS`.
PCI = re.compile(r"feature\.node\.kubernetes\.io/pci-(?:\w+_)?(10de|1002|1da3)(?:_.*)?\.present", re.ASCII)
PRODUCT, GPU_COUNT = "nvidia.com/gpu.product", "nvidia.com/gpu.count"
MEMORY, REPLICAS = "nvidia.com/gpu.memory", "nvidia.com/gpu.replicas"
MAJOR, MINOR = "nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor"
DRIVER_FULL = "nvidia.com/cuda.driver-version.full"
DRIVER_MAJOR = "nvidia.com/cuda.driver-version.major"
DRIVER_MINOR = "nvidia.com/cuda.driver-version.minor"
DRIVER_REVISION = "nvidia.com/cuda.driver-version.revision"
# The same in earlier releases of GPU feature discovery.
OLD_DRIVER = ("nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev")
STRATEGY, MIXED = "nvidia.com/mig.strategy", "mixed"
VGPU = "nvidia.com/vgpu.present"
RESOURCE = "nvidia.com/gpu"
ACCELERATORS = (
    *(our_labels.PREFIX, "nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu", "gpu.intel.com/", "habana.ai/"),
    "aws.amazon.com/neuron",
)
# NFD's words for the vendor_id of /proc/cpuinfo.
VENDORS = {"Intel": "GenuineIntel", "AMD": "AuthenticAMD", "Hygon": "HygonGenuine"}
MIG = re.compile(r"-MIG-(?:\d+c\.)?\d+g\.\d+gb.*|-MIG-INVALID", re.ASCII)
SHARED = "-SHARED"
UNDESCRIBED = "no label describes it"
SOURCE = "labels of NVIDIA's GPU feature discovery"


def read_nfd_labels(labels: Mapping[str, str], architecture: str | None, capacity: Mapping[str, str]) -> Host:
    """Return the Host of a node with these labels.

    `architecture` and `capacity` are those of the node's status. The architecture is used if no label has it;
    the capacity shows GPUs that no label describes.
    """
    arch = get_machine_name(labels.get(ARCH) or architecture or "")
    shown = [
        key.removeprefix(CPUID) for key, value in labels.items() if key.startswith(CPUID) and value == "true"
    ]
    flags = cpuid.expand_flags(shown, arch)
    warnings = [] if arch else ["CPU architecture unknown"]
    if not flags:
        warnings.append("CPU flags unknown: no labels of Node Feature Discovery or of imagematrix found")
    elif arch == "x86_64":
        level = marches.get_level(flags) or "none"
        warnings.append(
            f"CPU flags that Node Feature Discovery hides are inferred from the psABI level, {level}"
        )
    gpus, gpu_warnings = _read_gpus(labels, capacity)
    return Host(
        arch=arch or our_labels.UNKNOWN,
        cpu=Cpu(
            vendor=VENDORS.get(labels.get(VENDOR, "")),
            model=None,
            flags=flags,
            level=marches.get_level(flags) if arch == "x86_64" else None,
        ),
        driver=_read_driver(labels),
        gpus=gpus,
        accelerators=() if gpus else tuple(_find_accelerators(labels, capacity)),
        warnings=(*warnings, *gpu_warnings),
    )


def _read_driver(labels: Mapping[str, str]) -> Driver | None:
    parts = [labels.get(key) for key in (DRIVER_MAJOR, DRIVER_MINOR, DRIVER_REVISION)]
    if not parts[0]:
        parts = [labels.get(key) for key in OLD_DRIVER]
    version = labels.get(DRIVER_FULL) or ".".join(filter(None, parts))
    if not versions.DRIVER.fullmatch(version):
        return None
    return Driver(version=version, kind=None, source=SOURCE)


def _read_gpus(
    labels: Mapping[str, str], capacity: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs, and warnings about what the labels do not show of them."""
    product = labels.get(PRODUCT)
    if product is None:
        return (), ()
    mig = MIG.search(product)
    # The discovery appends to the product's name how its GPUs are shared.
    name = MIG.sub("", product.removesuffix(SHARED))
    count = min(parse_natural(labels.get(GPU_COUNT, "")) or 0, GPUS)  # a label may state any number
    if not count:
        warning = f"label {GPU_COUNT} missing or invalid: the number of GPUs is unknown"
        return (Gpu(index=0, state="unconfirmed"),), (warning,)
    warnings = []
    if mig:
        warnings.append("the number of GPUs is unknown: their labels count MIG devices")
        count = 1
    elif STRATEGY in labels:
        warnings.append("labels do not show which GPUs are in MIG mode")
    major, minor = labels.get(MAJOR, ""), labels.get(MINOR, "")
    compute = f"{major}.{minor}"
    valid = versions.CAPABILITY.fullmatch(compute) is not None
    if not valid:
        warnings.append("compute capability unknown: no labels nvidia.com/gpu.compute.* found")
    if _read_driver(labels) is None:
        warnings.append("driver version unknown: no labels nvidia.com/cuda.driver-version.* found")
    virtual = products.is_vgpu(name) or labels.get(VGPU) == "true"
    gpus = [
        Gpu(
            index=index,
            name=our_labels.restore_spaces(name),
            compute=compute if valid else None,
            brand=products.get_brand(our_labels.restore_spaces(name)),
            # In MIG mode, the label has the memory of the MIG devices.
            memory_mib=None if labels.get(STRATEGY) == MIXED else parse_natural(labels.get(MEMORY, "")),
            mig=() if mig else None,  # in MIG mode, with devices that no label describes
            state="vgpu" if virtual else "ok",
        )
        for index in range(count)
    ]
    shares = max(1, parse_natural(labels.get(REPLICAS, "")) or 1)
    further = (
        0 if mig else min(parse_natural(capacity.get(RESOURCE, "")) or 0, GPUS * shares) // shares - count
    )
    if further > 0:
        warnings.append(f"{further} GPUs are of models that no label describes")
    gpus += [Gpu(index=index, state="unconfirmed") for index in range(count, count + further)]
    return tuple(gpus), tuple(warnings)


def _find_accelerators(labels: Mapping[str, str], capacity: Mapping[str, str]) -> Iterator[Accelerator]:
    """Yield the signs of accelerators on a node that has no label describing a GPU."""
    for key in sorted(labels):
        if PCI.fullmatch(key) and labels[key] == "true":
            yield Accelerator(kind="label", where=key, why=UNDESCRIBED)
    yield from list_accelerator_resources(capacity)


def list_accelerator_resources(capacity: Mapping[str, str]) -> Iterator[Accelerator]:
    """Yield the resources in a node's capacity that are accelerators, for a node without a known GPU."""
    for resource in sorted(capacity):
        if resource.startswith(ACCELERATORS) and capacity[resource] != "0":
            yield Accelerator(kind="device", where=resource, why=UNDESCRIBED)
