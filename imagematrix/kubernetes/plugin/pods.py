"""What pods hold of a node's GPUs, as kubelet's pod resources API lists it.

See https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins, "Monitoring
device plugin resources".
"""

from __future__ import annotations

from imagematrix.allocation.usage import Consumer, combined, keys
from imagematrix.errors import EngineError
from imagematrix.kubernetes.plugin import kubelet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.allocation.usage import Usage
    from imagematrix.node.host import Host

__all__ = ["SOCKET", "usage"]

SOCKET = kubelet.FOLDER / kubelet.POD_RESOURCES / kubelet.SOCKET
ANSWER_S = 5.0


def usage(host: Host, socket: Path = SOCKET) -> Usage:
    """Return the usage of a host's GPUs by the containers of pods, which have them from any device plugin.

    Containers with imagematrix.io/vram-gib use a share. Raises EngineError if kubelet does not answer.
    """
    import grpc

    from imagematrix.kubernetes.plugin.messages import PODS, call, message
    from imagematrix.kubernetes.plugin.offer import GIB, VRAM, held, offer

    there = offer(host)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        ask = call(channel, f"/{PODS}/List", "ListPodResourcesResponse")
        try:
            answer = ask(message("Empty")(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            raise EngineError(f"{socket}: kubelet does not answer: {error.details()}") from error
    found: Usage = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                share = len(devices.device_ids) * GIB if devices.resource_name == VRAM else None
                name = f"{pod.namespace}/{pod.name} ({container.name})"
                user = Consumer(kind="container", name=name, vram_mib=share)
                for unit in held(there, devices.device_ids):
                    found = combined(found, dict.fromkeys(keys(there.units[unit]), (user,)))
    return found
