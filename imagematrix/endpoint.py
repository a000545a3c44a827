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

__all__ = ["address", "certificates", "context", "group", "listener"]

DEFAULT = "unix:///var/run/docker.sock"


def address() -> str:
    """Return the address of the engine as docker's command determines it: DOCKER_HOST, context, default."""
    name = context()
    return os.environ.get("DOCKER_HOST") or (DEFAULT if name == "default" else _context_address(name))


def context() -> str:
    """Return the name of the docker context in use; "default" if DOCKER_HOST overrides it."""
    if os.environ.get("DOCKER_HOST"):
        return "default"
    return str(os.environ.get("DOCKER_CONTEXT") or _current_context() or "default")


def _current_context() -> object:
    try:
        config = _json("config.json")
    except (OSError, ValueError):
        return None
    return config.get("currentContext") if isinstance(config, dict) else None


def certificates() -> tuple[str, bool] | None:
    """Return the folder of certificates for a TCP address, and whether to verify the engine's.

    None without TLS. They come from the context in use, or from DOCKER_TLS_VERIFY and DOCKER_CERT_PATH.
    """
    name = context()
    if name == "default":
        verify = bool(os.environ.get("DOCKER_TLS_VERIFY"))
        given = verify or os.environ.get("DOCKER_TLS")
        return (os.environ.get("DOCKER_CERT_PATH") or _folder(), verify) if given else None
    folder = f"{_folder()}/contexts/tls/{_number(name)}/docker"
    skip = bool(_endpoint(name).get("SkipTLSVerify"))
    return (folder, not skip) if skip or os.path.isdir(folder) else None  # noqa: PTH112 - see below


def _context_address(name: str) -> str:
    return str(_endpoint(name)["Host"])


def _endpoint(name: str) -> dict[str, Any]:
    """Return the settings of the engine in the context `name`, which include its address."""
    try:
        endpoint = _json(f"contexts/meta/{_number(name)}/meta.json")["Endpoints"]["docker"]
        return {**endpoint, "Host": endpoint["Host"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"docker context not found: {name!r}", remedy="run `docker context ls`") from error


def _number(name: str) -> str:
    from hashlib import sha256

    return sha256(name.encode()).hexdigest()


def _folder() -> str:
    return os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")  # noqa: PTH111 - see below


def _json(name: str) -> Any:
    with open(f"{_folder()}/{name}", encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow to load
        return json.load(file)


def listener(where: str) -> str | None:
    """Return the name of the process that listens at a socket; None if it is in another PID namespace."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(where.removeprefix("unix://"))
        pid = int.from_bytes(connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 4), sys.byteorder)
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - see below
            return file.read().strip()
    except OSError:
        return None
    finally:
        connection.close()


def group() -> int | None:
    """Return the id of the group whose members, besides root, have access to the engine's local socket.

    None if the engine is remote, runs as an ordinary user, or is accessible to all users: it is then unknown
    who may start containers on this machine.
    """
    import stat

    where = address()
    try:
        status = os.stat(where.removeprefix("unix://"))  # noqa: PTH116 - pathlib is slow to load
    except OSError:
        return None
    restricted = status.st_uid == 0 and not status.st_mode & stat.S_IWOTH
    return status.st_gid if where.startswith("unix://") and restricted else None
