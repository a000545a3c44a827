"""The engine itself: what it is, and on which machine."""

from __future__ import annotations

import errno
import os

from imagematrix.common.programs import find_program
from imagematrix.errors import EngineError
from imagematrix.images.engine.endpoint import find_address, get_listener_name
from imagematrix.images.engine.transport import OK, connect, open_local_socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.images.engine.transport import Transport, UnixSocket

PODMAN = "Podman Engine"
# The names in /proc/PID/comm of engines that listen at a socket. Other listeners, such as ssh, forward it.
ENGINES = frozenset({"dockerd", "podman"})
CONTAINER = r"[0-9a-f]{64}"  # the id of a container


def get_info(transport: Transport | None = None) -> dict[str, Any]:
    """Return the engine's information, as `docker info` does; raise EngineError."""
    with connect(transport) as engine:
        return engine.get("/info").expect(dict)


def is_podman() -> bool:
    """Whether the engine is podman, which has the same API; raise EngineError."""
    return _is_podman(_get_version())


def get_docker_version(transport: Transport | None = None) -> str | None:
    """Return the version of Docker; None if the engine is another; raise EngineError."""
    answer = _get_version(transport)
    return None if _is_podman(answer) else str(answer.get("Version") or "")


def get_architecture(transport: Transport | None = None) -> str:
    """Return the architecture of the engine's machine as images name it, "" if it is unknown.

    It comes from the engine's version, which takes less time than its information. Raises EngineError.
    """
    return str(_get_version(transport).get("Arch") or "")


def _get_version(transport: Transport | None = None) -> dict[str, Any]:
    with connect(transport) as engine:
        answer = engine.get("/version").json()
    return answer if isinstance(answer, dict) else {}


def _is_podman(answer: dict[str, Any]) -> bool:
    parts = answer.get("Components") or ()
    return any(isinstance(part, dict) and part.get("Name") == PODMAN for part in parts)


def reports_system() -> bool:
    """Whether the engine reports its operating system in the response to /_ping; raise EngineError.

    Docker's command passes no devices to an engine that does not, such as podman 4.3.
    """
    with connect() as engine:
        return "ostype" in engine.get("/_ping").headers


def get_remote_name() -> str | None:
    """Return the name of the engine's machine if it is not this one, else None.

    A local socket may be forwarded, for example by ssh. The engine counts as local if it listens at the
    socket itself, has this machine's name, or runs the container of this process. Raises EngineError.
    """
    where, local = find_address(), open_local_socket()
    if local and get_listener_name(where) in ENGINES:
        return None
    name = str(get_info().get("Name") or "")
    if name == os.uname().nodename or (local and _find_own_container(local)):
        return None
    return name or where


def get_own_mounts() -> list[dict[str, Any]] | None:
    """Return the mounts of the container of this process, as `docker inspect` does; None if unknown.

    Raises EngineError.
    """
    local = open_local_socket()
    container = _find_own_container(local) if local else None
    return None if container is None else list(container.get("Mounts") or ())


def _find_own_container(engine: UnixSocket) -> dict[str, Any] | None:
    """Return the container of this process, if the engine at a local socket runs it.

    Engines mount files such as /etc/hostname from a folder whose path contains the container's id.
    """
    import re

    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - pathlib is slow to load
            container_ids = set(re.findall(CONTAINER, file.read()))
    except OSError:
        return None
    for container_id in container_ids:
        response = engine.get(f"/containers/{container_id}/json")
        if response.status == OK:
            return response.expect(dict)
    return None


def find_docker() -> str:
    """Return the absolute path of docker's command; raise EngineError if the node has none."""
    program = find_program("docker")
    if program is None:
        raise make_start_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    return program


def make_start_error(error: OSError) -> EngineError:
    """Return the error for docker's command if it cannot be started."""
    return EngineError(
        f"cannot start `docker`: {error.strerror}", remedy="install the package docker-cli or docker-ce-cli"
    )
