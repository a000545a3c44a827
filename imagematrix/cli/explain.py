"""`imagematrix explain`: every candidate, why it is refused, and what would make it fit."""

from __future__ import annotations

from collections import Counter

from imagematrix.cli.shared.inputs import apply_warm_settings, count_usable_cpus, find_catalog, load_node
from imagematrix.cli.shared.output import escape_text, fold_paragraph, print_json, print_lines
from imagematrix.common.text import shorten_words
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import CLAIM, UNKNOWN
from imagematrix.images.catalog.sources import require_not_built_on
from imagematrix.selection.selection import NothingFits

EXAMPLE = "imagematrix explain registry.example.com/ml/training:v1 --host node.json"
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
        NoWarm,
        NvidiaSmi,
        Policy,
        Root,
        Where,
    )
    from imagematrix.hardware.host.host import Host
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
    no_warm: NoWarm = False,
    json: Json = False,
) -> None:
    """Show every variant with the results of the rules: those that fit, best first, then the others."""
    from imagematrix.selection.query import parse_where
    from imagematrix.selection.selector import explain

    node, requested = load_node(host, root, nvidia_smi, gpus)
    selection = explain(
        node,
        apply_warm_settings(find_catalog(image, catalog, policy), no_warm=no_warm),
        gpus=requested,
        allow_cpu=allow_cpu,
        where=parse_where(where or ()),
    )
    selection = count_usable_cpus(selection, host, root)
    if json:
        print_json(selection.to_json())
    else:
        print_lines(*_format_selection(node, selection))
    if selection.selected:
        require_not_built_on(image, catalog, [selection.selected])
    ambiguity = selection.decision.ambiguity
    if ambiguity:
        raise UsageError(ambiguity[0], remedy=ambiguity[1].shown)
    if selection.selected is None:
        raise SystemExit(NothingFits.exit_code)


def _format_selection(host: Host, selection: Selection) -> Iterator[str]:
    name = f"{selection.image}:{selection.version}{selection.decision.question.words}"
    yield from map(escape_text, fold_paragraph("", f"{name} on {_describe_host(host, selection)}"))
    candidates = selection.candidates  # computed on each access
    fitting = [candidate for candidate in candidates if candidate.fits]
    yield ""
    yield f"[green]{len(fitting)} fit[/], best first" if fitting else "[red]nothing fits[/]"
    for candidate in fitting:
        chosen = " <- selected" if candidate.reference == selection.selected else ""
        yield escape_text(
            f"  {candidate.rank:>3}  {_shorten_reference(candidate.reference, selection)}{chosen}"
        )
        unknown = ", ".join(rule.rule for rule in candidate.rules if rule.source == UNKNOWN)
        remarks = [f"some of its needs are unknown: {unknown}"] if unknown else []
        # What the image depends on, such as an assumed CUDA release.
        remarks += [
            text for rule in candidate.rules if rule.rule in NOTING for text in rule.why.split("; ")[1:]
        ]
        remarks += [warning.text for warning in candidate.warnings]
        for remark in remarks:
            yield from map(escape_text, fold_paragraph("       ", remark))

    yield from map(escape_text, _format_warm_images(selection))
    refused: dict[tuple[str, ...], list[Candidate]] = {}  # by their reasons
    for candidate in candidates:
        if not candidate.fits:
            refused.setdefault(tuple(map(_format_refusal, candidate.failing)), []).append(candidate)
    if refused:
        yield ""
        yield f"[yellow]{sum(map(len, refused.values()))} refused[/], the nearest first"
    for group in refused.values():
        yield from map(escape_text, _format_refused(group, selection))


def _format_warm_images(selection: Selection) -> Iterator[str]:
    """Yield the warm images of the selected variant, each with what it expects or what keeps it away."""
    choice = selection.choose_warm()
    if choice is None:
        return
    yield ""
    yield "warm images of the selected variant"
    for verdict in choice.verdicts:
        image, mismatch = verdict.image, verdict.mismatch
        chosen = " <- selected in its place" if image is choice.image else ""
        yield f"       {_shorten_reference(image.reference, selection)}{chosen}"
        if mismatch:
            remark = f"{mismatch.field}: it was made for {mismatch.need}, and this is {mismatch.have}"
            yield from fold_paragraph("         ", remark)
        if image.inputs:
            yield from fold_paragraph("         ", f"hits with {', '.join(path for _, path in image.inputs)}")


def _format_refused(candidates: list[Candidate], selection: Selection) -> Iterator[str]:
    """Yield the rules that refuse all of these candidates; the remedies may differ among them."""
    references = [_shorten_reference(candidate.reference, selection) for candidate in candidates]
    yield from fold_paragraph("  ", shorten_words(references, SHOWN, more=", {} more"))
    for position, rule in enumerate(candidates[0].failing):
        yield from fold_paragraph("       ", _format_refusal(rule))
        fixes = dict.fromkeys(fix for candidate in candidates if (fix := candidate.failing[position].shown))
        if fixes:
            yield from fold_paragraph(
                "         ", f"-> {shorten_words([*fixes], SHOWN, ' or ', ' or {} more')}"
            )


def _format_refusal(rule: RuleResult) -> str:
    """Return a rule with its reason, and with the source of the need unless that is a claim."""
    source = "" if rule.source == CLAIM else f" ({rule.source})"
    return f"{rule.rule}{source}: {rule.why}"


def _shorten_reference(reference: str, selection: Selection) -> str:
    return reference.removeprefix(f"{selection.image}:{selection.version}-")


def _describe_host(host: Host, selection: Selection) -> str:
    driver = f"driver {host.driver.version}" if host.driver else "no NVIDIA driver"
    kinds = Counter[str]()
    for gpu in selection.chosen_gpus:
        state = "" if gpu.state == "ok" else f", {gpu.state}"
        kinds[f"{gpu.name or 'unknown GPU'} (compute {gpu.compute or 'unknown'}{state})"] += 1
    gpus = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return (
        f"{host.cpu.model or host.arch} ({host.cpu.level or host.arch}), {driver}, {gpus or 'no GPU passed'}"
    )
