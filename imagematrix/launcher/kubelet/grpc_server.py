"""Serving the calls of a kubelet at a socket on its node, until a signal ends the process."""

from __future__ import annotations

import asyncio
import signal

import grpc

from imagematrix.errors import UsageError
from imagematrix.launcher.kubelet.messages import load_message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path
    from typing import Any

SOCKET_PATH = 107  # bytes without the terminating zero: sun_path, unix(7)


def run_until_signal(run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `run` with an event that SIGINT or SIGTERM sets."""

    async def main() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await run(ended)

    asyncio.run(main())


async def run_together(*work: Coroutine[Any, Any, object]) -> None:
    """Run coroutines until the first of them ends, then cancel the others; raise the first error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def run_periodically(
    seconds: float, action: Callable[[], Awaitable[None]], *, at_once: bool = False
) -> None:
    """Call `action` again and again, with pauses; the first time after a pause, or `at_once`."""
    if at_once:
        await action()
    while True:
        await asyncio.sleep(seconds)
        await action()


async def start_server(path: Path, *handlers: Any) -> Any:
    """Return a started gRPC server at a socket, which replaces that of a process that was killed.

    Raises UsageError if it cannot listen there.
    """
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    _bind_socket(server, path)
    await server.start()
    return server


def _bind_socket(server: Any, path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot replace {path}: {error.strerror}", remedy="remove it as root") from error
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        remedy = "run as root"
        if len(bytes(path)) > SOCKET_PATH:
            remedy = f"use a shorter path: the path of a socket has at most {SOCKET_PATH} bytes"
        raise UsageError(f"cannot listen on {path}: {error}", remedy=remedy) from error


def make_handler(kind: Any, behaviour: Any, request: str) -> Any:
    """Return the handler of a method; `kind` is a function of grpc, and `request` names a message."""
    return kind(
        behaviour,
        request_deserializer=load_message(request).FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )
