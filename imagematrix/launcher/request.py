"""A requested launch: what to start on which GPUs, and how these are claimed."""

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
    from imagematrix.launcher.options import RunArgs
    from imagematrix.launcher.plan import Launch
    from imagematrix.node.host import Gpu, Host
    from imagematrix.selection.selection import Selection

    T = TypeVar("T")

__all__ = ["Request", "remote_machine", "request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `args` request on `host`, from `catalog`.

    `sets` are sets of GPUs: any `count` of one set will do. `wanted` is the requested `--gpus` value.
    `passed` are the GPUs that the user's own options for docker pass. `remote` is the name of the engine's
    machine if it is another one.
    """

    args: RunArgs
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

        Raises NothingFits, and DevicesError if a device node cannot be used and the launch is not just
        printed.
        """
        gpus = self.sets[0][: self.count]
        return self._planned(exactly(gpus) if gpus else self.wanted)

    def on(self, claimed: Claim) -> tuple[Selection, Launch]:
        """Return what to start on the claimed GPUs; raises what `first` does."""
        chosen, launch = self._planned(exactly(claimed.gpus)) if claimed.gpus else self.first()
        if self.args.privileged:  # the list of devices shows other launches what this container uses
            launch = launch.with_devices(nodes(self.host, self.passed))
        return chosen, launch.with_labels(claimed.labels)

    def _planned(self, gpus: str | None) -> tuple[Selection, Launch]:
        args = self.args
        chosen = select(self.host, self.catalog, gpus=gpus, allow_cpu=args.allow_cpu, where=args.where)
        nothing: frozenset[str] | None = frozenset()
        held = self._ask(lambda: _held(chosen), nothing)
        launch = plan(chosen, args.command, share=self.share, held=held)
        if launch.injected and args.host is None:
            info: Mapping[str, Any] = self._ask(engine.info, {})
            launch = through_cdi(launch, info.get("CDISpecDirs") or ())
        if launch.injected and args.capabilities:
            # As docker does with the capabilities in its --gpus (daemon/nvidia_linux.go).
            launch = launch.with_environment({"NVIDIA_DRIVER_CAPABILITIES": args.capabilities})
        if args.shown is None and self.remote is None:
            require(launch.devices)
        return chosen, launch

    def _ask(self, query: Callable[[], T], default: T) -> T:
        """Query the engine; a launch that is only printed needs none, and gets the default."""
        try:
            return query()
        except EngineError:
            if self.args.shown:
                return default
            raise

    def doubts(self, chosen: Selection, launch: Launch) -> Iterator[tuple[str, str | None]]:
        """Yield warnings about the launch, each with its remedy."""
        if self.remote is None and os.geteuid() != 0:
            for problem in check(launch.devices):
                yield f"{problem}; the engine may still have access", problem.remedy
        if chosen.variant and mode(chosen.variant) in ("exact", "compat"):
            option = second_driver(self.args, engine.info)
            if option:
                yield f"the image has its own driver, and {option} injects the node's as well", None
        daemon = self.share.mps
        if daemon and daemon.user and not self.args.values("--user", "u"):
            yield "the MPS daemon serves only its own user", f"pass --user {daemon.user}"

    def claim(self, launch: Launch, report: Callable[[str], None]) -> Claim:
        """Return a claim on unused GPUs, or on shares of GPUs; `report` gets the reason for waiting.

        If `launch`, the first plan, has no GPUs, the claim is on those that the user's own options pass.
        """
        from imagematrix.allocation.claim import claim, claim_first
        from imagematrix.allocation.locks import folder
        from imagematrix.allocation.survey import query_nvml, survey

        # Of a remote machine only the containers are visible, and the locks here are not for its GPUs.
        query = query_nvml if self.remote is None else lambda: None
        path = folder() if self.remote is None else f"{folder()}-{re.sub('[^A-Za-z0-9.-]', '_', self.remote)}"

        def current_usage() -> Usage:
            return survey(self.host.gpus, engine.running, query)

        def take(gpus: tuple[Gpu, ...], wait_s: float) -> Claim:
            vram_mib, through_mps = self.share.vram_mib, self.share.mps is not None
            return claim(
                gpus,
                self.count if launch.gpus else 0,
                current_usage,
                also=self.passed,
                vram_mib=vram_mib,
                mps=through_mps,
                wait_s=wait_s,
                report=report,
                path=path,
                group=engine.group() if self.remote is None else None,
            )

        return claim_first(self.sets if launch.gpus else ((),), take, self.args.wait_s)


def remote_machine(args: RunArgs) -> str | None:
    """Return the name of the machine that the engine runs on, or None if it is this one.

    Raises UsageError if it is another one and its Host is not given: a probe would describe this machine.
    """
    if args.host and args.shown:
        return None
    try:
        machine = engine.remote()
    except EngineError:
        if args.shown:  # printing a launch needs no engine
            return None
        raise
    if machine and not args.host:
        raise UsageError(
            f"the engine runs on {machine}, but a probe would describe this machine",
            remedy=f"run `imagematrix probe --json > node.json` on {machine}, then pass --host node.json",
        )
    return machine


def request(args: RunArgs, host: Host, catalog: Catalog, wanted: str | None, remote: str | None) -> Request:
    """Return the request; `wanted` is the `--gpus` value.

    Raises UsageError if the host lacks these GPUs, ProbeError if the MPS daemon is not running.
    """
    own = passed(args, host.gpus, _info)
    minors = {gpu.minor for gpu in host.gpus}
    if own.named and args.gpus is None and minors.issuperset(gpu.minor for gpu in own.gpus):
        wanted = exactly(own.gpus)
    if args.vram_mib is not None and args.gpus is None:  # for a share, one GPU is the default
        host, wanted = replace(host, gpus=choose(host, wanted)), "1"
    sets, count = serving(host, catalog, wanted, args.where)
    if args.vram_mib is not None:
        sets = _large_enough(sets, count, args.vram_mib)
    share = Share(vram_mib=args.vram_mib, mps=_mps(args))
    return Request(
        args=args,
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
    except EngineError:  # printing a launch needs no engine, and starting one fails later
        return {}


def _large_enough(
    sets: tuple[tuple[Gpu, ...], ...], count: int, vram_mib: int
) -> tuple[tuple[Gpu, ...], ...]:
    """Return the sets without GPUs known to be too small; the unchanged sets if none has `count` left."""
    large = (tuple(gpu for gpu in gpus if (total(gpu) or vram_mib) >= vram_mib) for gpus in sets)
    return tuple(gpus for gpus in large if len(gpus) >= count) or sets


def _mps(args: RunArgs) -> Mps | None:
    if not args.mps:
        return None
    if args.host and args.shown:  # the daemon of another node is out of reach
        return Mps(threads=args.mps_threads)
    return mps(os.environ, args.mps_threads)


def _held(chosen: Selection) -> frozenset[str] | None:
    """Return the digests of the engine's image with the selected name, None if it is not from a registry."""
    reference = str(chosen.selected)
    return engine.digests(reference) if "/" in reference else None
