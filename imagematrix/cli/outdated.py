"""`imagematrix outdated`: what has aged since a matrix was written and locked."""

from __future__ import annotations

import datetime as dt
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.options import AllowContext, File, Json, Only, Platforms, Policy
from imagematrix.cli.shared.output import (
    escape_text,
    fold_paragraph,
    format_names,
    print_info,
    print_json,
    print_lines,
    print_table,
)
from imagematrix.common.text import format_count, shorten_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from imagematrix.build.outdated.finding import AgeFinding
    from imagematrix.hardware.host.host import Host

SHORT = 19  # characters of a digest
SHOWN = 3  # names of one kind, with one reason


def command(
    file: File = Path("matrix.yaml"),
    only: Only = None,
    platform: Platforms = None,
    hosts: Annotated[
        list[Path] | None,
        typer.Option(
            "--hosts",
            metavar="HOSTS",
            help="Name the hosts that are concerned: files, folders, .ndjson, or - for stdin; repeatable.",
        ),
    ] = None,
    allow_context: AllowContext = None,
    policy: Policy = None,
    json: Json = False,
) -> None:
    """Show what is outdated: base images that moved, drivers and wheels with newer releases, old CUDA facts.

    Exits with 11 if something is outdated, else with 8 if something could not be asked.
    """
    from imagematrix.build.outdated.finding import make_outdated_document
    from imagematrix.build.outdated.indexes import find_lock_indexes, read_index_settings
    from imagematrix.build.outdated.outdated import find_outdated
    from imagematrix.build.plan import lock
    from imagematrix.build.plan.plan import PlanContext, Planned
    from imagematrix.cli.shared.build_session import plan_with_lock
    from imagematrix.errors import EngineError, OutdatedError, UsageError
    from imagematrix.selection.fleet.hosts import load_hosts

    fleet = load_hosts(*hosts, stream=sys.stdin.buffer) if hosts else {}
    plan = plan_with_lock(file, PlanContext(), only, platforms=platform or (), contexts=allow_context or ())
    if not any(isinstance(item, Planned) for item in plan.items):
        raise UsageError("no cell can be built, so nothing can be outdated", remedy="see `imagematrix plan`")
    locked = lock.read_base_digests(lock.locate_lock(file))
    indexes = partial(
        find_lock_indexes, settings=read_index_settings(file.parent, os.environ), environment=os.environ
    )
    hosts_by_cell = _find_hosts_by_cell(file, allow_context or (), fleet) if fleet else {}
    findings = find_outdated(plan, locked, hosts_by_cell, dt.datetime.now(dt.UTC).date(), indexes, policy)
    if json:
        print_json(make_outdated_document(findings))
    else:
        _print_findings(findings)
    unlocked = sorted(plan.unresolved)
    if unlocked:
        print_info(f"not locked, so the next build resolves them: {', '.join(unlocked)}")
    old = [finding for finding in findings if finding.status == "outdated"]
    unknown = [finding for finding in findings if finding.status == "unknown"]
    if old:
        remedy = (
            "`imagematrix lock --upgrade` for bases, edit the matrix for the rest; then `imagematrix bump`"
        )
        also = f", {len(unknown)} unknown" if unknown else ""
        raise OutdatedError(f"{format_count(len(old), 'thing')} outdated{also}", remedy=remedy)
    if unknown:
        remedies = dict.fromkeys(finding.remedy or "run this again later" for finding in unknown)
        raise EngineError(
            f"{format_count(len(unknown), 'thing')} could not be asked", remedy="; ".join(remedies)
        )
    print_info("nothing is outdated")


def _find_hosts_by_cell(
    file: Path, contexts: Sequence[Path], fleet: Mapping[str, Host]
) -> dict[str, tuple[str, ...]]:
    """Return the hosts that would choose each cell of the whole matrix, as `plan --for` decides."""
    from imagematrix.build.matrix.load import load_matrix
    from imagematrix.build.matrix.promised_variants import list_candidates
    from imagematrix.build.plan.cell_inputs import expand_with_compat
    from imagematrix.selection.fleet.needed_variants import group_hosts_by_choice

    matrix = load_matrix(file, contexts=contexts)
    expansion = expand_with_compat(matrix)
    catalogs = [list_candidates(matrix, expansion, image).catalog for image in matrix.images]
    return {
        name: hosts for catalog in catalogs for name, hosts in group_hosts_by_choice(fleet, catalog).items()
    }


def _print_findings(findings: Sequence[AgeFinding]) -> None:
    """Print a table of the findings, then each reason once, with the hosts that are concerned."""
    if not findings:
        return
    print_table(
        ("kind", "name", "used", "now", "images", "cells"),
        [
            (
                finding.kind,
                escape_text(finding.name),
                escape_text(_shorten_digest(finding.used)),
                escape_text(_shorten_digest(finding.now)) if finding.now else "[yellow]unknown[/]",
                format_names(finding.images),
                str(len(finding.items)),
            )
            for finding in findings
        ],
    )
    groups: dict[tuple[str, str, str], list[AgeFinding]] = {}
    for finding in findings:
        date = f" ({finding.date})" if finding.date else ""
        groups.setdefault((finding.kind, finding.why, f"{finding.source}{date}"), []).append(finding)
    for (kind, why, source), group in groups.items():
        names = shorten_words([finding.name for finding in group], SHOWN)
        print_lines("", *fold_paragraph("", escape_text(f"{kind} {names}: {why}; {source}")))
        hosts = sorted({host for finding in group for host in finding.hosts})
        if hosts:
            print_lines(*fold_paragraph("  ", format_names(hosts)))


def _shorten_digest(text: str) -> str:
    """Return the beginning of a digest, which identifies it, and any other text unchanged."""
    return text[:SHORT] if text.startswith("sha256:") else text
