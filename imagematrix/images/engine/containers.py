"""The engine's containers, and the only reader of what `docker inspect` tells of one."""

from __future__ import annotations

import contextlib
import time

from imagematrix.common.record import Record
from imagematrix.errors import EngineError
from imagematrix.hardware.vendors import runtime
from imagematrix.images.engine import images, system
from imagematrix.images.engine.transport import OK, connect, make_filters, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.images.engine.transport import EngineResponse, Transport

    LeaseCheck = Callable[[Mapping[str, str]], bool]

YOUNG_S = 60  # from the creation of a container to its start, which usually follows at once
START_S, EACH_S = 30, 1  # timeout for all starts, and the least for each: NVIDIA's runtime wakes GPUs
LAUNCH, TASK = "io.imagematrix.selected", "com.docker.swarm.task.id"  # labels of launches, and of Swarm


class PassedDevices(Record):
    """How a container comes to devices.

    `paths` are the node's device nodes, or folders of them, that are passed to it; `cgroup_rules` let it open
    others. `requested` are names by which NVIDIA's runtime, or the engine through CDI, knows GPUs.
    """

    paths: tuple[str, ...] = ()
    cgroup_rules: tuple[str, ...] = ()
    requested: tuple[str, ...] = ()


class ContainerMount(Record):
    """Files at `target` in a container; they are those at `source` on the node, None if it has none there."""

    target: str
    source: str | None


class RunningContainer(Record):
    """A container that runs or is being started.

    `labels` are those of its launch, without the image's. `image` is the image's name, None if unknown, and
    `cgroup_parent` the cgroup that its launch named, if any.
    """

    container_id: str
    name: str
    image: str | None
    devices: PassedDevices
    labels: Mapping[str, str] = {}
    mounts: tuple[ContainerMount, ...] = ()
    cgroup_parent: str = ""


def list_ids(transport: Transport | None = None) -> frozenset[str]:
    """Return the ids of all containers of the engine, running or not; raise EngineError."""
    with connect(transport) as engine:
        listed = engine.get("/containers/json?all=1").expect(list)
    return frozenset(str(entry["Id"]) for entry in listed)


def list_images_in_use(transport: Transport | None = None) -> dict[str, str]:
    """Return the ids, digests and names of the images of all containers, running or not.

    Each has the name of a container that uses it. Raises EngineError.
    """
    with connect(transport) as engine:
        listed = engine.get("/containers/json?all=1").expect(list)
    used: dict[str, str] = {}
    for entry in listed:
        container = str((entry.get("Names") or [entry["Id"]])[0]).lstrip("/")
        described = entry.get("ImageManifestDescriptor") or {}
        for key in (entry.get("ImageID"), entry.get("Image"), described.get("digest")):
            used.setdefault(str(key), container)
    return used


def list_labelled(label: str, transport: Transport | None = None) -> dict[str, str]:
    """Return the names of all containers with a label, NAME=VALUE, by their ids; raise EngineError."""
    with connect(transport) as engine:
        listed = engine.get(f"/containers/json?all=1&{make_filters(label=[label])}").expect(list)
    return {str(entry["Id"]): str((entry.get("Names") or [""])[0]).lstrip("/") for entry in listed}


def list_running(transport: Transport | None = None) -> list[RunningContainer]:
    """Return the running containers; raise EngineError.

    Containers that end meanwhile are left out. Only the labels of the launch are returned: the engine merges
    those of the image into them, and the image's author must not decide what a launch may use. So a label is
    removed if the image has it with the same value, and all labels if the image is gone.
    """
    with connect(transport) as engine:
        return _list_running(engine, _Origins(engine))


def list_launch_labels(label: str, transport: Transport | None = None) -> dict[str, str]:
    """Return the ids of all containers, running or not, whose launch gave them a label, each with its value.

    As in `list_running`, one that the image has with the same value does not count. Raises EngineError.
    """
    with connect(transport) as engine:
        listed = engine.get(f"/containers/json?all=1&{make_filters(label=[label])}").expect(list)
        origins = _Origins(engine)
        labelled = {
            str(entry["Id"]): origins.select_launch_labels(entry.get("Labels"), entry.get("ImageID"))
            for entry in listed
        }
    return {identifier: labels[label] for identifier, labels in labelled.items() if label in labels}


def list_running_or_starting(
    is_lease_live: LeaseCheck = lambda _: True, transport: Transport | None = None
) -> list[RunningContainer]:
    """Return the running containers, as `list_running` does, and those that are being started.

    Left out are launches for whose labels `is_lease_live`, because a lease counts for them, and tasks of
    Swarm, because their start may wait for the caller. Only labels that the image does not have tell which
    these are. The engine describes a container only once it has started. A container is left out if that
    takes more than START_S for all of them together, or if nobody has started it within YOUNG_S of its
    creation.
    """
    with connect(transport) as engine:
        created = engine.get(f"/containers/json?all=1&{make_filters(status=['created'])}").expect(list)
        origins = _Origins(engine)
        # Queried last: a container that starts meanwhile is in one of the lists, or in both.
        containers = _list_running(engine, origins)
        oldest, deadline = time.time() - YOUNG_S, time.monotonic() + START_S
        seen = {container.container_id for container in containers}
        for entry in created:
            if entry.get("Created", 0) < oldest or entry["Id"] in seen:
                continue
            labels = origins.select_launch_labels(entry.get("Labels"), entry.get("ImageID"))
            if TASK in labels or (LAUNCH in labels and is_lease_live(labels)):
                continue
            container = _inspect_starting(engine, entry["Id"], max(EACH_S, deadline - time.monotonic()))
            if container:
                containers.append(origins.parse_container(container))
        return containers


def _list_running(engine: Transport, origins: _Origins) -> list[RunningContainer]:
    listed = engine.get("/containers/json").expect(list)
    inspected = [_inspect(engine, entry["Id"]).expect_or_none(dict) for entry in listed]
    return [origins.parse_container(container) for container in inspected if container is not None]


def _inspect_starting(engine: Transport, container_id: str, answer_s: float) -> dict[str, Any] | None:
    """Return a container that is being started or has just started; None if it is not, or not in time."""
    container: dict[str, Any] = {}
    with contextlib.suppress(EngineError):
        container = _inspect(engine, container_id, answer_s).expect(dict)
    state = container.get("State") or {}
    waits = state.get("Status") == "created" and not state.get("Error")
    return container if state.get("Running") or waits else None


def _inspect(engine: Transport, container_id: str, answer_s: float | None = None) -> EngineResponse:
    return engine.get(f"/containers/{quote(container_id)}/json", answer_s)


def parse_container(
    document: Mapping[str, Any], get_info: Callable[[], Mapping[str, Any]], labels: Mapping[str, str]
) -> RunningContainer:
    """Return the container that a document of `docker inspect` describes, with the `labels` of its launch.

    `get_info` returns the engine's information, and is called only if needed.
    """
    config, host = document.get("Config") or {}, document.get("HostConfig") or {}
    requested = [*list_requested_names(host.get("DeviceRequests") or ())]
    variables = dict(str(text).partition("=")[::2] for text in config.get("Env") or ())
    if runtime.requests_gpus(variables) and runtime.is_nvidia(host.get("Runtime"), get_info):
        requested += variables[runtime.VISIBLE].split(",")
    container_id = str(document.get("Id") or "")
    return RunningContainer(
        container_id=container_id,
        name=str(document.get("Name") or container_id).lstrip("/"),
        image=config.get("Image"),
        devices=PassedDevices(
            paths=tuple(str(device.get("PathOnHost")) for device in host.get("Devices") or ()),
            cgroup_rules=tuple(map(str, host.get("DeviceCgroupRules") or ())),
            requested=tuple(requested),
        ),
        labels=labels,
        mounts=tuple(
            ContainerMount(target=str(mount.get("Destination")), source=mount.get("Source"))
            for mount in document.get("Mounts") or ()
        ),
        cgroup_parent=str(host.get("CgroupParent") or ""),
    )


def list_requested_names(requests: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the GPUs in the device requests of a container, as the engine's API has them.

    The engine turns a count of N into the first N indices, and -1 into "all" (daemon/nvidia_linux.go).
    """
    for request in requests:
        driver, capabilities = request.get("Driver") or "", request.get("Capabilities") or ()
        if not driver.startswith((runtime.NVIDIA, "cdi")) and (
            driver or all(runtime.CAPABILITIES.isdisjoint(alternative) for alternative in capabilities)
        ):
            continue
        yield from (str(name) for name in request.get("DeviceIDs") or ())
        count = int(request.get("Count") or 0)
        yield from ["all"] if count < 0 else [str(index) for index in range(count)]


class _Origins:
    """What an engine tells of the images and runtimes of its containers, each requested once."""

    def __init__(self, engine: Transport) -> None:
        self._engine = engine
        self._labels: dict[str, Mapping[str, str] | None] = {}
        self._info: Mapping[str, Any] | None = None

    def parse_container(self, container: Mapping[str, Any]) -> RunningContainer:
        """Return the container that a document describes, with only the labels of its launch."""
        labels = (container.get("Config") or {}).get("Labels")
        return parse_container(
            container, self._get_info, self.select_launch_labels(labels, container.get("Image"))
        )

    def select_launch_labels(self, labels: Mapping[str, str] | None, image: object) -> dict[str, str]:
        """Return those of a container's labels that its image, given by its id, does not have."""
        if not labels:
            return {}
        name = str(image or "")
        if name not in self._labels:
            inspected = images.inspect_image(name, self._engine) if name else None
            config = inspected.get("Config", inspected) if inspected and "Id" in inspected else None
            self._labels[name] = (config.get("Labels") or {}) if isinstance(config, dict) else None
        inherited = self._labels[name]
        if inherited is None:
            return {}
        return {label: value for label, value in labels.items() if inherited.get(label) != value}

    def _get_info(self) -> Mapping[str, Any]:
        if self._info is None:
            self._info = system.get_info(self._engine)
        return self._info


def read_log_tail(label: str, lines: int) -> bytes:
    """Return the last lines of the log of the container with `label` (NAME=VALUE), running or not.

    It is empty if there is no such container. Raises EngineError.
    """
    with connect() as engine:
        matches = engine.get(f"/containers/json?all=1&{make_filters(label=[label])}").expect(list)
        if not matches:
            return b""
        query = f"stdout=1&stderr=1&tail={lines}"
        log = engine.get(f"/containers/{quote(matches[0]['Id'])}/logs?{query}")
        return log.body if log.status == OK else b""
