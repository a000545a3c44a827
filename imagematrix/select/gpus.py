"""Which of a host's GPUs a container gets: what `--gpus` says, applied to a host."""

from __future__ import annotations

from imagematrix.errors import UsageError
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.probe.host import Gpu, Host, MigDevice

__all__ = ["among", "choose", "names", "spec"]


def choose(host: Host, wanted: int | str | None) -> tuple[Gpu, ...]:
    """Return the GPUs of `host` that `wanted` names; see `among`."""
    return among(host.gpus, wanted)


def among(gpus: tuple[Gpu, ...], wanted: int | str | None) -> tuple[Gpu, ...]:
    """Return those of `gpus` that `wanted` names, in their own order; raise UsageError where one isn't there.

    `wanted` is "all" (or None), "none", a count ("2": the first two that work), or names joined by commas:
    an index, the start of a UUID, or a MIG device by its UUID or as GPU:INSTANCE:COMPUTE-INSTANCE. A single
    index is written "device=0", as for docker. A GPU of which only some MIG devices are named is returned
    with these alone in its `mig`.
    """
    if wanted is None or wanted == "all":
        return gpus
    wanted = str(wanted)
    if wanted == "none":
        return ()
    if _number(wanted):
        return _first(gpus, int(wanted))
    picked: dict[int, Gpu] = {}
    for name in wanted.removeprefix("device=").split(","):
        gpu = _find(gpus, name.strip())
        picked[gpu.index] = _joined(picked.get(gpu.index, gpu), gpu)
    return tuple(picked[gpu.index] for gpu in gpus if gpu.index in picked)


def names(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Return a name for each of `gpus`, or for its MIG devices: the UUID, or a number where it is unknown."""
    found: list[str] = []
    for gpu in gpus:
        if gpu.mig:
            found.extend(device.uuid or _instance(gpu, device) for device in gpu.mig)
        else:
            found.append(gpu.uuid or str(gpu.index))
    return tuple(found)


def spec(gpus: Iterable[Gpu]) -> str:
    """Return what to write after `--gpus` for exactly `gpus`."""
    indices = [str(gpu.index) for gpu in gpus]
    return ",".join(indices) if len(indices) > 1 else f"device={indices[0]}"


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _first(gpus: tuple[Gpu, ...], count: int) -> tuple[Gpu, ...]:
    if count == 0:
        raise UsageError("--gpus 0 asks for no GPU", remedy="write --gpus none, or --gpus device=0 for GPU 0")
    usable = tuple(gpu for gpu in gpus if gpu.state == "ok")
    if count > len(usable):
        raise UsageError(f"--gpus {count}: the host has {len(gpus)} GPUs, of which {len(usable)} can be used")
    return usable[:count]


def _find(gpus: tuple[Gpu, ...], name: str) -> Gpu:
    found = [match for gpu in gpus for match in _matches(gpu, name)]
    if not found:
        raise UsageError(f"--gpus: the host has no {name!r}", remedy=_there(gpus))
    if len(found) > 1:
        raise UsageError(f"--gpus: {name!r} is the start of several UUIDs", remedy=_there(gpus))
    return found[0]


def _matches(gpu: Gpu, name: str) -> list[Gpu]:
    if name in (str(gpu.index), gpu.uuid):
        return [gpu]
    if name.startswith("GPU-"):
        return [gpu] if (gpu.uuid or "").startswith(name) else []
    return [replace(gpu, mig=(device,)) for device in gpu.mig or () if _is_mig(gpu, device, name)]


def _is_mig(gpu: Gpu, device: MigDevice, name: str) -> bool:
    by_uuid = name.startswith("MIG-") and (device.uuid or "").startswith(name)
    return by_uuid or name == _instance(gpu, device)


def _instance(gpu: Gpu, device: MigDevice) -> str:
    return f"{gpu.index}:{device.gpu_instance}:{device.compute_instance}"


def _joined(one: Gpu, other: Gpu) -> Gpu:
    if one.mig is None or other.mig is None:
        return one
    return replace(one, mig=tuple(dict.fromkeys(one.mig + other.mig)))


def _there(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "it has no GPU"
    listed = (f"{gpu.label}: {', '.join(names([gpu]))}" for gpu in gpus)
    return f"it has {'; '.join(listed)}"
