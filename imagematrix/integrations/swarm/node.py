"""The GPUs of a node as configured, matched again with the kernel's facts at each start of a task.

UUIDs and memory were read from NVML when the node was configured. Facts that can change, which are the GPUs
that exist and their numbers, are read from the kernel when a task starts.
"""

from __future__ import annotations

from imagematrix.common.record import replace
from imagematrix.errors import ProbeError
from imagematrix.hardware.gpu_request.choice import list_mig_devices
from imagematrix.hardware.host import nvidia

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.hardware.host.tree import Tree

REMEDY = "run `imagematrix swarm node-config` on the node and restart its engine"


def list_offered_gpus(host: Host) -> tuple[Gpu, ...]:
    """Return what a node offers: its usable GPUs, or the MIG devices of those in MIG mode."""
    usable = (gpu for gpu in host.gpus if gpu.usable)
    return tuple(
        part for gpu in usable for part in (list_mig_devices(gpu) if gpu.mig is not None else (gpu,))
    )


def keep_present_gpus(host: Host, tree: Tree) -> Host:
    """Return `host`, the node as configured, with the GPUs that still exist and their current numbers.

    If the kernel does not show the driver, as in a sandbox, the GPUs stay as they were.
    """
    kernel = nvidia.read_nvidia(tree)
    by_address = {gpu.bus_id: gpu for gpu in kernel.information if gpu.bus_id}
    present = []
    for gpu in host.gpus:
        current = by_address.get(gpu.pci_bus_id or "")
        if current is None or current.excluded or current.minor is None:
            continue
        # The kernel shows a UUID once the GPU was in use. Another UUID means another card in the slot.
        if current.uuid not in (None, gpu.uuid):
            continue
        if gpu.mig is None and current.minor in kernel.mig:
            continue
        present.append(replace(gpu, minor=current.minor))
    return replace(
        host,
        driver=kernel.driver,
        gpus=nvidia.with_capabilities(tree, tuple(present) if kernel.loaded else host.gpus),
        devices=nvidia.list_nodes(tree) or host.devices,
    )


def find_gpus(gpus: Iterable[Gpu], uuids: Iterable[str]) -> tuple[Gpu, ...]:
    """Return the GPUs and MIG devices with these UUIDs; raise ProbeError if the node lacks one."""
    by_uuid = {gpu.mig[0].uuid if gpu.mig else gpu.uuid: gpu for gpu in gpus}
    missing = [uuid for uuid in uuids if uuid not in by_uuid]
    if missing:
        raise ProbeError(f"Swarm assigned {', '.join(missing)}, which this node does not have", remedy=REMEDY)
    return tuple(by_uuid[uuid] for uuid in uuids)
