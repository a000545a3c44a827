"""`imagematrix report`: the outcome of a matrix that several jobs built."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.build.plan.plan import PlanStatus
from imagematrix.build.reports.outcome import BUILT, MISSING
from imagematrix.cli.shared import progress
from imagematrix.cli.shared.host_filter import load_host_needs
from imagematrix.cli.shared.options import AtMost, ForHosts, Json
from imagematrix.cli.shared.output import escape_text, print_info, print_json, print_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.reports.outcome import Outcome

COLOURS: dict[str, str] = {**progress.COLOURS, PlanStatus.UP_TO_DATE: "dim", MISSING: "red"}


def command(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="The output of `build --json` from each job; add that of `plan --json` to see missing jobs.",
        ),
    ],
    hosts: ForHosts = None,
    at_most: AtMost = None,
    json: Json = False,
) -> None:
    """Merge the reports of several builds, and show which images are built, failed or missing.

    With --for, what all builds found decides again which cells the hosts need.
    """
    from imagematrix.build.matrix.promised_variants import make_reference
    from imagematrix.build.reports import outcome
    from imagematrix.build.reports.candidates import KnownCandidates
    from imagematrix.build.reports.merge import merge_reports
    from imagematrix.cli.shared.ci import write_summary

    needs = load_host_needs(hosts, at_most)
    candidates = KnownCandidates()
    reports = map(outcome.load_report, files)
    merged = merge_reports(map(candidates.add, reports) if needs else reports)
    document = merged.to_json()
    if needs:
        needs.set_candidates(candidates.candidates)
        document["for"] = needs.to_json()
    outcomes = outcome.parse_report(document, "report").outcomes
    if json:
        print_json(document)
    else:
        _print_outcomes(outcomes)
    write_summary(outcomes)
    error = merged.find_failure()
    if error:
        raise error
    if needs:
        needs.require_built(
            [
                make_reference(built.image, built.version, built.cell)
                for built in outcomes
                if built.status in BUILT
            ]
        )
        if unserved := needs.find_unserved_error():
            raise unserved


def _print_outcomes(outcomes: tuple[Outcome, ...]) -> None:
    from imagematrix.cli.shared.ci import describe_test

    has_tests = any(outcome.test for outcome in outcomes)
    print_table(
        ("image", "cell", "status", *(["test"] if has_tests else []), "seconds"),
        [
            (
                escape_text(f"{outcome.image}:{outcome.version}"),
                escape_text(outcome.cell),
                f"[{COLOURS[outcome.status]}]{outcome.status}[/]",
                *([escape_text(describe_test(outcome))] if has_tests else []),
                "" if outcome.seconds is None else f"{outcome.seconds:.1f}",
            )
            for outcome in outcomes
            if outcome.status in COLOURS
        ],
    )
    counts = Counter(outcome.status for outcome in outcomes)
    print_info(", ".join(f"{count} {status}" for status, count in counts.items()) or "no cells")
