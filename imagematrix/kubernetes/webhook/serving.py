"""Running the webhook until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

from imagematrix.kubernetes.webhook.certificate import Certificate
from imagematrix.kubernetes.webhook.journal import Journal
from imagematrix.kubernetes.webhook.server import Server
from imagematrix.kubernetes.webhook.sources import follow_catalog
from imagematrix.kubernetes.webhook.state import State
from imagematrix.listening import Address, listening

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from imagematrix.kubernetes.webhook.sources import Nodes
    from imagematrix.kubernetes.webhook.state import Question

__all__ = ["Settings", "serve"]

DRAIN_S = 5.0  # after SIGTERM, until the cluster sends no new reviews
GRACE_S = 10.0  # for reviews in progress, after that


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of `imagematrix kubernetes webhook`; `listen` is ADDRESS:PORT."""

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
    address = Address.parse(settings.listen)
    certificate = Certificate(settings.chain, settings.key)
    asyncio.run(_serve(settings, certificate, address, note))


async def _serve(
    settings: Settings, certificate: Certificate, address: Address, note: Callable[[str], None]
) -> None:
    journal = Journal(note)
    state = State(settings.catalogs, settings.question, journal)
    server = Server(state, journal)
    ended: asyncio.Queue[int] = asyncio.Queue()
    async with listening(server.application(), address, grace_s=GRACE_S, tls=certificate.context) as bound:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.put_nowait, number)
        for each in bound:
            note(f"answering reviews on {each}")
        tasks = [
            asyncio.create_task(each)
            for each in (
                ended.get(),
                state.follow(),
                certificate.follow(journal),
                settings.nodes.follow(state, journal),
                *(follow_catalog(catalog, state, journal) for catalog in settings.catalogs),
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
