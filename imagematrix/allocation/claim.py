"""Claims: reserving unused GPUs, or shares of GPUs, for one launch."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from imagematrix.allocation import shares
from imagematrix.allocation.containers import GPUS, LEASE, VRAM
from imagematrix.allocation.locks import Locks, folder, inherit, release
from imagematrix.allocation.queue import Queue, Ticket
from imagematrix.allocation.slots import Slot, ranked, reserved, unreserved
from imagematrix.allocation.survey import SHARE, leases
from imagematrix.allocation.usage import combined, consumers, keys, overlap
from imagematrix.errors import GpusBusyError, ProbeError, UsageError
from imagematrix.gpus.choice import label, memory_mib, merged
from imagematrix.gpus.spec import names
from imagematrix.record import Record, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from imagematrix.allocation.usage import Usage
    from imagematrix.errors import ImagematrixError
    from imagematrix.gpus.choice import Choice
    from imagematrix.node.host import Gpu

    Attended = Callable[[Mapping[str, str]], bool]

__all__ = ["Claim", "claim", "claim_first"]

POLL_S = 1.0


class Claim:
    """GPUs, or shares of GPUs, reserved for this process until it ends or releases them.

    `labels` are for the container that gets the GPUs: they state the size of a share and its lease.
    `descriptors` hold the locks; pass them to a child process (`pass_fds`) that should keep the claim too.
    """

    def __init__(
        self, gpus: tuple[Gpu, ...], descriptors: tuple[int, ...], labels: Mapping[str, str] | None = None
    ) -> None:
        self.gpus = gpus
        self.descriptors = descriptors
        self.labels = labels or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        release(self.descriptors)
        self.descriptors = ()

    def pass_on(self) -> None:
        """Keep the claim across the exec of another program in this process."""
        inherit(self.descriptors)


def claim(  # noqa: PLR0913 - each is one aspect of the demand
    choice: Choice,
    survey: Callable[[Attended], Usage],
    *,
    also: tuple[Gpu, ...] = (),
    vram_mib: int | None = None,
    mps: bool = False,
    wait_s: float = 0.0,
    report: Callable[[str], None] = lambda _: None,
    path: str | None = None,
    group: int | None = None,
) -> Claim:
    """Return a claim on the first unused GPUs of `choice`, as many as it needs, or on a share of each.

    The GPUs in `also` are claimed too, because the container gets them anyway. They are not in `Claim.gpus`,
    except those that are also in `choice`, which are taken first. With `vram_mib`, at least 1, the claim is a
    share of that many MiB on each GPU. A share is placed on the shared GPU with the least memory left, so
    that whole GPUs stay free. With `mps` an MPS server may run on the GPUs.

    `survey` returns the current usage (`imagematrix.allocation.survey`). It gets a function that takes the
    labels of a launch's container and returns whether the lease of the launch still counts. If too few GPUs
    are free, this waits up to `wait_s` seconds behind earlier launches and passes the reason to `report`.
    `path` is the lock folder, by default this node's, and `group` the group whose members may start
    containers. Raises GpusBusyError, which names the consumers; UsageError if the GPUs have less memory than
    the share; ProbeError if their memory is unknown; and what `survey` raises.
    """
    demand = _demand(_large_enough(choice, vram_mib), also, vram_mib, mps=mps)
    ticket = Ticket(count=len(demand.also) + demand.count, gpus=tuple(map(keys, demand.also + demand.gpus)))
    eligible = frozenset(key for gpu in ticket.gpus for key in gpu)
    deadline = time.monotonic() + wait_s
    reported = None
    reason = ""
    with ExitStack() as stack:
        locks = stack.enter_context(Locks(path or folder(), group))
        queue = Queue(locks)
        stack.callback(queue.leave)
        while True:
            with ExitStack() as turn:
                try:
                    turn.enter_context(locks.turn(max(0.0, deadline - time.monotonic()) if wait_s else None))
                except GpusBusyError as error:  # at the end of the wait, another launch had its turn
                    raise _busy(reason) if reason else error from None
                ahead = [
                    other for other in queue.ahead() if any(overlap(gpu, eligible) for gpu in other.gpus)
                ]
                outcome = _try(locks, demand, survey, ahead)
                if isinstance(outcome, Claim):
                    return outcome
                reason = outcome
                if wait_s and not queue.joined:
                    queue.join(ticket)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise _busy(reason)
            if reported != len(ahead):
                reported = len(ahead)
                report(f"waiting: {reason}")
            time.sleep(min(POLL_S, left_s))


def claim_first(
    choices: Sequence[Choice], take: Callable[[Choice, float], Claim], wait_s: float = 0.0
) -> Claim:
    """Return a claim on GPUs of the first choice that has enough of them free.

    `choices` are those of `imagematrix.selection.select.serving`; `take` is `claim` with all arguments bound
    but the choice and the seconds to wait. If no choice has enough free GPUs, this waits up to `wait_s`
    seconds for the first choice whose GPUs are only busy. Raises what `take` raises for that choice; if no
    choice can ever have enough, what it raises for the last.
    """
    if len(choices) == 1:
        return take(choices[0], wait_s)
    busy: list[Choice] = []
    unfit: ImagematrixError | None = None
    for choice in choices:
        try:
            return take(choice, 0.0)
        except GpusBusyError:
            busy.append(choice)
        except (ProbeError, UsageError) as error:
            unfit = error
    if unfit and not busy:
        raise unfit
    return take(busy[0], wait_s)


class _Demand(Record):
    """What a launch needs: `count` of `gpus` and all of `also`, whole or a share of `vram_mib` on each.

    `chosen` are the GPUs of `also` that the choice contains too; they are part of the claim.
    """

    gpus: tuple[Gpu, ...]
    count: int
    also: tuple[Gpu, ...]
    chosen: tuple[Gpu, ...]
    vram_mib: int | None
    mps: bool

    def __str__(self) -> str:
        mig_only = all(len(gpu.mig or ()) == 1 for gpu in self.also + self.gpus)
        gpus = _counted(len(self.also) + self.count, "MIG device" if mig_only else "GPU")
        return gpus if self.vram_mib is None else f"{gpus} with {self.vram_mib} MiB free"


def _demand(choice: Choice, also: tuple[Gpu, ...], vram_mib: int | None, *, mps: bool) -> _Demand:
    gpus, count = choice.gpus, choice.count
    also_keys = [key for gpu in also for key in keys(gpu)]
    chosen = tuple(gpu for gpu in gpus if also_keys and overlap(keys(gpu), also_keys))[:count]
    others = tuple(gpu for gpu in gpus if not (also_keys and overlap(keys(gpu), also_keys)))
    # If the choice has a whole GPU, and `also` only a part of it, the whole GPU is claimed.
    whole = tuple(gpu for gpu in chosen if not set(keys(gpu)) <= set(also_keys))
    return _Demand(
        gpus=others, count=count - len(chosen), also=also + whole, chosen=chosen, vram_mib=vram_mib, mps=mps
    )


def _large_enough(choice: Choice, vram_mib: int | None) -> Choice:
    """Return the choice among the GPUs that are known to have the memory; raise if there are too few.

    The shares of a GPU add up to at most its memory, so a GPU with unknown memory cannot be shared.
    """
    if vram_mib is None:
        return choice
    count, totals = choice.count, {gpu: memory_mib(gpu) for gpu in choice.gpus}
    large = tuple(gpu for gpu, total in totals.items() if total is not None and total >= vram_mib)
    unknown = [gpu for gpu, total in totals.items() if total is None]
    if len(large) >= count:
        return replace(choice, gpus=large)
    if len(large) + len(unknown) >= count:
        raise ProbeError(
            f"cannot share {', '.join(map(label, unknown))}: memory size unknown",
            remedy="check with `imagematrix probe` that NVML works; name one device of a GPU in MIG mode",
        )
    sizes = ", ".join(f"{label(gpu)} has {total} MiB" for gpu, total in totals.items())
    raise UsageError(f"requested {_counted(count, 'GPU')} with {vram_mib} MiB, {len(large)} present: {sizes}")


def _try(
    locks: Locks, demand: _Demand, survey: Callable[[Attended], Usage], ahead: list[Ticket]
) -> Claim | str:
    """Return the claim, or the reason why there is none yet; call this while holding the turn."""
    holders = ", ".join(ticket.holder for ticket in ahead if ticket.holder)
    queued = f"{_counted(len(ahead), 'launch', 'launches')} ahead in the queue"
    queued += f" ({holders})" if holders else ""
    eligible = demand.also + demand.gpus
    count = len(demand.also) + demand.count
    if len(eligible) - reserved((key for gpu in eligible for key in keys(gpu)), ahead) < count:
        return f"requested {demand}, {queued}"
    held: dict[tuple[str, ...], tuple[int, ...]] = {}
    try:
        for gpu in eligible:
            held[keys(gpu)] = locks.take(*keys(gpu)) or ()
        # After taking the locks: a launch that has released its lease has its container by now, or has ended.
        leased = leases(locks, whole=not all(held.values()))
        unleased = frozenset(name for gpu in eligible if held[keys(gpu)] for name in names([gpu]))
        usage = combined(leased, survey(lambda labels: _is_attended(labels, leased, unleased)))
        slots = [_slot(gpu, usage, demand, leased=not held[keys(gpu)]) for gpu in eligible]
        available = ranked(unreserved(slots, ahead), demand.vram_mib)
        required = [slot for slot in available if slot.gpu in demand.also]
        free = [slot for slot in available if slot.gpu in demand.gpus]
        if len(required) < len(demand.also) or len(free) < demand.count:
            roomy = [slot for slot in slots if slot.has_room(demand.vram_mib)]
            reasons = [_reason(slot) for slot in slots if slot not in roomy] + ([queued] if ahead else [])
            return f"requested {demand}, {len(roomy)} free: {'; '.join(reasons)}"
        picked = tuple(slot.gpu for slot in slots if slot in free[: demand.count])
        claimed = merged(sorted(demand.chosen + picked, key=lambda gpu: gpu.index))
        if demand.vram_mib is not None:
            return _share(locks, claimed, demand.also + picked, demand.vram_mib)
        return Claim(claimed, tuple(lock for gpu in demand.also + picked for lock in held.pop(keys(gpu))))
    finally:
        for descriptors in held.values():
            release(descriptors)


def _is_attended(labels: Mapping[str, str], leased: Usage, unleased: frozenset[str]) -> bool:
    share = labels.get(LEASE)
    if share is not None:
        return any(share in consumer.marks for using in leased.values() for consumer in using)
    return unleased.isdisjoint(labels.get(GPUS, "").split(","))


def _slot(gpu: Gpu, usage: Usage, demand: _Demand, *, leased: bool) -> Slot:
    using = consumers(usage, keys(gpu))
    free_mib = None if leased else shares.remaining(gpu, using, mps=demand.mps)
    return Slot(gpu=gpu, consumers=using, leased=leased, free_mib=free_mib)


def _share(locks: Locks, claimed: tuple[Gpu, ...], gpus: tuple[Gpu, ...], vram_mib: int) -> Claim:
    """Return a claim on `claimed` that holds a share of each of `gpus`.

    The locks of the GPUs are released after this turn: a launch that needs a whole GPU then sees the share.
    """
    name = f"{SHARE}{os.urandom(8).hex()}"
    text = " ".join([str(vram_mib), *(key for gpu in gpus for key in keys(gpu))])
    return Claim(claimed, locks.hold(name, text), {VRAM: str(vram_mib), LEASE: name})


def _reason(slot: Slot) -> str:
    using = ", ".join(map(str, slot.consumers)) or "a lease whose holder is not visible from here"
    if slot.free_mib is None:
        return f"{label(slot.gpu)} is in use by {using}"
    return f"{label(slot.gpu)} has {slot.free_mib} MiB free, shared with {using}"


def _busy(reason: str) -> GpusBusyError:
    return GpusBusyError(reason, remedy="run `imagematrix gpus` for details, or wait with --wait 10m")


def _counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"
