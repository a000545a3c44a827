"""Leadership: of several processes, the one that holds a Lease of coordination.k8s.io/v1 does a task.

The clocks of the processes are never compared: a Lease has expired if it has not changed for its duration, as
the process that watches it has measured. See https://kubernetes.io/docs/concepts/architecture/leases.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import time
from contextlib import suppress
from dataclasses import dataclass

from imagematrix.errors import EngineError, UsageError
from imagematrix.kubernetes.webhook.api import FAILURES, checked, failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    import aiohttp

    from imagematrix.kubernetes.webhook.api import ApiServer
    from imagematrix.kubernetes.webhook.telemetry import Telemetry

__all__ = ["Leadership"]

DURATION_S = 30  # without a renewal, after which another process may take over
RENEWED_S = 20  # without a renewal, after which the holder stops: before another process takes over
RETRY_S = 5.0
PAUSE_S = 30.0  # the longest pause, of a process that does not hold it, after failures
LONGEST_S = 3600  # a duration that another process may have asked for
NOT_FOUND, CONFLICT = 404, 409


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The Lease `name` in the namespace of this process's pod; `identity` names this process."""

    api: ApiServer
    name: str
    identity: str

    async def follow(self, lead: Callable[[], Coroutine[Any, Any, None]], telemetry: Telemetry) -> None:
        """Run `lead` while this process holds the Lease, until cancelled; if it fails, it is run again."""
        holding = _Holding()
        task: asyncio.Task[None] | None = None
        pause = RETRY_S
        try:
            while True:
                answered = await self._hold(holding, telemetry)
                if task is not None and task.done():
                    error = task.exception()
                    telemetry.failed("events", EngineError(f"started again after {error!r:.300}"))
                    task = None
                if holding.held and task is None:
                    telemetry.note(f"{self.identity} leads")
                    task = asyncio.create_task(lead())
                elif not holding.held and task is not None:
                    telemetry.note(f"{self.identity} leads no longer")
                    await _end(task)
                    task = None
                pause = RETRY_S if answered or holding.held else min(2 * pause, PAUSE_S)
                await asyncio.sleep(pause * random.uniform(0.8, 1.0))  # noqa: S311
        finally:
            if task is not None:
                task.cancel()

    async def _hold(self, holding: _Holding, telemetry: Telemetry) -> bool:
        """Take or renew the Lease if possible; return whether the API server has answered."""
        try:
            async with asyncio.timeout(RENEWED_S - RETRY_S):
                async with self.api.session() as session:
                    holding.renewed = time.monotonic() if await self._renewed(session, holding) else None
                    return True
        except (EngineError, UsageError) as error:
            telemetry.failed("lease", error)
        except FAILURES as error:
            telemetry.failed("lease", failure(error))
        return False

    async def _renewed(self, session: aiohttp.ClientSession, holding: _Holding) -> bool:
        """Read the Lease, and write it if it is this process's turn; return whether this process holds it."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.api.namespace()}/leases/{self.name}"
        async with session.get(path, headers=self.api.headers()) as answer:
            if answer.status == NOT_FOUND:
                raise UsageError(
                    f"there is no Lease {self.name}", remedy="`kubernetes render install` writes one"
                )
            lease = await checked(answer, "lease")
        found = lease.object_or_none("spec")
        spec = dict(found.data) if found else {}
        holder = found.text_or_none("holderIdentity") if found else None
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if holder != self.identity:
            duration = (found.integer_or_none("leaseDurationSeconds") if found else None) or DURATION_S
            if holder and not holding.expired((holder, spec.get("renewTime")), min(duration, LONGEST_S)):
                return False
            transitions = (found.integer_or_none("leaseTransitions") if found else None) or 0
            spec |= {"acquireTime": now, "leaseTransitions": transitions + 1}
        spec |= {"holderIdentity": self.identity, "leaseDurationSeconds": DURATION_S, "renewTime": now}
        # Its resourceVersion makes the API server refuse it if another process was faster.
        async with session.put(path, json={**lease.data, "spec": spec}, headers=self.api.headers()) as answer:
            if answer.status == CONFLICT:
                return False
            await checked(answer, "lease")
        return True


@dataclass(slots=True)
class _Holding:
    """When this process last renewed the Lease, and since when another's has not changed."""

    renewed: float | None = None
    seen: object = None
    since: float = 0.0

    @property
    def held(self) -> bool:
        """Whether this process holds the Lease, and nobody else can."""
        return self.renewed is not None and time.monotonic() - self.renewed < RENEWED_S

    def expired(self, record: object, duration_s: float) -> bool:
        """Whether another's record has not changed for so long."""
        if record != self.seen:
            self.seen, self.since = record, time.monotonic()
        return time.monotonic() - self.since >= duration_s


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
