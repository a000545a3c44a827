"""Usage of GPUs by pods of Kubernetes, as the kubelet of this node lists them.

See https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins, "Monitoring
device plugin resources".
"""

from __future__ import annotations

import os

from imagematrix.errors import EngineError, UsageError
from imagematrix.hardware.gpu_request.choice import list_mig_devices
from imagematrix.launcher.gpu_claims.usage import Consumer, list_lock_names, merge_usages
from imagematrix.launcher.kubelet import sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.common.json_documents import Fields
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.launcher.gpu_claims.usage import Usage

VRAM = "imagematrix.io/vram-gib"  # the resource of shares
CHECK = "check `systemctl status kubelet`; if this node has no kubelet any more, remove the socket"
GIB = 1024  # MiB
SHARE = "::"  # in a device id, between a UUID and the number of a share of that device
TIMEOUT_S = 20.0  # for a process that imports gRPC and queries kubelet


def find_socket() -> str:
    """Return the path of the socket at which the kubelet of this node lists its pods."""
    return sockets.locate_pods_socket(sockets.find_root_dir())


def format_denied() -> str:
    """Return the message for a user who may not ask the kubelet of this node."""
    return f"{find_socket()}: permission denied: GPU usage by pods unknown"


def check_access(socket: str | None = None) -> bool | None:
    """Return whether this user may ask the kubelet of this node; None if there is no kubelet.

    It listens at `socket`, by default at that of `find_socket`.
    """
    path = socket or find_socket()
    try:
        os.stat(path)  # noqa: PTH116 - pathlib is slow to import
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return False
    return os.access(path, os.W_OK)


def parse_uuids(devices: Iterable[str]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs and MIG devices in device ids, without duplicates.

    Ids of device plugins for other hardware are not UUIDs.
    """
    return tuple(dict.fromkeys(device.partition(SHARE)[0] for device in devices))


def compute_pod_usage(gpus: tuple[Gpu, ...], socket: str | None = None) -> Usage:
    """Return the usage of `gpus` by containers of pods that got them from any device plugin.

    The kubelet that is asked listens at `socket`, by default at that of `find_socket`. The usage is empty
    unless `check_access` returns true. Containers with imagematrix.io/vram-gib use a share.
    Raises EngineError if kubelet does not answer.
    """
    path = socket or find_socket()
    if not check_access(path):
        return {}
    by_uuid = {gpu.uuid: gpu for gpu in gpus if gpu.minor is not None}
    by_uuid |= {
        part.mig[0].uuid: part for gpu in by_uuid.values() for part in list_mig_devices(gpu) if part.mig
    }
    used_by: Usage = {}
    for devices in _query_pods(path):
        ids = devices.get_texts("ids")
        # Each id is one GiB: Kubernetes counts whole devices only.
        share = len(ids) * GIB if devices.get_text("resource") == VRAM else None
        user = Consumer(kind="container", name=devices.get_text("container"), vram_mib=share)
        for name in parse_uuids(ids):
            if name in by_uuid:
                used_by = merge_usages(used_by, dict.fromkeys(list_lock_names(by_uuid[name]), (user,)))
    return used_by


def _query_pods(path: str) -> tuple[Fields, ...]:
    """Return the devices that kubelet lists at the socket `path`, queried by a separate process.

    gRPC starts threads. They would receive the signals that a launch waits for, and a process with threads
    must not fork.
    """
    import subprocess

    from imagematrix.common.child_modules import make_child_command
    from imagematrix.common.json_documents import Fields, parse_json

    remedy = None
    command = [*make_child_command("imagematrix.launcher.gpu_claims.pods_query"), path]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
        answer = Fields(parse_json(process.stdout, "kubelet"), "kubelet")
        if (error := answer.get_text_or_none("error")) is None:
            return tuple(answer.list_objects("devices"))
        remedy = answer.get_text_or_none("remedy")
    except subprocess.TimeoutExpired:
        error = f"kubelet does not answer within {TIMEOUT_S:g} seconds"
    except (OSError, UsageError) as failure:
        error = f"the query process failed: {failure}"
    raise EngineError(f"{path}: {error}", remedy=remedy or CHECK)
