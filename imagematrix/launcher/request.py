"""A launch that was asked for: what to start on which GPUs, and how these are claimed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from imagematrix import engine
from imagematrix.allocation.shares import total
from imagematrix.errors import EngineError, UsageError
from imagematrix.gpus.spec import choose, exactly
from imagematrix.launcher.devices import check, nodes, require
from imagematrix.launcher.injection import second_driver, through_cdi
from imagematrix.launcher.passed import passed
from imagematrix.launcher.plan import plan
from imagematrix.launcher.share import Mps, Share, mps
from imagematrix.record import replace
from imagematrix.selection.drivers import mode
from imagematrix.selection.select import select, serving

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, TypeVar

    from imagematrix.allocation.claim import Claim
    from imagematrix.allocation.usage import Usage
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.launcher.options import Words
    from imagematrix.launcher.plan import Launch
    from imagematrix.node.host import Gpu, Host
    from imagematrix.selection.selection import Selection

    T = TypeVar("T")

__all__ = ["Request", "elsewhere", "request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `words` ask for on `host`, from `catalog`.

    `sets` are GPUs of which any `count` of one set will do; `wanted` is what was asked for. `passed` are
    those that the user's own options for docker pass. `remote` is the name of another machine, if the engine
    is there.
    """

    words: Words
    host: Host
    catalog: Catalog
    share: Share
    remote: str | None
    sets: tuple[tuple[Gpu, ...], ...]
    count: int
    wanted: str | None
    passed: tuple[Gpu, ...] = ()

    def first(self) -> tuple[Selection, Launch]:
        """Return what would be started if all GPUs were free.

        Raises NothingFits, and DevicesError where its device nodes cannot be used; not if it is only shown.
        """
        gpus = self.sets[0][: self.count]
        return self._planned(exactly(gpus) if gpus else self.wanted)

    def on(self, taken: Claim) -> tuple[Selection, Launch]:
        """Return what to start on the GPUs that were taken; raises what `first` does."""
        chosen, launch = self._planned(exactly(taken.gpus)) if taken.gpus else self.first()
        if self.words.privileged:  # a list of devices says to others what this container has
            launch = launch.passing(nodes(self.host, self.passed))
        return chosen, launch.labelled(taken.labels)

    def _planned(self, gpus: str | None) -> tuple[Selection, Launch]:
        words = self.words
        chosen = select(self.host, self.catalog, gpus=gpus, allow_cpu=words.allow_cpu, where=words.where)
        nothing: frozenset[str] | None = frozenset()
        held = self._ask(lambda: _held(chosen), nothing)
        launch = plan(chosen, words.command, share=self.share, held=held)
        if launch.injected and words.host is None:
            engine_s: Mapping[str, Any] = self._ask(engine.info, {})
            launch = through_cdi(launch, engine_s.get("CDISpecDirs") or ())
        if launch.injected and words.capabilities:
            # What docker makes of the capabilities in its --gpus (daemon/nvidia_linux.go).
            launch = launch.told({"NVIDIA_DRIVER_CAPABILITIES": words.capabilities})
        if words.shown is None and self.remote is None:
            require(launch.devices)
        return chosen, launch

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Ask the engine; a launch is shown also where there is none."""
        try:
            return question()
        except EngineError:
            if self.words.shown:
                return otherwise
            raise

    def doubts(self, chosen: Selection, launch: Launch) -> Iterator[tuple[str, str | None]]:
        """Yield what may go wrong with what was chosen, each with its remedy."""
        if self.remote is None and os.geteuid() != 0:
            for problem in check(launch.devices):
                yield f"{problem.path} {problem.what}; the engine may open it", problem.remedy
        if chosen.variant and mode(chosen.variant) in ("exact", "compat"):
            by = second_driver(self.words, engine.info)
            if by:
                yield f"the image has its own driver, and {by} brings the node's into it, too", None
        daemon = self.share.mps
        if daemon and daemon.user and not self.words.values("--user", "u"):
            yield "the MPS daemon serves its own user only", f"--user {daemon.user}"

    def claim(self, launch: Launch, tell: Callable[[str], None]) -> Claim:
        """Return a claim on GPUs that nobody uses, or on shares of them; tell `tell` what it waits for.

        If `launch`, the first that was planned, has none, it is on those that the user's own options pass.
        """
        from imagematrix.allocation.claim import claim, claim_first
        from imagematrix.allocation.locks import folder
        from imagematrix.allocation.survey import query_nvml, survey

        # Of another machine only the containers can be seen; its GPUs are not those of the locks here.
        ask = query_nvml if self.remote is None else lambda: None
        path = folder() if self.remote is None else f"{folder()}-{re.sub('[^A-Za-z0-9.-]', '_', self.remote)}"

        def look() -> Usage:
            return survey(self.host.gpus, engine.running, ask)

        def take(gpus: tuple[Gpu, ...], wait_s: float) -> Claim:
            vram_mib, through_mps = self.share.vram_mib, self.share.mps is not None
            return claim(
                gpus,
                self.count if launch.gpus else 0,
                look,
                also=self.passed,
                vram_mib=vram_mib,
                mps=through_mps,
                wait_s=wait_s,
                report=tell,
                path=path,
                group=engine.group() if self.remote is None else None,
            )

        return claim_first(self.sets if launch.gpus else ((),), take, self.words.wait_s)


def elsewhere(words: Words) -> str | None:
    """Return the name of the other machine that the engine runs on, or None.

    Raises UsageError where nobody knows what it has: a probe would describe this machine.
    """
    if words.host and words.shown:
        return None
    try:
        machine = engine.remote()
    except EngineError:
        if words.shown:  # a launch is shown also where there is no engine
            return None
        raise
    if machine and not words.host:
        raise UsageError(
            f"the engine runs on {machine}, and what is probed is this machine",
            remedy=f"`imagematrix probe --json > node.json` on {machine}, then --host node.json here",
        )
    return machine


def request(words: Words, host: Host, catalog: Catalog, wanted: str | None, remote: str | None) -> Request:
    """Return what is asked for; `wanted` are the GPUs, as `--gpus` takes them.

    Raises UsageError where the host has no such GPUs, ProbeError where there is no MPS daemon to join.
    """
    own = passed(words, host.gpus, _info)
    there = {gpu.minor for gpu in host.gpus}
    if own.named and words.gpus is None and there.issuperset(gpu.minor for gpu in own.gpus):
        wanted = exactly(own.gpus)
    if words.vram_mib is not None and words.gpus is None:  # of a GPU that is to be shared one will do
        host, wanted = replace(host, gpus=choose(host, wanted)), "1"
    sets, count = serving(host, catalog, wanted, words.where)
    if words.vram_mib is not None:
        sets = _large_enough(sets, count, words.vram_mib)
    share = Share(vram_mib=words.vram_mib, mps=_mps(words))
    return Request(
        words=words,
        host=host,
        catalog=catalog,
        share=share,
        remote=remote,
        sets=sets,
        count=count,
        wanted=wanted,
        passed=own.gpus,
    )


def _info() -> Mapping[str, Any]:
    try:
        return engine.info()
    except EngineError:  # a launch is shown also without one, and without one none is started
        return {}


def _large_enough(
    sets: tuple[tuple[Gpu, ...], ...], count: int, vram_mib: int
) -> tuple[tuple[Gpu, ...], ...]:
    """Return what of each set has the memory, or is not known to lack it; all where that is not enough."""
    large = (tuple(gpu for gpu in some if (total(gpu) or vram_mib) >= vram_mib) for some in sets)
    return tuple(some for some in large if len(some) >= count) or sets


def _mps(words: Words) -> Mps | None:
    if not words.mps:
        return None
    if words.host and words.shown:  # the daemon of another node can't be asked
        return Mps(threads=words.mps_threads)
    return mps(os.environ, words.mps_threads)


def _held(chosen: Selection) -> frozenset[str] | None:
    """Return the digests of what the engine has under the selected name; the rest is pulled by digest."""
    reference = str(chosen.selected)
    return engine.digests(reference) if "/" in reference else None
