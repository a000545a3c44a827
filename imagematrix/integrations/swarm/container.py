"""The container of a Swarm task: the engine's record of it, the assigned resources, and its OCI bundle.

Any container can have the variables and the labels of a task. The engine's record of a container on disk
states whether Swarm's agent created it (`Managed`, set by CreateManagedContainer in daemon/create.go of
Moby). No request of a client can set that.

The runtime turns the rules for devices in the bundle's config.json into a devices cgroup (v1) or a program in
the kernel (v2): https://github.com/opencontainers/runtime-spec/blob/main/config-linux.md#devices
"""
# pathlib costs more to import than the file takes to read.
# ruff: noqa: PTH116, PTH123

from __future__ import annotations

import json
import os
import stat

from imagematrix.common.json_documents import parse_natural
from imagematrix.common.record import Record
from imagematrix.errors import ProbeError, UsageError
from imagematrix.integrations.swarm.resources import GPU, PREFIX, VRAM, make_variable_name, parse_share_mib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

CONFIG = "config.json"
ACCESS = "rwm"  # the default of the engine's --device


class TaskContainer(Record):
    """The container of a task: its name, its image by name and by id, and its environment as "NAME=value"."""

    name: str
    image: str
    image_id: str
    environment: tuple[str, ...]


class AssignedGpus(Record):
    """What Swarm assigned to a task: GPUs and MIG devices by UUID, or a share of one in MiB."""

    uuids: tuple[str, ...] = ()
    vram_mib: int | None = None

    def __bool__(self) -> bool:
        return bool(self.uuids or self.vram_mib)


def read_task_container(data_root: str, container: str) -> TaskContainer | None:
    """Return the task that a container belongs to, None if Swarm did not create the container.

    `data_root` is the engine's. Raises ProbeError if the engine's record of the container cannot be read.
    """
    path = f"{data_root}/containers/{container}/config.v2.json"
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        config = record["Config"]
        if record.get("Managed") is not True:
            return None
        return TaskContainer(
            name=str(record["Name"]).lstrip("/"),
            image=str(config["Image"]),
            image_id=str(record["Image"]),
            environment=tuple(map(str, config.get("Env") or ())),
        )
    except OSError as error:
        raise ProbeError(
            f"the engine's record of the container cannot be read: {path}: {error.strerror}",
            remedy="after a change of the engine's data root, run `imagematrix swarm node-config` again",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProbeError(f"the engine's record of the container is malformed: {path}") from error


def parse_assigned_gpus(environment: Iterable[str], image: Iterable[str]) -> AssignedGpus:
    """Return what Swarm assigned to a task with this environment.

    `image` is the image's environment, whose variables are ignored. The last occurrence of a variable counts:
    the agent appends Swarm's variables to those of the service. Raises UsageError if several kinds of
    resources are assigned.
    """
    # An image with such a variable would get GPUs that Swarm did not assign.
    image_entries = set(image)
    values = {}
    for entry in environment:
        name, _, value = entry.partition("=")
        if name.startswith(PREFIX) and entry not in image_entries:
            values[name.removeprefix(PREFIX)] = value
    kinds = [
        kind for kind in values if make_variable_name(kind) == make_variable_name(GPU) or _is_memory(kind)
    ]
    if not kinds:
        return AssignedGpus()
    if len(kinds) > 1:
        raise UsageError(
            f"a task can have one kind of GPU resource, but this task has {', '.join(sorted(kinds))}",
            remedy="request only one of them in the service",
        )
    return _parse_assignment(kinds[0], values[kinds[0]])


def rewrite_bundle(bundle: str, devices: Iterable[str], environment: Mapping[str, str]) -> None:
    """Add device nodes of this machine, under the same paths, and variables to the bundle's config.json.

    The file is replaced atomically. Raises ProbeError if it is malformed or cannot be written, or if a device
    does not exist.
    """
    path = f"{bundle}/{CONFIG}"
    try:
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        spec = with_environment(with_devices(spec, devices), environment)
        draft = f"{path}.imagematrix"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(json.dumps(spec))  # json.dump would use the slow encoder in Python
        os.replace(draft, path)  # noqa: PTH105 - see above
    except OSError as error:
        raise ProbeError(f"{error.filename or path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProbeError(f"{path} is malformed") from error


def with_devices(spec: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return `spec` with device nodes and the rules that allow them added; existing ones stay."""
    linux = spec["linux"]
    resources = linux.get("resources") or {}
    devices, rules = list(linux.get("devices") or ()), list(resources.get("devices") or ())
    present = {device["path"] for device in devices}
    for path in paths:
        status = os.stat(path)
        kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
        numbers = {"major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
        rules.append({"allow": True, "type": kind, **numbers, "access": ACCESS})
        if path not in present:
            mode = stat.S_IMODE(status.st_mode)
            devices.append(
                {
                    "path": path,
                    "type": kind,
                    **numbers,
                    "fileMode": mode,
                    "uid": status.st_uid,
                    "gid": status.st_gid,
                }
            )
    return {**spec, "linux": {**linux, "devices": devices, "resources": {**resources, "devices": rules}}}


def with_environment(spec: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return `spec` with variables, which replace those of the same name."""
    process = spec["process"]
    kept = [entry for entry in process.get("env") or () if entry.partition("=")[0] not in environment]
    added = [f"{name}={value}" for name, value in environment.items()]
    return {**spec, "process": {**process, "env": kept + added}}


def _is_memory(kind: str) -> bool:
    return kind == VRAM or parse_share_mib(kind) is not None


def _parse_assignment(kind: str, value: str) -> AssignedGpus:
    if not _is_memory(kind):
        return AssignedGpus(uuids=tuple(filter(None, value.split(","))))
    count = parse_natural(value)
    if not count:
        raise UsageError(f"invalid {make_variable_name(kind)}: {value!r}")
    size = parse_share_mib(kind)
    if size is None:
        return AssignedGpus(vram_mib=count)
    if count > 1:
        raise UsageError(
            f"requested {count} shares of {kind}: they may be on different GPUs",
            remedy="request one; for more memory, let nodes offer larger shares",
        )
    return AssignedGpus(vram_mib=size)
