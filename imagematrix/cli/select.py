"""`imagematrix select`: the one reference that fits this node best."""

from __future__ import annotations

from imagematrix.cli.shared.inputs import choose_variant, count_usable_cpus, load_node, print_gpu_remark
from imagematrix.cli.shared.output import print_info, print_json, print_text
from imagematrix.errors import ImagematrixError, ProbeError, UnservedError, UsageError
from imagematrix.images.catalog.sources import require_not_built_on

EXAMPLE = "imagematrix select registry.example.com/ml/training:v1"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from imagematrix.cli.shared.options import (
        Alike,
        AllowCpu,
        AnswerFormat,
        CatalogName,
        GangHosts,
        Gpus,
        HostFile,
        Image,
        Json,
        NoWarm,
        NvidiaSmi,
        Policy,
        Root,
        Where,
    )
    from imagematrix.selection.selection import Selection

FORMATS = TEXT, CLASSAD = "text", "classad"
NO_VARIANT = (UnservedError.exit_code, ProbeError.exit_code)  # the errors after which a node has no variant


def command(
    image: Image,
    host: HostFile = None,
    catalog: CatalogName = None,
    policy: Policy = None,
    gpus: Gpus = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    root: Root = None,
    nvidia_smi: NvidiaSmi = None,
    gang: GangHosts = None,
    alike: Alike = None,
    no_warm: NoWarm = False,
    format: AnswerFormat = TEXT,
    json: Json = False,
) -> None:
    """Print the reference of the variant that fits this node best, or that several hosts run together.

    If a warm image of the variant fits, its reference is printed instead, unless --format classad is given.
    """
    if format != TEXT:
        _require_format(format, gang, json=json)
    if gang:
        if any(option is not None for option in (host, root, nvidia_smi)):
            raise UsageError("--gang has the hosts: --host, --root and --nvidia-smi name another one")
        from imagematrix.cli.shared.gang_options import GangRequest, print_gang_selection

        request = GangRequest(paths=gang, alike=alike, gpus=gpus, where=where, allow_cpu=allow_cpu)
        print_gang_selection(image, catalog, policy, request, json=json)
        return
    if alike is not None:
        raise UsageError("--alike is about several hosts", remedy="give them with --gang PATH")
    try:
        node, requested = load_node(host, root, nvidia_smi, gpus)
        selection = choose_variant(
            image,
            catalog,
            (node, requested),
            where=where,
            allow_cpu=allow_cpu,
            json=json,
            policy=policy,
            no_warm=no_warm,
        )
    except ImagematrixError as error:
        if format == CLASSAD and error.exit_code in NO_VARIANT:
            _print_classad(image, None)  # without a line, HTCondor would keep the attribute of the last call
        raise
    require_not_built_on(image, catalog, [str(selection.selected)])
    selection = count_usable_cpus(selection, host, root)
    if json:
        print_json(selection.to_json())
    elif format == CLASSAD:
        _print_classad(image, selection)
    else:
        _print_reference(selection)
        print_gpu_remark(selection, requested)


def _print_reference(selection: Selection) -> None:
    """Print the reference of the warm image, and on stderr of which variant it is; else of the variant."""
    warm = selection.warm
    if warm is None:
        print_text(str(selection.selected))
    else:
        print_text(warm.reference)
        print_info(f"imagematrix: this is a warm image of {selection.selected}")


def _require_format(format: str, gang: Sequence[Path] | None, *, json: bool) -> None:
    """Raise UsageError for a format that does not exist, or not for this answer."""
    from imagematrix.common.suggestions import require_known

    require_known(format, FORMATS, "format")
    for option, is_set in (("--json", json), ("--gang", gang)):
        if is_set:
            raise UsageError(f"{option} and --format {format} are mutually exclusive")


def _print_classad(image: str, selection: Selection | None) -> None:
    from imagematrix.integrations.export import classad

    print_text(classad.make_variant_line(image, selection))
