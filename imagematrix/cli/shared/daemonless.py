"""Execution of `imagematrix run --engine oci`: select, pull into a store, claim GPUs, and start.

Without typer, because jobs wait for it.
"""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack

from imagematrix.cli.shared.inputs import load_node, make_path
from imagematrix.cli.shared.output import print_document, print_info, print_json, warn
from imagematrix.cli.shared.wait_for_gpus import GpuWait
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
from imagematrix.launcher.docker.request import Engine, make_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

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
    from imagematrix.launcher.daemonless.start import choose_runtime

    daemonless = DaemonlessLaunch(args, image, parse_container_options(args, os.environ, engine), site)
    host, gpus = load_node(make_path(args.host), None, make_path(args.nvidia_smi), args.gpus)
    request = daemonless.make_request(host, gpus)
    selection, launch = request.plan_on_any()
    require_usable(launch, args)
    runtime = choose_runtime(engine, site.choose_value("runtime", None, "IMAGEMATRIX_RUNTIME"))
    if args.print_form:
        words = daemonless.format_command(selection, launch, runtime)
        if args.print_form == JSON:
            print_json({**launch.to_json(args.docker), "docker": None, "runtime": words})
            return 0
        print_document(f"{shlex.join(words)}\n", "see it with --dry-run=json")
        print_info(
            "this shows what is started, and is no command to paste: variables and folders are of a launch"
        )
        return 0
    for warning in selection.warnings:
        warn(warning.text)

    is_saved = args.host or args.nvidia_smi
    wait = GpuWait(None if is_saved else lambda: load_node(None, None, None, args.gpus)[0])
    with ExitStack() as stack:
        claim: Claim | None = None
        if launch.gpus:
            claim = stack.enter_context(request.claim_gpus(launch, wait.print_reason, wait.probe_again))
            selection, launch = request.plan_on_claimed(
                claim, selection, launch, wait.latest or wait.probe_again()
            )
            require_usable(launch, args)
        return daemonless.start(selection, launch, runtime, claim)


class DaemonlessLaunch:
    """A launch as the options and the site describe it: the store, the image in it, and the container.

    `folders` are mounted besides those of the site and the options. `inherited` are variables that those of
    the image override. With `own_processes`, the container has a process namespace, else it is in the node's.
    """

    def __init__(
        self,
        args: RunArgs,
        image: str,
        options: ContainerOptions,
        site: Site,
        *,
        folders: tuple[Bind, ...] = (),
        inherited: Mapping[str, str] | None = None,
        own_processes: bool = True,
    ) -> None:
        self._args = args
        self._image = site.complete_name(image)
        self._options = options
        self._site = site
        self._folders = folders
        self._inherited = inherited
        self._own_processes = own_processes
        self._policy = make_path(args.policy)
        self.store = ImageStore(find_store_folder(site, args.store))

    def open_catalog(self) -> Catalog:
        """Return the catalog that is named, or else that of the store, or else that of the image's registry.

        A version in the store is taken as it was when something of it was last pulled.
        """
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
        return make_request(
            self._args, host, catalog or self.open_catalog(), gpus, None, _make_daemonless_engine
        )

    def start(self, selection: Selection, launch: Launch, runtime: Runtime, claim: Claim | None) -> int:
        """Run a launch to its end, and return the exit code."""
        from imagematrix.launcher.daemonless.start import run_container as start_container

        image = self.fetch_image(selection)
        if user := find_other_user(_read_config(image)):
            warn(f"the image's user {user} is ignored: without a daemon, the process is yours")
        return start_container(self.make_container(image, launch), image, runtime, self.store, claim, warn)

    def fetch_image(self, selection: Selection) -> StoredImage:
        """Return the image of a selection, pulled into the store if it is not there."""
        variant = selection.variant
        if variant is None:
            raise UsageError("cannot run: nothing was selected")
        image = self.store.find(variant.digest) if variant.digest else None
        if image is not None and (image.kind == FOLDER or not self._args.unpacked):
            require_signed(variant, self._policy, version=selection.version)  # as fetching one does
            return image
        from imagematrix.cli.shared.pull_image import PullDisplay
        from imagematrix.cli.shared.store_image import fetch_into_store
        from imagematrix.images.local_store.image_fetch import FetchOptions

        how = FetchOptions(unpacked=self._args.unpacked, max_size=self._site.max_bytes)
        part = split_version(self._image)[1] not in (None, selection.version)
        with PullDisplay(variant.reference) as display:
            return fetch_into_store(
                selection, self.store, self._args.catalog, self._policy, how, display, part=part
            )

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

    def format_command(self, selection: Selection, launch: Launch, runtime: Runtime) -> list[str]:
        """Return the command that starts a launch, without values of variables.

        It has placeholders for what only the image says, if that is not in the store.
        """
        digest = selection.variant.digest if selection.variant else None
        image = self.store.find(digest) if digest else None
        if image is None:
            unknown = Fields({"Cmd": [UNKNOWN]}, launch.reference)
            container = make_container(unknown, launch, self._options, (), name=UNKNOWN, home="/root")
        else:
            container = self.make_container(image, launch)
        runtime.require_possible(container)
        return runtime.format_command(container)


def _read_config(image: StoredImage) -> Fields:
    return Fields(image.config, image.digest).get_object_or_empty("config")


def _make_daemonless_engine() -> Engine:
    from imagematrix.launcher.gpu_claims.survey import survey_without_daemon

    return Engine(get_info=dict, inspect_image=lambda _: None, survey=survey_without_daemon, any_user=True)


def require_usable(launch: Launch, args: RunArgs) -> None:
    """Raise an error if a launch cannot work without a daemon: the process has the rights of the caller."""
    if launch.injected:
        raise UsageError(
            f"{launch.reference} has no driver of its own, and no runtime of NVIDIA injects one here",
            remedy="build a variant with a driver (axis `driver` in matrix.yaml), or use --engine docker",
        )
    problems = check_device_nodes(launch.devices) if args.print_form is None else ()
    if problems:
        raise DevicesError(problems)
