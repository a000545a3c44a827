"""What a node has and what uses it: read again and again by whatever gives out its GPUs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
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


@dataclass(slots=True, kw_only=True)
class NodeMonitor(Generic[Node]):
    """A `node` as last probed, and the `usage` of its GPUs outside of pods, None until it is known.

    While one of them cannot be read, the last answer counts. `probe` reads the node, and `survey` the usage
    of its GPUs; both raise ImagematrixError. `on_line` gets lines about users and problems, `effect` is what
    follows while the usage was never known.
    """

    probe: Callable[[], Node]
    survey: Callable[[Node], Usage]
    on_line: Callable[[str], None]
    effect: str
    node: Node = field(init=False)
    usage: Usage | None = field(init=False, default=None)
    _users: Mapping[str, str] = field(init=False, default_factory=dict)  # as reported
    _problems: dict[str, str] = field(init=False, default_factory=dict)  # as last reported, by what fails

    async def read_node(self) -> None:
        """Probe the node; raise ImagematrixError if that fails."""
        self.node = await asyncio.to_thread(self.probe)

    async def update_node(self) -> None:
        """Probe the node, or report that it cannot be probed."""
        try:
            await self.read_node()
        except ImagematrixError as error:
            self.report_state("node", f"the node cannot be probed: {error}")
        else:
            self.report_state("node", None)

    async def read_usage(self) -> None:
        """Read the usage of GPUs outside of pods; raise ImagematrixError if that fails."""
        self.usage = await asyncio.to_thread(self.survey, self.node)

    async def update_usage(self) -> None:
        """Read the usage of GPUs outside of pods, or report that it is unknown."""
        try:
            await self.read_usage()
        except ImagematrixError as error:
            effect = self.effect if self.usage is None else "the last known counts"
            self.report_state("usage", f"usage of GPUs outside of pods unknown, {effect}: {error}")
        else:
            self.report_state("usage", None)

    def report_users(self, users: Mapping[str, str]) -> None:
        """Report which units are used outside of pods now, and which are not any more."""
        for unit in users.keys() - self._users.keys():
            self.on_line(f"{unit} is in use by {users[unit]}")
        for unit in self._users.keys() - users.keys():
            self.on_line(f"{unit} is no longer in use outside of pods")
        self._users = users

    def report_state(self, what: str, problem: str | None) -> None:
        """Report a problem of `what` when it comes up, until it changes or is solved (None).

        What failed is tried again every few seconds.
        """
        if problem is None:
            self._problems.pop(what, None)
        elif problem != self._problems.get(what):
            self._problems[what] = problem
            self.on_line(problem)
