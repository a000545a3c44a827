"""Tasks of a service: their states, and whether a job has ended.

The states are those of SwarmKit (api/types.proto), in the order in which a task passes through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

# States that a person sees as one.
WORDS = {
    **dict.fromkeys(("new", "pending"), "waiting"),
    **dict.fromkeys(("assigned", "accepted", "preparing", "ready"), "starting"),
}
RUNNING = "running"
COMPLETE = "complete"
# A task in any other state may still run, even if its node is down.
ENDED = frozenset({COMPLETE, "shutdown", "failed", "rejected", "remove", "orphaned"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmTask:
    """A task: its number in the service (`slot`, from 0 in a job), its node's id, its state and the reason.

    `exit_code` is that of its container, None if the container never ran or still runs. `since` is the time
    of its last change of state, in seconds since 1970.
    """

    id: str
    slot: int
    node: str
    state: str
    reason: str
    exit_code: int | None
    since: float

    @classmethod
    def from_engine(cls, document: Mapping[str, Any]) -> SwarmTask:
        """Return a task as the engine describes it."""
        status = document.get("Status") or {}
        container = status.get("ContainerStatus") or {}
        state = str(status.get("State"))
        return cls(
            id=str(document["ID"]),
            slot=int(document.get("Slot") or 0),
            node=str(document.get("NodeID") or ""),
            state=state,
            reason=str(status.get("Err") or status.get("Message") or ""),
            exit_code=container.get("ExitCode") if state in ENDED and container.get("ContainerID") else None,
            since=parse_timestamp(str(status.get("Timestamp") or "")),
        )

    @property
    def has_ended(self) -> bool:
        """Whether it has certainly ended, and will not start."""
        return self.state in ENDED


def find_latest(tasks: Iterable[SwarmTask]) -> list[SwarmTask]:
    """Return the task of each slot, in order; of several, one that has not ended, or else the last to end."""
    by_slot: dict[int, SwarmTask] = {}
    for task in sorted(tasks, key=lambda task: (not task.has_ended, task.since)):
        by_slot[task.slot] = task
    return [by_slot[slot] for slot in sorted(by_slot)]


def get_replicas(service: Mapping[str, Any]) -> int | None:
    """Return the number of tasks of a job from the engine's description; None if the service is not a job."""
    mode = (service.get("Spec") or {}).get("Mode") or {}
    job = mode.get("ReplicatedJob")
    return None if job is None else int(job.get("TotalCompletions") or 1)


def has_job_ended(tasks: Iterable[SwarmTask], count: int) -> bool:
    """Whether a job of `count` tasks has ended; the manager may not have created all of them yet."""
    created = list(tasks)
    return len({task.slot for task in created}) >= count and all(task.has_ended for task in created)


def summarize_states(tasks: Iterable[SwarmTask]) -> str:
    """Return the number of tasks in each state, and the reason why some wait."""
    counts: dict[str, int] = {}
    reasons = []
    for task in find_latest(tasks):
        word = WORDS.get(task.state, task.state)
        counts[word] = counts.get(word, 0) + 1
        if task.state == "pending" and task.reason and task.reason not in reasons:
            reasons.append(task.reason)
    order = ("waiting", "starting", RUNNING, COMPLETE)
    words = [*(word for word in order if word in counts), *sorted(counts.keys() - set(order))]
    text = ", ".join(f"{counts[word]} {word}" for word in words)
    return f"{text}: {reasons[0]}" if len(reasons) == 1 else text


def parse_timestamp(timestamp: str) -> float:
    """Return a time of the engine, RFC 3339 with nanoseconds, in seconds since 1970; 0 if invalid."""
    whole, dot, fraction = timestamp.removesuffix("Z").partition(".")
    try:
        time = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
        return time + float(f"0.{fraction}" if dot else 0)
    except ValueError:
        return 0.0
