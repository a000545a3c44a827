"""Claims: reserving unused GPUs, or shares of GPUs, for one launch.

A slot is a GPU that could serve the launch. Which slots it gets is decided by functions on them; the rest is
locks.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from functools import partial

from imagematrix.common.record import Record, replace
from imagematrix.common.text import format_count
from imagematrix.errors import GpusBusyError, ProbeError, UsageError
from imagematrix.hardware.gpu_request.choice import get_memory_mib, make_label, merge_gpus
from imagematrix.hardware.gpu_request.spec import name_gpus
from imagematrix.images.engine import endpoint
from imagematrix.launcher.gpu_claims import shares
from imagematrix.launcher.gpu_claims.container_leases import (
    ContainerLease,
    find_live_leases,
    hold_container_lease,
)
from imagematrix.launcher.gpu_claims.containers import LEASE, VRAM
from imagematrix.launcher.gpu_claims.lock_folder import require_shared
from imagematrix.launcher.gpu_claims.locks import Locks, inherit_locks, locate_locks, release_locks
from imagematrix.launcher.gpu_claims.queue import Queue, Ticket
from imagematrix.launcher.gpu_claims.survey import SHARE, compute_locked_usage, is_lease_live
from imagematrix.launcher.gpu_claims.usage import find_consumers, has_overlap, list_lock_names, merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Self

    from imagematrix.errors import ImagematrixError
    from imagematrix.hardware.gpu_request.choice import Choice
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.engine.containers import Attended
    from imagematrix.images.local_store.holder import Holder
    from imagematrix.launcher.gpu_claims.usage import Consumer, Usage

    Faults = Callable[[tuple[Gpu, ...]], Mapping[Gpu, str]]

POLL_S = 1.0  # seconds between the attempts of a waiting launch; each surveys the node


class Claim:
    """GPUs, or shares of GPUs, reserved for this process until it ends or releases them.

    `labels` are for the container that gets the GPUs: they state the size of a share and its lease.
    `descriptors` hold the locks; pass them to a child process (`pass_fds`) that should keep the claim too.
    `lease` is what a container without a daemon gets by it, and `locks` is their folder.
    """

    def __init__(
        self,
        gpus: tuple[Gpu, ...],
        descriptors: tuple[int, ...],
        labels: Mapping[str, str] | None = None,
        *,
        lease: ContainerLease,
        locks: str,
    ) -> None:
        self.gpus = gpus
        self.descriptors = descriptors
        self.labels = labels or {}
        self._lease = lease
        self._locks = locks
        self._files: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # While the locks are held, nobody reads the files.
        if self._files:
            with suppress(ProbeError), Locks(self._locks) as locks:
                for name in self._files:
                    locks.remove(name)
        release_locks(self.descriptors)
        self.descriptors = ()

    def extend_to(self, holder: Holder) -> None:
        """Let the claim last as long as a container's first process, the `holder`, when this process is dead.

        Raises ProbeError if that cannot be written.
        """
        with Locks(self._locks) as locks:
            name, held = hold_container_lease(locks, self._lease, holder)
            for before in self._files:
                locks.remove(before)
        self._files = [name]
        self.descriptors += held

    def pass_on(self) -> None:
        """Keep the claim across the exec of another program in this process."""
        inherit_locks(self.descriptors)


def claim_gpus(  # noqa: PLR0913 - each is one aspect of the demand
    choices: Sequence[Choice],
    survey: Callable[[Attended], Usage],
    *,
    extra_gpus: tuple[Gpu, ...] = (),
    vram_mib: int | None = None,
    mps: bool = False,
    wait_s: float = 0.0,
    report: Callable[[str], None] = lambda _: None,
    faults: Faults = lambda _: {},
    machine: str | None = None,
    path: str | None = None,
    group: int | None = None,
    any_user: bool = False,
) -> Claim:
    """Return a claim on unused GPUs, or on a share of each, of the first choice that has enough of them.

    `choices` are those of `imagematrix.selection.selector.find_feasible_gpu_sets`. The `extra_gpus` are
    claimed too, because the container gets them anyway. They are not in `Claim.gpus`, except those that are
    also in the choice, which are taken first. With `vram_mib`, at least 1, the claim is a share of that many
    MiB on each GPU. A share is placed on the shared GPU with the least memory left, so that whole GPUs stay
    free. With `mps` an MPS server may run on the GPUs.

    `survey` returns the current usage (`imagematrix.launcher.gpu_claims.survey`). It gets a function that
    takes the labels of a launch's container and returns whether the lease of the launch still counts.
    `faults` gets unused GPUs, and returns why some do not work now, so that another is taken. If no choice
    has enough free GPUs, this waits up to `wait_s` seconds for the first whose GPUs are only busy, behind
    earlier launches, and passes the reason to `report`.

    `path` is the lock folder, and `group` the group whose members may start containers, by default those of
    this node; with `any_user` every user may. For GPUs of another `machine` it is a folder of its name,
    because this node's locks are not for them. Raises GpusBusyError, which names the consumers; UsageError if
    the GPUs have less memory than the share; ProbeError if their memory is unknown, or if other launches have
    another lock folder; and what `survey` raises.
    """
    if path is None:
        path = locate_locks(machine)
        if machine is None:
            require_shared(path)
            group = None if any_user else endpoint.get_socket_group()
    with Locks(path, group) as locks:

        def take(choice: Choice, wait_s: float) -> Claim:
            demand = _make_demand(_filter_by_memory(choice, vram_mib), extra_gpus, vram_mib, mps=mps)
            return _wait_for_claim(
                locks, demand, partial(_try_claim, locks, demand, survey, faults), wait_s, report
            )

        if len(choices) == 1:
            return take(choices[0], wait_s)
        busy: list[Choice] = []
        unfit: ImagematrixError | None = None
        for choice in choices:
            try:
                # Without waiting: the GPUs of a later choice may be free now.
                return take(choice, 0.0)
            except GpusBusyError:
                busy.append(choice)
            except (ProbeError, UsageError) as error:
                # A choice that can never serve the launch must not hide one whose GPUs are only busy.
                unfit = error
        if unfit and not busy:
            raise unfit
        return take(busy[0], wait_s)


def adopt_scheduler_gpus(gpus: Sequence[Gpu], *, by: str) -> Claim:
    """Return a claim on GPUs that the batch system `by` has given to this process.

    Its tasks can have a GPU together, and no other launch gets it meanwhile. Raises GpusBusyError if a launch
    that the batch system did not start has one, and ProbeError if the lock folder cannot be used.
    """
    path = locate_locks()
    require_shared(path)
    every = tuple(key for gpu in gpus for key in list_lock_names(gpu))
    with Locks(path) as locks, locks.hold_mutex():
        descriptors = locks.take(*every, shared=True)
        containers = find_live_leases(locks)
        if descriptors is not None and any(one.is_excluding(every, common=True) for one, _ in containers):
            release_locks(descriptors)
            descriptors = None
        if descriptors is not None:
            lease = ContainerLease(keys=every, common=True)
            return Claim(tuple(gpus), descriptors, lease=lease, locks=path)
        usage = compute_locked_usage(locks)
        busy = [
            f"{make_label(gpu)} is in use by {', '.join(map(str, using))}"
            for gpu in gpus
            if (using := find_consumers(usage, list_lock_names(gpu)))
        ]
        raise GpusBusyError(
            f"{by} gave this job GPUs that others use: {'; '.join(busy) or 'by a lease of another launch'}",
            remedy=f"launch on this node through {by} only; `imagematrix gpus` shows what uses them",
        )


def _wait_for_claim(
    locks: Locks,
    demand: _Demand,
    attempt: Callable[[list[Ticket]], Claim | str],
    wait_s: float,
    report: Callable[[str], None],
) -> Claim:
    """Return the claim of the first successful attempt; each gets the tickets ahead, and holds the turn."""
    ticket = Ticket(
        count=len(demand.extra_gpus) + demand.count,
        gpus=tuple(map(list_lock_names, demand.extra_gpus + demand.gpus)),
    )
    eligible = frozenset(key for gpu in ticket.gpus for key in gpu)
    deadline = time.monotonic() + wait_s
    reported = None
    reason = ""
    queue = Queue(locks)
    try:
        while True:
            with ExitStack() as turn:
                try:
                    # The wait for the turn is part of the wait that the user granted. Without one, only a
                    # holder that hangs ends it.
                    turn.enter_context(
                        locks.hold_mutex(max(0.0, deadline - time.monotonic()) if wait_s else None)
                    )
                except GpusBusyError as error:  # at the end of the wait, another launch had its turn
                    raise _busy_error(reason) if reason else error from None
                ahead = [
                    other
                    for other in queue.list_ahead()
                    if any(has_overlap(gpu, eligible) for gpu in other.gpus)
                ]
                outcome = attempt(ahead)
                if isinstance(outcome, Claim):
                    return outcome
                reason = outcome
                if wait_s and not queue.joined:
                    # In the turn of the failed attempt, so that no later launch gets ahead of this one.
                    queue.join(ticket)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise _busy_error(reason)
            # Once for each position in the queue, not once a second.
            if reported != len(ahead):
                reported = len(ahead)
                report(f"waiting: {reason}")
            # The turn has ended, so other launches survey and claim meanwhile.
            time.sleep(min(POLL_S, left_s))
    finally:
        queue.leave()


class _Demand(Record):
    """What a launch needs: `count` of `gpus` and all of `extra_gpus`, whole or a share of `vram_mib` on each.

    `chosen` are the GPUs of `extra_gpus` that the choice contains too; they are part of the claim.
    """

    gpus: tuple[Gpu, ...]
    count: int
    extra_gpus: tuple[Gpu, ...]
    chosen: tuple[Gpu, ...]
    vram_mib: int | None
    mps: bool

    def __str__(self) -> str:
        mig_only = all(len(gpu.mig or ()) == 1 for gpu in self.extra_gpus + self.gpus)
        gpus = format_count(len(self.extra_gpus) + self.count, "MIG device" if mig_only else "GPU")
        return gpus if self.vram_mib is None else f"{gpus} with {self.vram_mib} MiB free"


def _make_demand(choice: Choice, extra_gpus: tuple[Gpu, ...], vram_mib: int | None, *, mps: bool) -> _Demand:
    gpus, count = choice.gpus, choice.count
    extra_keys = [key for gpu in extra_gpus for key in list_lock_names(gpu)]
    chosen = tuple(gpu for gpu in gpus if extra_keys and has_overlap(list_lock_names(gpu), extra_keys))[
        :count
    ]
    others = tuple(gpu for gpu in gpus if not (extra_keys and has_overlap(list_lock_names(gpu), extra_keys)))
    # If the choice has a whole GPU, and `extra_gpus` only a part of it, the whole GPU is claimed.
    whole = tuple(gpu for gpu in chosen if not set(list_lock_names(gpu)) <= set(extra_keys))
    return _Demand(
        gpus=others,
        count=count - len(chosen),
        extra_gpus=extra_gpus + whole,
        chosen=chosen,
        vram_mib=vram_mib,
        mps=mps,
    )


def _filter_by_memory(choice: Choice, vram_mib: int | None) -> Choice:
    """Return the choice among the GPUs that are known to have the memory; raise if there are too few.

    The shares of a GPU add up to at most its memory, so a GPU with unknown memory cannot be shared.
    """
    if vram_mib is None:
        return choice
    count, totals = choice.count, {gpu: get_memory_mib(gpu) for gpu in choice.gpus}
    large = tuple(gpu for gpu, total in totals.items() if total is not None and total >= vram_mib)
    unknown = [gpu for gpu, total in totals.items() if total is None]
    if len(large) >= count:
        return replace(choice, gpus=large)
    if len(large) + len(unknown) >= count:
        raise ProbeError(
            f"cannot share {', '.join(map(make_label, unknown))}: memory size unknown",
            remedy="check with `imagematrix probe` that NVML works; name one device of a GPU in MIG mode",
        )
    sizes = ", ".join(f"{make_label(gpu)} has {total} MiB" for gpu, total in totals.items())
    raise UsageError(
        f"requested {format_count(count, 'GPU')} with {vram_mib} MiB, {len(large)} present: {sizes}"
    )


def _try_claim(
    locks: Locks,
    demand: _Demand,
    survey: Callable[[Attended], Usage],
    faults: Faults,
    ahead: list[Ticket],
) -> Claim | str:
    """Return the claim, or the reason why there is none yet; call this while holding the turn."""
    holders = ", ".join(ticket.holder for ticket in ahead if ticket.holder)
    queued = f"{format_count(len(ahead), 'launch', 'launches')} ahead in the queue"
    queued += f" ({holders})" if holders else ""
    eligible = demand.extra_gpus + demand.gpus
    count = len(demand.extra_gpus) + demand.count
    # First what needs neither locks nor a survey: each launch in the queue comes here once a second.
    if (
        len(eligible) - count_reserved((key for gpu in eligible for key in list_lock_names(gpu)), ahead)
        < count
    ):
        return f"requested {demand}, {queued}"
    held: dict[tuple[str, ...], tuple[int, ...]] = {}
    try:
        for gpu in eligible:
            held[list_lock_names(gpu)] = (
                locks.take(*list_lock_names(gpu)) or ()
            )  # empty: another launch leases it
        containers = find_live_leases(locks)  # perhaps after their launches were killed
        for lease, _ in containers:
            for gpu in eligible:
                if lease.is_excluding(list_lock_names(gpu)):
                    release_locks(held[list_lock_names(gpu)])
                    held[list_lock_names(gpu)] = ()
        # After taking the locks: a launch that has released its lease has its container by now, or has ended.
        leased = compute_locked_usage(locks, whole=not all(held.values()), containers=containers)
        unleased = frozenset(
            name for gpu in eligible if held[list_lock_names(gpu)] for name in name_gpus([gpu])
        )
        usage = merge_usages(leased, survey(lambda labels: is_lease_live(labels, leased, unleased)))
        slots = [_make_slot(gpu, usage, demand, leased=not held[list_lock_names(gpu)]) for gpu in eligible]
        unused = tuple(slot.gpu for slot in slots if slot.gpu in demand.gpus and slot.fits(demand.vram_mib))
        why = faults(unused) if unused else {}
        slots = [replace(slot, fault=why.get(slot.gpu)) for slot in slots]
        available = rank_slots(find_unreserved(slots, ahead), demand.vram_mib)
        required = [slot for slot in available if slot.gpu in demand.extra_gpus]
        free = [slot for slot in available if slot.gpu in demand.gpus]
        if len(required) < len(demand.extra_gpus) or len(free) < demand.count:
            fitting = [slot for slot in slots if slot.fits(demand.vram_mib)]
            reasons = [_describe_use(slot) for slot in slots if slot not in fitting] + (
                [queued] if ahead else []
            )
            return f"requested {demand}, {len(fitting)} free: {'; '.join(reasons)}"
        picked = tuple(slot.gpu for slot in slots if slot in free[: demand.count])
        claimed = merge_gpus(sorted(demand.chosen + picked, key=lambda gpu: gpu.index))
        if demand.vram_mib is not None:
            return _claim_share(locks, claimed, demand.extra_gpus + picked, demand.vram_mib)
        # What is not popped from `held` is released below.
        gpus = demand.extra_gpus + picked
        taken = tuple(lock for gpu in gpus for lock in held.pop(list_lock_names(gpu)))
        lease = ContainerLease(keys=tuple(key for gpu in gpus for key in list_lock_names(gpu)))
        return Claim(claimed, taken, lease=lease, locks=locks.path)
    finally:
        for descriptors in held.values():
            release_locks(descriptors)


class Slot(Record):
    """A GPU and its `consumers`; `leased` if another process holds its lock.

    `free_mib` is the memory that another share could get, None if the GPU cannot be shared. `fault` states
    why the GPU does not work, None if it does as far as is known.
    """

    gpu: Gpu
    consumers: tuple[Consumer, ...]
    leased: bool
    free_mib: int | None
    fault: str | None = None

    @property
    def free(self) -> bool:
        """Whether nothing uses it."""
        return not (self.leased or self.consumers)

    def fits(self, vram_mib: int | None) -> bool:
        """Whether a share of `vram_mib` fits, or with None a launch that needs the whole GPU."""
        if self.fault is not None:
            return False
        if vram_mib is None:
            return self.free
        return self.free_mib is not None and self.free_mib >= vram_mib


def rank_slots(slots: Iterable[Slot], vram_mib: int | None) -> list[Slot]:
    """Return the slots that a launch fits, best first.

    A share goes to the GPU that is shared already and has the least memory left, so that whole GPUs stay
    free. Ties keep the order of `slots`.
    """
    suitable = [slot for slot in slots if slot.fits(vram_mib)]
    if vram_mib is None:
        return suitable
    return sorted(suitable, key=lambda slot: (slot.free, slot.free_mib or 0))


def find_unreserved(slots: Sequence[Slot], queue: Iterable[Ticket]) -> list[Slot]:
    """Return the slots that no ticket in `queue` reserves: each reserves its count, the emptiest first.

    No other launch gets a reserved slot, so it drains until it is as empty as the waiting launch needs. A GPU
    that does not work is no use to any of them.
    """
    remaining = [slot for slot in slots if slot.fault is None]
    for ticket in queue:
        eligible = [
            [slot for slot in remaining if has_overlap(list_lock_names(slot.gpu), gpu)] for gpu in ticket.gpus
        ]
        taken = sorted(filter(None, eligible), key=lambda group: max(map(_load_key, group)))[: ticket.count]
        remaining = [slot for slot in remaining if not any(slot in group for group in taken)]
    return remaining


def count_reserved(keys: Iterable[str], queue: Iterable[Ticket]) -> int:
    """Return how many of the GPUs with these keys the tickets in `queue` reserve."""
    wanted = tuple(keys)
    return sum(min(ticket.count, sum(has_overlap(gpu, wanted) for gpu in ticket.gpus)) for ticket in queue)


def _load_key(slot: Slot) -> tuple[int, int]:
    # Free, then shared with the most memory left, then used as a whole.
    if slot.free:
        return 0, 0
    return (2, 0) if slot.free_mib is None else (1, -slot.free_mib)


def _make_slot(gpu: Gpu, usage: Usage, demand: _Demand, *, leased: bool) -> Slot:
    using = find_consumers(usage, list_lock_names(gpu))
    free_mib = None if leased else shares.compute_remaining(gpu, using, mps=demand.mps)
    return Slot(gpu=gpu, consumers=using, leased=leased, free_mib=free_mib)


def _claim_share(locks: Locks, claimed: tuple[Gpu, ...], gpus: tuple[Gpu, ...], vram_mib: int) -> Claim:
    """Return a claim on `claimed` that holds a share of each of `gpus`.

    The locks of the GPUs are released after this turn: a launch that needs a whole GPU then sees the share.
    """
    # Not a process id: launches in containers use the same folder, and have process ids of their own.
    name = f"{SHARE}{os.urandom(8).hex()}"
    every = tuple(key for gpu in gpus for key in list_lock_names(gpu))
    held = locks.hold(name, " ".join([str(vram_mib), *every]))
    lease = ContainerLease(keys=every, vram_mib=vram_mib, share=name)
    return Claim(claimed, held, {VRAM: str(vram_mib), LEASE: name}, lease=lease, locks=locks.path)


def _describe_use(slot: Slot) -> str:
    if slot.fault is not None:
        return f"{make_label(slot.gpu)} does not work: {slot.fault}"
    using = ", ".join(map(str, slot.consumers)) or "a lease whose holder is not visible from here"
    if slot.free_mib is None:
        return f"{make_label(slot.gpu)} is in use by {using}"
    return f"{make_label(slot.gpu)} has {slot.free_mib} MiB free, shared with {using}"


def _busy_error(reason: str) -> GpusBusyError:
    return GpusBusyError(reason, remedy="run `imagematrix gpus` for details, or wait with --wait 10m")
