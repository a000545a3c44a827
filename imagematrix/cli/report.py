"""`imagematrix report`: the outcome of a matrix that several jobs built."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.build.plan.plan import PlanStatus
from imagematrix.build.reports.outcome import BUILT, MISSING
from imagematrix.cli.shared import progress
from imagematrix.cli.shared.host_filter import needing
from imagematrix.cli.shared.options import AtMost, ForHosts, Json
from imagematrix.cli.shared.output import escaped, info, print_json, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.reports.outcome import Outcome

__all__ = ["command"]

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
    from imagematrix.build.matrix.claims import name
    from imagematrix.build.reports import outcome
    from imagematrix.build.reports.candidates import Known
    from imagematrix.build.reports.merge import merge
    from imagematrix.cli.shared.ci import write_summary

    needs = needing(hosts, at_most)
    known = Known()
    reports = map(outcome.load, files)
    merged = merge(map(known.add, reports) if needs else reports)
    document = merged.to_json()
    if needs:
        needs.consider(known.candidates)
        document["for"] = needs.to_json()
    outcomes = outcome.parse(document, "report").outcomes
    if json:
        print_json(document)
    else:
        _print(outcomes)
    write_summary(outcomes)
    error = merged.failure()
    if error:
        raise error
    if needs:
        needs.require([name(one.image, one.version, one.cell) for one in outcomes if one.status in BUILT])
        if unserved := needs.error():
            raise unserved


def _print(outcomes: tuple[Outcome, ...]) -> None:
    from imagematrix.cli.shared.ci import test_of

    tested = any(outcome.test for outcome in outcomes)
    table(
        ("image", "cell", "status", *(["test"] if tested else []), "seconds"),
        [
            (
                escaped(f"{outcome.image}:{outcome.version}"),
                escaped(outcome.cell),
                f"[{COLOURS[outcome.status]}]{outcome.status}[/]",
                *([escaped(test_of(outcome))] if tested else []),
                "" if outcome.seconds is None else f"{outcome.seconds:.1f}",
            )
            for outcome in outcomes
            if outcome.status in COLOURS
        ],
    )
    counts = Counter(outcome.status for outcome in outcomes)
    info(", ".join(f"{count} {status}" for status, count in counts.items()) or "no cells")
