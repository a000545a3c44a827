"""The webhook's HTTP server: reviews, health and metrics on one port."""

from __future__ import annotations

import time

from aiohttp import web

from imagematrix.errors import UsageError
from imagematrix.kubernetes.webhook.review import PATH, answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.kubernetes.webhook.journal import Journal
    from imagematrix.kubernetes.webhook.state import State

__all__ = ["PATH", "Server"]

LARGEST = 3 << 20  # bytes of a request; the API server has the same limit


class Server:
    """Answers reviews by the current policies; `ending` makes it unready, so that it gets no new connections.

    Until the nodes and all catalogs are known, it answers reviews with 503, so that the failurePolicy of the
    webhook's configuration applies.
    """

    def __init__(self, state: State, journal: Journal) -> None:
        self.ending = False
        self._state = state
        self._journal = journal

    def application(self) -> web.Application:
        """Return the application."""
        application = web.Application(client_max_size=LARGEST)
        application.router.add_post(PATH, self._review)
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/readyz", self._ready)
        application.router.add_get("/metrics", self._metrics)
        return application

    async def _review(self, request: web.Request) -> web.Response:
        raw = await request.read()
        start = time.perf_counter()
        policies = self._state.policies
        if policies is None:
            self._journal.reviewed("unready", time.perf_counter() - start)
            return web.Response(status=503, text=f"{self._state.missing}\n")
        try:
            review = answer(raw, policies)
        except UsageError as error:
            self._journal.reviewed("invalid", time.perf_counter() - start)
            return web.Response(status=400, text=f"{error}\n")
        response = web.json_response(review.document)
        self._journal.reviewed(review.outcome, time.perf_counter() - start, review.pod, review.reason)
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _: web.Request) -> web.Response:
        """Answer whether there are policies, and the server is not ending."""
        if self.ending:
            return web.Response(status=503, text="ending\n")
        if self._state.policies is None:
            return web.Response(status=503, text=f"{self._state.missing}\n")
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._journal.text(), headers={"Content-Type": self._journal.TYPE})
