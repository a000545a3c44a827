"""`imagematrix explain`: every candidate, why it is refused, and what would make it fit."""

from __future__ import annotations

from collections import Counter

from imagematrix.cli.shared.inputs import find_catalog, load_node
from imagematrix.cli.shared.output import escape_text, fold_paragraph, print_json, print_lines
from imagematrix.common.text import shorten_words
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import CLAIM, UNKNOWN
from imagematrix.images.catalog.sources import require_not_built_on
from imagematrix.selection.selection import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.cli.shared.options import (
        AllowCpu,
        CatalogName,
        Gpus,
        HostFile,
        Image,
        Json,
        NvidiaSmi,
        Policy,
        Root,
        Where,
    )
    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.selection.candidate import Candidate
    from imagematrix.selection.rule import RuleResult
    from imagematrix.selection.selection import Selection

NOTING = ("device-code", "driver-cuda")  # rules whose reason has more after a semicolon
SHOWN = 3  # variants refused for one reason, or remedies, that are listed; further ones are counted


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
    json: Json = False,
) -> None:
    """Show every variant with the results of the rules: those that fit, best first, then the others."""
    from imagematrix.selection.query import parse_where
    from imagematrix.selection.selector import explain

    node, wanted = load_node(host, root, nvidia_smi, gpus)
    selection = explain(
        node,
        find_catalog(image, catalog, policy),
        gpus=wanted,
        allow_cpu=allow_cpu,
        where=parse_where(where or ()),
    )
    if json:
        print_json(selection.to_json())
    else:
        print_lines(*_lines(node, selection))
    if selection.selected:
        require_not_built_on(image, catalog, [selection.selected])
    ambiguity = selection.decision.ambiguity
    if ambiguity:
        raise UsageError(ambiguity[0], remedy=ambiguity[1].shown)
    if selection.selected is None:
        raise SystemExit(NothingFits.exit_code)


def _lines(host: Host, selection: Selection) -> Iterator[str]:
    name = f"{selection.image}:{selection.version}{selection.decision.question.words}"
    yield from map(escape_text, fold_paragraph("", f"{name} on {_host(host, selection)}"))
    candidates = selection.candidates  # computed on each access
    fitting = [candidate for candidate in candidates if candidate.fits]
    yield ""
    yield f"[green]{len(fitting)} fit[/], best first" if fitting else "[red]nothing fits[/]"
    for candidate in fitting:
        chosen = " <- selected" if candidate.reference == selection.selected else ""
        yield escape_text(f"  {candidate.rank:>3}  {_short(candidate, selection)}{chosen}")
        unknown = ", ".join(rule.rule for rule in candidate.rules if rule.source == UNKNOWN)
        if unknown:
            yield from map(
                escape_text, fold_paragraph("       ", f"some of its needs are unknown: {unknown}")
            )
        for note in _notes(candidate):
            yield from map(escape_text, fold_paragraph("       ", note))
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in candidates:
        if not candidate.fits:
            groups.setdefault(tuple(map(_refusal, candidate.failing)), []).append(candidate)
    if groups:
        yield ""
        yield f"[yellow]{sum(map(len, groups.values()))} refused[/], the nearest first"
    for members in groups.values():
        yield from map(escape_text, _group(members, selection))


def _notes(candidate: Candidate) -> Iterator[str]:
    """Yield what an image that fits depends on, such as an assumed CUDA release, and its warnings."""
    for rule in candidate.rules:
        if rule.rule in NOTING:
            yield from rule.why.split("; ")[1:]
    yield from (warning.text for warning in candidate.warnings)


def _group(members: list[Candidate], selection: Selection) -> Iterator[str]:
    """Yield the rules that refuse all of `members`; the remedies may differ among them."""
    references = [_short(candidate, selection) for candidate in members]
    yield from fold_paragraph("  ", shorten_words(references, SHOWN, more=", {} more"))
    for position, rule in enumerate(members[0].failing):
        yield from fold_paragraph("       ", _refusal(rule))
        fixes = dict.fromkeys(fix for candidate in members if (fix := candidate.failing[position].shown))
        if fixes:
            yield from fold_paragraph(
                "         ", f"-> {shorten_words([*fixes], SHOWN, ' or ', ' or {} more')}"
            )


def _refusal(rule: RuleResult) -> str:
    """Return a rule with its reason, marked with where the need comes from unless it is a claim."""
    source = "" if rule.source == CLAIM else f" ({rule.source})"
    return f"{rule.rule}{source}: {rule.why}"


def _short(candidate: Candidate, selection: Selection) -> str:
    return candidate.reference.removeprefix(f"{selection.image}:{selection.version}-")


def _host(host: Host, selection: Selection) -> str:
    driver = f"driver {host.driver.version}" if host.driver else "no NVIDIA driver"
    kinds = Counter(_kind(gpu) for gpu in selection.chosen_gpus)
    gpus = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return (
        f"{host.cpu.model or host.arch} ({host.cpu.level or host.arch}), {driver}, {gpus or 'no GPU passed'}"
    )


def _kind(gpu: Gpu) -> str:
    state = "" if gpu.state == "ok" else f", {gpu.state}"
    return f"{gpu.name or 'unknown GPU'} (compute {gpu.compute or 'unknown'}{state})"
