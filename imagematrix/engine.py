"""The Docker engine's API: one request without a library where speed counts, docker-py for all the rest."""

from __future__ import annotations

import json
import os
import socket

from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import docker

__all__ = [
    "address",
    "answers",
    "client",
    "context",
    "digests",
    "digests_of",
    "images",
    "info",
    "is_podman",
    "remote",
    "running",
    "running_of",
    "tells_system",
    "unreachable",
]

DEFAULT = "unix:///var/run/docker.sock"
START = "start one (`systemctl start docker`), or name it in DOCKER_HOST"
OK, MISSING = b"200", b"404"  # of HTTP
PODMAN = "Podman Engine"
SYSTEM = b"\nostype:"  # a header, in lower case
TIMEOUT = 600  # seconds of silence; a large image takes its time to load
RESPONSE_LIMIT = 256 * 1024 * 1024  # bytes


def address() -> str:
    """Return where the engine is, as docker's own command finds it: DOCKER_HOST, the context, the default."""
    name = context()
    return os.environ.get("DOCKER_HOST") or (DEFAULT if name == "default" else _context_address(name))


def context() -> str:
    """Return the name of the docker context in use; "default" also where DOCKER_HOST overrides it."""
    if os.environ.get("DOCKER_HOST"):
        return "default"
    return str(os.environ.get("DOCKER_CONTEXT") or _current_context() or "default")


def _current_context() -> object:
    try:
        config = _json("config.json")
    except (OSError, ValueError):
        return None
    return config.get("currentContext") if isinstance(config, dict) else None


def _context_address(name: str) -> str:
    from hashlib import sha256

    try:
        number = sha256(name.encode()).hexdigest()
        return str(_json(f"contexts/meta/{number}/meta.json")["Endpoints"]["docker"]["Host"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"there is no docker context {name!r}", remedy="see `docker context ls`") from error


def _json(name: str) -> Any:
    folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")  # noqa: PTH111 - see below
    with open(f"{folder}/{name}", encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow to load
        return json.load(file)


def answers() -> bool:
    """Return whether something answers at the engine's socket; False where it is elsewhere, and not asked.

    Raises EngineError where nobody does.
    """
    where = address()
    if not where.startswith("unix://"):
        return False
    _get_local(where, "/_ping")
    return True


def client() -> docker.DockerClient:
    """Return a docker-py client that has reached the engine; raise EngineError."""
    answers()  # where nobody does, docker-py would be loaded for nothing

    import docker
    import requests

    where = address()
    try:
        if where.startswith("tcp"):
            return docker.from_env(version="auto", timeout=TIMEOUT)  # with the certificates, if any
        return docker.DockerClient(base_url=where, version="auto", timeout=TIMEOUT, use_ssh_client=True)
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise unreachable(where, error) from error


def unreachable(where: str, error: Exception) -> EngineError:
    """Return the error that says that no engine answers at `where`."""
    text = str(error)
    if "Permission denied" in text:
        remedy = "become a member of the group docker, or run this as root"
        return EngineError(f"no permission to talk to the Docker engine at {where}", remedy=remedy)
    return EngineError(f"no Docker engine answers at {where}", remedy=START)


def images(label: str) -> list[object]:
    """Return the engine's images that have `label` (NAME or NAME=VALUE), as its API lists them.

    Over a local socket this takes a millisecond and no library; any other address goes through docker-py.
    Raises EngineError.
    """
    where = address()
    if not where.startswith("unix://"):
        return list(_remote(where, lambda reached: reached.api.images(filters={"label": label})))
    query = _quote(json.dumps({"label": [label]}))
    status, answer = _local(where, f"/images/json?filters={query}")
    if status != OK or not isinstance(answer, list):
        raise _refused(where, answer)
    return answer


def digests(reference: str) -> frozenset[str]:
    """Return the digests that the engine's image of this name has; none where there is no such image.

    Raises EngineError.
    """
    where = address()
    if where.startswith("unix://"):
        status, answer = _local(where, f"/images/{_quote(reference)}/json")
        if status == MISSING:
            return frozenset()
        if status != OK or not isinstance(answer, dict):
            raise _refused(where, answer)
        return _digests(answer)
    return frozenset(_remote(where, lambda reached: digests_of(reached, reference)))


def digests_of(client: docker.DockerClient, reference: str) -> frozenset[str]:
    """Return the same as `digests`, of the engine that a docker-py client has reached."""
    from docker.errors import ImageNotFound

    try:
        return _digests(client.images.get(reference).attrs)
    except ImageNotFound:
        return frozenset()


def _digests(image: dict[str, Any]) -> frozenset[str]:
    names = image.get("RepoDigests") or ()
    return frozenset([str(image.get("Id")), *(str(name).rpartition("@")[2] for name in names)])


def info() -> dict[str, Any]:
    """Return what the engine tells of itself, as `docker info` does; raise EngineError."""
    where = address()
    if not where.startswith("unix://"):
        return dict(_remote(where, lambda reached: reached.info()))
    status, answer = _local(where, "/info")
    if status != OK or not isinstance(answer, dict):
        raise _refused(where, answer)
    return answer


def remote() -> str | None:
    """Return the name of the machine that the engine runs on where it is another than this one.

    A local socket leads to this machine, whatever container or namespace one looks from. Raises EngineError.
    """
    if address().startswith("unix://"):
        return None
    name = str(info().get("Name") or "")
    return None if name == os.uname().nodename else name or address()


def is_podman() -> bool:
    """Whether it is podman that answers, which speaks the same language; raise EngineError."""
    where = address()
    if where.startswith("unix://"):
        _, answer = _local(where, "/version")
    else:
        answer = _remote(where, lambda reached: reached.version())
    parts = answer.get("Components") if isinstance(answer, dict) else None
    return any(isinstance(part, dict) and part.get("Name") == PODMAN for part in parts or ())


def tells_system() -> bool:
    """Whether the engine tells its operating system where docker's command asks; raise EngineError.

    Docker's command passes no device to an engine that does not, such as podman 4.3.
    """
    where = address()
    if where.startswith("unix://"):
        head, _ = _get_local(where, "/_ping")
        return SYSTEM in head.lower()
    return bool(
        _remote(where, lambda reached: "Ostype" in reached.api.get(f"{reached.api.base_url}/_ping").headers)
    )


def running() -> list[dict[str, Any]]:
    """Return what the engine tells of each running container, as `docker inspect` does; raise EngineError.

    One that ends meanwhile is left out.
    """
    where = address()
    if not where.startswith("unix://"):
        return list(_remote(where, running_of))
    status, listed = _local(where, "/containers/json")
    if status != OK or not isinstance(listed, list):
        raise _refused(where, listed)
    found = []
    for entry in listed:
        status, container = _local(where, f"/containers/{_quote(entry['Id'])}/json")
        if status == OK and isinstance(container, dict):
            found.append(container)
        elif status != MISSING:
            raise _refused(where, container)
    return found


def running_of(client: docker.DockerClient) -> list[dict[str, Any]]:
    """Return the same as `running`, of the engine that a docker-py client has reached.

    docker-py's `containers.list()` fails where a container ends between its two questions.
    """
    from contextlib import suppress

    from docker.errors import NotFound

    found = []
    for entry in client.api.containers():
        with suppress(NotFound):
            found.append(client.api.inspect_container(entry["Id"]))
    return found


def _remote(where: str, ask: Callable[[docker.DockerClient], Any]) -> Any:
    import docker
    import requests

    reached = client()
    try:
        return ask(reached)
    except docker.errors.APIError as error:
        raise EngineError(f"the Docker engine at {where} refused: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as error:
        raise unreachable(where, error) from error
    finally:
        reached.close()


def _refused(where: str, answer: object) -> EngineError:
    message = answer.get("message", answer) if isinstance(answer, dict) else answer
    return EngineError(f"the Docker engine at {where} refused: {message}")


def _local(where: str, resource: str) -> tuple[bytes, object]:
    head, body = _get_local(where, resource)
    words = head.split(None, 2)
    try:
        return words[1] if len(words) > 1 else b"", json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"what answers at {where} is no Docker engine") from error


def _get_local(where: str, resource: str) -> tuple[bytes, bytes]:
    """Return head and body of the engine's answer at a local socket; raise EngineError."""
    try:
        return _get(where.removeprefix("unix://"), resource)
    except OSError as error:
        raise unreachable(where, error) from error


def _get(path: str, resource: str) -> tuple[bytes, bytes]:
    # HTTP/1.0 has neither chunks nor keep-alive: the body is all that comes until the engine hangs up.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(60)
        connection.connect(path)
        connection.sendall(f"GET {resource} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
        chunks = []
        size = 0
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > RESPONSE_LIMIT:
                raise EngineError(f"the engine's answer is larger than {RESPONSE_LIMIT // 2**20} MiB")
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    return head, body


def _quote(text: str) -> str:
    # urllib.parse.quote, without the milliseconds that loading urllib takes.
    return "".join(
        char if char.isalnum() and char.isascii() else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in text
    )
