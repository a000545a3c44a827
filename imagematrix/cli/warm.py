"""`imagematrix warm`: compile on this node what a program compiles on its first start, for all like it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Protocol

import typer

from imagematrix.cli.shared.options import AllowCpu, Image, Where
from imagematrix.cli.shared.output import print_info, print_text, warn
from imagematrix.common.settings import ENGINES
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import ALL
from imagematrix.launcher.docker.options import OWN

EXAMPLE = (
    "imagematrix warm registry.example.com/ml/training:v1 --staging registry.example.com/staging/training"
)
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker import DockerClient

    from imagematrix.cli.shared.daemonless import DaemonlessLaunch
    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.images.oci.registry import Registry
    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.launcher.warm_up.warm_up_session import WarmUpEngine, WarmUpPlan
    from imagematrix.selection.selection import Selection


def command(
    image: Image,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=DIR",
            help="Give the warm-up this folder as its input NAME, read-only; repeatable.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Write the layer to this new folder, as an OCI layout."),
    ] = None,
    staging: Annotated[
        str | None,
        typer.Option(
            "--staging", metavar="REPO", help="Push the layer to this repository, which nothing starts from."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help=OWN["--engine"][1],
            autocompletion=lambda: list(ENGINES),
        ),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option("--wait", metavar="TIME", help="Wait for GPUs that are in use: 90s, 10m, 2h."),
    ] = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Start the variant that fits this node with its warm-up, and keep what it compiled as one layer.

    The layer is proved before it is kept: the program starts again with it, and neither compiles nor misses a
    cache. It serves nodes like this one once `imagematrix publish --warm` has added it to the version.
    """
    from imagematrix.images.oci.registry import Registry
    from imagematrix.launcher.docker.options import RunArgs, parse_seconds
    from imagematrix.launcher.warm_up.input_folders import hash_inputs, parse_inputs
    from imagematrix.launcher.warm_up.plan_warm_up import make_warm_up_plan
    from imagematrix.launcher.warm_up.staged_image import require_new_folder
    from imagematrix.selection.query import parse_where

    if to is not None and staging is not None:
        raise UsageError("--to and --staging are mutually exclusive", remedy="leave one of them out")
    if to is not None:
        require_new_folder(to)
    args = RunArgs(
        options=(),
        image=image,
        command=(),
        allow_cpu=allow_cpu,
        where=parse_where(where or ()),
        wait_s=parse_seconds(wait, "--wait") if wait else 0.0,
    )
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(Registry(staging)) if staging else None
        starter = _open_starter(args, engine, stack)
        request, warm_up, user = _request_warm_up(starter)
        folders = parse_inputs(inputs or (), warm_up)
        plan = make_warm_up_plan(request, warm_up, hash_inputs(folders), user)
        _keep_warm_layer(plan, starter.make_engine(plan, request, folders), registry, to)


class _Starter(Protocol):
    """What fetches a variant and starts its warm-up."""

    def open_catalog(self) -> Catalog:
        """Return the catalog of the image."""
        ...

    def make_request(self, host: Host, gpus: str | None, catalog: Catalog) -> LaunchRequest:
        """Return the request for GPUs of a host."""
        ...

    def fetch_base(self, selection: Selection, launch: Launch) -> tuple[WarmUp, str]:
        """Fetch the selected variant by its digest; return its warm-up, and its user, empty for root."""
        ...

    def make_engine(
        self, plan: WarmUpPlan, request: LaunchRequest, folders: Mapping[str, Path]
    ) -> WarmUpEngine:
        """Return what starts the warm-up of a plan, with the folders of its inputs."""
        ...


class _DockerStarter:
    """Docker's engine."""

    def __init__(self, args: RunArgs, client: DockerClient) -> None:
        self._args = args
        self._client = client

    def open_catalog(self) -> Catalog:
        """Return the catalog of the image; see _Starter."""
        from imagematrix.cli.shared.inputs import find_catalog

        return find_catalog(self._args.image, None)

    def make_request(self, host: Host, gpus: str | None, catalog: Catalog) -> LaunchRequest:
        """Return the request for GPUs of a host; see _Starter."""
        from imagematrix.launcher.docker.request import make_request

        return make_request(self._args, host, catalog, gpus, None)

    def fetch_base(self, selection: Selection, _: Launch) -> tuple[WarmUp, str]:
        """Pull the variant; see _Starter."""
        from imagematrix.cli.shared.pull_image import PullDisplay
        from imagematrix.launcher.warm_up.plan_warm_up import pull_base

        with PullDisplay(str(selection.selected)) as display:
            return pull_base(selection, self._client, display)

    def make_engine(
        self, plan: WarmUpPlan, request: LaunchRequest, folders: Mapping[str, Path]
    ) -> WarmUpEngine:
        """Return what starts the warm-up; see _Starter."""
        from imagematrix.launcher.launch_session import UnusedGpus
        from imagematrix.launcher.warm_up.container_run import ContainerRuns
        from imagematrix.launcher.warm_up.docker_warm_up import DockerWarmUp

        runs = ContainerRuns(self._client, request, UnusedGpus(on_wait=print_info), plan.warm_up, folders)
        return DockerWarmUp(self._client, plan.name, runs)


class _StoreStarter:
    """A runtime without a daemon, which starts from a store; `stack` keeps the lease on the image."""

    def __init__(self, launch: DaemonlessLaunch, stack: contextlib.ExitStack) -> None:
        self._launch = launch
        self._stack = stack

    def open_catalog(self) -> Catalog:
        """Return the catalog of the image; see _Starter."""
        return self._launch.open_catalog()

    def make_request(self, host: Host, gpus: str | None, catalog: Catalog) -> LaunchRequest:
        """Return the request for GPUs of a host; see _Starter."""
        return self._launch.make_request(host, gpus, catalog)

    def fetch_base(self, selection: Selection, launch: Launch) -> tuple[WarmUp, str]:
        """Fetch the variant into the store, unless it is there, where it stays meanwhile; see _Starter."""
        from imagematrix.common.json_documents import Fields
        from imagematrix.launcher.docker.plan import require_variant
        from imagematrix.launcher.warm_up.plan_warm_up import name_published, require_warm_up

        variant = require_variant(selection)
        name_published(variant)
        self._stack.callback(self._launch.store.take_lease(str(variant.digest)).release)
        self._image = self._launch.pull(selection, launch)
        config = Fields(self._image.config, self._image.digest).get_object_or_empty("config")
        return require_warm_up(self._image.config, variant), config.get_text_or_none("User") or ""

    def make_engine(
        self, plan: WarmUpPlan, request: LaunchRequest, folders: Mapping[str, Path]
    ) -> WarmUpEngine:
        """Return what starts the warm-up; see _Starter."""
        from imagematrix.launcher.launch_session import UnusedGpus
        from imagematrix.launcher.warm_up.daemonless_warm_up import DaemonlessWarmUp

        gpus = UnusedGpus(on_wait=print_info)
        return DaemonlessWarmUp(self._launch, self._image, request, gpus, plan.warm_up, folders)


def _open_starter(args: RunArgs, engine: str | None, stack: contextlib.ExitStack) -> _Starter:
    """Return what `run` would start the image with; raise EngineError if it cannot warm up here."""
    from imagematrix.common.settings import DOCKER, read_site

    site = read_site()
    name = site.choose_value("engine", engine, "IMAGEMATRIX_ENGINE") or DOCKER
    if name == DOCKER:
        from imagematrix.images.engine.transport import open_client
        from imagematrix.launcher.docker.request import find_remote_machine

        find_remote_machine(args)  # an engine elsewhere has neither the GPUs nor the inputs of this machine
        return _DockerStarter(args, stack.enter_context(contextlib.closing(open_client())))
    from imagematrix.cli.shared.daemonless import DaemonlessLaunch
    from imagematrix.launcher.daemonless.options import parse_container_options
    from imagematrix.launcher.warm_up.daemonless_warm_up import require_root

    launch = DaemonlessLaunch(args, str(args.image), name, parse_container_options(args, {}, name), site)
    require_root(launch.require_runtime())
    return _StoreStarter(launch, stack)


def _request_warm_up(starter: _Starter) -> tuple[LaunchRequest, WarmUp, str]:
    """Select and fetch a variant; return the request of its warm-up here, the warm-up, and its user."""
    from imagematrix.cli.shared.inputs import load_node
    from imagematrix.common.record import replace
    from imagematrix.hardware.host.usable_cpus import add_usable_cpus
    from imagematrix.launcher.docker.plan import require_variant
    from imagematrix.launcher.launch_session import SignatureCheck

    host, gpus = load_node(None, None, None, None)
    host = add_usable_cpus(host)
    catalog = starter.open_catalog().without_warm()
    selection, launch = starter.make_request(host, gpus, catalog).plan_on_any()
    SignatureCheck(None).require_signed(selection)
    for warning in selection.warnings:
        warn(warning.text)
    warm_up, user = starter.fetch_base(selection, launch)
    # Of the same variant, on the GPUs that its warm-up takes.
    variants = replace(catalog, variants=(require_variant(selection),))
    wanted = gpus if warm_up.gpus == ALL else warm_up.gpus
    return starter.make_request(host, wanted, variants), warm_up, user


def _keep_warm_layer(
    plan: WarmUpPlan, engine: WarmUpEngine, registry: Registry | None, to: Path | None
) -> None:
    """Warm up unless the staging repository has the result, and keep it there or in a folder."""
    from imagematrix.common.temp_folder import make_scratch_folder
    from imagematrix.launcher.warm_up import staged_image
    from imagematrix.launcher.warm_up.warm_up_session import LAYER, make_warm_layer, report_full_disk

    digest = registry and staged_image.find_staged_image(registry, plan.tag, plan.key)
    if digest:
        print_info("imagematrix: this warm-up is there already")
    else:
        with make_scratch_folder() as folder:
            with report_full_disk(folder):
                layer, label = make_warm_layer(
                    engine, plan, folder, lambda step: print_info(f"imagematrix: {step}")
                )
            image = staged_image.make_staged_image(
                layer, folder / LAYER, label, plan.compression, plan.platform
            )
            if registry is not None:
                digest = staged_image.push_staged_image(registry, image, plan.tag, plan.key)
            elif to is not None:
                with report_full_disk(to):
                    staged_image.write_staged_layout(image, plan.tag, to)
    if registry is not None:
        print_text(f"{registry.name}:{plan.tag}@{digest}")
    elif to is not None:
        print_text(f"oci:{to}")
    else:
        print_info("imagematrix: proved, and not kept: add --to DIR or --staging REPO")
