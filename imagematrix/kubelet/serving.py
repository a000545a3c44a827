"""Serving the calls of a kubelet at a socket on its node."""

from __future__ import annotations

import grpc

from imagematrix.errors import UsageError
from imagematrix.kubelet.messages import message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

__all__ = ["SOCKET_PATH", "listen", "method"]

SOCKET_PATH = 107  # bytes without the terminating zero: sun_path, unix(7)


async def listen(path: Path, *handlers: Any) -> Any:
    """Return a started gRPC server at a socket, which replaces that of a process that was killed.

    Raises UsageError if it cannot listen there.
    """
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    _bind(server, path)
    await server.start()
    return server


def method(kind: Any, behaviour: Any, request: str) -> Any:
    """Return the handler of a method; `kind` is a function of grpc, and `request` names a message."""
    return kind(
        behaviour,
        request_deserializer=message(request).FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )


def _bind(server: Any, path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        remedy = "run as root"
        if len(bytes(path)) > SOCKET_PATH:
            remedy = f"use a shorter path: the path of a socket has at most {SOCKET_PATH} bytes"
        raise UsageError(f"cannot listen on {path}: {error}", remedy=remedy) from error
