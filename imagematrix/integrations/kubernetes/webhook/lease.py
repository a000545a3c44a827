"""Leadership: of several processes, the one that holds a Lease of coordination.k8s.io/v1 does a task.

The clocks of the processes are never compared: a Lease has expired if it has not changed for its duration, as
the process that watches it has measured. See https://kubernetes.io/docs/concepts/architecture/leases.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import time
from dataclasses import dataclass

from imagematrix.errors import EngineError, UsageError
from imagematrix.integrations.kubernetes.client.api import ConflictError, NotFoundError, send_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from imagematrix.integrations.kubernetes.client.api import ApiServer
    from imagematrix.integrations.kubernetes.webhook.telemetry import Telemetry

DURATION_S = 30  # without a renewal, after which another process may take over
RENEWED_S = 20  # without a renewal, after which the holder stops: before another process takes over
RETRY_S = 5.0
PAUSE_S = 30.0  # the longest pause, of a process that does not hold it, after failures
LONGEST_S = 3600  # a duration that another process may have asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The Lease `name` in a namespace; `identity` names this process."""

    api: ApiServer
    namespace: str
    name: str
    identity: str

    async def follow(self, lead: Callable[[], Coroutine[Any, Any, None]], telemetry: Telemetry) -> None:
        """Run `lead` while this process holds the Lease, until cancelled; if it fails, it is run again."""
        holding = _Holding()
        task: asyncio.Task[None] | None = None
        pause = RETRY_S
        try:
            while True:
                answered = await self._try_renewal(holding, telemetry)
                if task is not None and task.done():
                    error = task.exception()
                    telemetry.record_failure("events", EngineError(f"started again after {error!r:.300}"))
                    task = None
                if holding.is_held and task is None:
                    telemetry.log(f"{self.identity} leads")
                    task = asyncio.create_task(lead())
                elif not holding.is_held and task is not None:
                    telemetry.log(f"{self.identity} leads no longer")
                    # To suppress the task's CancelledError would also suppress our own.
                    task.cancel()
                    await asyncio.wait([task])
                    task = None
                pause = RETRY_S if answered or holding.is_held else min(2 * pause, PAUSE_S)
                await asyncio.sleep(pause * random.uniform(0.8, 1.0))  # noqa: S311
        finally:
            if task is not None:
                task.cancel()

    async def _try_renewal(self, holding: _Holding, telemetry: Telemetry) -> bool:
        """Take or renew the Lease if possible; return whether the API server has answered."""
        # The holder stops in time, even if the API server does not answer.
        started, patience = time.monotonic(), RENEWED_S - RETRY_S
        if holding.renewed is not None and holding.is_held:
            patience = min(patience, holding.renewed + RENEWED_S - started)
        try:
            async with asyncio.timeout(patience):
                holding.renewed = started if await self._renew(holding) else None
        except TimeoutError:
            telemetry.record_failure("lease", EngineError("the API server does not answer"))
        except (EngineError, UsageError) as error:
            telemetry.record_failure("lease", error)
        else:
            return True
        return False

    async def _renew(self, holding: _Holding) -> bool:
        """Read the Lease, and write it if it is this process's turn; return whether this process holds it."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{self.name}"
        try:
            lease = await send_request(self.api, "GET", path)
        except NotFoundError as error:
            raise EngineError(f"there is no Lease {self.name} in {self.namespace}") from error
        spec = lease.get_object_or_empty("spec")
        holder, renewed = spec.get_text_or_none("holderIdentity"), dict(spec.data)
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if holder != self.identity:
            duration = spec.get_integer_or_none("leaseDurationSeconds") or DURATION_S
            record = (holder, spec.get_text_or_none("renewTime"))
            if holder and not holding.has_expired(record, min(duration, LONGEST_S)):
                return False
            transitions = spec.get_integer_or_none("leaseTransitions") or 0
            renewed |= {"acquireTime": now, "leaseTransitions": transitions + 1}
        renewed |= {"holderIdentity": self.identity, "leaseDurationSeconds": DURATION_S, "renewTime": now}
        try:
            # Its resourceVersion makes the API server refuse it if another process was faster.
            await send_request(self.api, "PUT", path, {**lease.data, "spec": renewed})
        except ConflictError:
            return False
        return True


@dataclass(slots=True)
class _Holding:
    """When this process last renewed the Lease, and since when another's has not changed."""

    renewed: float | None = None
    record: object = None
    since: float = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this process holds the Lease, and nobody else can."""
        return self.renewed is not None and time.monotonic() - self.renewed < RENEWED_S

    def has_expired(self, record: object, duration_s: float) -> bool:
        """Whether another's record has not changed for so long."""
        if record != self.record:
            self.record, self.since = record, time.monotonic()
        return time.monotonic() - self.since >= duration_s
