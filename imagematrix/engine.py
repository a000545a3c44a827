"""The Docker engine's API: one request without a library where speed counts, docker-py for all the rest."""

from __future__ import annotations

import json
import os
import socket
import sys

from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    import docker

__all__ = [
    "address",
    "answers",
    "client",
    "connected",
    "context",
    "digests",
    "digests_of",
    "group",
    "images",
    "info",
    "is_podman",
    "last_said",
    "quote",
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
ANSWER_S = 10  # seconds of silence at a local socket, where questions take milliseconds
# Who listens at an engine's socket, as /proc/PID/comm has it. Others pass on what they hear: ssh, socat.
ENGINES = frozenset({"dockerd", "podman"})
CONTAINER = r"[0-9a-f]{64}"  # of the id of a container
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
    if "Permission denied" in text and where.startswith("unix"):
        remedy = "become a member of the group docker, or run this as root"
        return EngineError(f"no permission to talk to the Docker engine at {where}", remedy=remedy)
    if isinstance(error, TimeoutError):
        remedy = "see what it is busy with, or restart it: `systemctl status docker`"
        return EngineError(
            f"the Docker engine at {where} gave no answer within {ANSWER_S} seconds", remedy=remedy
        )
    remedies = {
        "ssh": f"`ssh {where} docker version` tells whether the machine, the login or the engine is missing",
        "tcp": "start it on that machine (`systemctl start docker`), or name another in DOCKER_HOST",
    }
    return EngineError(
        f"no Docker engine answers at {where}", remedy=remedies.get(where.partition("://")[0], START)
    )


def images(label: str) -> list[object]:
    """Return the engine's images that have `label` (NAME or NAME=VALUE), as its API lists them.

    Over a local socket this takes a millisecond and no library; any other address goes through docker-py.
    Raises EngineError.
    """
    where = address()
    if not where.startswith("unix://"):
        return list(_remote(where, lambda reached: reached.api.images(filters={"label": label})))
    query = quote(json.dumps({"label": [label]}))
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
        status, answer = _local(where, f"/images/{quote(reference)}/json")
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

    A local socket may lead elsewhere, as one that ssh forwards does. The engine is on this machine if it
    listens at the socket itself, has this machine's name, or runs the container that this process is in;
    where nothing proves it, it is not. Raises EngineError.
    """
    where = address()
    local = where.startswith("unix://")
    if local and _listener(where) in ENGINES:
        return None
    name = str(info().get("Name") or "")
    if name == os.uname().nodename or (local and _runs_this(where)):
        return None
    return name or where


def _listener(where: str) -> str | None:
    """Return the name of the process that listens at a socket; None where it is in another PID namespace."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(where.removeprefix("unix://"))
            pid = int.from_bytes(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder
            )
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - see above
            return file.read().strip()
    except OSError:
        return None


def _runs_this(where: str) -> bool:
    """Whether the engine at a local socket has the container in which this process is.

    Engines mount files from a folder that has the container's id over such as /etc/hostname.
    """
    import re

    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - see above
            numbers = set(re.findall(CONTAINER, file.read()))
    except OSError:
        return False
    return any(_local(where, f"/containers/{number}/json")[0] == OK for number in numbers)


def group() -> int | None:
    """Return the number of the group whose members, with root, may talk to the engine at a local socket.

    None where the engine is elsewhere or an ordinary user's, or where everybody may: nobody knows, then, who
    starts containers on this machine.
    """
    import stat

    where = address()
    try:
        found = os.stat(where.removeprefix("unix://"))  # noqa: PTH116 - pathlib is slow to load
    except OSError:
        return None
    closed = found.st_uid == 0 and not found.st_mode & stat.S_IWOTH
    return found.st_gid if where.startswith("unix://") and closed else None


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

    One that ends meanwhile is left out. Labels are those of the container's launch: an engine mixes them with
    those of the image, whose author says nothing of what a launch may have. So one that the image has with
    the same value is left out, and all of them where nobody knows the image any more.
    """
    where = address()
    if not where.startswith("unix://"):
        return list(_remote(where, running_of))
    status, listed = _local(where, "/containers/json")
    if status != OK or not isinstance(listed, list):
        raise _refused(where, listed)
    found = []
    for entry in listed:
        status, container = _local(where, f"/containers/{quote(entry['Id'])}/json")
        if status == OK and isinstance(container, dict):
            found.append(container)
        elif status != MISSING:
            raise _refused(where, container)

    def image(name: str) -> object:
        return _local(where, f"/images/{quote(name)}/json")[1]

    return _launched(found, image)


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

    def image(name: str) -> object:
        with suppress(NotFound):
            return client.images.get(name).attrs
        return None

    return _launched(found, image)


def _launched(containers: list[dict[str, Any]], image: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return `containers` with the labels of their launches alone; `image` inspects one, by its id."""
    known: dict[str, Mapping[str, str] | None] = {}
    found = []
    for container in containers:
        config = container.get("Config") or {}
        labels = config.get("Labels")
        if not labels:
            found.append(container)
            continue
        name = str(container.get("Image") or "")
        if name not in known:
            known[name] = _labels(image(name)) if name else None
        inherited = known[name]
        own = {
            label: value
            for label, value in labels.items()
            if inherited is not None and inherited.get(label) != value
        }
        found.append({**container, "Config": {**config, "Labels": own}})
    return found


def _labels(image: object) -> Mapping[str, str] | None:
    """Return the labels of an image as it is inspected, None where that is none."""
    config = image.get("Config", image) if isinstance(image, dict) and "Id" in image else None
    return (config.get("Labels") or {}) if isinstance(config, dict) else None


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


def connected(resource: str) -> socket.socket | None:
    """Return a connection on which the answer of the local engine comes; None where that is not local.

    It comes with its head, and ends when the engine hangs up. Raises EngineError.
    """
    where = address()
    if not where.startswith("unix://"):
        return None
    try:
        return _asked(where.removeprefix("unix://"), resource)
    except OSError as error:
        raise unreachable(where, error) from error


def last_said(label: str, lines: int) -> bytes:
    """Return the last lines of the container with `label` (NAME=VALUE), running or not; none without one.

    Raises EngineError.
    """
    where = address()
    if not where.startswith("unix://"):
        return bytes(_remote(where, lambda reached: _last_said_of(reached, label, lines)))
    _, found = _local(where, f"/containers/json?all=1&filters={quote(json.dumps({'label': [label]}))}")
    if not isinstance(found, list) or not found:
        return b""
    query = f"stdout=1&stderr=1&tail={lines}"
    return _get_local(where, f"/containers/{quote(found[0]['Id'])}/logs?{query}")[1]


def _last_said_of(client: docker.DockerClient, label: str, lines: int) -> bytes:
    found = client.api.containers(all=True, filters={"label": label})
    return bytes(client.api.logs(found[0]["Id"], tail=lines)) if found else b""


def _asked(path: str, resource: str) -> socket.socket:
    """Return a connection to the socket `path` that has asked for `resource`."""
    # HTTP/1.0 has neither chunks nor keep-alive: the body is all that comes until the engine hangs up.
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(path)
        connection.sendall(f"GET {resource} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _get(path: str, resource: str) -> tuple[bytes, bytes]:
    with _asked(path, resource) as connection:
        chunks = []
        size = 0
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > RESPONSE_LIMIT:
                raise EngineError(f"the engine's answer is larger than {RESPONSE_LIMIT // 2**20} MiB")
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    return head, body


def quote(text: str) -> str:
    """Return `text` as it stands in a resource's query."""
    # urllib.parse.quote, without the milliseconds that loading urllib takes.
    return "".join(
        char if char.isalnum() and char.isascii() else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in text
    )
