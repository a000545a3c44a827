"""Running the webhook until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

from aiohttp import web

from imagematrix.errors import UsageError
from imagematrix.kubernetes.webhook.certificate import Certificate
from imagematrix.kubernetes.webhook.journal import Journal
from imagematrix.kubernetes.webhook.known import Known
from imagematrix.kubernetes.webhook.server import Server
from imagematrix.kubernetes.webhook.sources import follow_catalog
from imagematrix.resolver.address import address

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from imagematrix.kubernetes.webhook.known import Question
    from imagematrix.kubernetes.webhook.sources import Nodes

__all__ = ["Settings", "serve"]

DRAIN_S = 5.0  # after SIGTERM, until the cluster sends no new reviews
GRACE_S = 10.0  # for reviews in progress, after that


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `imagematrix kubernetes webhook` was started with; `listen` is ADDRESS:PORT."""

    catalogs: tuple[str, ...]
    nodes: Nodes
    chain: Path
    key: Path
    listen: str
    question: Question


def serve(settings: Settings, note: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `note` gets lines about changes, refusals and failures.

    Raises UsageError for invalid settings, or a certificate that cannot be read.
    """
    where = address(settings.listen)
    certificate = Certificate(settings.chain, settings.key)
    asyncio.run(_serve(settings, certificate, where, note))


async def _serve(
    settings: Settings, certificate: Certificate, where: tuple[str, int], note: Callable[[str], None]
) -> None:
    journal = Journal(note)
    known = Known(settings.catalogs, settings.question, journal)
    server = Server(known, journal)
    runner = server.runner(GRACE_S)
    await runner.setup()
    ended: asyncio.Queue[int] = asyncio.Queue()
    tasks: list[asyncio.Task[object]] = []
    try:
        try:
            await web.TCPSite(runner, *where, ssl_context=certificate.context).start()
        except OSError as error:
            raise UsageError(f"cannot listen on {settings.listen}: {error.strerror}") from error
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.put_nowait, number)
        for bound in runner.addresses:
            name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
            note(f"answering reviews on {name}:{bound[1]}")
        tasks += map(
            asyncio.create_task,
            (
                ended.get(),
                known.follow(),
                certificate.follow(journal),
                settings.nodes.follow(known, journal),
                *(follow_catalog(catalog, known, journal) for catalog in settings.catalogs),
            ),
        )
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if any(task.result() == signal.SIGTERM for task in done):
            server.ending = True
            await asyncio.sleep(DRAIN_S)
    finally:
        for task in tasks:
            task.cancel()
        await runner.cleanup()
