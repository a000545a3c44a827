"""The GPUs of a node as it was configured, found again at each start of a task.

What the engine offers to Swarm was read once, with NVML. Starting a task takes UUIDs and memory from there,
and from the kernel what changes: which GPUs there are, and their numbers.
"""

from __future__ import annotations

from imagematrix.errors import ProbeError
from imagematrix.gpus.choice import parts
from imagematrix.node import nvidia
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.node.host import Gpu, Host
    from imagematrix.node.nvidia import Kernel
    from imagematrix.node.tree import Tree

__all__ = ["REMEDY", "named", "offered", "present"]

REMEDY = "run `imagematrix swarm node-config` on the node and restart its engine"


def offered(host: Host) -> tuple[Gpu, ...]:
    """Return what a node offers: its usable GPUs, and of those in MIG mode the MIG devices."""
    usable = (gpu for gpu in host.gpus if gpu.usable)
    return tuple(one for gpu in usable for one in (parts(gpu) if gpu.mig is not None else (gpu,)))


def present(host: Host, tree: Tree) -> Host:
    """Return `host`, the node as it was configured, with the GPUs that it still has and their numbers.

    A kernel that shows nothing of the driver, as in a sandbox, leaves the GPUs as they were.
    """
    kernel = nvidia.read(tree)
    gpus = tuple(_found(host.gpus, kernel)) if kernel.loaded else host.gpus
    return replace(
        host,
        driver=kernel.driver,
        gpus=nvidia.with_capabilities(tree, gpus),
        devices=nvidia.nodes(tree) or host.devices,
    )


def named(gpus: Iterable[Gpu], uuids: Iterable[str]) -> tuple[Gpu, ...]:
    """Return the GPUs and MIG devices with these UUIDs; raise ProbeError if the node lacks one."""
    by_uuid = {gpu.mig[0].uuid if gpu.mig else gpu.uuid: gpu for gpu in gpus}
    missing = [uuid for uuid in uuids if uuid not in by_uuid]
    if missing:
        raise ProbeError(
            f"{', '.join(missing)} was assigned by Swarm, and this node does not have it", remedy=REMEDY
        )
    return tuple(by_uuid[uuid] for uuid in uuids)


def _found(gpus: Iterable[Gpu], kernel: Kernel) -> Iterable[Gpu]:
    information = {one.bus_id: one for one in kernel.information if one.bus_id}
    for gpu in gpus:
        now = information.get(gpu.pci_bus_id or "")
        # The kernel knows a UUID once the GPU was in use: then another one is another card in its slot.
        if now is None or now.excluded or now.minor is None or now.uuid not in (None, gpu.uuid):
            continue
        if gpu.mig is None and now.minor in kernel.mig:
            continue
        yield replace(gpu, minor=now.minor)
