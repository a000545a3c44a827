"""The Docker engine's API: plain requests over the local socket where speed matters, else docker-py."""

from __future__ import annotations

import contextlib
import json
import os
import time

from imagematrix import unix_http
from imagematrix.endpoint import address, listener
from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    import docker

    Attended = Callable[[Mapping[str, str]], bool]

__all__ = [
    "cannot_start",
    "client",
    "connect",
    "digests",
    "digests_of",
    "environment_of",
    "errors",
    "images",
    "info",
    "is_podman",
    "log_tail",
    "remote",
    "reports_system",
    "responds",
    "running",
    "running_of",
    "running_or_starting",
    "running_or_starting_of",
    "unreachable",
]

START = "start one (`systemctl start docker`), or set DOCKER_HOST to its address"
OK, MISSING = b"200", b"404"  # HTTP status codes
PODMAN = "Podman Engine"
SYSTEM = b"\nostype:"  # a header, in lower case
TIMEOUT = 600  # seconds without data; loading a large image takes long
# The names in /proc/PID/comm of engines that listen at a socket. Other listeners, such as ssh, forward it.
ENGINES = frozenset({"dockerd", "podman"})
CONTAINER = r"[0-9a-f]{64}"  # the id of a container
YOUNG_S = 60  # from the creation of a container to its start, which usually follows at once
START_S, ONE_S = 30, 1  # timeout for all starts, and the least for each: NVIDIA's runtime wakes GPUs
LAUNCH, TASK = "io.imagematrix.selected", "com.docker.swarm.task.id"  # labels of launches, and of Swarm


def responds() -> bool:
    """Return whether the engine responds at a local socket; False if its address is not one.

    Raises EngineError if it does not respond.
    """
    where = address()
    if not where.startswith("unix://"):
        return False
    _get_local(where, "/_ping")
    return True


def client() -> docker.DockerClient:
    """Return a docker-py client that is connected to the engine; raise EngineError."""
    responds()  # else docker-py would be loaded for nothing

    import docker
    import requests

    from imagematrix.docker_client import Client

    where = address()
    try:
        return Client(where, TIMEOUT)
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise unreachable(where, error) from error
    except ValueError as error:
        raise EngineError(f"docker's configuration cannot be read: {error}") from error


def unreachable(where: str, error: Exception) -> EngineError:
    """Return the error for an engine that cannot be reached at `where`."""
    text = str(error)
    if "Permission denied" in text and where.startswith("unix"):
        remedy = "join the group docker, or run this as root"
        return EngineError(f"cannot reach the Docker engine at {where}: permission denied", remedy=remedy)
    if isinstance(error, TimeoutError):
        remedy = "check what it is busy with, or restart it: `systemctl status docker`"
        return EngineError(
            f"the Docker engine at {where} did not respond within {unix_http.ANSWER_S} seconds", remedy=remedy
        )
    remedies = {
        "ssh": f"run `ssh {where} docker version` to check machine, login and engine",
        "tcp": "start it on that machine (`systemctl start docker`), or set DOCKER_HOST to another",
    }
    return EngineError(
        f"cannot reach the Docker engine at {where}", remedy=remedies.get(where.partition("://")[0], START)
    )


@contextlib.contextmanager
def errors(*passed: type[Exception]) -> Iterator[None]:
    """Raise EngineError in place of docker-py's errors, except for those of the types `passed`."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except passed:
        raise
    except APIError as error:
        raise _refused(address(), error.explanation or str(error)) from error
    except (DockerException, RequestException, HTTPError, ConnectionError, TimeoutError) as error:
        raise unreachable(address(), error) from error


def cannot_start(error: OSError) -> EngineError:
    """Return the error for docker's command if it cannot be started."""
    return EngineError(
        f"cannot start `docker`: {error.strerror}", remedy="install the package docker-cli or docker-ce-cli"
    )


def images(label: str) -> list[object]:
    """Return the engine's images with `label` (NAME or NAME=VALUE), as its API lists them.

    A local socket is queried in a millisecond without a library, other addresses through docker-py. Raises
    EngineError.
    """
    where = address()
    if not where.startswith("unix://"):
        return list(_remote(lambda client: client.api.images(filters={"label": label})))
    query = unix_http.quote(json.dumps({"label": [label]}))
    status, answer = _local(where, f"/images/json?filters={query}")
    if status != OK or not isinstance(answer, list):
        raise _refused(where, answer)
    return answer


def digests(reference: str) -> frozenset[str]:
    """Return the digests of the engine's image with this name; none if it is not found.

    Raises EngineError.
    """
    where = address()
    if where.startswith("unix://"):
        status, answer = _local(where, f"/images/{unix_http.quote(reference)}/json")
        if status == MISSING:
            return frozenset()
        if status != OK or not isinstance(answer, dict):
            raise _refused(where, answer)
        return _digests(answer)
    return frozenset(_remote(lambda client: digests_of(client, reference)))


def digests_of(client: docker.DockerClient, reference: str) -> frozenset[str]:
    """Return the same as `digests`, through a docker-py client."""
    from docker.errors import ImageNotFound

    try:
        return _digests(client.images.get(reference).attrs)
    except ImageNotFound:
        return frozenset()


def _digests(image: dict[str, Any]) -> frozenset[str]:
    names = image.get("RepoDigests") or ()
    return frozenset([str(image.get("Id")), *(str(name).rpartition("@")[2] for name in names)])


def environment_of(image: str) -> tuple[str, ...]:
    """Return the environment that the engine's image with this name or id sets, as "NAME=value".

    Raises EngineError, also if there is no such image.
    """
    where = address()
    if where.startswith("unix://"):
        status, answer = _local(where, f"/images/{unix_http.quote(image)}/json")
        if status != OK or not isinstance(answer, dict):
            raise _refused(where, answer)
    else:
        answer = _remote(lambda client: client.images.get(image).attrs)
    return tuple(map(str, (answer.get("Config") or {}).get("Env") or ()))


def info() -> dict[str, Any]:
    """Return the engine's information, as `docker info` does; raise EngineError."""
    where = address()
    if not where.startswith("unix://"):
        return dict(_remote(lambda client: client.info()))
    status, answer = _local(where, "/info")
    if status != OK or not isinstance(answer, dict):
        raise _refused(where, answer)
    return answer


def remote() -> str | None:
    """Return the name of the engine's machine if it is not this one, else None.

    A local socket may be forwarded, for example by ssh. The engine counts as local if it listens at the
    socket itself, has this machine's name, or runs the container of this process. Raises EngineError.
    """
    where = address()
    local = where.startswith("unix://")
    if local and listener(where) in ENGINES:
        return None
    name = str(info().get("Name") or "")
    if name == os.uname().nodename or (local and _runs_this(where)):
        return None
    return name or where


def _runs_this(where: str) -> bool:
    """Whether the engine at a local socket runs the container of this process.

    Engines mount files such as /etc/hostname from a folder whose path contains the container's id.
    """
    import re

    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - see above
            numbers = set(re.findall(CONTAINER, file.read()))
    except OSError:
        return False
    return any(_local(where, f"/containers/{number}/json")[0] == OK for number in numbers)


def is_podman() -> bool:
    """Whether the engine is podman, which has the same API; raise EngineError."""
    where = address()
    if where.startswith("unix://"):
        _, answer = _local(where, "/version")
    else:
        answer = _remote(lambda client: client.version())
    parts = answer.get("Components") if isinstance(answer, dict) else None
    return any(isinstance(part, dict) and part.get("Name") == PODMAN for part in parts or ())


def reports_system() -> bool:
    """Whether the engine reports its operating system in the response to /_ping; raise EngineError.

    Docker's command passes no devices to an engine that does not, such as podman 4.3.
    """
    where = address()
    if where.startswith("unix://"):
        head, _ = _get_local(where, "/_ping")
        return SYSTEM in head.lower()
    return bool(_remote(lambda client: "Ostype" in client.api.get(f"{client.api.base_url}/_ping").headers))


def running_or_starting(attended: Attended = lambda _: True) -> list[dict[str, Any]]:
    """Return the running containers, as `running` does, and those that are being started.

    Left out are launches whose labels are `attended`, because a lease counts for them, and tasks of Swarm,
    because their start may wait for the caller. The engine describes a container only once it has started. A
    container is left out if that takes more than START_S for all of them together, or if nobody has started
    it within YOUNG_S of its creation.
    """
    where = address()
    if not where.startswith("unix://"):
        return list(_remote(lambda client: running_or_starting_of(client, attended)))
    query = unix_http.quote(json.dumps({"status": ["created"]}))
    status, created = _local(where, f"/containers/json?all=1&filters={query}")
    if status != OK or not isinstance(created, list):
        raise _refused(where, created)

    def inspect(number: str, answer_s: float) -> object:
        with contextlib.suppress(EngineError):
            status, container = _local(where, f"/containers/{unix_http.quote(number)}/json", answer_s)
            return container if status == OK else None
        return None

    # Queried last: a container that starts meanwhile is in one of the lists, or in both.
    return _with_starting(running(), created, inspect, attended)


def running_or_starting_of(
    client: docker.DockerClient, attended: Attended = lambda _: True
) -> list[dict[str, Any]]:
    """Return the same as `running_or_starting`, through a docker-py client."""
    import requests

    api = client.api
    created = api.containers(all=True, filters={"status": "created"})

    def inspect(number: str, answer_s: float) -> object:
        # inspect_container() has only the client's own timeout, which is for slower answers.
        with contextlib.suppress(requests.RequestException, ValueError):
            resource = f"{api.base_url}/v{api.api_version}/containers/{number}/json"
            answer = api.get(resource, timeout=answer_s)
            return answer.json() if answer.ok else None
        return None

    return _with_starting(running_of(client), created, inspect, attended)


def _with_starting(
    running: list[dict[str, Any]],
    created: list[dict[str, Any]],
    inspect: Callable[[str, float], object],
    attended: Attended,
) -> list[dict[str, Any]]:
    """Return `running`, and the containers in `created` that are being started or have just started.

    `inspect` returns a container once it has started, or None if that takes longer than the given seconds.
    """
    oldest, deadline = time.time() - YOUNG_S, time.monotonic() + START_S
    seen = {container.get("Id") for container in running}
    containers = list(running)
    for entry in created:
        young, labels = entry.get("Created", 0) >= oldest, entry.get("Labels") or {}
        if not young or entry["Id"] in seen or TASK in labels or (LAUNCH in labels and attended(labels)):
            continue
        container = inspect(entry["Id"], max(ONE_S, deadline - time.monotonic()))
        state = (container.get("State") or {}) if isinstance(container, dict) else {}
        waits = state.get("Status") == "created" and not state.get("Error")
        if isinstance(container, dict) and (state.get("Running") or waits):
            # It is not known here which labels come from the image.
            containers.append({**container, "Config": {**(container.get("Config") or {}), "Labels": {}}})
    return containers


def running() -> list[dict[str, Any]]:
    """Return each running container as `docker inspect` describes it; raise EngineError.

    Containers that end meanwhile are left out. Only the labels of the launch are returned: the engine merges
    them with the image's labels, and the image's author must not decide what a launch may use. So a label is
    removed if the image has it with the same value, and all labels if the image is gone.
    """
    where = address()
    if not where.startswith("unix://"):
        return list(_remote(running_of))
    status, listed = _local(where, "/containers/json")
    if status != OK or not isinstance(listed, list):
        raise _refused(where, listed)
    containers = []
    for entry in listed:
        status, container = _local(where, f"/containers/{unix_http.quote(entry['Id'])}/json")
        if status == OK and isinstance(container, dict):
            containers.append(container)
        elif status != MISSING:
            raise _refused(where, container)

    def image(name: str) -> object:
        return _local(where, f"/images/{unix_http.quote(name)}/json")[1]

    return _with_launch_labels(containers, image)


def running_of(client: docker.DockerClient) -> list[dict[str, Any]]:
    """Return the same as `running`, through a docker-py client.

    docker-py's `containers.list()` fails if a container ends between its two requests.
    """
    from contextlib import suppress

    from docker.errors import NotFound

    containers = []
    for entry in client.api.containers():
        with suppress(NotFound):
            containers.append(client.api.inspect_container(entry["Id"]))

    def image(name: str) -> object:
        with suppress(NotFound):
            return client.images.get(name).attrs
        return None

    return _with_launch_labels(containers, image)


def _with_launch_labels(
    containers: list[dict[str, Any]], image: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Return `containers` with only the labels of their launches; `image` inspects an image by id."""
    image_labels: dict[str, Mapping[str, str] | None] = {}
    result = []
    for container in containers:
        config = container.get("Config") or {}
        labels = config.get("Labels")
        if not labels:
            result.append(container)
            continue
        name = str(container.get("Image") or "")
        if name not in image_labels:
            image_labels[name] = _labels(image(name)) if name else None
        inherited = image_labels[name]
        added = {
            label: value
            for label, value in labels.items()
            if inherited is not None and inherited.get(label) != value
        }
        result.append({**container, "Config": {**config, "Labels": added}})
    return result


def _labels(image: object) -> Mapping[str, str] | None:
    """Return the labels of an inspected image, None if it is not one."""
    config = image.get("Config", image) if isinstance(image, dict) and "Id" in image else None
    return (config.get("Labels") or {}) if isinstance(config, dict) else None


def _remote(request: Callable[[docker.DockerClient], Any]) -> Any:
    with contextlib.closing(client()) as connected, errors():
        return request(connected)


def _refused(where: str, answer: object) -> EngineError:
    message = answer.get("message", answer) if isinstance(answer, dict) else answer
    return EngineError(f"the Docker engine at {where} refused: {message}")


def _local(where: str, resource: str, answer_s: float | None = None) -> tuple[bytes, object]:
    head, body = _get_local(where, resource, answer_s)
    words = head.split(None, 2)
    try:
        return words[1] if len(words) > 1 else b"", json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"not a Docker engine at {where}") from error


def _get_local(where: str, resource: str, answer_s: float | None = None) -> tuple[bytes, bytes]:
    """Return head and body of the engine's response at a local socket; raise EngineError."""
    try:
        return unix_http.get(where.removeprefix("unix://"), resource, answer_s)
    except OSError as error:
        raise unreachable(where, error) from error


def connect(resource: str) -> socket.socket | None:
    """Request `resource` and return the connection with the response; None if the engine is not local.

    The response includes its head, and ends when the engine closes the connection. Raises EngineError.
    """
    import socket

    where = address()
    if not where.startswith("unix://"):
        return None
    try:
        requested = unix_http.request(where.removeprefix("unix://"), resource)
    except OSError as error:
        raise unreachable(where, error) from error
    connection = socket.socket(fileno=requested.detach())
    connection.settimeout(unix_http.ANSWER_S)
    return connection


def log_tail(label: str, lines: int) -> bytes:
    """Return the last lines of the log of the container with `label` (NAME=VALUE), running or not.

    It is empty if there is no such container.

    Raises EngineError.
    """
    where = address()
    if not where.startswith("unix://"):
        return bytes(_remote(lambda client: _log_tail_of(client, label, lines)))
    _, matches = _local(
        where, f"/containers/json?all=1&filters={unix_http.quote(json.dumps({'label': [label]}))}"
    )
    if not isinstance(matches, list) or not matches:
        return b""
    query = f"stdout=1&stderr=1&tail={lines}"
    return _get_local(where, f"/containers/{unix_http.quote(matches[0]['Id'])}/logs?{query}")[1]


def _log_tail_of(client: docker.DockerClient, label: str, lines: int) -> bytes:
    matches = client.api.containers(all=True, filters={"label": label})
    return bytes(client.api.logs(matches[0]["Id"], tail=lines)) if matches else b""
