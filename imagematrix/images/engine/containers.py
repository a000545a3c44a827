"""The engine's containers."""

from __future__ import annotations

import contextlib
import time

from imagematrix.errors import EngineError
from imagematrix.hardware.vendors import runtime
from imagematrix.images.engine import images, system
from imagematrix.images.engine.transport import OK, connect, make_filters, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from imagematrix.images.engine.transport import EngineResponse, Transport

    Attended = Callable[[Mapping[str, str]], bool]

YOUNG_S = 60  # from the creation of a container to its start, which usually follows at once
START_S, EACH_S = 30, 1  # timeout for all starts, and the least for each: NVIDIA's runtime wakes GPUs
LAUNCH, TASK = "io.imagematrix.selected", "com.docker.swarm.task.id"  # labels of launches, and of Swarm


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


def list_running(transport: Transport | None = None) -> list[dict[str, Any]]:
    """Return each running container as `docker inspect` describes it; raise EngineError.

    Containers that end meanwhile are left out. Only the labels of the launch are returned: the engine merges
    those of the image into them, and the image's author must not decide what a launch may use. So a label is
    removed if the image has it with the same value, and all labels if the image is gone.
    """
    with connect(transport) as engine:
        return _list_running(engine, _Origins(engine))


def list_running_or_starting(
    attended: Attended = lambda _: True, transport: Transport | None = None
) -> list[dict[str, Any]]:
    """Return the running containers, as `list_running` does, and those that are being started.

    Left out are launches whose labels are `attended`, because a lease counts for them, and tasks of Swarm,
    because their start may wait for the caller. Only labels that the image does not have tell which these
    are. The engine describes a container only once it has started. A container is left out if that takes
    more than START_S for all of them together, or if nobody has started it within YOUNG_S of its creation.
    """
    with connect(transport) as engine:
        created = engine.get(f"/containers/json?all=1&{make_filters(status=['created'])}").expect(list)
        origins = _Origins(engine)
        # Queried last: a container that starts meanwhile is in one of the lists, or in both.
        containers = _list_running(engine, origins)
        oldest, deadline = time.time() - YOUNG_S, time.monotonic() + START_S
        seen = {container.get("Id") for container in containers}
        for entry in created:
            if entry.get("Created", 0) < oldest or entry["Id"] in seen:
                continue
            labels = origins.select_launch_labels(entry.get("Labels"), entry.get("ImageID"))
            if TASK in labels or (LAUNCH in labels and attended(labels)):
                continue
            container = _inspect_starting(engine, entry["Id"], max(EACH_S, deadline - time.monotonic()))
            if container:
                containers.append(origins.describe(container))
        return containers


def _list_running(engine: Transport, origins: _Origins) -> list[dict[str, Any]]:
    listed = engine.get("/containers/json").expect(list)
    inspected = [_inspect(engine, entry["Id"]).expect_or_none(dict) for entry in listed]
    return [origins.describe(container) for container in inspected if container is not None]


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


class _Origins:
    """What an engine tells of the images and runtimes of its containers, each requested once."""

    def __init__(self, engine: Transport) -> None:
        self._engine = engine
        self._labels: dict[str, Mapping[str, str] | None] = {}
        self._info: Mapping[str, Any] | None = None

    def describe(self, container: dict[str, Any]) -> dict[str, Any]:
        """Return a container with only the labels of its launch, and NVIDIA's runtime by its usual name."""
        config, host = container.get("Config") or {}, container.get("HostConfig") or {}
        if config.get("Labels"):
            labels = self.select_launch_labels(config["Labels"], container.get("Image"))
            container = {**container, "Config": {**config, "Labels": labels}}
        variables = dict(str(text).partition("=")[::2] for text in config.get("Env") or ())
        if runtime.requests_gpus(variables) and runtime.is_nvidia(host.get("Runtime"), self._information):
            container = {**container, "HostConfig": {**host, "Runtime": runtime.NVIDIA}}
        return container

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

    def _information(self) -> Mapping[str, Any]:
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
