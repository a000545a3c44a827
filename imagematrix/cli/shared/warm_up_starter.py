"""What starts the warm-up of an image: Docker's engine, or a runtime without a daemon."""

from __future__ import annotations

import contextlib
from typing import Protocol

from imagematrix.cli.shared.output import print_info

TYPE_CHECKING = False
if TYPE_CHECKING:
    from docker import DockerClient

    from imagematrix.cli.shared.daemonless import DaemonlessLaunch
    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.launcher.warm_up.program_run import WarmUpStart
    from imagematrix.launcher.warm_up.warm_up_session import WarmUpEngine, WarmUpPlan
    from imagematrix.selection.selection import Selection


class WarmUpStarter(Protocol):
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

    def make_engine(self, plan: WarmUpPlan, start: WarmUpStart) -> WarmUpEngine:
        """Return what starts the warm-up of a plan."""
        ...


class _DockerStarter:
    """Docker's engine."""

    def __init__(self, args: RunArgs, client: DockerClient) -> None:
        self._args = args
        self._client = client

    def open_catalog(self) -> Catalog:
        """Return the catalog of the image; see WarmUpStarter."""
        from imagematrix.cli.shared.inputs import find_catalog

        return find_catalog(self._args.image, None)

    def make_request(self, host: Host, gpus: str | None, catalog: Catalog) -> LaunchRequest:
        """Return the request for GPUs of a host; see WarmUpStarter."""
        from imagematrix.launcher.docker.request import make_request

        return make_request(self._args, host, catalog, gpus, None)

    def fetch_base(self, selection: Selection, _: Launch) -> tuple[WarmUp, str]:
        """Pull the variant; see WarmUpStarter."""
        from imagematrix.cli.shared.pull_image import PullDisplay
        from imagematrix.launcher.warm_up.plan_warm_up import pull_base

        with PullDisplay(str(selection.selected)) as display:
            return pull_base(selection, self._client, display)

    def make_engine(self, plan: WarmUpPlan, start: WarmUpStart) -> WarmUpEngine:
        """Return what starts the warm-up; see WarmUpStarter."""
        from imagematrix.launcher.warm_up.container_run import ContainerRuns
        from imagematrix.launcher.warm_up.docker_warm_up import DockerWarmUp

        return DockerWarmUp(self._client, plan.name, ContainerRuns(self._client, start))


class _StoreStarter:
    """A runtime without a daemon, which starts from a store; `stack` keeps the lease on the image."""

    def __init__(self, launch: DaemonlessLaunch, stack: contextlib.ExitStack) -> None:
        self._launch = launch
        self._stack = stack

    def open_catalog(self) -> Catalog:
        """Return the catalog of the image; see WarmUpStarter."""
        return self._launch.open_catalog()

    def make_request(self, host: Host, gpus: str | None, catalog: Catalog) -> LaunchRequest:
        """Return the request for GPUs of a host; see WarmUpStarter."""
        return self._launch.make_request(host, gpus, catalog)

    def fetch_base(self, selection: Selection, launch: Launch) -> tuple[WarmUp, str]:
        """Fetch the variant into the store, where it stays meanwhile; see WarmUpStarter."""
        from imagematrix.common.json_documents import Fields
        from imagematrix.launcher.docker.plan import require_variant
        from imagematrix.launcher.warm_up.plan_warm_up import name_published, require_warm_up

        variant = require_variant(selection)
        name_published(variant)
        self._stack.callback(self._launch.store.take_lease(str(variant.digest)).release)
        self._image = self._launch.pull(selection, launch)
        config = Fields(self._image.config, self._image.digest).get_object_or_empty("config")
        return require_warm_up(self._image.config, variant), config.get_text_or_none("User") or ""

    def make_engine(self, _: WarmUpPlan, start: WarmUpStart) -> WarmUpEngine:
        """Return what starts the warm-up; see WarmUpStarter."""
        from imagematrix.launcher.warm_up.daemonless_warm_up import DaemonlessWarmUp

        return DaemonlessWarmUp(self._launch, self._image, start)


def open_starter(args: RunArgs, engine: str | None, stack: contextlib.ExitStack) -> WarmUpStarter:
    """Return what `run` would start the image with; raise EngineError if it cannot warm up here."""
    from imagematrix.common.settings import DOCKER, read_site

    site = read_site()
    name = site.choose_value("engine", engine, "IMAGEMATRIX_ENGINE") or DOCKER
    if name == DOCKER:
        from imagematrix.images.engine.transport import open_client
        from imagematrix.launcher.docker.request import find_remote_machine
        from imagematrix.launcher.warm_up.leftovers import remove_leftovers

        find_remote_machine(args)  # an engine elsewhere has neither the GPUs nor the inputs of this machine
        client = stack.enter_context(contextlib.closing(open_client()))
        if remove_leftovers(client):
            print_info("imagematrix: removed what a killed warm-up had left in the engine")
        return _DockerStarter(args, client)
    from imagematrix.cli.shared.daemonless import DaemonlessLaunch
    from imagematrix.launcher.daemonless.options import parse_container_options
    from imagematrix.launcher.warm_up.daemonless_warm_up import require_root

    launch = DaemonlessLaunch(args, str(args.image), name, parse_container_options(args, {}, name), site)
    require_root(launch.require_runtime())
    return _StoreStarter(launch, stack)
