"""The webhook's HTTP server, with reviews, health and metrics on one port: it runs until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

from aiohttp import web

from imagematrix.errors import UsageError
from imagematrix.kubernetes.webhook.certificate import Certificate
from imagematrix.kubernetes.webhook.review import PATH, answer
from imagematrix.kubernetes.webhook.sources import follow_catalog
from imagematrix.kubernetes.webhook.state import ClusterState
from imagematrix.kubernetes.webhook.telemetry import Telemetry
from imagematrix.listening import Address, listening

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from imagematrix.kubernetes.webhook.events import Events
    from imagematrix.kubernetes.webhook.sources import NodeSource
    from imagematrix.kubernetes.webhook.state import PolicyOptions

__all__ = ["Server", "WebhookSettings", "serve"]

LARGEST = 3 << 20  # bytes of a request; the API server has the same limit
DRAIN_S = 5.0  # after SIGTERM, until the cluster sends no new reviews
GRACE_S = 10.0  # for reviews in progress, after that


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """The settings of `imagematrix kubernetes webhook`.

    `listen` is ADDRESS:PORT, `events` writes Events, `policy` is the user's policy of signatures.
    """

    catalogs: tuple[str, ...]
    nodes: NodeSource
    chain: Path
    key: Path
    listen: str
    options: PolicyOptions
    events: Events | None = None
    policy: Path | None = None


def serve(settings: WebhookSettings, note: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `note` gets lines about changes, refusals and failures.

    Raises UsageError for invalid settings, or a certificate that cannot be read.
    """
    address = Address.parse(settings.listen)
    certificate = Certificate(settings.chain, settings.key)
    asyncio.run(_serve(settings, certificate, address, note))


async def _serve(
    settings: WebhookSettings, certificate: Certificate, address: Address, note: Callable[[str], None]
) -> None:
    telemetry = Telemetry(note)
    state = ClusterState(settings.catalogs, settings.options, telemetry)
    server = Server(state, telemetry)
    ended: asyncio.Queue[int] = asyncio.Queue()
    async with listening(server.application(), address, grace_s=GRACE_S, tls=certificate.context) as bound:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.put_nowait, number)
        note(f"answering reviews on {bound}")
        tasks = [
            asyncio.create_task(each)
            for each in (
                ended.get(),
                state.follow(),
                certificate.follow(telemetry),
                settings.nodes.follow(state, telemetry),
                *(
                    follow_catalog(catalog, state, telemetry, settings.policy)
                    for catalog in settings.catalogs
                ),
                *([settings.events.follow(state, telemetry)] if settings.events else []),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() == signal.SIGTERM for task in done):
                server.ending = True
                await asyncio.sleep(DRAIN_S)
        finally:
            for task in tasks:
                task.cancel()


class Server:
    """Answers reviews by the current policies; `ending` makes it unready, and it gets no new connections.

    Until the nodes and all catalogs are known, it answers reviews with 503, so that the failurePolicy of the
    webhook's configuration applies.
    """

    def __init__(self, state: ClusterState, telemetry: Telemetry) -> None:
        self.ending = False
        self._state = state
        self._telemetry = telemetry

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
            self._telemetry.reviewed("unready", time.perf_counter() - start)
            return web.Response(status=503, text=f"{self._state.missing}\n")
        try:
            review = answer(raw, policies)
        except UsageError as error:
            self._telemetry.reviewed("invalid", time.perf_counter() - start)
            return web.Response(status=400, text=f"{error}\n")
        response = web.json_response(review.document)
        if self.ending:  # the client would send its next review to a server that may have ended
            response.force_close()
        self._telemetry.reviewed(review.outcome, time.perf_counter() - start, review.pod, review.reason)
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
        return web.Response(body=self._telemetry.text(), headers={"Content-Type": self._telemetry.TYPE})
