"""Which of a host's GPUs a container gets: the value of `--gpus`, applied to a host."""

from __future__ import annotations

from imagematrix.common.json_documents import parse_natural
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.choice import Choice, list_mig_devices, merge_gpus, name_mig_device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.hardware.host.host import Gpu

    # What `--gpus` takes, or GPUs: as objects of the host, or by their indices or names.
    Wanted = int | str | Sequence[Gpu | int | str] | None

NONE = "none"  # requests no GPU
ALL = "all"
GPUS_VARIABLE = "IMAGEMATRIX_GPUS"  # in containers that a scheduler starts: the `name_gpus` of their GPUs


def select_gpus(gpus: tuple[Gpu, ...], wanted: Wanted) -> tuple[Gpu, ...]:
    """Return those of `gpus` that `wanted` names, in their order: the first of `find_candidates`."""
    if wanted is None:  # the usual case if many hosts are decided on
        return gpus
    return find_candidates(gpus, wanted).first


def find_candidates(gpus: tuple[Gpu, ...], wanted: Wanted) -> Choice:
    """Return those of `gpus` that can serve `wanted`, in the order of `gpus`, and how many it needs.

    `wanted` is "all" (or None), "none", a count ("2": any two that work), or names joined by commas: an
    index, the start of a UUID, or a MIG device by its UUID or as GPU:INSTANCE:COMPUTE-INSTANCE. A single
    index is written "device=0", as for docker. If only some MIG devices of a GPU are named, its `mig` has
    only these. Instead of names there may be conditions ("memory>=40G", see the module `conditions`), alone
    or with a count: GPUs that work and meet all of them. A list has GPUs of the host, or their names:
    [0] is GPU 0, and an empty one is an error, since only the word "none" says that no GPU is wanted.

    A MIG profile ("1g.10gb") means any MIG device of that profile. With a profile, or a condition on it, each
    MIG device is a separate candidate. Raises UsageError if `gpus` cannot serve it.
    """
    if wanted is None or wanted == ALL:
        return Choice(gpus=gpus, count=len(gpus))
    if isinstance(wanted, list | tuple):
        if not wanted:
            raise UsageError(
                "the list of GPUs is empty",
                remedy='give "none" to use no GPU, or None to use all of the host',
            )
        return _require_all(gpus, (_find_item(gpus, item) for item in wanted))
    if not isinstance(wanted, str) and not _is_number(wanted):
        raise UsageError(
            f"invalid GPUs {wanted!r:.80}",
            remedy='give a count, text such as "device=0", or a list of GPUs of the host',
        )
    wanted = str(wanted)
    if wanted == NONE:
        return Choice(gpus=(), count=0)
    count = parse_natural(wanted)
    if count is not None:
        return _choose_any(gpus, count)
    words = [word.strip() for word in wanted.removeprefix("device=").split(",")]
    if not wanted.startswith("device=") and any(char in wanted for char in "<>=."):
        return _filter_gpus(gpus, wanted, words)
    return _require_all(gpus, (_find(gpus, name) for name in words))


def name_gpus(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Return a name for each of `gpus`, or for its MIG devices: the UUID, or numbers if it is unknown."""
    # UUIDs first: CUDA, NVIDIA's runtime and NVML count GPUs in different ways.
    identifiers: list[str] = []
    for gpu in gpus:
        if gpu.mig:
            identifiers.extend(device.uuid or name_mig_device(gpu, device) for device in gpu.mig)
        else:
            identifiers.append(gpu.uuid or str(gpu.index))
    return tuple(identifiers)


def make_exact_spec(gpus: Iterable[Gpu]) -> str:
    """Return the `--gpus` value that names `gpus`, or in MIG mode the MIG devices in their `mig`."""
    return f"device={','.join(name_gpus(gpus))}"


def make_spec(gpus: Iterable[Gpu]) -> str:
    """Return the shortest `--gpus` value for exactly `gpus`, by index."""
    indices = [str(gpu.index) for gpu in gpus]
    return ",".join(indices) if len(indices) > 1 else f"device={indices[0]}"


def _find_item(gpus: tuple[Gpu, ...], item: Gpu | int | str) -> Gpu:
    """Return the GPU of the host that an item of a list is or names."""
    from imagematrix.hardware.host.host import Gpu

    if isinstance(item, str) or _is_number(item):
        return _find(gpus, str(item))
    if not isinstance(item, Gpu):
        raise UsageError(f"{item!r:.80} is not a GPU", remedy="list GPUs of the host, their indices or UUIDs")
    # It may have only some of the MIG devices of a GPU.
    devices = item.mig or ()
    wholes = [gpu for gpu in gpus if devices and {*devices} <= {*(gpu.mig or ())}]
    if item not in (*gpus, *(replace(gpu, mig=devices) for gpu in wholes)):
        raise UsageError(
            f"{item.label} is not one of these GPUs, but another host's, or from another probe",
            remedy=_describe_present(gpus),
        )
    return item


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_all(gpus: tuple[Gpu, ...], requested: Iterable[Gpu]) -> Choice:
    """Return all of the GPUs `requested`, in the order of `gpus`."""
    by_index = {gpu.index: gpu for gpu in merge_gpus(requested)}
    ordered = tuple(by_index[gpu.index] for gpu in gpus if gpu.index in by_index)
    return Choice(gpus=ordered, count=len(by_index))


def _choose_any(gpus: tuple[Gpu, ...], count: int) -> Choice:
    if count == 0:
        raise UsageError(
            "0 GPUs wanted: the count must be at least 1",
            remedy='write "none" for no GPU, or "device=0" for GPU 0',
        )
    usable = _select_usable(gpus)
    if count > len(usable):
        from imagematrix.common.text import format_count

        raise UsageError(
            f"{format_count(count, 'GPU')} wanted: {len(usable)} of the host's {len(gpus)} GPUs are usable"
        )
    return Choice(gpus=usable, count=count)


def _filter_gpus(gpus: tuple[Gpu, ...], wanted: str, words: list[str]) -> Choice:
    from imagematrix.hardware.gpu_request.conditions import is_profile, parse_condition

    if is_profile(wanted):
        words = ["1", f"profile={wanted}"]
    counts = [count for word in words if (count := parse_natural(word)) is not None]
    conditions = [parse_condition(word) for word in words if parse_natural(word) is None and word != ALL]
    if len(words) - len(conditions) > 1:
        raise UsageError(
            f"GPUs {wanted}: conditions can be combined with one count only",
            remedy="use conditions with a count, or names of GPUs, but not both",
        )
    profiled = any(condition.fact == "profile" for condition in conditions)
    devices = tuple(part for gpu in gpus for part in list_mig_devices(gpu)) if profiled else gpus
    matching = tuple(
        gpu for gpu in _select_usable(devices) if all(condition.is_met(gpu) for condition in conditions)
    )
    count = counts[0] if counts else len(matching)
    if not 0 < count <= len(matching):
        noun = "MIG devices" if profiled else "GPUs"
        raise UsageError(
            f"GPUs {wanted}: {len(matching)} of {len(devices)} {noun} are usable and match",
            remedy=_describe_profiles(devices) if profiled else _describe_kinds(gpus),
        )
    return Choice(gpus=matching, count=count)


def _select_usable(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in gpus if gpu.usable)


def _find(gpus: tuple[Gpu, ...], name: str) -> Gpu:
    matches = [match for gpu in gpus for match in _list_matches(gpu, name)]
    if not matches:
        raise UsageError(f"GPU {name!r} not found on this host", remedy=_describe_present(gpus))
    if len(matches) > 1:
        raise UsageError(
            f"GPU {name!r} is ambiguous: several UUIDs begin with it", remedy=_describe_present(gpus)
        )
    return matches[0]


def _list_matches(gpu: Gpu, name: str) -> list[Gpu]:
    """Return the GPU, or those of its MIG devices that have the name; of a UUID, its beginning is enough."""
    if name in (str(gpu.index), gpu.uuid):
        return [gpu]
    if name.startswith("GPU-"):
        return [gpu] if (gpu.uuid or "").startswith(name) else []
    return [
        replace(gpu, mig=(device,))
        for device in gpu.mig or ()
        if (name.startswith("MIG-") and (device.uuid or "").startswith(name))
        or name == name_mig_device(gpu, device)
    ]


def _describe_kinds(gpus: tuple[Gpu, ...]) -> str:
    kinds = [
        f"{gpu.name or 'unknown'}, compute {gpu.compute or 'unknown'}, {gpu.memory_mib or 'unknown'} MiB"
        for gpu in gpus
    ]
    return f"it has {_tally(kinds)}" if kinds else "it has no GPU"


def _describe_profiles(devices: tuple[Gpu, ...]) -> str:
    profiles = [device.profile or "unknown" for gpu in devices for device in gpu.mig or ()]
    return f"it has {_tally(profiles)}" if profiles else "it has no MIG device, or NVML does not report any"


def _tally(words: list[str]) -> str:
    return "; ".join(f"{words.count(word)} x {word}" for word in dict.fromkeys(words))


def _describe_present(gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "it has no GPU"
    names = (f"{gpu.label}: {', '.join(name_gpus([gpu]))}" for gpu in gpus)
    return f"it has {'; '.join(names)}"
