"""The address of Docker's engine, as docker's command determines it, and who has access to it."""

from __future__ import annotations

import _socket  # the core of `socket`, which takes longer to import than most requests take
import json
import os
import sys

from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEFAULT = "unix:///var/run/docker.sock"
ROOT = 0


def find_address() -> str:
    """Return the address of the engine as docker's command determines it: DOCKER_HOST, context, default."""
    name = get_context()
    address = os.environ.get("DOCKER_HOST")
    return address or (DEFAULT if name == "default" else str(_read_endpoint(name)["Host"]))


def get_context() -> str:
    """Return the name of the docker context in use; "default" if DOCKER_HOST overrides it."""
    if os.environ.get("DOCKER_HOST"):
        return "default"
    name = os.environ.get("DOCKER_CONTEXT")
    if name:
        return name
    try:
        config = _read_json("config.json")
    except (OSError, ValueError):  # docker's command takes the default context then, too
        return "default"
    return str((config.get("currentContext") if isinstance(config, dict) else None) or "default")


def find_certificates() -> tuple[str, bool] | None:
    """Return the folder of certificates for a TCP address, and whether to verify the engine's.

    None without TLS. They come from the context in use, or from DOCKER_TLS_VERIFY and DOCKER_CERT_PATH.
    """
    name = get_context()
    if name == "default":
        verify = bool(os.environ.get("DOCKER_TLS_VERIFY"))
        wants_tls = verify or os.environ.get("DOCKER_TLS")  # which asks for TLS without verification
        return (os.environ.get("DOCKER_CERT_PATH") or _get_folder(), verify) if wants_tls else None
    folder = f"{_get_folder()}/contexts/tls/{_hash_name(name)}/docker"
    skip = bool(_read_endpoint(name).get("SkipTLSVerify"))
    return (folder, not skip) if skip or os.path.isdir(folder) else None  # noqa: PTH112 - see below


def _read_endpoint(name: str) -> dict[str, Any]:
    """Return the settings of the engine in the context `name`, which include its address."""
    try:
        endpoint = _read_json(f"contexts/meta/{_hash_name(name)}/meta.json")["Endpoints"]["docker"]
        return {**endpoint, "Host": endpoint["Host"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"docker context not found: {name!r}", remedy="run `docker context ls`") from error


def _hash_name(name: str) -> str:
    from hashlib import sha256

    return sha256(name.encode()).hexdigest()  # docker names the folders of contexts so


def _get_folder() -> str:
    return os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")  # noqa: PTH111 - see below


def _read_json(name: str) -> Any:
    with open(f"{_get_folder()}/{name}", encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow to load
        return json.load(file)


def get_listener_pid(where: str) -> int | None:
    """Return the process id of a socket's listener: 0 in an outer PID namespace, None without one."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(where.removeprefix("unix://"))
        return int.from_bytes(
            connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 4), sys.byteorder
        )
    except OSError:
        return None
    finally:
        connection.close()


def get_listener_name(where: str) -> str | None:
    """Return the name of the process that listens at a socket; None if it is in another PID namespace."""
    try:
        with open(f"/proc/{get_listener_pid(where)}/comm", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - see below
            return file.read().strip()
    except OSError:
        return None


def get_socket_group() -> int | None:
    """Return the id of the group whose members, besides root, have access to the engine's local socket.

    None if the engine is remote, runs as an ordinary user, or is accessible to all users: it is then unknown
    who may start containers on this machine.
    """
    import stat

    status = _find_socket_file()
    if status is None or status.st_uid != ROOT or status.st_mode & stat.S_IWOTH:
        return None
    return status.st_gid


def runs_as_root() -> bool:
    """Whether the engine's local socket belongs to root; False if there is none."""
    status = _find_socket_file()
    return status is not None and status.st_uid == ROOT


def _find_socket_file() -> os.stat_result | None:
    where = find_address()
    try:
        status = os.stat(where.removeprefix("unix://"))  # noqa: PTH116 - pathlib is slow to load
    except OSError:
        return None
    return status if where.startswith("unix://") else None
