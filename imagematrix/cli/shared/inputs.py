"""What options of `select`, `explain`, `pull` and `run` name: the host and the catalog, and what is done."""

from __future__ import annotations

from imagematrix.errors import UsageError
from imagematrix.images.catalog.sources import open_catalog, open_stored_catalog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.launcher.launch_session import ContainerEngine, Image
    from imagematrix.selection.selection import Selection


def load_node(
    file: Path | None, root: Path | None, nvidia_smi: Path | None, gpus: str | None
) -> tuple[Host, str | None]:
    """Return the host and the requested GPUs: `gpus`, or else those that the environment names.

    The host is the one saved in `file`, or this one (or the captured tree `root`) as probed now. The
    environment applies to this machine only: if it names GPUs, the host has no others.
    """
    host = load_host(file, root, nvidia_smi)
    if any(option is not None for option in (file, root, nvidia_smi)):
        return host, gpus
    from imagematrix.hardware.gpu_request.visible import within

    return within(host, gpus)


def load_launch_node(args: RunArgs) -> tuple[Host, str | None]:
    """Return the host and the requested GPUs of a launch, as `load_node` does."""
    return load_node(make_path(args.host), None, make_path(args.nvidia_smi), args.gpus)


def start_launch(
    request: LaunchRequest,
    engine: ContainerEngine[Image, int],
    print_launch: Callable[[Selection, Launch], object],
) -> int:
    """Start what `run` is to start on unused GPUs, or only print it; return the exit code.

    A saved host is not read again after a wait.
    """
    from imagematrix.cli.shared.output import print_info, warn
    from imagematrix.launcher.launch_session import LaunchSession, PrintedLaunch, UnclaimedGpus, UnusedGpus

    args = request.args
    if args.print_form:
        printed = PrintedLaunch(engine, print_launch)
        return LaunchSession(request=request, gpus=UnclaimedGpus()).run(printed)
    is_saved = args.host or args.nvidia_smi
    gpus = UnusedGpus(None if is_saved else lambda: load_launch_node(args)[0], print_info)
    return LaunchSession(request=request, gpus=gpus, on_warning=warn).run(engine)


def require_one_host(file: Path | None, root: Path | None, nvidia_smi: Path | None = None) -> None:
    """Raise UsageError if options name both a saved host and a captured tree or dump."""
    for option, value in (("--root", root), ("--nvidia-smi", nvidia_smi)):
        if file is not None and value is not None:
            raise UsageError(
                f"--host and {option} are mutually exclusive: a saved host has all facts of its node",
                remedy=f"leave out --host, or {option}",
            )


def load_host(file: Path | None, root: Path | None, nvidia_smi: Path | None) -> Host:
    """Return the host saved in `file`, or this one (or the captured tree `root`) as probed now."""
    require_one_host(file, root, nvidia_smi)
    if file is not None:
        from imagematrix.hardware.host.host import Host

        return Host.load(file)
    from imagematrix.hardware.host.probe import probe_hardware

    return probe_hardware(root or "/", smi=nvidia_smi)


def choose_variant(
    image: str,
    catalog: str | None,
    host: tuple[Host, str | None],
    *,
    where: Sequence[str] | None,
    allow_cpu: bool,
    json: bool,
    policy: Path | None = None,
    no_warm: bool = False,
) -> Selection:
    """Return the selection from a catalog, as `find_catalog` finds it, for a `host` of `load_node`.

    With `no_warm` it has no warm image. Raises NothingFits, or UsageError if the choice is open; with `json`,
    the document with the reasons is printed before.
    """
    from imagematrix.cli.shared.output import print_json
    from imagematrix.selection.query import parse_where
    from imagematrix.selection.selection import require_selected
    from imagematrix.selection.selector import explain

    node, gpus = host
    choices = apply_warm_settings(find_catalog(image, catalog, policy), no_warm=no_warm)
    selection = explain(node, choices, gpus=gpus, allow_cpu=allow_cpu, where=parse_where(where or ()))
    if json and selection.variant is None:
        print_json(selection.to_json())
    return require_selected(selection)


def count_usable_cpus(selection: Selection, file: Path | None, root: Path | None) -> Selection:
    """Return a selection with the CPUs that this process may use, unless its host is a saved one."""
    return selection.on_this_machine() if file is None and root is None else selection


def print_gpu_remark(selection: Selection, gpus: str | None) -> None:
    """Print which GPUs an answer is for, if the request `gpus` could be served by GPUs of another kind, too.

    Assumptions about the host are printed as well.
    """
    from imagematrix.cli.shared.output import print_info
    from imagematrix.hardware.gpu_request.choice import make_label
    from imagematrix.hardware.gpu_request.spec import find_candidates
    from imagematrix.selection.hardware_key import get_gpu_kind

    choice = find_candidates(selection.host.gpus, gpus)
    if choice.count < len(choice.gpus) and len({*map(get_gpu_kind, choice.gpus)}) > 1:
        print_info(f"imagematrix: for {', '.join(map(make_label, selection.chosen_gpus))}")
    for warning in selection.warnings:
        print_info(f"imagematrix: {warning.text}")


def find_catalog(image: str | None, name: str | None, policy: Path | None = None) -> Catalog:
    """Return the catalog `name`, or that of `image` where it is stored; print a note if it is elsewhere.

    `policy` is the user's own policy of signatures, None for that of the environment.
    """
    if name is None:
        from imagematrix.cli.shared.output import print_info

        return open_stored_catalog(image or "", lambda text: print_info(f"imagematrix: {text}"), policy)
    return open_catalog(name, image=image, policy=policy)


def apply_warm_settings(catalog: Catalog, *, no_warm: bool) -> Catalog:
    """Return a catalog, without its warm images if the option `no_warm` or the site's file says so."""
    if not catalog.warm:
        return catalog
    from imagematrix.common.settings import read_site

    return catalog.without_warm() if no_warm or read_site().warm is False else catalog


def require_image(image: str | None, catalog: str | None) -> None:
    """Raise UsageError if the options --image and --catalog name neither."""
    if image is None and catalog is None:
        raise UsageError("no image given", remedy="give --image IMAGE[:VERSION], or --catalog FILE|REF")


def make_path(text: str | None) -> Path | None:
    """Return the path in an option that typer did not parse; pathlib is loaded only if there is one."""
    if text is None:
        return None
    from pathlib import Path

    return Path(text)
