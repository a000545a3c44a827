"""A requested launch: what to start on which GPUs, and how to claim them."""

from __future__ import annotations

import os
from functools import cache, partial

from imagematrix.common.record import Record, replace
from imagematrix.errors import EngineError, ProbeError, UsageError
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.gpu_request.spec import find_candidates, make_exact_spec, select_gpus
from imagematrix.images.engine import endpoint, images, system
from imagematrix.launcher.docker.devices import check_device_nodes, list_device_nodes, require_device_nodes
from imagematrix.launcher.docker.injection import find_second_driver, inject_through_cdi
from imagematrix.launcher.docker.plan import find_engine_digests, plan_launch
from imagematrix.launcher.docker.remote_engine import find_engine_machine
from imagematrix.launcher.docker.share import Mps, Share, find_mps
from imagematrix.launcher.docker.user_gpu_options import find_user_gpus, list_mounted
from imagematrix.launcher.gpu_claims import pods
from imagematrix.launcher.gpu_claims.usage import list_lock_names
from imagematrix.selection.drivers import get_driver_mode
from imagematrix.selection.selector import find_feasible_gpu_sets, select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, TypeVar

    from imagematrix.hardware.gpu_request.spec import Wanted
    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.gpu_claims.gpu_claim import Claim
    from imagematrix.launcher.gpu_claims.usage import Usage
    from imagematrix.selection.selection import Selection

    T = TypeVar("T")


class Engine(Record):
    """The queries to the engine that starts the container.

    `get_info` describes the engine, `inspect_image` an image by its name, and `survey` returns the usage of
    GPUs. `get_architecture` returns that of its machine as images name it, "" if it is unknown. With
    `any_user`, every user may start containers, not only members of a group.
    """

    get_info: Callable[[], Mapping[str, Any]]
    inspect_image: Callable[[str], Mapping[str, Any] | None]
    survey: Callable[..., Usage]
    get_architecture: Callable[[], str] = lambda: ""
    any_user: bool = False


def make_docker_engine(*, remote: bool = False) -> Engine:
    """Return the engine of docker's command, which gets each query once."""
    from imagematrix.launcher.gpu_claims.survey import survey_containers, survey_node

    # Of a remote machine only the containers are visible.
    survey = survey_containers if remote else survey_node
    return Engine(
        get_info=cache(system.get_info),
        inspect_image=cache(images.inspect_image),
        survey=survey,
        get_architecture=cache(system.get_architecture),
    )


class LaunchRequest(Record):
    """What `args` request on `host`; `choose` selects the image for GPUs of a host.

    Any of `choices` can serve the request; `gpus_spec` is the requested `--gpus` value. `passed_gpus` are
    those that the user's own options for docker pass. `remote` is the name of the engine's machine if it is
    not this one. `make_engine` returns the engine without remembered answers; `engine` is the one in use.
    """

    args: RunArgs
    host: Host
    choose: Callable[[Host, Wanted], Selection]
    share: Share
    remote: str | None
    choices: tuple[Choice, ...]
    gpus_spec: Wanted
    make_engine: Callable[[], Engine]
    engine: Engine
    passed_gpus: tuple[Gpu, ...] = ()

    def plan_on_any(self) -> tuple[Selection, Launch]:
        """Return what would be started if all GPUs were free.

        Raises NothingFits; UsageError if the engine is of another architecture, and DevicesError if a device
        node cannot be used, unless the launch is only printed.
        """
        return self.plan_on(self.choices[0].first or self.gpus_spec)

    def plan_on_claimed(
        self, claim: Claim, selection: Selection, launch: Launch, current: Host | None = None
    ) -> tuple[Selection, Launch]:
        """Return what to start on the claimed GPUs; raises what `plan_on_any` does.

        It is `selection` and `launch`, from `plan_on_any`, if the claim is on their GPUs and the host is the
        same. `current` is the host after the wait, if it was probed again: its driver may have changed.
        Raises UsageError or ProbeError if it no longer has these GPUs or MIG devices.
        """
        if current is not None and current != self.host:
            gpus = _refresh_gpus(claim.gpus, current) or self.choices[0].first or self.gpus_spec
            # The engine may have other images now.
            later = replace(self, host=current, engine=self.make_engine())
            selection, launch = later.plan_on(gpus)
        elif claim.gpus != launch.gpus:
            selection, launch = self.plan_on(claim.gpus)
        if self.args.is_privileged:  # its list of devices shows other launches which GPUs it uses
            launch = launch.with_devices(list_device_nodes(current or self.host, self.passed_gpus))
        return selection, launch.with_labels(claim.labels)

    def plan_on(self, gpus: Wanted) -> tuple[Selection, Launch]:
        """Return what to start on `gpus`; raises what `plan_on_any` does."""
        args, needed = self.args, self.args.print_form is None  # what is only printed needs no engine
        selection = self.choose(self.host, gpus)
        # Without an engine, an image of a registry would be pulled. With `--pull always` it is: by its tag,
        # docker's command would start what that is now.
        default: frozenset[str] | None = frozenset() if "/" in str(selection.selected) else None
        digests = default
        if args.is_pulled_first or not args.may_pull:
            digests = _query_engine(
                lambda: find_engine_digests(selection, self.engine.inspect_image), default, needed=needed
            )
        launch = plan_launch(selection, args.command, share=self.share, digests=digests)
        if needed:
            _require_native(launch, self.engine.get_architecture())
        if launch.injected and args.host is None:
            info: Mapping[str, Any] = _query_engine(self.engine.get_info, {}, needed=needed)
            launch = inject_through_cdi(launch, info.get("CDISpecDirs") or ())
        if launch.injected and args.capabilities:
            # Docker does the same with the capabilities in its --gpus (daemon/nvidia_linux.go).
            launch = launch.with_environment({"NVIDIA_DRIVER_CAPABILITIES": args.capabilities})
        if needed and self.remote is None:
            require_device_nodes(launch.devices)
        return selection, launch

    def find_doubts(self, selection: Selection, launch: Launch) -> Iterator[tuple[str, str | None]]:
        """Yield warnings about the launch, each with its remedy."""
        for warning in selection.warnings:
            yield warning.text, None
        if selection.warm_refusal:
            yield selection.warm_refusal, None
        if self.remote is None and (launch.gpus or self.passed_gpus) and pods.check_access() is False:
            yield pods.format_denied(), "run this as root"
        if self.remote is None and os.geteuid() != 0 and not endpoint.runs_as_root():
            groups: dict[tuple[str, str], list[str]] = {}
            for problem in check_device_nodes(launch.devices):
                groups.setdefault((problem.what, problem.remedy), []).append(problem.path)
            for (what, remedy), paths in groups.items():
                yield f"{', '.join(paths)}: {what}; the engine may still have access", remedy
        if selection.variant and get_driver_mode(selection.variant) in ("exact", "compat"):
            option = find_second_driver(self.args, self.engine.get_info)
            if option:
                yield f"the image has its own driver, and {option} injects the node's as well", None
        daemon = self.share.mps
        if daemon and daemon.user and not self.args.get_values("--user", "u"):
            yield "the MPS daemon serves only its own user", f"pass --user {daemon.user}"

    def claim_gpus(
        self,
        launch: Launch,
        on_wait: Callable[[str], None],
        probe_again: Callable[[], Host | None] = lambda: None,
    ) -> Claim:
        """Return a claim on unused GPUs, or on shares of GPUs; `on_wait` gets the reason for waiting.

        If `launch`, the first plan, has no GPUs, the claim is on those that the user's own options pass.
        `probe_again` returns the host as it is after a wait, in which GPUs may have failed; None before a
        wait, and for a saved host.
        """
        from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, claim_gpus, find_lock_folder

        def find_faults(gpus: tuple[Gpu, ...]) -> Mapping[Gpu, str]:
            host = probe_again() or self.host
            faults = {}
            for gpu in gpus:
                try:
                    (current,) = (gpu,) if host == self.host else _refresh_gpus((gpu,), host)
                    if not current.usable:
                        faults[gpu] = f"it is in state {current.state}"
                    elif launch.devices and self.args.print_form is None and self.remote is None:
                        require_device_nodes(list_device_nodes(host, (current,)))
                except (ProbeError, UsageError) as error:
                    faults[gpu] = str(error)
            return faults

        request = ClaimRequest(
            choices=self.choices if launch.gpus else (Choice(gpus=(), count=0),),
            extra_gpus=self.passed_gpus,
            vram_mib=self.share.vram_mib,
            mps=self.share.mps is not None,
        )
        return claim_gpus(
            request,
            partial(self.engine.survey, self.host.gpus),
            wait_s=self.args.wait_s,
            on_wait=on_wait,
            find_faults=find_faults,
            folder=find_lock_folder(self.remote, any_user=self.engine.any_user),
        )


def find_remote_machine(args: RunArgs) -> str | None:
    """Return the name of the machine that the engine runs on, or None if it is this machine.

    Raises UsageError for another machine without its saved Host: a probe would describe this machine.
    """
    if args.host and args.print_form:
        return None
    return _query_engine(
        lambda: find_engine_machine(described=args.host is not None), None, needed=args.print_form is None
    )


def make_request(
    args: RunArgs,
    host: Host,
    catalog: Catalog,
    gpus_spec: str | None,
    remote: str | None,
    make_engine: Callable[[], Engine] | None = None,
    mounted: Iterable[str] | None = None,
) -> LaunchRequest:
    """Return the request; `gpus_spec` is the `--gpus` value.

    `make_engine` returns the engine, by default docker's. `mounted` are the files and folders that the user's
    options mount, by default as docker reads them. Raises UsageError if the host lacks these GPUs,
    ProbeError if the MPS daemon is not running.
    """
    make_engine = make_engine or partial(make_docker_engine, remote=remote is not None)
    engine = make_engine()
    nothing: dict[str, Any] = {}
    # Without an engine, starting the launch fails later.
    passed = find_user_gpus(
        args,
        host.gpus,
        lambda: _query_engine(engine.get_info, nothing, needed=False),
        list_mounted(args) if mounted is None else mounted,
        without_daemon=engine.any_user,
    )
    minors = {gpu.minor for gpu in host.gpus}
    if passed.names_all and args.gpus is None and minors.issuperset(gpu.minor for gpu in passed.gpus):
        gpus_spec = make_exact_spec(passed.gpus)
    choice = find_candidates(host.gpus, gpus_spec)
    if args.vram_mib is not None and args.gpus is None:  # for a share, one GPU is the default
        choice = find_candidates(choice.first, 1)
    choices = find_feasible_gpu_sets(host, catalog, choice, args.where, vram_mib=args.vram_mib)
    if args.vram_mib is not None:
        # Without GPUs known to be too small, unless no choice has enough others. GPUs with unknown memory
        # stay: this only prefers images, and the claim refuses such GPUs.
        large = (choice.with_memory(args.vram_mib) for choice in choices)
        choices = tuple(choice for choice in large if choice.enough) or choices

    def select_image(host: Host, gpus: Wanted) -> Selection:
        selection = select(
            host, catalog, gpus=gpus, allow_cpu=args.allow_cpu, where=args.where, vram_mib=args.vram_mib
        )
        if not catalog.warm:
            return selection
        from imagematrix.launcher.docker.warm_start import allow_warm_image, count_container_cpus

        return allow_warm_image(count_container_cpus(selection, args, engine.get_info), args.policy)

    return LaunchRequest(
        args=args,
        host=host,
        choose=select_image,
        share=Share(vram_mib=args.vram_mib, mps=_find_mps(args)),
        remote=remote,
        choices=choices,
        gpus_spec=gpus_spec,
        make_engine=make_engine,
        engine=engine,
        passed_gpus=passed.gpus,
    )


def _require_native(launch: Launch, architecture: str) -> None:
    """Raise UsageError if the engine's machine is of another architecture than the image.

    The probe may describe another machine: that of a saved host, or an emulated one.
    """
    if architecture and architecture != launch.platform.split("/")[1]:
        raise UsageError(
            f"{launch.reference} is for {launch.platform}, and its engine runs on linux/{architecture}",
            remedy=f"start it on a machine with {launch.platform}",
        )


def _query_engine(query: Callable[[], T], default: T, *, needed: bool) -> T:
    """Return the engine's answer, or the default if it does not respond and the answer is not `needed`."""
    try:
        return query()
    except EngineError:
        if needed:
            raise
        return default


def _refresh_gpus(gpus: tuple[Gpu, ...], host: Host) -> tuple[Gpu, ...]:
    """Return the claimed GPUs as `host` has them now."""
    current = select_gpus(host.gpus, make_exact_spec(gpus)) if gpus else ()
    if [list_lock_names(gpu) for gpu in current] != [list_lock_names(gpu) for gpu in gpus]:
        raise ProbeError(
            f"the devices of {', '.join(gpu.label for gpu in gpus)} changed during the wait",
            remedy="run the command again",
        )
    return current


def _find_mps(args: RunArgs) -> Mps | None:
    if not args.mps:
        return None
    if args.host and args.print_form:  # the daemon of another node cannot be reached
        return Mps(threads=args.mps_threads)
    return find_mps(os.environ, args.mps_threads)
