"""Whether a service is alive and ready, on a port and in a thread of its own, so that no load delays it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future

from aiohttp import web

from imagematrix.errors import ImagematrixError
from imagematrix.integrations.http_service.connections import Limits
from imagematrix.integrations.http_service.http_server import Address, serve_http

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

ASK_S = 1.0  # between answers that a service makes for itself
FRESH_S = 10.0  # for which such an answer proves that the service answers
ALIVE_S = 30.0  # without a turn of its event loop, after which a service is not alive
LIMITS = Limits(clients=128, peer=128, slow_s=5.0)


class Health:
    """The health of a service.

    It is ready if `problem` returns None and `answer` has lately returned: the service's own answer to a
    question of its own, made as for a client. `problem` is called in another thread.
    """

    def __init__(self, problem: Callable[[], str | None], answer: Callable[[], Awaitable[object]]) -> None:
        self._problem = problem
        self._answer = answer
        self._failure = "no answer was made yet"
        self._answered = -FRESH_S
        self._turned = time.monotonic()

    async def follow(self) -> None:
        """Make answers until cancelled, in the service's event loop."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._note_turns())
            while True:
                try:
                    await self._answer()
                except ImagematrixError as error:
                    self._failure = str(error)
                else:
                    self._answered = time.monotonic()
                    self._failure = f"no answer was made for {FRESH_S:g} s"
                await asyncio.sleep(ASK_S)

    @contextlib.asynccontextmanager
    async def serve(self, address: Address) -> AsyncIterator[Address]:
        """Serve /healthz and /readyz; yield the address with its port; see `serve_http`."""
        bound: Future[Address] = Future()
        ended = threading.Event()

        async def serve() -> None:
            async with serve_http(self.make_application(), address, limits=LIMITS) as listening:
                bound.set_result(listening)
                await asyncio.to_thread(ended.wait)

        def run() -> None:
            try:
                asyncio.run(serve())
            except Exception as error:  # noqa: BLE001 - raised in the service's thread
                if not bound.done():
                    bound.set_exception(error)

        thread = threading.Thread(target=run, name="health", daemon=True)
        thread.start()
        try:
            yield await asyncio.wrap_future(bound)
        finally:
            ended.set()
            await asyncio.to_thread(thread.join)

    async def _note_turns(self) -> None:
        """Note again and again that the event loop turns."""
        while True:
            self._turned = time.monotonic()
            await asyncio.sleep(ASK_S)

    def make_application(self) -> web.Application:
        """Return the application."""
        application = web.Application()
        application.router.add_get("/healthz", self._show_alive)
        application.router.add_get("/readyz", self._show_ready)
        return application

    async def _show_alive(self, _: web.Request) -> web.Response:
        still_s = time.monotonic() - self._turned
        return _format_problem(f"nothing was done for {still_s:.0f} s" if still_s > ALIVE_S else None)

    async def _show_ready(self, _: web.Request) -> web.Response:
        late = time.monotonic() - self._answered >= FRESH_S
        return _format_problem(self._problem() or (self._failure if late else None))


def _format_problem(problem: str | None) -> web.Response:
    return web.Response(status=503, text=f"{problem}\n") if problem else web.Response(text="ok\n")
