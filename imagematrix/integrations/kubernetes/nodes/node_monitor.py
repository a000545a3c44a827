"""What a node has and what uses it: read again and again by whatever gives out its GPUs.

While something cannot be read, the last answer counts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from imagematrix.errors import ImagematrixError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from imagematrix.launcher.gpu_claims.usage import Usage

Node = TypeVar("Node")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorTimes:
    """Intervals and limits in seconds.

    `probe` and `usage` are the intervals for reading the node, and the usage of its GPUs outside of pods.
    `stop` is the limit for calls of kubelet that are being answered when the process ends.
    """

    probe: float = 30.0
    usage: float = 5.0
    stop: float = 1.0


class NodeMonitor(Generic[Node]):
    """A `node` as last probed, and the `usage` of its GPUs outside of pods, None until it is known.

    `probe` reads the node, and `survey` the usage of its GPUs; both raise ImagematrixError. `on_line` gets
    lines about users and problems, `effect` is what follows while the usage was never known. With
    `repeats`, a problem is reported again after another one of the same thing.
    """

    node: Node

    def __init__(
        self,
        probe: Callable[[], Node],
        survey: Callable[[Node], Usage],
        on_line: Callable[[str], None],
        effect: str,
        *,
        repeats: bool = False,
    ) -> None:
        self.usage: Usage | None = None
        self._probe = probe
        self._survey = survey
        self._on_line = on_line
        self._effect = effect
        self._repeats = repeats
        self._users: Mapping[str, str] = {}  # as reported
        self._problems: dict[str, set[str]] = {}  # as reported, by what fails, until it succeeds

    async def read_node(self) -> None:
        """Probe the node; raise ImagematrixError if that fails."""
        self.node = await asyncio.to_thread(self._probe)

    async def update_node(self) -> None:
        """Probe the node, or report that it cannot be probed."""
        try:
            await self.read_node()
        except ImagematrixError as error:
            self.report_state("node", f"the node cannot be probed: {error}")
        else:
            self.report_state("node", None)

    async def update_usage(self) -> None:
        """Read the usage of GPUs outside of pods, or report that it is unknown."""
        try:
            self.usage = await asyncio.to_thread(self._survey, self.node)
        except ImagematrixError as error:
            effect = self._effect if self.usage is None else "the last known counts"
            self.report_state("usage", f"usage of GPUs outside of pods unknown, {effect}: {error}")
        else:
            self.report_state("usage", None)

    def report_users(self, users: Mapping[str, str]) -> None:
        """Report which units are used outside of pods now, and which are not any more."""
        for unit in users.keys() - self._users.keys():
            self._on_line(f"{unit} is in use by {users[unit]}")
        for unit in self._users.keys() - users.keys():
            self._on_line(f"{unit} is no longer in use outside of pods")
        self._users = users

    def report_state(self, what: str, problem: str | None) -> None:
        """Report a problem of `what` once until it succeeds (None): it is tried again every few seconds."""
        if problem is None:
            self._problems.pop(what, None)
            return
        reported = self._problems.setdefault(what, set())
        if problem not in reported:
            if self._repeats:
                reported.clear()
            reported.add(problem)
            self._on_line(problem)
