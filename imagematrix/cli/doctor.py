"""`imagematrix doctor`: problems of this node that would stop a launch, and their remedies."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.choosing import catalog_of
from imagematrix.cli.completing import images
from imagematrix.cli.options import HostFile, Json, Policy, Where
from imagematrix.cli.output import escaped, print_json, print_lines
from imagematrix.errors import EngineError, ImagematrixError, ProbeError, UnknownImageError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.doctor.checks import Finding
    from imagematrix.doctor.facts import ImageFacts
    from imagematrix.node.host import Host

__all__ = ["command"]

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
# The exit code if this check is the first that fails; all other checks have the code of ProbeError.
CODES = dict.fromkeys(("engine", "docker-command", "kubelet"), EngineError.exit_code)


def command(
    image: Annotated[str | None, typer.Argument(metavar="[IMAGE[:VERSION]]", autocompletion=images)] = None,
    host: HostFile = None,
    where: Where = None,
    policy: Policy = None,
    json: Json = False,
) -> None:
    """Check this node, and an image if one is given, for problems that would stop a launch.

    With --host, only the saved host is checked, not this machine.
    """
    from imagematrix.allocation.survey import query_nvml
    from imagematrix.doctor.checks import ERROR, examine, to_json
    from imagematrix.doctor.facts import gather, saved
    from imagematrix.node.host import Host
    from imagematrix.node.probe import assemble
    from imagematrix.node.tree import Tree
    from imagematrix.selection.question import parse
    from imagematrix.swarm.program import installed_locks

    conditions = parse(where or ())
    if host:
        node = Host.load(host)
        image_facts = _image(node, image, conditions, policy, live=False) if image else None
        findings = examine(saved(node, image_facts))
    else:
        nvml = query_nvml()
        node = assemble(Tree("/"), query=(lambda: nvml) if nvml else None)
        image_facts = _image(node, image, conditions, policy, live=True) if image else None
        restricted, error = _restricted(node)
        findings = examine(gather(restricted, nvml, image_facts, environment=error, tasks=installed_locks))
    if json:
        print_json(to_json(findings))
    else:
        _print(findings)
    for finding in findings:
        if finding.severity == ERROR:
            codes = CODES | ({"image": image_facts.code} if image_facts else {})
            raise typer.Exit(codes.get(finding.check, ProbeError.exit_code))


def _restricted(host: Host) -> tuple[Host, UsageError | None]:
    """Return the host as the environment limits it, and the error if the environment is invalid."""
    from imagematrix.gpu_request.visible import within

    try:
        return within(host)[0], None
    except UsageError as error:
        return host, error


def _image(
    host: Host, name: str, where: Mapping[str, Sequence[str]], policy: Path | None, *, live: bool
) -> ImageFacts:
    from imagematrix.doctor.facts import ImageFacts
    from imagematrix.doctor.image import libcudas
    from imagematrix.gpu_request.visible import within
    from imagematrix.selection.select import select

    try:
        node, wanted = within(host) if live else (host, None)
        chosen = select(node, catalog_of(name, None, policy), gpus=wanted, where=where)
        driver = chosen.variant.driver if chosen.variant else None
        try:
            paths = libcudas(str(chosen.selected)) if driver else ()
        except UnknownImageError:  # in a registry, and not pulled yet
            paths = None
        mode = driver.mode if driver else None
        return ImageFacts(name=name, selected=chosen.selected, mode=mode, libcudas=paths)
    except ImagematrixError as error:
        return ImageFacts(name=name, error=str(error), remedy=error.remedy, code=error.exit_code)


def _print(findings: Iterable[Finding]) -> None:
    lines = []
    for finding in findings:
        colour = COLOURS[finding.severity]
        lines.append(f"[{colour}]{finding.severity:<9}[/]{finding.check:<16}{escaped(finding.saw)}")
        if finding.remedy:
            lines.append(f"{'':<25}-> {escaped(finding.remedy)}")
    print_lines(*lines)
