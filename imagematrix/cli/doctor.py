"""`imagematrix doctor`: what on this node would stop a launch, and the remedy."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from imagematrix.cli.choosing import catalog_of
from imagematrix.cli.options import HostFile, Json
from imagematrix.cli.output import answer
from imagematrix.errors import EngineError, ImagematrixError, NothingFits, ProbeError, UnknownImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.doctor.checks import Finding
    from imagematrix.doctor.facts import ImageFacts
    from imagematrix.probe.host import Host

__all__ = ["command"]

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
# Whose fault the first error is decides the exit code; all others are the host's.
CODES: dict[str, type[ImagematrixError]] = {
    "engine": EngineError,
    "docker-command": EngineError,
    "image": NothingFits,
}


def command(
    image: Annotated[str | None, typer.Argument(metavar="[IMAGE[:VERSION]]")] = None,
    host: HostFile = None,
    json: Json = False,
) -> None:
    """Examine this node, and an image if one is named: what would stop a launch, and what cures it."""
    from imagematrix.doctor.checks import ERROR, examine, to_json
    from imagematrix.doctor.facts import gather
    from imagematrix.probe.host import Host
    from imagematrix.probe.probe import assemble
    from imagematrix.probe.tree import Tree
    from imagematrix.use.survey import ask_nvml

    live = ask_nvml()
    node = Host.load(host) if host else assemble(Tree("/"), ask=(lambda: live) if live else None)
    findings = examine(gather(node, live, _image(node, image) if image else None))
    if json:
        answer(to_json(findings))
    else:
        _show(findings)
    for finding in findings:
        if finding.severity == ERROR:
            raise typer.Exit(CODES.get(finding.check, ProbeError).exit_code)


def _image(host: Host, name: str) -> ImageFacts:
    from imagematrix.doctor.facts import ImageFacts
    from imagematrix.doctor.image import libcudas
    from imagematrix.select.select import select
    from imagematrix.select.visible import visible

    try:
        chosen = select(host, catalog_of(name, None), gpus=visible(host.gpus, os.environ))
        driver = chosen.variant.driver if chosen.variant else None
        try:
            found = libcudas(str(chosen.selected)) if driver else ()
        except UnknownImageError:  # of a registry, and not pulled yet
            found = None
        mode = driver.mode if driver else None
        return ImageFacts(name=name, selected=chosen.selected, mode=mode, libcudas=found)
    except ImagematrixError as error:
        return ImageFacts(name=name, error=str(error), remedy=error.remedy)


def _show(findings: Iterable[Finding]) -> None:
    import sys

    from rich.markup import escape

    from imagematrix.cli.output import console

    lines = []
    for finding in findings:
        colour = COLOURS[finding.severity]
        lines.append(f"[{colour}]{finding.severity:<9}[/]{finding.check:<16}{escape(finding.saw)}")
        if finding.remedy:
            lines.append(f"{'':<25}-> {escape(finding.remedy)}")
    console(sys.stdout).print("\n".join(lines), soft_wrap=True)
