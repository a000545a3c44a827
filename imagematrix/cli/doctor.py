"""`imagematrix doctor`: problems of this node that would stop a launch, and their remedies."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from imagematrix.cli.shared.completion import complete_images
from imagematrix.cli.shared.inputs import find_catalog
from imagematrix.cli.shared.options import HostFile, Json, Policy, Where
from imagematrix.cli.shared.output import escape_text, print_document, print_info, print_json, print_lines
from imagematrix.common.suggestions import require_known
from imagematrix.errors import EngineError, ImagematrixError, ProbeError, UnknownImageError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from imagematrix.hardware.host.host import Host
    from imagematrix.launcher.doctor.node_facts import ImageFacts

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
# The exit code if this check is the first that fails; all other checks have the code of ProbeError.
CODES = dict.fromkeys(("engine", "docker-command", "kubelet"), EngineError.exit_code)


def command(
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="IMAGE[:VERSION]",
            help="Check whether this image would start here, too.",
            autocompletion=complete_images,
        ),
    ] = None,
    host: HostFile = None,
    where: Where = None,
    policy: Policy = None,
    json: Json = False,
    drop_in: Annotated[
        str | None,
        typer.Option(
            "--drop-in",
            metavar="ENGINE",
            help="Only print a file of settings with which containerd or docker pulls faster here.",
            autocompletion=_complete_engines,
        ),
    ] = None,
) -> None:
    """Check this node, and an image if one is given, for problems that would stop a launch.

    With --host, only the saved host is checked, not this machine.
    """
    from imagematrix.hardware.gpu_request.visible import within
    from imagematrix.hardware.host.host import Host
    from imagematrix.hardware.host.probe import assemble_host
    from imagematrix.hardware.host.tree import Tree
    from imagematrix.integrations.swarm.program import get_installed_locks
    from imagematrix.launcher.doctor.checks import ERROR, make_doctor_document, run_checks
    from imagematrix.launcher.doctor.node_facts import gather_facts, make_saved_facts
    from imagematrix.launcher.doctor.pulls import list_pull_settings
    from imagematrix.launcher.gpu_claims.survey import query_nvml
    from imagematrix.selection.query import parse_where

    if where and not image:
        raise UsageError("--where decides among the variants of an image", remedy="name the image, too")
    if drop_in is not None:
        _print_drop_in(drop_in, alone=not (image or host or json))
        return
    conditions = parse_where(where or ())
    if host:
        node = Host.load(host)
        image_facts = _gather_image_facts(node, image, conditions, policy, live=False) if image else None
        facts = make_saved_facts(node, image_facts)
    else:
        nvml = query_nvml()
        node = assemble_host(Tree("/"), query=(lambda: nvml) if nvml else None)
        image_facts = _gather_image_facts(node, image, conditions, policy, live=True) if image else None
        restricted, error = node, None
        try:
            restricted = within(node)[0]
        except UsageError as invalid:  # the environment names GPUs that are not there
            error = invalid
        facts = gather_facts(restricted, nvml, image_facts, environment=error, tasks=get_installed_locks)
    findings = run_checks(facts)
    if json:
        print_json(make_doctor_document(findings, list_pull_settings(facts.pulls)))
    else:
        lines = []
        for finding in findings:
            colour = COLOURS[finding.severity]
            lines.append(f"[{colour}]{finding.severity:<9}[/]{finding.check:<16}{escape_text(finding.saw)}")
            if finding.remedy:
                lines.append(f"{'':<25}-> {escape_text(finding.remedy)}")
        print_lines(*lines)
    for finding in findings:
        if finding.severity == ERROR:
            codes = CODES | ({"image": image_facts.code} if image_facts else {})
            raise typer.Exit(codes.get(finding.check, ProbeError.exit_code))


def _complete_engines() -> list[str]:
    from imagematrix.launcher.doctor.pulls import DROP_INS

    return list(DROP_INS)


def _print_drop_in(engine: str, *, alone: bool) -> None:
    if not alone:
        raise UsageError("--drop-in stands alone: it is about the engines of this machine")
    from imagematrix.launcher.doctor.node_facts import gather_engine_pulls
    from imagematrix.launcher.doctor.pulls import DROP_INS, format_drop_in, list_pull_settings

    require_known(engine, DROP_INS, "engine")
    settings = list_pull_settings(gather_engine_pulls())
    if not any(setting.engine == engine for setting in settings):
        raise EngineError(
            f"no {engine} of this machine answers",
            remedy="run `imagematrix doctor` as root on the node whose engine it is",
        )
    text = format_drop_in(engine, settings)
    if text:
        print_document(text)
    else:
        print_info(f"{engine} has no setting to change")


def _gather_image_facts(
    host: Host, name: str, where: Mapping[str, Sequence[str]], policy: Path | None, *, live: bool
) -> ImageFacts:
    from imagematrix.hardware.gpu_request.visible import within
    from imagematrix.images.engine.images import get_environment
    from imagematrix.launcher.doctor.image import find_libcudas
    from imagematrix.launcher.doctor.node_facts import ImageFacts
    from imagematrix.selection.selector import select

    try:
        node, gpus = within(host) if live else (host, None)
        selection = select(node, find_catalog(name, None, policy), gpus=gpus, where=where)
        driver = selection.variant.driver if selection.variant else None
        paths: tuple[str, ...] | None = None if driver else ()
        if driver and live:
            with suppress(EngineError, UnknownImageError):  # not pulled yet, or no engine starts it here
                paths = find_libcudas(str(selection.selected))
        environment: tuple[str, ...] = ()
        if selection.selected:
            with suppress(EngineError):  # not pulled yet; the engine has a check of its own
                environment = get_environment(selection.selected)
        return ImageFacts(
            name=name,
            selected=selection.selected,
            mode=driver.mode if driver else None,
            libcudas=paths,
            environment=environment,
        )
    except ImagematrixError as error:
        return ImageFacts(name=name, error=str(error), remedy=error.remedy, code=error.exit_code)
