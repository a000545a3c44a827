"""`imagematrix doctor`: what on this node would stop a launch, and the remedy."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.choosing import catalog_of
from imagematrix.cli.completing import images
from imagematrix.cli.options import HostFile, Json, Where
from imagematrix.cli.output import answer
from imagematrix.errors import EngineError, ImagematrixError, ProbeError, UnknownImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.doctor.checks import Finding
    from imagematrix.doctor.facts import ImageFacts
    from imagematrix.node.host import Host

__all__ = ["command"]

COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}
# Whose fault the first error is decides the exit code; all others are the host's.
CODES = {"engine": EngineError.exit_code, "docker-command": EngineError.exit_code}


def command(
    image: Annotated[str | None, typer.Argument(metavar="[IMAGE[:VERSION]]", autocompletion=images)] = None,
    host: HostFile = None,
    where: Where = None,
    json: Json = False,
) -> None:
    """Examine this node, and an image if one is named: what would stop a launch, and what cures it.

    Of a host saved in a file it is what the file says, and nothing about this machine.
    """
    from imagematrix.allocation.survey import query_nvml
    from imagematrix.doctor.checks import ERROR, examine, to_json
    from imagematrix.doctor.facts import gather, saved
    from imagematrix.node.host import Host
    from imagematrix.node.probe import assemble
    from imagematrix.node.tree import Tree
    from imagematrix.selection.question import parse

    asked = parse(where or ())
    if host:
        node = Host.load(host)
        named = _image(node, image, asked, live=False) if image else None
        findings = examine(saved(node, named))
    else:
        live = query_nvml()
        node = assemble(Tree("/"), query=(lambda: live) if live else None)
        named = _image(node, image, asked, live=True) if image else None
        findings = examine(gather(node, live, named))
    if json:
        answer(to_json(findings))
    else:
        _show(findings)
    for finding in findings:
        if finding.severity == ERROR:
            codes = CODES | ({"image": named.code} if named else {})
            raise typer.Exit(codes.get(finding.check, ProbeError.exit_code))


def _image(host: Host, name: str, where: Mapping[str, Sequence[str]], *, live: bool) -> ImageFacts:
    from imagematrix.doctor.facts import ImageFacts
    from imagematrix.doctor.image import libcudas
    from imagematrix.gpus.visible import within
    from imagematrix.selection.select import select

    try:
        node, wanted = within(host) if live else (host, None)
        chosen = select(node, catalog_of(name, None), gpus=wanted, where=where)
        driver = chosen.variant.driver if chosen.variant else None
        try:
            found = libcudas(str(chosen.selected)) if driver else ()
        except UnknownImageError:  # of a registry, and not pulled yet
            found = None
        mode = driver.mode if driver else None
        return ImageFacts(name=name, selected=chosen.selected, mode=mode, libcudas=found)
    except ImagematrixError as error:
        return ImageFacts(name=name, error=str(error), remedy=error.remedy, code=error.exit_code)


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
