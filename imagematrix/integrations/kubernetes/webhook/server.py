"""The webhook's servers, of reviews and metrics and of its health: they run until a signal ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from dataclasses import dataclass

from aiohttp import web

from imagematrix.errors import EngineError, UsageError
from imagematrix.integrations.http_service.connections import Limits, read_body
from imagematrix.integrations.http_service.health import Health
from imagematrix.integrations.http_service.http_server import Address, serve_http
from imagematrix.integrations.http_service.metrics import make_metrics_handler
from imagematrix.integrations.http_service.workers import Workers
from imagematrix.integrations.kubernetes.webhook.certificate import Certificate
from imagematrix.integrations.kubernetes.webhook.review import API, KIND, PATH, answer_review
from imagematrix.integrations.kubernetes.webhook.sources import follow_catalog
from imagematrix.integrations.kubernetes.webhook.state import ClusterState
from imagematrix.integrations.kubernetes.webhook.telemetry import Telemetry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy
    from imagematrix.integrations.kubernetes.webhook.events import Events
    from imagematrix.integrations.kubernetes.webhook.review import ReviewAnswer
    from imagematrix.integrations.kubernetes.webhook.sources import NodeSource
    from imagematrix.integrations.kubernetes.webhook.state import PolicyOptions

# The API server has the same limit on a request. A review takes moments, so few connections answer many
# clients, and those of TLS keep a third of a MiB each.
LIMITS = Limits(body=3 << 20, clients=600, peer=500)
DRAIN_S = 5.0  # after SIGTERM, until the cluster sends no new reviews
GRACE_S = 10.0  # for reviews in progress, after that


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """The settings of `imagematrix kubernetes webhook`.

    `listen` and `health` are ADDRESS:PORT, `events` writes Events, `policy` is the user's policy of
    signatures.
    """

    catalogs: tuple[str, ...]
    nodes: NodeSource
    chain: Path
    key: Path
    listen: str
    options: PolicyOptions
    health: str | None = None
    events: Events | None = None
    policy: Path | None = None


def serve(settings: WebhookSettings, on_line: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_line` gets lines about changes, refusals and failures.

    Raises UsageError for invalid settings, or a certificate that cannot be read.
    """
    address = Address.parse(settings.listen)
    certificate = Certificate(settings.chain, settings.key)
    health = Address.parse(settings.health) if settings.health else None
    asyncio.run(_run_webhook(settings, certificate, address, health, on_line))


async def _run_webhook(
    settings: WebhookSettings,
    certificate: Certificate,
    address: Address,
    health_address: Address | None,
    on_line: Callable[[str], None],
) -> None:
    telemetry = Telemetry(on_line)
    state = ClusterState(settings.catalogs, settings.options, telemetry)
    workers = Workers(answer_review.__module__)
    server = Server(state, telemetry, workers)
    health = Health(server.find_problem, server.check_answer)
    ended: asyncio.Queue[int] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(workers.end)
        serving = serve_http(
            server.make_application(), address, grace_s=GRACE_S, tls=certificate.context, limits=LIMITS
        )
        bound = await stack.enter_async_context(serving)
        where = f"answering reviews on {bound}"
        if health_address:
            where += f", health on {await stack.enter_async_context(health.serve(health_address))}"
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.put_nowait, number)
        on_line(where)
        tasks = [
            asyncio.create_task(work)
            for work in (
                ended.get(),
                state.follow(),
                health.follow(),
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
            ended_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() == signal.SIGTERM for task in ended_tasks):
                server.is_ending = True
                await asyncio.sleep(DRAIN_S)
        finally:
            for task in tasks:
                task.cancel()


class Server:
    """Answers reviews by the current policies; `is_ending` makes it unready, and it gets no new connections.

    Until the nodes and all catalogs are known, it answers reviews with 503, so that the failurePolicy of the
    webhook's configuration applies. Reviews are decided in processes of their own.
    """

    def __init__(self, state: ClusterState, telemetry: Telemetry, workers: Workers) -> None:
        self.is_ending = False
        self._state = state
        self._telemetry = telemetry
        self._workers = workers

    def make_application(self) -> web.Application:
        """Return the application."""
        application = web.Application()
        application.router.add_post(PATH, self._answer_review)
        application.router.add_get("/metrics", make_metrics_handler(self._telemetry.registry))
        return application

    def find_problem(self) -> str | None:
        """Return why the webhook is to get no reviews, or None."""
        if self.is_ending:
            return "ending"
        return self._state.unready_reason if self._state.policies is None else None

    async def check_answer(self) -> None:
        """Answer a review of this process's own; raise EngineError if there is no answer."""
        policies = self._state.policies
        if policies is None:
            raise EngineError(str(self._state.unready_reason))
        await self._decide(_make_sample_review(policies), policies)

    async def _decide(self, raw: bytes, policies: tuple[AdmissionPolicy, ...]) -> ReviewAnswer:
        return await self._workers.call(answer_review, raw, cached=policies, size=len(raw))

    async def _answer_review(self, _: web.Request) -> web.Response:
        start = time.perf_counter()
        policies = self._state.policies
        if policies is None:
            self._telemetry.record_review("unready", time.perf_counter() - start)
            return web.Response(status=503, text=f"{self._state.unready_reason}\n")
        try:
            review = await self._decide(read_body(), policies)
        except UsageError as error:
            self._telemetry.record_review("invalid", time.perf_counter() - start)
            return web.Response(status=400, text=f"{error}\n")
        except EngineError as error:
            self._telemetry.record_review("expensive", time.perf_counter() - start)
            return web.Response(status=503, text=f"{error}\n")
        response = web.json_response(review.document)
        if self.is_ending:  # the client would send its next review to a server that may have ended
            response.force_close()
        seconds = time.perf_counter() - start
        self._telemetry.record_review(review.outcome, seconds, review.pod, review.reason)
        return response


def _make_sample_review(policies: Sequence[AdmissionPolicy]) -> bytes:
    """Return a review of a pod that uses all images."""
    containers = [{"name": f"c{index}", "image": policy.name} for index, policy in enumerate(policies)]
    request = {
        "uid": "own",
        "operation": "CREATE",
        "resource": {"resource": "pods"},
        "object": {"metadata": {}, "spec": {"containers": containers}},
    }
    return json.dumps({"apiVersion": API, "kind": KIND, "request": request}).encode()
