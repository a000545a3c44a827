"""Execution of `imagematrix run --engine oci`: select, pull into a store, claim GPUs, and start.

Without typer, because jobs wait for it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from imagematrix.catalog.sources import open_catalog, require_signed
from imagematrix.catalog.store import stored
from imagematrix.cli.choosing import node_of
from imagematrix.cli.output import info, print_json, warn
from imagematrix.documents import Fields
from imagematrix.errors import UnknownImageError, UsageError
from imagematrix.image_store.folder import ImageStore, default_store
from imagematrix.launcher.devices import DevicesError, check
from imagematrix.launcher.options import JSON
from imagematrix.launcher.request import Engine, request
from imagematrix.reference import names_registry
from imagematrix.runtimes.container import container, other_user
from imagematrix.runtimes.options import container_options, site_binds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.catalog.catalog import Catalog, Variant
    from imagematrix.image_store.folder import StoredImage
    from imagematrix.launcher.options import RunArgs
    from imagematrix.launcher.plan import Launch
    from imagematrix.node.host import Host
    from imagematrix.runtimes.options import Bind
    from imagematrix.site import Site

__all__ = ["start"]


def start(args: RunArgs, image: str, engine: str, site: Site) -> int:
    """Print the launch, or start it on unused GPUs; return the exit code.

    Raises what `imagematrix.cli.starting.start` does.
    """
    options = container_options(args, os.environ, engine)
    policy = _path(args.policy)
    store = ImageStore(site.chosen("store", args.store, "IMAGEMATRIX_STORE") or default_store())
    host, wanted = node_of(_path(args.host), None, _path(args.nvidia_smi), args.gpus)
    catalog = _catalog(site.full(image), args.catalog, store, policy)
    requested = request(args, host, catalog, wanted, None, _no_engine)
    chosen, launch = requested.first()
    _require(launch, args)
    if args.shown:
        _print(launch, args, engine)
        return 0
    from imagematrix.runtimes.start import runtime_of
    from imagematrix.runtimes.start import start as start_container

    runtime = runtime_of(site.chosen("runtime", None, "IMAGEMATRIX_RUNTIME"))
    if chosen.doubt:
        warn(chosen.doubt)
    waits: list[str] = []

    def report(reason: str) -> None:
        waits.append(reason)
        info(reason)

    def now() -> Host | None:
        """Return this node's host as it is after a wait, None before one, or if the host was given."""
        if not waits or args.host or args.nvidia_smi:
            return None
        return node_of(None, None, None, args.gpus)[0]

    with ExitStack() as stack:
        leases: tuple[int, ...] = ()
        if launch.gpus:
            claimed = stack.enter_context(requested.claim(launch, report, now))
            chosen, launch = requested.on(claimed, chosen, launch, now())
            _require(launch, args)
            leases = claimed.descriptors
        if chosen.variant is None:  # `first` would have raised
            raise UsageError("cannot run: nothing was selected")
        found = _image(chosen.variant, store, quiet=args.quiet, policy=policy)
        config = Fields(
            Fields(found.config, launch.reference).object_or_empty("config").data, launch.reference
        )
        if user := other_user(config):
            warn(f"the image's user {user} is ignored: without a daemon, the process is yours")
        binds = site_binds(site.mounts)
        name = f"imagematrix-{os.getpid()}"
        made = container(config, launch, options, binds, name=name, home=_home((*binds, *options.binds)))
        return start_container(made, found, runtime, store, leases)


def _no_engine() -> Engine:
    from imagematrix.allocation.survey import survey_without_daemon

    return Engine(info=dict, image=lambda _: None, survey=survey_without_daemon, any_user=True)


def _catalog(image: str, name: str | None, store: ImageStore, policy: Path | None) -> Catalog:
    """Return the catalog that is named, or else that of the store, or else that of the image's registry.

    A version in the store is taken as it was when something of it was last pulled.
    """
    if name is not None:
        return open_catalog(name, image=image, policy=policy)
    try:
        return stored(image, store)
    except UnknownImageError:
        if not names_registry(image):
            raise
    return open_catalog(image, policy=policy)


def _require(launch: Launch, args: RunArgs) -> None:
    """Raise an error if a launch cannot work without a daemon: the process has the rights of the caller."""
    if launch.injected:
        raise UsageError(
            f"{launch.reference} has no driver of its own, and no runtime of NVIDIA injects one here",
            remedy="build a variant with a driver (axis `driver` in matrix.yaml), or use --engine docker",
        )
    problems = check(launch.devices) if args.shown is None else ()
    if problems:
        raise DevicesError(problems)


def _image(variant: Variant, store: ImageStore, *, quiet: bool, policy: Path | None) -> StoredImage:
    """Return the image of a variant, pulled into the store if it is not there."""
    require_signed(variant, policy)
    found = store.find(variant.digest) if variant.digest else None
    if found is not None:
        return found
    from imagematrix.cli.storing import pull_into

    return pull_into(variant, store, quiet=quiet)


def _home(binds: tuple[Bind, ...]) -> str:
    """Return the user's home if it is mounted at the same path, else root's."""
    home = os.path.expanduser("~")  # noqa: PTH111 - pathlib is slow to load
    mounted = any(bind.source == bind.target and f"{home}/".startswith(f"{bind.target}/") for bind in binds)
    return home if mounted else "/root"


def _print(launch: Launch, args: RunArgs, engine: str) -> None:
    document = {**launch.to_json(args.docker), "docker": None, "engine": engine}
    if args.shown == JSON:
        print_json(document)


def _path(text: str | None) -> Path | None:
    if text is None:
        return None
    from pathlib import Path

    return Path(text)
