"""Claims: taking GPUs that nobody uses, or shares of them, and keeping these from all others."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass

from imagematrix.allocation import shares
from imagematrix.allocation.containers import LEASE, VRAM
from imagematrix.allocation.locks import Locks, folder, inherit, release
from imagematrix.allocation.places import Place, best, left_over, reserved
from imagematrix.allocation.queue import Line, Ticket
from imagematrix.allocation.survey import SHARE, leases
from imagematrix.allocation.usage import joined, keys, overlap, users
from imagematrix.errors import GpusBusyError, ProbeError, UsageError
from imagematrix.gpus.spec import merged

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from imagematrix.allocation.usage import Uses
    from imagematrix.errors import ImagematrixError
    from imagematrix.node.host import Gpu

__all__ = ["Claim", "claim", "claim_first"]

POLL_S = 1.0


class Claim:
    """GPUs, or shares of them, that are this process's until it ends or releases them.

    `labels` are for the container that gets them: of one with a share they say which, and under which lease.
    `descriptors` hold the locks; they are for a child (`pass_fds`) that is to keep the claim as well.
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
        """Let the claim live on in the program that this process becomes through exec."""
        inherit(self.descriptors)


def claim(  # noqa: PLR0913 - each says another thing about one wish
    gpus: tuple[Gpu, ...],
    count: int,
    look: Callable[[], Uses],
    *,
    also: tuple[Gpu, ...] = (),
    vram_mib: int | None = None,
    mps: bool = False,
    wait_s: float = 0.0,
    tell: Callable[[str], None] = lambda _: None,
    path: str | None = None,
    group: int | None = None,
) -> Claim:
    """Return a claim on the first `count` of `gpus` that nobody uses, or on a share of so many.

    With it go all GPUs in `also`, which the container gets anyway: they are not among the claim's, and those
    of `gpus` that are in it come first. With `vram_mib`, at least 1, it is for a share of so many MiB on
    each. Shares go where others are already and the least is left, so that whole GPUs stay free. With `mps`
    the server of MPS may run there.

    `look` says who uses which (`imagematrix.allocation.survey`). Where too few are free, this waits for up to
    `wait_s` seconds in all, behind those who came earlier, and tells `tell` why. `path` is the folder of the
    locks, by default the one of this node, and `group` the group whose members may start containers. Raises
    GpusBusyError, which names the users; UsageError where the GPUs have less memory than the share;
    ProbeError where it is not known; and what `look` raises.
    """
    asked = _asked(_large_enough(gpus, count, vram_mib), count, also, vram_mib, mps=mps)
    ticket = Ticket(count=len(asked.also) + asked.count, gpus=tuple(map(keys, asked.also + asked.gpus)))
    wanted = frozenset(key for gpu in ticket.gpus for key in gpu)
    deadline = time.monotonic() + wait_s
    told = None
    with ExitStack() as stack:
        locks = stack.enter_context(Locks(path or folder(), group))
        line = Line(locks)
        stack.callback(line.leave)
        while True:
            with locks.turn(max(0.0, deadline - time.monotonic()) if wait_s else None):
                before = [
                    earlier for earlier in line.earlier() if any(overlap(gpu, wanted) for gpu in earlier.gpus)
                ]
                found = _try(locks, asked, look, before)
                if isinstance(found, Claim):
                    return found
                if wait_s and not line.joined:
                    line.join(ticket)
            left = deadline - time.monotonic()
            if left <= 0:
                raise GpusBusyError(found, remedy="see `imagematrix gpus`, or wait for them with --wait 10m")
            if told != len(before):
                told = len(before)
                tell(f"waiting: {found}")
            time.sleep(min(POLL_S, left))


def claim_first(
    sets: Sequence[tuple[Gpu, ...]], take: Callable[[tuple[Gpu, ...], float], Claim], wait_s: float = 0.0
) -> Claim:
    """Return a claim on GPUs of the first of several sets that has them free.

    `sets` are those of `imagematrix.selection.select.serving`; `take` is `claim` with all but the GPUs and
    the seconds to wait. Where none has them free, this waits up to `wait_s` seconds for the first that could.
    Raises what `take` raises of that one, or of the last where none ever could.
    """
    if len(sets) == 1:
        return take(sets[0], wait_s)
    busy: list[tuple[Gpu, ...]] = []
    unfit: ImagematrixError | None = None
    for gpus in sets:
        try:
            return take(gpus, 0.0)
        except GpusBusyError:
            busy.append(gpus)
        except (ProbeError, UsageError) as error:
            unfit = error
    if unfit and not busy:
        raise unfit
    return take(busy[0], wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a launch wants: `count` of `gpus` and all of `also`, whole or a share of `vram_mib` on each.

    `given` are those in `also` that were to be chosen from, and are the claim's as well.
    """

    gpus: tuple[Gpu, ...]
    count: int
    also: tuple[Gpu, ...]
    given: tuple[Gpu, ...]
    vram_mib: int | None
    mps: bool

    def __str__(self) -> str:
        parted = all(len(gpu.mig or ()) == 1 for gpu in self.also + self.gpus)
        gpus = _counted(len(self.also) + self.count, "MIG device" if parted else "GPU")
        return gpus if self.vram_mib is None else f"{gpus} with {self.vram_mib} MiB left"


def _asked(
    gpus: tuple[Gpu, ...], count: int, also: tuple[Gpu, ...], vram_mib: int | None, *, mps: bool
) -> _Asked:
    own = [key for gpu in also for key in keys(gpu)]
    given = tuple(gpu for gpu in gpus if own and overlap(keys(gpu), own))[:count]
    parts = tuple(gpu for gpu in gpus if not (own and overlap(keys(gpu), own)))
    # A whole GPU that was to be chosen from, and of which `also` has a part, is wanted whole.
    whole = tuple(gpu for gpu in given if not set(keys(gpu)) <= set(own))
    return _Asked(
        gpus=parts, count=count - len(given), also=also + whole, given=given, vram_mib=vram_mib, mps=mps
    )


def _large_enough(gpus: tuple[Gpu, ...], count: int, vram_mib: int | None) -> tuple[Gpu, ...]:
    """Return those of `gpus` that have the memory; raise where that can never be enough of them."""
    if vram_mib is None:
        return gpus
    totals = {gpu: shares.total(gpu) for gpu in gpus}
    large = tuple(gpu for gpu, total in totals.items() if total is not None and total >= vram_mib)
    unknown = [gpu for gpu, total in totals.items() if total is None]
    if len(large) >= count:
        return large
    if len(large) + len(unknown) >= count:
        raise ProbeError(
            f"no share can be given of {', '.join(map(_label, unknown))}: the memory is not known",
            remedy="NVML tells it: see `imagematrix probe`; of a GPU with several MIG devices name one",
        )
    told = ", ".join(f"{_label(gpu)} has {total} MiB" for gpu, total in totals.items())
    raise UsageError(
        f"{_counted(count, 'GPU')} with {vram_mib} MiB asked for, and there are {len(large)}: {told}"
    )


def _try(locks: Locks, asked: _Asked, look: Callable[[], Uses], before: list[Ticket]) -> Claim | str:
    """Return the claim, or why there is none now; it is this launch's turn."""
    named = ", ".join(ticket.by for ticket in before if ticket.by)
    others = f"{_counted(len(before), 'other')} came first" + (f" ({named})" if named else "")
    every = asked.also + asked.gpus
    count = len(asked.also) + asked.count
    if len(every) - reserved((key for gpu in every for key in keys(gpu)), before) < count:
        return f"{asked} asked for, and {others}"
    held: dict[tuple[str, ...], tuple[int, ...]] = {}
    try:
        for gpu in every:
            held[keys(gpu)] = locks.take(*keys(gpu)) or ()
        # Only now: who has let go of a lease has a container by now, or wants no GPU any more.
        uses = joined(leases(locks), look())
        places = [_place(gpu, uses, asked, leased=not held[keys(gpu)]) for gpu in every]
        ours = best(left_over(places, before), asked.vram_mib)
        must = [place for place in ours if place.gpu in asked.also]
        free = [place for place in ours if place.gpu in asked.gpus]
        if len(must) < len(asked.also) or len(free) < asked.count:
            there = [place for place in places if place.suits(asked.vram_mib)]
            told = [_told(place) for place in places if place not in there] + ([others] if before else [])
            return f"{asked} asked for, {len(there)} free: {'; '.join(told)}"
        picked = [place for place in places if place in free[: asked.count]]
        chosen = tuple(place.gpu for place in picked)
        claimed = merged(sorted(asked.given + chosen, key=lambda gpu: gpu.index))
        if asked.vram_mib is not None:
            return _shared(locks, claimed, asked.also + chosen, asked.vram_mib)
        return Claim(claimed, tuple(lock for gpu in asked.also + chosen for lock in held.pop(keys(gpu))))
    finally:
        for taken in held.values():
            release(taken)


def _place(gpu: Gpu, uses: Uses, asked: _Asked, *, leased: bool) -> Place:
    by = users(uses, keys(gpu))
    left = None if leased else shares.left(gpu, by, mps=asked.mps)
    return Place(gpu=gpu, users=by, leased=leased, left_mib=left)


def _shared(locks: Locks, claimed: tuple[Gpu, ...], gpus: tuple[Gpu, ...], vram_mib: int) -> Claim:
    """Take a share on each of `gpus`, of which a launch has `claimed`.

    The GPUs' own locks are free again after this turn: who wants one whole sees the share, as all others do.
    """
    name = f"{SHARE}{os.urandom(8).hex()}"
    text = " ".join([str(vram_mib), *(key for gpu in gpus for key in keys(gpu))])
    return Claim(claimed, locks.hold(name, text), {VRAM: str(vram_mib), LEASE: name})


def _told(place: Place) -> str:
    by = ", ".join(map(str, place.users)) or "a lease that this process cannot look at"
    if place.left_mib is None:
        return f"{_label(place.gpu)} is used by {by}"
    return f"{_label(place.gpu)} has {place.left_mib} MiB left beside {by}"


def _label(gpu: Gpu) -> str:
    if len(gpu.mig or ()) != 1:
        return gpu.label
    (device,) = gpu.mig or ()
    return f"{gpu.label}:{device.gpu_instance}:{device.compute_instance}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
