"""A Swarm task as its node sees it: the container that the engine created, and the assigned resources.

Any container can have the variables and the labels of a task. The engine's record of a container on disk
states whether Swarm's agent created it (`Managed`, set by CreateManagedContainer in daemon/create.go of
Moby). No request of a client can set that.
"""
# pathlib costs more to import than the file takes to read.
# ruff: noqa: PTH123

from __future__ import annotations

import json

from imagematrix.documents import natural
from imagematrix.errors import ProbeError, UsageError
from imagematrix.record import Record
from imagematrix.swarm.resources import GPU, PREFIX, VRAM, share_mib, variable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Assigned", "Task", "assigned", "read"]


class Task(Record):
    """The container of a task: its name, its image by name and by id, and its environment as "NAME=value"."""

    name: str
    image: str
    image_id: str
    environment: tuple[str, ...]


class Assigned(Record):
    """What Swarm assigned to a task: GPUs and MIG devices by UUID, or a share of one in MiB."""

    uuids: tuple[str, ...] = ()
    vram_mib: int | None = None

    def __bool__(self) -> bool:
        return bool(self.uuids or self.vram_mib)


def read(data_root: str, container: str) -> Task | None:
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
        return Task(
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


def assigned(environment: Iterable[str], image: Iterable[str]) -> Assigned:
    """Return what Swarm assigned to a task with this environment.

    `image` is the image's environment, whose variables are ignored. The last occurrence of a variable counts:
    the agent appends Swarm's variables to those of the service. Raises UsageError if several kinds of
    resources are assigned.
    """
    own = set(image)
    values = {}
    for entry in environment:
        name, _, value = entry.partition("=")
        if name.startswith(PREFIX) and entry not in own:
            values[name.removeprefix(PREFIX)] = value
    requested = [kind for kind in values if variable(kind) == variable(GPU) or _is_memory(kind)]
    if len(requested) > 1:
        raise UsageError(
            f"a task can have one kind of GPU resource, but this task has {', '.join(sorted(requested))}",
            remedy="request only one of them in the service",
        )
    for kind in requested:
        return _assigned(kind, values[kind])
    return Assigned()


def _is_memory(kind: str) -> bool:
    return kind == VRAM or share_mib(kind) is not None


def _assigned(kind: str, value: str) -> Assigned:
    if not _is_memory(kind):
        return Assigned(uuids=tuple(filter(None, value.split(","))))
    number = natural(value)
    if not number:
        raise UsageError(f"invalid {variable(kind)}: {value!r}")
    size = share_mib(kind)
    if size is None:
        return Assigned(vram_mib=number)
    if number > 1:
        raise UsageError(
            f"requested {number} shares of {kind}: they may be on different GPUs",
            remedy="request one; for more memory, let nodes offer larger shares",
        )
    return Assigned(vram_mib=size)
