"""`imagematrix explain`: every candidate, what speaks against it, and what would make it fit."""

from __future__ import annotations

import sys
import textwrap

import typer

from imagematrix.cli.choosing import catalog_of, host_of
from imagematrix.cli.options import AllowCpu, CatalogName, Gpus, HostFile, Json, NvidiaSmi, Root
from imagematrix.cli.output import answer, console
from imagematrix.cli.select import Image
from imagematrix.errors import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.probe.host import Host
    from imagematrix.select.selection import Candidate, RuleResult, Selection

__all__ = ["command"]

WIDTH = 100
SHOWN = 3  # variants refused for one reason that are named before "and N more"


def command(
    image: Image,
    host: HostFile = None,
    catalog: CatalogName = None,
    gpus: Gpus = None,
    allow_cpu: AllowCpu = False,
    root: Root = None,
    nvidia_smi: NvidiaSmi = None,
    json: Json = False,
) -> None:
    """Show every variant with what the rules say: those that fit, best first, then the others."""
    from imagematrix.select.select import explain

    node = host_of(host, root, nvidia_smi)
    found = explain(node, catalog_of(image, catalog), gpus=gpus, allow_cpu=allow_cpu)
    if json:
        answer(found.to_json())
    else:
        console(sys.stdout).print("\n".join(_lines(node, found)), markup=True, soft_wrap=True)
    if found.selected is None:
        raise typer.Exit(NothingFits.exit_code)


def _lines(host: Host, selection: Selection) -> Iterator[str]:
    from rich.markup import escape

    yield escape(f"{selection.image}:{selection.version} on {_host(host, selection)}")
    fitting = [candidate for candidate in selection.candidates if candidate.fits]
    yield f"\n[green]{len(fitting)} fit[/], best first" if fitting else "\n[red]nothing fits[/]"
    for candidate in fitting:
        chosen = " <- selected" if candidate.reference == selection.selected else ""
        yield escape(f"  {candidate.rank:>3}  {_short(candidate, selection)}{chosen}")
    groups: dict[tuple[RuleResult, ...], list[Candidate]] = {}
    for candidate in selection.candidates:
        if not candidate.fits:
            groups.setdefault(candidate.failing, []).append(candidate)
    if groups:
        yield f"\n[yellow]{sum(map(len, groups.values()))} refused[/], the nearest first"
    for rules, members in groups.items():
        yield from map(escape, _group(rules, members, selection))


def _group(rules: tuple[RuleResult, ...], members: list[Candidate], selection: Selection) -> Iterator[str]:
    names = [_short(candidate, selection) for candidate in members[:SHOWN]]
    if len(members) > SHOWN:
        names.append(f"and {len(members) - SHOWN} more")
    yield from _folded("  ", ", ".join(names))
    for rule in rules:
        yield from _folded("       ", f"{rule.rule}: {rule.why}")
        if rule.fix:
            yield from _folded("         ", f"-> {rule.fix}")


def _folded(indent: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _short(candidate: Candidate, selection: Selection) -> str:
    return candidate.reference.removeprefix(f"{selection.image}:{selection.version}-")


def _host(host: Host, selection: Selection) -> str:
    driver = f"driver {host.driver.version}" if host.driver else "no NVIDIA driver"
    gpus = ", ".join(
        f"{gpu.label} {gpu.compute or '?'}" + ("" if gpu.state == "ok" else f" {gpu.state}")
        for gpu in selection.chosen_gpus
    )
    return (
        f"{host.cpu.model or host.arch} ({host.cpu.level or host.arch}), {driver}, {gpus or 'no GPU passed'}"
    )
