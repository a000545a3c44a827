"""Execution of `imagematrix run --engine oci`: select, pull into a store, claim GPUs, and start.

Without typer, because jobs wait for it.
"""

from __future__ import annotations

import os
import shlex

from imagematrix.cli.shared.inputs import apply_warm_settings, load_launch_node, make_path, start_launch
from imagematrix.cli.shared.output import print_document, print_info, print_json, warn
from imagematrix.common.image_reference import names_registry, split_version
from imagematrix.common.json_documents import Fields
from imagematrix.common.record import replace
from imagematrix.errors import UnknownImageError, UsageError
from imagematrix.images.catalog.sources import open_catalog, require_signed
from imagematrix.images.catalog.store import open_stored
from imagematrix.images.local_store.folder import FOLDER, ImageStore, find_store_folder
from imagematrix.launcher.daemonless.container import find_other_user, make_container
from imagematrix.launcher.daemonless.options import make_site_binds, parse_container_options
from imagematrix.launcher.docker.devices import DevicesError, check_device_nodes
from imagematrix.launcher.docker.options import JSON
from imagematrix.launcher.docker.plan import get_start_image, require_variant
from imagematrix.launcher.docker.request import Engine, make_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.common.settings import Site
    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.local_store.folder import StoredImage
    from imagematrix.launcher.daemonless.container import ContainerSpec
    from imagematrix.launcher.daemonless.options import Bind, ContainerOptions
    from imagematrix.launcher.daemonless.runtime import Runtime
    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.launcher.gpu_claims.gpu_claim import Claim
    from imagematrix.selection.selection import Selection

UNKNOWN = "..."  # the command of an image that is not in the store


def run_daemonless(args: RunArgs, image: str, engine: str, site: Site) -> int:
    """Print the launch, or start it on unused GPUs; return the exit code.

    Raises what `imagematrix.cli.shared.run_docker.run_with_docker` does.
    """
    launch = DaemonlessLaunch(args, image, engine, parse_container_options(args, os.environ, engine), site)
    return start_launch(launch.make_request(*load_launch_node(args)), launch, launch.print_launch)


class DaemonlessLaunch:
    """A launch as the options and the site describe it: the store, the image in it, and the container.

    `engine` chooses the runtime. `folders` are mounted besides those of the site and the options. `inherited`
    are variables that those of the image override. With `own_processes`, the container has a process
    namespace, else it is in the node's.
    """

    # Whether a process keeps the number of its user, with runtimes that leave the choice.
    of_user = False

    def __init__(
        self,
        args: RunArgs,
        image: str,
        engine: str,
        options: ContainerOptions,
        site: Site,
        *,
        folders: tuple[Bind, ...] = (),
        inherited: Mapping[str, str] | None = None,
        own_processes: bool = True,
    ) -> None:
        self._args = args
        self._image = site.complete_name(image)
        self._engine = engine
        self._options = options
        self._site = site
        self._folders = folders
        self._inherited = inherited
        self._own_processes = own_processes
        self._policy = make_path(args.policy)
        self._runtime: Runtime | None = None
        self.store = ImageStore(find_store_folder(site, args.store))

    def require_runtime(self) -> Runtime:
        """Return the runtime that starts the container, chosen once; raises what `choose_runtime` does."""
        from imagematrix.launcher.daemonless.start import choose_runtime

        if self._runtime is None:
            required = self._site.choose_value("runtime", None, "IMAGEMATRIX_RUNTIME")
            self._runtime = choose_runtime(self._engine, required, of_user=self.of_user)
        return self._runtime

    def open_catalog(self) -> Catalog:
        """Return the catalog that is named, or else that of the store, or else that of the image's registry.

        A version in the store is taken as it was when something of it was last pulled.
        """
        return apply_warm_settings(self._find_catalog(), no_warm=self._args.no_warm)

    def _find_catalog(self) -> Catalog:
        if self._args.catalog is not None:
            return open_catalog(self._args.catalog, image=self._image, policy=self._policy)
        try:
            return open_stored(self._image, self.store)
        except UnknownImageError:
            if not names_registry(self._image):
                raise
        return open_catalog(self._image, policy=self._policy)

    def make_request(self, host: Host, gpus: str | None, catalog: Catalog | None = None) -> LaunchRequest:
        """Return the request for GPUs of a host, from the image's catalog or another."""
        mounted = [bind.source for bind in self._options.binds]
        return make_request(
            self._args, host, catalog or self.open_catalog(), gpus, None, _make_daemonless_engine, mounted
        )

    def verify(self, _: Selection, launch: Launch) -> Launch:
        """Return the launch if it can work here and there is a runtime for it; see ContainerEngine."""
        _require_usable(launch, self._args)
        self.require_runtime()
        return launch

    def find_warnings(self, selection: Selection, _: Launch) -> Iterable[tuple[str, str | None]]:
        """Return what the image does not prove; see ContainerEngine."""
        texts = [*(warning.text for warning in selection.warnings), selection.warm_refusal]
        return ((text, None) for text in texts if text)

    def prepare(self, _: Launch) -> None:
        """Do nothing; see ContainerEngine."""

    def pull(self, selection: Selection, _: Launch) -> StoredImage:
        """Return the image of a selection, pulled into the store if it is not there; see ContainerEngine.

        Its signatures are checked here, also those of an image in the store: fetching one checks them.
        """
        variant, chosen = require_variant(selection), get_start_image(selection)
        image = self.store.find(chosen.digest) if chosen.digest else None
        if image is not None and (image.kind == FOLDER or not self._args.unpacked):
            require_signed(variant, self._policy, version=selection.version)
            return image
        from imagematrix.cli.shared.pull_image import PullDisplay
        from imagematrix.cli.shared.store_image import fetch_into_store
        from imagematrix.images.local_store.image_fetch import FetchOptions

        how = FetchOptions(unpacked=self._args.unpacked, max_size=self._site.max_bytes)
        part = split_version(self._image)[1] not in (None, selection.version)
        with PullDisplay(chosen.reference) as display:
            return fetch_into_store(
                selection, self.store, self._args.catalog, self._policy, how, display, part=part
            )

    def start(self, _: Selection, launch: Launch, image: StoredImage, claim: Claim | None) -> int:
        """Run the container to its end, and return its exit code; see ContainerEngine."""
        from imagematrix.launcher.daemonless.start import run_container

        if user := find_other_user(_read_config(image)):
            warn(f"the image's user {user} is ignored: without a daemon, the process is yours")
        container = self.make_container(image, launch)
        return run_container(container, image, self.require_runtime(), self.store, claim, warn)

    def make_container(self, image: StoredImage, launch: Launch) -> ContainerSpec:
        """Return the container of a launch from an image in the store."""
        binds = (*make_site_binds(self._site.mounts), *self._folders)
        # The user's home, if it is mounted at the same path.
        home = os.path.expanduser("~")  # noqa: PTH111 - pathlib is slow to load
        if not any(
            bind.source == bind.target and f"{home}/".startswith(f"{bind.target}/")
            for bind in (*binds, *self._options.binds)
        ):
            home = "/root"
        name = f"imagematrix-{os.getpid()}"
        container = make_container(
            _read_config(image), launch, self._options, binds, name=name, home=home, inherited=self._inherited
        )
        return replace(container, own_processes=self._own_processes)

    def print_launch(self, selection: Selection, launch: Launch) -> None:
        """Print the command that starts a launch, or the launch as a document."""
        words = self._format_command(selection, launch)
        if self._args.print_form == JSON:
            print_json({**launch.to_json(self._args.docker), "docker": None, "runtime": words})
            return
        print_document(f"{shlex.join(words)}\n", "see it with --print json")
        print_info(
            "this shows what is started, and is no command to paste: variables and folders are of a launch"
        )

    def _format_command(self, selection: Selection, launch: Launch) -> list[str]:
        """Return the command that starts a launch, without values of variables.

        It has placeholders for what only the image says, if that is not in the store.
        """
        digest = get_start_image(selection).digest
        image = self.store.find(digest) if digest else None
        if image is None:
            unknown = Fields({"Cmd": [UNKNOWN]}, launch.reference)
            container = make_container(unknown, launch, self._options, (), name=UNKNOWN, home="/root")
        else:
            container = self.make_container(image, launch)
        runtime = self.require_runtime()
        runtime.require_possible(container)
        return runtime.format_command(container)


def _read_config(image: StoredImage) -> Fields:
    return Fields(image.config, image.digest).get_object_or_empty("config")


def _make_daemonless_engine() -> Engine:
    from imagematrix.launcher.gpu_claims.survey import survey_without_daemon
    from imagematrix.selection.selection_target import ARCHITECTURES

    machine = os.uname().machine
    return Engine(
        get_info=dict,
        inspect_image=lambda _: None,
        survey=survey_without_daemon,
        get_architecture=lambda: ARCHITECTURES.get(machine, machine),
        any_user=True,
    )


def _require_usable(launch: Launch, args: RunArgs) -> None:
    """Raise an error if a launch cannot work without a daemon: the process has the rights of the caller."""
    if launch.injected:
        raise UsageError(
            f"{launch.reference} has no driver of its own, and no runtime of NVIDIA injects one here",
            remedy="build a variant with a driver (axis `driver` in matrix.yaml), or use --engine docker",
        )
    problems = check_device_nodes(launch.devices) if args.print_form is None else ()
    if problems:
        raise DevicesError(problems)
