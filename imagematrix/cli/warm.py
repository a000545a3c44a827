"""`imagematrix warm`: compile on this node what a program compiles on its first start, for all like it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.options import AllowCpu, Image, Json, Where
from imagematrix.cli.shared.output import print_info, print_json, print_text, warn
from imagematrix.common.settings import ENGINES
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import ALL
from imagematrix.launcher.docker.options import OWN

EXAMPLE = (
    "imagematrix warm registry.example.com/ml/training:v1 --staging registry.example.com/staging/training"
)
KEEPING = "add --to DIR or --staging REPO"
SHOWN = ("base", "key", "match", "seconds", "tools", "proofs")  # of the label, in the answer of --json
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.cli.shared.warm_up_starter import WarmUpStarter
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.images.oci.registry import Registry
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.launcher.warm_up.input_folders import ReadInput
    from imagematrix.launcher.warm_up.staged_image import KeptWarmUp
    from imagematrix.launcher.warm_up.warm_up_session import WarmUpEngine, WarmUpPlan
    from imagematrix.selection.selection import NothingFits


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
    json: Json = False,
) -> None:
    """Start the variant that fits this node with its warm-up, and keep what it compiled as one layer.

    The layer is proved before it is kept: the program starts again with it, and neither compiles nor misses a
    cache. It serves nodes like this one once `imagematrix publish --warm` has added it to the version.
    """
    from imagematrix.cli.shared.warm_up_starter import open_starter
    from imagematrix.images.oci.registry import Registry
    from imagematrix.launcher.docker.options import RunArgs, parse_seconds
    from imagematrix.launcher.launch_session import UnusedGpus
    from imagematrix.launcher.warm_up.input_folders import parse_inputs, read_inputs
    from imagematrix.launcher.warm_up.plan_warm_up import make_warm_up_plan
    from imagematrix.launcher.warm_up.program_run import WarmUpStart
    from imagematrix.launcher.warm_up.staged_image import make_new_folder, require_other_repository
    from imagematrix.selection.query import parse_where

    if to is not None and staging is not None:
        raise UsageError("--to and --staging are mutually exclusive", remedy="leave one of them out")
    if to is None and staging is None:
        print_info(f"imagematrix: nothing will be kept: {KEEPING}")
    args = RunArgs(
        options=(),
        image=image,
        command=(),
        allow_cpu=allow_cpu,
        where=parse_where(where or ()),
        wait_s=parse_seconds(wait, "--wait") if wait else 0.0,
    )
    with contextlib.ExitStack() as stack:
        if to is not None:
            stack.enter_context(make_new_folder(to))
        registry = stack.enter_context(Registry(staging)) if staging else None
        starter = open_starter(args, engine, stack)
        catalog = starter.open_catalog().without_warm()
        if staging is not None:
            require_other_repository(staging, catalog.image)
        request, warm_up, user = _request_warm_up(starter, catalog)
        folders = parse_inputs(inputs or (), warm_up)
        read = read_inputs(folders)
        digests = {name: folder.digest for name, folder in read.items()}
        plan = make_warm_up_plan(request, warm_up, digests, user)
        start = WarmUpStart(
            request=request, gpus=UnusedGpus(on_wait=print_info), warm_up=warm_up, folders=folders
        )
        warm_engine = starter.make_engine(plan, start)
        version = f"{catalog.image}:{catalog.version}"
        kept, is_adopted = _keep_warm_layer(plan, warm_engine, read, registry, to, version)
    reference = f"{registry.name}:{plan.tag}" if registry else None
    if json:
        print_json(_make_document(kept, reference, to, is_adopted=is_adopted))
    elif reference is not None:
        print_text(f"{reference}@{kept.digest}")
    elif to is not None:
        print_text(f"oci:{to}")
    else:
        print_info(f"imagematrix: proved, and not kept: {KEEPING}")


def _request_warm_up(starter: WarmUpStarter, catalog: Catalog) -> tuple[LaunchRequest, WarmUp, str]:
    """Select and fetch a variant; return the request of its warm-up here, the warm-up, and its user."""
    from imagematrix.cli.shared.inputs import load_host
    from imagematrix.common.record import replace
    from imagematrix.hardware.gpu_request.visible import within
    from imagematrix.hardware.host.usable_cpus import add_usable_cpus
    from imagematrix.launcher.docker.plan import require_variant
    from imagematrix.launcher.launch_session import SignatureCheck
    from imagematrix.selection.selection import NothingFits

    node = add_usable_cpus(load_host(None, None, None))
    host, gpus = within(node)
    try:
        selection, launch = starter.make_request(host, gpus, catalog).plan_on_any()
    except NothingFits as error:
        raise _suggest_variable(error) from error
    SignatureCheck(None).require_signed(selection)
    for warning in selection.warnings:
        warn(warning.text)
    warm_up, user = starter.fetch_base(selection, launch)
    # Of the same variant, on the GPUs that its warm-up takes.
    variants = replace(catalog, variants=(require_variant(selection),))
    host, gpus = within(node, None if warm_up.gpus == ALL else warm_up.gpus)
    return starter.make_request(host, gpus, variants), warm_up, user


def _suggest_variable(error: NothingFits) -> NothingFits:
    """Return an error with a remedy that this command can follow: it has no option for GPUs, as `run` has."""
    from imagematrix.hardware.gpu_request.spec import name_gpus, select_gpus
    from imagematrix.hardware.gpu_request.visible import CUDA
    from imagematrix.selection.selection import NothingFits

    selection = error.selection
    change = (selection.miss and selection.miss.change) or {}
    option, _, spec = str(change.get("option")).partition(" ")
    if option != "--gpus":
        return error
    names = ",".join(name_gpus(select_gpus(selection.host.gpus, spec)))
    return NothingFits(str(error), selection=selection, remedy=f"export {CUDA}={names}")


def _keep_warm_layer(
    plan: WarmUpPlan,
    engine: WarmUpEngine,
    inputs: Mapping[str, ReadInput],
    registry: Registry | None,
    to: Path | None,
    version: str,
) -> tuple[KeptWarmUp, bool]:
    """Warm up unless the staging repository has the result, and keep it there or in a folder.

    Return the image, and whether it was in the repository already. `version` is what `publish` would add it
    to.
    """
    from imagematrix.common.temp_folder import make_scratch_folder
    from imagematrix.common.text import quote_word
    from imagematrix.launcher.warm_up import staged_image
    from imagematrix.launcher.warm_up.input_folders import require_unchanged
    from imagematrix.launcher.warm_up.warm_up_session import LAYER, make_warm_layer, report_unwritten

    found = registry and staged_image.find_staged_image(registry, plan.tag, plan.key)
    if found:
        print_info("imagematrix: this warm-up is there already")
        return found, True
    if registry is not None:
        staged_image.require_push(registry)

    def report_left(folder: Path) -> None:
        warn(
            f"what was proved is left in {folder}",
            f"publish it: `imagematrix publish --warm {quote_word(f'oci:{folder}')} {quote_word(version)}`",
        )

    with make_scratch_folder() as folder:
        with report_unwritten(folder, "set TMPDIR to a folder on another disk"):
            layer, label = make_warm_layer(
                engine, plan, folder, lambda step: print_info(f"imagematrix: {step}")
            )
        require_unchanged(inputs)
        image = staged_image.make_staged_image(layer, folder / LAYER, label, plan.compression, plan.platform)
        kept = staged_image.KeptWarmUp(digest=image.digest, label=label)
        with staged_image.leave_on_error(image, plan.tag, report_left):
            if registry is not None:
                kept = staged_image.push_staged_image(registry, image, plan.tag, plan.key)
            elif to is not None:
                with report_unwritten(to, "name a folder on another disk with --to"):
                    staged_image.write_staged_layout(image, plan.tag, to)
    return kept, kept.digest != image.digest


def _make_document(
    kept: KeptWarmUp, reference: str | None, to: Path | None, *, is_adopted: bool
) -> dict[str, object]:
    """Return the answer of --json."""
    label = kept.label.to_json()
    return {
        "schema": "imagematrix.warmed/v1",
        "reference": reference,
        "path": None if to is None else str(to),
        "digest": kept.digest,
        "adopted": is_adopted,
        **{name: label[name] for name in SHOWN},
    }
