"""The GPUs of a node as CDI devices: with them, any engine passes a container what a launch passes."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.errors import ProbeError
from imagematrix.hardware.gpu_request.choice import list_mig_devices, name_mig_device
from imagematrix.integrations import cdi
from imagematrix.launcher.docker.devices import list_device_nodes
from imagematrix.launcher.gpu_claims.containers import CDI_KIND

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TypeGuard

    from imagematrix.hardware.host.host import Gpu, Host

FILE = "imagematrix.json"
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A CDI spec, the device nodes in it, and the GPUs that are not: each with the reason, as a sentence."""

    document: dict[str, Any]
    paths: tuple[str, ...]
    excluded: tuple[str, ...]


def make_gpu_spec(host: Host) -> GpuSpec:
    """Return the spec of a host's GPUs: by index and UUID, their MIG devices too, and all in one device.

    Raises ProbeError if none can be passed to a container.
    """
    devices: dict[str, tuple[str, ...]] = {}
    passable: list[Gpu] = []
    reasons = []
    for gpu in host.gpus:
        if gpu.state != "ok":
            reasons.append(f"{gpu.label} is left out: its state is {gpu.state}")
            continue
        try:
            for name, device in _list_device_names(gpu):
                devices.setdefault(name, list_device_nodes(host, [device]))
        except ProbeError as error:
            reasons.append(f"{gpu.label} is left out: {error}")
        else:
            passable.append(gpu)
    if not passable:
        raise ProbeError(
            "; ".join(["no GPU of this node can be passed to a container", *reasons]),
            remedy="run `imagematrix doctor` on the node",
        )
    paths = list_device_nodes(host, passable)
    return GpuSpec(
        document=cdi.make_spec(CDI_KIND, {**devices, ALL: paths}), paths=paths, excluded=tuple(reasons)
    )


def _list_device_names(gpu: Gpu) -> Iterator[tuple[str, Gpu]]:
    """Yield the names of a GPU and of its MIG devices, as in `--gpus`, if CDI devices can have them."""
    yield str(gpu.index), gpu
    if _is_device_name(gpu.uuid, "GPU-"):
        yield gpu.uuid, gpu
    for part in list_mig_devices(gpu):
        (device,) = part.mig or ()
        yield name_mig_device(gpu, device), part
        if _is_device_name(device.uuid, "MIG-"):
            yield device.uuid, part


def _is_device_name(uuid: str | None, prefix: str) -> TypeGuard[str]:
    return uuid is not None and uuid.startswith(prefix) and cdi.NAME.fullmatch(uuid) is not None
