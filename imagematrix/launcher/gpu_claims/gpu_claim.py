"""Claims: reserving unused GPUs, or shares of GPUs, for one launch.

A slot is a GPU that could serve the launch. Which slots it gets is decided by functions on them; the rest is
locks.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager, suppress
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
from imagematrix.launcher.gpu_claims.grants import compute_grant_usage
from imagematrix.launcher.gpu_claims.lock_folder import require_shared
from imagematrix.launcher.gpu_claims.locks import Locks, inherit_locks, locate_locks, release_locks
from imagematrix.launcher.gpu_claims.queue import Queue, Ticket
from imagematrix.launcher.gpu_claims.survey import (
    SHARE,
    compute_locked_usage,
    compute_share_usage,
    is_lease_live,
)
from imagematrix.launcher.gpu_claims.usage import find_consumers, has_overlap, list_lock_names, merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self

    from imagematrix.errors import ImagematrixError
    from imagematrix.hardware.gpu_request.choice import Choice
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.engine.containers import LeaseCheck
    from imagematrix.images.local_store.holder import Holder
    from imagematrix.launcher.gpu_claims.container_leases import ContainerLeases
    from imagematrix.launcher.gpu_claims.usage import Consumer, Usage

    FindFaults = Callable[[tuple[Gpu, ...]], Mapping[Gpu, str]]

POLL_S = 1.0  # seconds between the attempts of a waiting launch; each surveys the node


class Claim:
    """GPUs, or shares of GPUs, reserved for this process until it ends or releases them.

    `labels` are for the container that gets the GPUs: they state the size of a share and its lease.
    `descriptors` hold the locks; pass them to a child process (`pass_fds`) that should keep the claim too.
    `lease` is that of a container without a daemon, and `locks` is the path of the lock folder.
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
            name, descriptors = hold_container_lease(locks, self._lease, holder)
            for earlier in self._files:
                locks.remove(earlier)
        self._files = [name]
        self.descriptors += descriptors

    def pass_on(self) -> None:
        """Keep the claim across the exec of another program in this process."""
        inherit_locks(self.descriptors)


class ClaimRequest(Record):
    """What a launch requests: the GPUs of one of `choices`, whole or a share of `vram_mib` on each.

    `choices` are those of `imagematrix.selection.selector.find_feasible_gpu_sets`. The `extra_gpus` are
    claimed too, because the container gets them anyway. They are not in `Claim.gpus`, except those that are
    also in the choice, which are taken first. `vram_mib` is at least 1. With `mps` an MPS server may run on
    the GPUs.
    """

    choices: Sequence[Choice]
    extra_gpus: tuple[Gpu, ...] = ()
    vram_mib: int | None = None
    mps: bool = False


class LockFolder(Record):
    """The folder of locks at `path`, and the id of the `group` whose members may start containers, if any."""

    path: str
    group: int | None = None


def find_lock_folder(machine: str | None = None, *, any_user: bool = False) -> LockFolder:
    """Return the folder of this node's locks; with `any_user`, every user may start containers.

    For GPUs of another `machine` it is a folder of its name, because this node's locks are not for them.
    Raises ProbeError if other launches have another lock folder.
    """
    path = locate_locks(machine)
    if machine is not None:
        return LockFolder(path=path)
    require_shared(path)
    return LockFolder(path=path, group=None if any_user else endpoint.get_socket_group())


# How a claim comes about. One launch at a time has the mutex of the lock folder, and in it
#
# 1. looks at the queue: the launches ahead of it reserve as many GPUs as they wait for,
# 2. takes the locks of all GPUs that could serve it; a lock that it does not get is a lease,
# 3. surveys who uses the GPUs whose locks it has: containers, pods, processes, shares,
# 4. ranks the unused ones, keeps the locks of those that it gets, and releases the others.
#
# The locks come before the survey: a launch releases its lease once its container runs, so whoever is not
# seen as a lease is seen by the survey. A share is no lock of a GPU but a file of its own, so that others can
# share the GPU; a launch that needs the whole GPU finds the file. If there are not enough GPUs, the launch
# joins the queue before it releases the mutex, and tries again every POLL_S seconds.


def claim_gpus(
    request: ClaimRequest,
    survey: Callable[[LeaseCheck], Usage],
    *,
    wait_s: float = 0.0,
    on_wait: Callable[[str], None] = lambda _: None,
    find_faults: FindFaults = lambda _: {},
    folder: LockFolder | None = None,
) -> Claim:
    """Return a claim on unused GPUs, or on a share of each, of the first choice that has enough of them.

    A share is placed on the shared GPU with the least memory left, so that whole GPUs stay free.

    `survey` returns the current usage (`imagematrix.launcher.gpu_claims.survey`). It gets a function that
    takes the labels of a launch's container and returns whether the lease of the launch still counts.
    `find_faults` gets unused GPUs, and returns why some do not work now, so that another is taken. If no
    choice has enough free GPUs, this waits up to `wait_s` seconds for the first whose GPUs are only busy,
    behind earlier launches, and passes the reason to `on_wait`. `folder` is the lock folder, by default this
    node's.

    Raises GpusBusyError, which names the consumers; UsageError if the GPUs have less memory than the share;
    ProbeError if their memory is unknown; and what `find_lock_folder` and `survey` raise.
    """
    folder = folder or find_lock_folder()
    with Locks(folder.path, folder.group) as locks:

        def claim_choice(choice: Choice, wait_s: float) -> Claim:
            demand = _make_demand(choice, request)
            attempt = partial(_try_claim, locks, demand, survey, find_faults)
            return _wait_for_claim(locks, demand, attempt, wait_s, on_wait)

        if len(request.choices) == 1:
            return claim_choice(request.choices[0], wait_s)
        busy: list[Choice] = []
        unfit: ImagematrixError | None = None
        for choice in request.choices:
            try:
                # Without waiting: the GPUs of a later choice may be free now.
                return claim_choice(choice, 0.0)
            except GpusBusyError:
                busy.append(choice)
            except (ProbeError, UsageError) as error:
                # A choice that can never serve the launch must not hide one whose GPUs are only busy.
                unfit = error
        if unfit and not busy:
            raise unfit
        return claim_choice(busy[0], wait_s)


def adopt_scheduler_gpus(gpus: Sequence[Gpu], *, by: str) -> Claim:
    """Return a claim on the GPUs that this process has from the batch system `by`.

    Its tasks can have a GPU together, and no other launch gets it meanwhile. Raises GpusBusyError if one has
    a lease, whole or of a share, that the batch system did not start, or belongs to a pod; ProbeError if the
    lock folder cannot be used; and EngineError if a kubelet that this user may ask does not answer.
    """
    from imagematrix.launcher.gpu_claims import pods  # the runtime of Swarm's tasks does without it

    path = locate_locks()
    require_shared(path, by_scheduler=True)
    keys = tuple(key for gpu in gpus for key in list_lock_names(gpu))
    pod_usage = pods.compute_pod_usage(tuple(gpus))
    with Locks(path) as locks, locks.hold_mutex():
        descriptors = locks.take(*keys, shared=True)
        leases = find_live_leases(locks)
        others = merge_usages(pod_usage, compute_share_usage(locks), compute_grant_usage(locks))
        is_used = bool(find_consumers(others, keys)) or any(
            lease.is_excluding(keys, common=True) for lease, _ in leases
        )
        if descriptors is not None and is_used:
            release_locks(descriptors)
            descriptors = None
        if descriptors is not None:
            lease = ContainerLease(keys=keys, common=True)
            return Claim(tuple(gpus), descriptors, lease=lease, locks=path)
        usage = merge_usages(pod_usage, compute_locked_usage(locks))
        busy = [
            f"{make_label(gpu)} is in use by {', '.join(map(str, consumers))}"
            for gpu in gpus
            if (consumers := find_consumers(usage, list_lock_names(gpu)))
        ]
        raise GpusBusyError(
            f"{by} gave this job GPUs that others use: {'; '.join(busy) or 'by a lease of another launch'}",
            remedy=f"launch on this node through {by} only; `imagematrix gpus` shows what uses them",
        )


def lock_gpus(gpus: Sequence[Gpu], wait_s: float) -> tuple[int, ...]:
    """Return descriptors that hold the locks of whole GPUs which kubelet has chosen for a pod.

    Launches that wait for these GPUs go on waiting: their queue is not asked. Until the descriptors are
    closed, no launch gets one of the GPUs. Whether anything but a lease uses them is to be surveyed
    afterwards. Raises GpusBusyError if one has a lease, or another launch chooses for `wait_s` seconds, and
    ProbeError if the lock folder cannot be used.
    """
    folder = find_lock_folder()
    with (
        Locks(folder.path, folder.group) as locks,
        locks.hold_mutex(wait_s),
        _lock_unleased(locks, tuple(gpus)) as (held, leases),
    ):
        leased = [gpu for gpu in gpus if not held[list_lock_names(gpu)]]
        if leased:
            usage = compute_locked_usage(locks, containers=leases)
            raise GpusBusyError("; ".join(_describe_lease(gpu, usage) for gpu in leased))
        return tuple(lock for gpu in gpus for lock in held.pop(list_lock_names(gpu)))


def _wait_for_claim(
    locks: Locks,
    demand: _Demand,
    attempt: Callable[[list[Ticket]], Claim],
    wait_s: float,
    on_wait: Callable[[str], None],
) -> Claim:
    """Return the claim of the first successful attempt; each gets the tickets ahead, and holds the mutex.

    An attempt fails with GpusBusyError, which is raised when the wait is over.
    """
    ticket = Ticket(
        count=len(demand.extra_gpus) + demand.count,
        gpus=tuple(map(list_lock_names, demand.extra_gpus + demand.gpus)),
    )
    eligible = frozenset(key for gpu in ticket.gpus for key in gpu)
    deadline = time.monotonic() + wait_s
    position = None  # in the queue, as last reported
    busy: GpusBusyError | None = None
    queue = Queue(locks)
    try:
        while True:
            with ExitStack() as mutex:
                # The wait for the mutex is part of the wait that the user granted. Without one, only a holder
                # that hangs ends it.
                patience_s = max(0.0, deadline - time.monotonic()) if wait_s else None
                try:
                    mutex.enter_context(locks.hold_mutex(patience_s))
                except GpusBusyError as error:  # at the end of the wait, another launch had the mutex
                    raise busy or error from None
                ahead = [
                    waiting
                    for waiting in queue.list_ahead()
                    if any(has_overlap(gpu, eligible) for gpu in waiting.gpus)
                ]
                try:
                    return attempt(ahead)
                except GpusBusyError as error:
                    busy = error
                if wait_s and not queue.is_joined:
                    # With the mutex of the failed attempt, so that no later launch gets ahead of this one.
                    queue.join(ticket)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise busy
            # Once for each position in the queue, not once a second.
            if position != len(ahead):
                position = len(ahead)
                on_wait(f"waiting: {busy}")
            # The mutex is free, so other launches survey and claim meanwhile.
            time.sleep(min(POLL_S, remaining_s))
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


def require_memory(choice: Choice, vram_mib: int) -> tuple[Gpu, ...]:
    """Return the GPUs of a choice that have room for a share; raise UsageError if they are too few.

    The shares of a GPU add up to at most its memory, so a GPU with unknown memory cannot be shared: raises
    ProbeError if it would be needed.
    """
    totals = {gpu: get_memory_mib(gpu) for gpu in choice.gpus}
    gpus = tuple(gpu for gpu, total in totals.items() if total is not None and total >= vram_mib)
    unknown = [gpu for gpu, total in totals.items() if total is None]
    if len(gpus) < choice.count <= len(gpus) + len(unknown):
        raise ProbeError(
            f"cannot share {', '.join(map(make_label, unknown))}: memory size unknown",
            remedy="check with `imagematrix probe` that NVML works; name one device of a GPU in MIG mode",
        )
    if len(gpus) < choice.count:
        requested = f"requested {format_count(choice.count, 'GPU')} with {vram_mib} MiB"
        sizes = ", ".join(f"{make_label(gpu)} has {total} MiB" for gpu, total in totals.items())
        raise UsageError(f"{requested}, {len(gpus)} present: {sizes}")
    return gpus


def _make_demand(choice: Choice, request: ClaimRequest) -> _Demand:
    """Return the demand on one of the choices; raise ProbeError or UsageError if it cannot be met."""
    gpus, count, vram_mib = choice.gpus, choice.count, request.vram_mib
    if vram_mib is not None:
        gpus = require_memory(choice, vram_mib)

    # Of the GPUs that the container gets anyway, those that are in the choice count for it.
    extra_keys = [key for gpu in request.extra_gpus for key in list_lock_names(gpu)]
    overlapping = [gpu for gpu in gpus if extra_keys and has_overlap(list_lock_names(gpu), extra_keys)]
    chosen = tuple(overlapping[:count])
    # If the choice has a whole GPU, and `extra_gpus` only a part of it, the whole GPU is claimed.
    whole = tuple(gpu for gpu in chosen if not set(list_lock_names(gpu)) <= set(extra_keys))
    return _Demand(
        gpus=tuple(gpu for gpu in gpus if gpu not in overlapping),
        count=count - len(chosen),
        extra_gpus=request.extra_gpus + whole,
        chosen=chosen,
        vram_mib=vram_mib,
        mps=request.mps,
    )


def _try_claim(
    locks: Locks,
    demand: _Demand,
    survey: Callable[[LeaseCheck], Usage],
    find_faults: FindFaults,
    ahead: list[Ticket],
) -> Claim:
    """Return the claim; call this while holding the mutex. Raises GpusBusyError if there is none yet."""
    holders = ", ".join(ticket.holder for ticket in ahead if ticket.holder)
    queued = f"{format_count(len(ahead), 'launch', 'launches')} ahead in the queue"
    queued += f" ({holders})" if holders else ""
    eligible = demand.extra_gpus + demand.gpus
    # First what needs neither locks nor a survey: each launch in the queue comes here once a second.
    reserved = count_reserved((key for gpu in eligible for key in list_lock_names(gpu)), ahead)
    if len(eligible) - reserved < len(demand.extra_gpus) + demand.count:
        raise _make_busy_error(f"requested {demand}, {queued}")

    with _lock_unleased(locks, eligible) as (held, leases):
        # After taking the locks: a launch that has released its lease has its container by now, or has ended.
        leased = compute_locked_usage(locks, whole=not all(held.values()), containers=leases)
        unleased = frozenset(
            name for gpu in eligible if held[list_lock_names(gpu)] for name in name_gpus([gpu])
        )
        usage = merge_usages(leased, survey(lambda labels: is_lease_live(labels, leased, unleased)))
        slots = []
        for gpu in eligible:
            consumers, is_leased = find_consumers(usage, list_lock_names(gpu)), not held[list_lock_names(gpu)]
            free_mib = None if is_leased else shares.compute_remaining(gpu, consumers, mps=demand.mps)
            slots.append(Slot(gpu=gpu, consumers=consumers, is_leased=is_leased, free_mib=free_mib))
        unused = tuple(slot.gpu for slot in slots if slot.gpu in demand.gpus and slot.fits(demand.vram_mib))
        faults = find_faults(unused) if unused else {}
        slots = [replace(slot, fault=faults.get(slot.gpu)) for slot in slots]

        available = rank_slots(find_unreserved(slots, ahead), demand.vram_mib)
        required = [slot for slot in available if slot.gpu in demand.extra_gpus]
        free = [slot for slot in available if slot.gpu in demand.gpus]
        if len(required) < len(demand.extra_gpus) or len(free) < demand.count:
            fitting = [slot for slot in slots if slot.fits(demand.vram_mib)]
            reasons = [_describe_use(slot) for slot in slots if slot not in fitting]
            reasons += [queued] if ahead else []
            raise _make_busy_error(f"requested {demand}, {len(fitting)} free: {'; '.join(reasons)}")
        picked = tuple(slot.gpu for slot in slots if slot in free[: demand.count])
        claimed = merge_gpus(sorted(demand.chosen + picked, key=lambda gpu: gpu.index))
        gpus = demand.extra_gpus + picked
        if demand.vram_mib is not None:
            return _claim_share(locks, claimed, gpus, demand.vram_mib)
        # What stays in `held` is released.
        kept = tuple(lock for gpu in gpus for lock in held.pop(list_lock_names(gpu)))
        lease = ContainerLease(keys=tuple(key for gpu in gpus for key in list_lock_names(gpu)))
        return Claim(claimed, kept, lease=lease, locks=locks.path)


@contextmanager
def _lock_unleased(
    locks: Locks, gpus: tuple[Gpu, ...]
) -> Iterator[tuple[dict[tuple[str, ...], tuple[int, ...]], ContainerLeases]]:
    """Hold the locks of the GPUs that no other launch leases; at the end, release what is still in the dict.

    Yields the locks of each GPU, none if it is leased, and the leases of live containers.
    """
    held: dict[tuple[str, ...], tuple[int, ...]] = {}
    try:
        for gpu in gpus:
            held[list_lock_names(gpu)] = locks.take(*list_lock_names(gpu)) or ()
        leases = find_live_leases(locks)  # perhaps after their launches were killed
        for lease, _ in leases:
            for gpu in gpus:
                if lease.is_excluding(list_lock_names(gpu)):
                    release_locks(held[list_lock_names(gpu)])
                    held[list_lock_names(gpu)] = ()
        yield held, leases
    finally:
        for descriptors in held.values():
            release_locks(descriptors)


class Slot(Record):
    """A GPU and its `consumers`; `is_leased` if another process holds its lock.

    `free_mib` is the memory that another share could get, None if the GPU cannot be shared. `fault` states
    why the GPU does not work, None if it does as far as is known.
    """

    gpu: Gpu
    consumers: tuple[Consumer, ...]
    is_leased: bool
    free_mib: int | None
    fault: str | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing uses it."""
        return not (self.is_leased or self.consumers)

    def fits(self, vram_mib: int | None) -> bool:
        """Whether a share of `vram_mib` fits, or with None a launch that needs the whole GPU."""
        if self.fault is not None:
            return False
        if vram_mib is None:
            return self.is_free
        return self.free_mib is not None and self.free_mib >= vram_mib


def rank_slots(slots: Iterable[Slot], vram_mib: int | None) -> list[Slot]:
    """Return the slots that a launch fits, best first.

    A share goes to the GPU that is shared already and has the least memory left, so that whole GPUs stay
    free. Ties keep the order of `slots`.
    """
    suitable = [slot for slot in slots if slot.fits(vram_mib)]
    if vram_mib is None:
        return suitable
    return sorted(suitable, key=lambda slot: (slot.is_free, slot.free_mib or 0))


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
        groups = sorted(filter(None, eligible), key=lambda group: max(map(_make_load_key, group)))
        remaining = [slot for slot in remaining if not any(slot in group for group in groups[: ticket.count])]
    return remaining


def count_reserved(keys: Iterable[str], queue: Iterable[Ticket]) -> int:
    """Return how many of the GPUs with these keys the tickets in `queue` reserve."""
    eligible = tuple(keys)
    return sum(min(ticket.count, sum(has_overlap(gpu, eligible) for gpu in ticket.gpus)) for ticket in queue)


def _make_load_key(slot: Slot) -> tuple[int, int]:
    # Free, then shared with the most memory left, then used as a whole.
    if slot.is_free:
        return 0, 0
    return (2, 0) if slot.free_mib is None else (1, -slot.free_mib)


def _claim_share(locks: Locks, claimed: tuple[Gpu, ...], gpus: tuple[Gpu, ...], vram_mib: int) -> Claim:
    """Return a claim on `claimed` that holds a share of each of `gpus`.

    The locks of the GPUs are released with the mutex: a launch that needs a whole GPU then sees the share.
    """
    # Not a process id: launches in containers use the same folder, and have process ids of their own.
    name = f"{SHARE}{os.urandom(8).hex()}"
    keys = tuple(key for gpu in gpus for key in list_lock_names(gpu))
    descriptors = locks.hold(name, " ".join([str(vram_mib), *keys]))
    lease = ContainerLease(keys=keys, vram_mib=vram_mib, share=name)
    return Claim(claimed, descriptors, {VRAM: str(vram_mib), LEASE: name}, lease=lease, locks=locks.path)


def _describe_lease(gpu: Gpu, usage: Usage) -> str:
    consumers = find_consumers(usage, list_lock_names(gpu))
    return _describe_use(Slot(gpu=gpu, consumers=consumers, is_leased=True, free_mib=None))


def _describe_use(slot: Slot) -> str:
    if slot.fault is not None:
        return f"{make_label(slot.gpu)} does not work: {slot.fault}"
    consumers = ", ".join(map(str, slot.consumers)) or "a lease whose holder is not visible from here"
    if slot.free_mib is None:
        return f"{make_label(slot.gpu)} is in use by {consumers}"
    return f"{make_label(slot.gpu)} has {slot.free_mib} MiB free, shared with {consumers}"


def _make_busy_error(reason: str) -> GpusBusyError:
    return GpusBusyError(reason, remedy="run `imagematrix gpus` for details, or wait with --wait 10m")
