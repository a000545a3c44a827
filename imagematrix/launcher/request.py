"""A requested launch: what to start on which GPUs, and how to claim them."""

from __future__ import annotations

import os
import re

from imagematrix import endpoint, engine
from imagematrix.allocation import pods
from imagematrix.allocation.usage import combined, keys
from imagematrix.errors import EngineError, ProbeError, UsageError
from imagematrix.gpus.choice import Choice
from imagematrix.gpus.spec import among, candidates, exactly
from imagematrix.launcher.devices import check, nodes, require
from imagematrix.launcher.injection import second_driver, through_cdi
from imagematrix.launcher.passed import passed
from imagematrix.launcher.plan import plan
from imagematrix.launcher.share import Mps, Share, mps
from imagematrix.record import Record
from imagematrix.selection.drivers import mode
from imagematrix.selection.select import select, serving

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, TypeVar

    from imagematrix.allocation.claim import Attended, Claim
    from imagematrix.allocation.usage import Usage
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.gpus.spec import Wanted
    from imagematrix.launcher.options import RunArgs
    from imagematrix.launcher.plan import Launch
    from imagematrix.node.host import Gpu, Host
    from imagematrix.selection.selection import Selection

    T = TypeVar("T")

__all__ = ["Request", "remote_machine", "request"]


class Request(Record):
    """What `args` request on `host`, from `catalog`.

    Any of `choices` can serve the request; `wanted` is the requested `--gpus` value. `passed` are the GPUs
    that the user's own options for docker pass. `remote` is the name of the engine's machine if it is not
    this one.
    """

    args: RunArgs
    host: Host
    catalog: Catalog
    share: Share
    remote: str | None
    choices: tuple[Choice, ...]
    wanted: str | None
    passed: tuple[Gpu, ...] = ()

    def first(self) -> tuple[Selection, Launch]:
        """Return what would be started if all GPUs were free.

        Raises NothingFits; DevicesError if a device node cannot be used, unless the launch is only printed.
        """
        return self._planned(self.choices[0].first or self.wanted, self.host)

    def on(self, claimed: Claim, now: Host | None = None) -> tuple[Selection, Launch]:
        """Return what to start on the claimed GPUs; raises what `first` does.

        `now` is the host after the wait, if it was probed again: its driver may have changed. Raises
        UsageError or ProbeError if it no longer has these GPUs or MIG devices.
        """
        host = now or self.host
        gpus = claimed.gpus if host == self.host else _refreshed(claimed.gpus, host)
        chosen, launch = self._planned(gpus or self.choices[0].first or self.wanted, host)
        if self.args.privileged:  # its list of devices shows other launches which GPUs it uses
            launch = launch.with_devices(nodes(host, self.passed))
        return chosen, launch.with_labels(claimed.labels)

    def _planned(self, gpus: Wanted, host: Host) -> tuple[Selection, Launch]:
        args = self.args
        chosen = select(host, self.catalog, gpus=gpus, allow_cpu=args.allow_cpu, where=args.where)
        nothing: frozenset[str] | None = frozenset()
        held = self._ask(lambda: _held(chosen), nothing)
        launch = plan(chosen, args.command, share=self.share, held=held)
        if launch.injected and args.host is None:
            info: Mapping[str, Any] = self._ask(engine.info, {})
            launch = through_cdi(launch, info.get("CDISpecDirs") or ())
        if launch.injected and args.capabilities:
            # Docker does the same with the capabilities in its --gpus (daemon/nvidia_linux.go).
            launch = launch.with_environment({"NVIDIA_DRIVER_CAPABILITIES": args.capabilities})
        if args.shown is None and self.remote is None:
            require(launch.devices)
        return chosen, launch

    def _ask(self, query: Callable[[], T], default: T) -> T:
        """Query the engine; a launch that is only printed needs no engine, and gets the default."""
        try:
            return query()
        except EngineError:
            if self.args.shown:
                return default
            raise

    def doubts(self, chosen: Selection, launch: Launch) -> Iterator[tuple[str, str | None]]:
        """Yield warnings about the launch, each with its remedy."""
        if self.remote is None and (launch.gpus or self.passed) and pods.access() is False:
            yield pods.DENIED, "run this as root"
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

        # Only the containers of a remote machine are visible, and this machine's locks are not for its GPUs.
        query = query_nvml if self.remote is None else lambda: None
        path = folder() if self.remote is None else f"{folder()}-{re.sub('[^A-Za-z0-9.-]', '_', self.remote)}"

        def current_usage(attended: Attended) -> Usage:
            by_pods = pods.usage(self.host.gpus) if self.remote is None else {}
            return combined(
                by_pods, survey(self.host.gpus, lambda: engine.running_or_starting(attended), query)
            )

        def take(choice: Choice, wait_s: float) -> Claim:
            vram_mib, through_mps = self.share.vram_mib, self.share.mps is not None
            return claim(
                choice,
                current_usage,
                also=self.passed,
                vram_mib=vram_mib,
                mps=through_mps,
                wait_s=wait_s,
                report=report,
                path=path,
                group=endpoint.group() if self.remote is None else None,
            )

        choices = self.choices if launch.gpus else (Choice(gpus=(), count=0),)
        return claim_first(choices, take, self.args.wait_s)


def remote_machine(args: RunArgs) -> str | None:
    """Return the name of the machine that the engine runs on, or None if it is this machine.

    Raises UsageError for another machine whose Host is not given: a probe would describe this machine.
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
    choice = candidates(host.gpus, wanted)
    if args.vram_mib is not None and args.gpus is None:  # for a share, one GPU is the default
        choice = candidates(choice.first, 1)
    choices = serving(host, catalog, choice, args.where)
    if args.vram_mib is not None:
        choices = _large_enough(choices, args.vram_mib)
    share = Share(vram_mib=args.vram_mib, mps=_mps(args))
    return Request(
        args=args,
        host=host,
        catalog=catalog,
        share=share,
        remote=remote,
        choices=choices,
        wanted=wanted,
        passed=own.gpus,
    )


def _info() -> Mapping[str, Any]:
    try:
        return engine.info()
    except EngineError:  # printing a launch needs no engine, and starting one fails later
        return {}


def _refreshed(gpus: tuple[Gpu, ...], host: Host) -> tuple[Gpu, ...]:
    """Return the claimed GPUs as `host` has them now."""
    current = among(host.gpus, exactly(gpus)) if gpus else ()
    if [keys(gpu) for gpu in current] != [keys(gpu) for gpu in gpus]:
        raise ProbeError(
            f"the devices of {', '.join(gpu.label for gpu in gpus)} changed during the wait",
            remedy="run the command again",
        )
    return current


def _large_enough(choices: tuple[Choice, ...], vram_mib: int) -> tuple[Choice, ...]:
    """Return the choices without GPUs known to be too small; unchanged if no choice has enough GPUs left.

    GPUs with unknown memory stay: this only prefers images, and the claim refuses such GPUs.
    """
    large = (choice.with_memory(vram_mib) for choice in choices)
    return tuple(choice for choice in large if choice.enough) or choices


def _mps(args: RunArgs) -> Mps | None:
    if not args.mps:
        return None
    if args.host and args.shown:  # the daemon of another node cannot be reached
        return Mps(threads=args.mps_threads)
    return mps(os.environ, args.mps_threads)


def _held(chosen: Selection) -> frozenset[str] | None:
    """Return the digests of the engine's image with the selected name, None if it is not from a registry."""
    reference = str(chosen.selected)
    return engine.digests(reference) if "/" in reference else None
