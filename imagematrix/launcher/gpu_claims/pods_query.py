"""Asks a kubelet what its pods hold, and prints the answer as one JSON object.

imagematrix.launcher.gpu_claims.pods runs this in a separate process, because gRPC starts threads.
"""

from __future__ import annotations

import json
import sys

ANSWER_S = 5.0  # less than TIMEOUT_S of `pods`, so that kubelet is blamed, and not this process


def query_kubelet(socket: str) -> dict[str, object]:
    """Return the devices of each container as "devices", or the reason why they are unknown as "error".

    A "remedy" is added if the cause is not kubelet.
    """
    try:
        import grpc

        from imagematrix.launcher.kubelet.messages import PODS, load_message, make_call
    except ModuleNotFoundError as error:
        return _describe_missing_module(error)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        list_pods = make_call(channel, f"/{PODS}/List", "ListPodResourcesResponse")
        try:
            answer = list_pods(load_message("Empty")(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            return {"error": f"kubelet does not answer: {error.details()}"}
    devices = [
        {
            "container": f"{pod.namespace}/{pod.name} ({container.name})",
            "resource": devices.resource_name,
            "ids": list(devices.device_ids),
        }
        for pod in answer.pod_resources
        for container in pod.containers
        for devices in container.devices
    ]
    return {"devices": devices}


def _describe_missing_module(error: ModuleNotFoundError) -> dict[str, object]:
    from imagematrix.common.extras import find_missing_extra, make_install_command
    from imagematrix.common.zipapp_writer import WHOLE_PACKAGE

    extra = find_missing_extra(error)
    if extra:
        return {
            "error": f"asking kubelet needs the extra [{extra}]",
            "remedy": f"install it: {make_install_command(extra)}",
        }
    # The file of `make zipapp` has no gRPC, nor extras.
    return {"error": f"cannot ask kubelet: {error.name} is not installed", "remedy": WHOLE_PACKAGE}


def main() -> None:
    """Print the answer of the kubelet at the socket that the argument names."""
    sys.stdout.write(json.dumps(query_kubelet(sys.argv[1])))
