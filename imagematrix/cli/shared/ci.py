"""Output in the format of the CI system that runs the command: folded logs, errors, a summary.

GitHub Actions: docs.github.com, "Workflow commands for GitHub Actions". GitLab: docs.gitlab.com, "CI/CD job
logs", "Custom collapsible sections".
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections import Counter
from pathlib import Path

from imagematrix.build.executor.image_tester import ImageTestOutcome
from imagematrix.build.executor.result import BuildStatus
from imagematrix.build.reports.outcome import BUILT, DROPPED, MISSING
from imagematrix.cli.shared.output import print_info
from imagematrix.common.text import make_headline, strip_escapes
from imagematrix.errors import sanitize_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.build.reports.outcome import Outcome

SUMMARY = 256 * 1024  # bytes of rows; GitHub drops the summary of a step that is larger than 1 MiB
ORDER = (BuildStatus.FAILED, MISSING, BuildStatus.SKIPPED, BuildStatus.STOPPED, *BUILT)


def find_ci_system() -> str | None:
    """Return "github" or "gitlab" if one of them runs this process."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        return "github"
    return "gitlab" if os.environ.get("GITLAB_CI") == "true" else None


def format_failure(system: str, name: str, title: str, text: str) -> str:
    """Return the report of a failed cell for a CI system: `text` folded, then a one-line error.

    It contains no commands to the system but those made here.
    """
    name, text, title = sanitize_line(name), strip_escapes(text), strip_escapes(title)
    if system == "github":
        property_ = _escape_data(name).replace(":", "%3A").replace(",", "%2C")
        error = f"::error title={property_}::{_escape_data(title)}"
        return f"::group::{name}: failed\n{text}\n::endgroup::\n{error}"
    section = f"cell_{secrets.token_hex(8)}"
    now = int(time.time())
    return (
        f"\x1b[0Ksection_start:{now}:{section}[collapsed=true]\r\x1b[0K{name}: failed\n{text}\n"
        f"\x1b[0Ksection_end:{now}:{section}\r\x1b[0K\n{name}: {title}"
    )


def write_summary(outcomes: Sequence[Outcome], fatal: str | None = None) -> None:
    """Append the table of `outcomes` to the job's summary, if GitHub provides one.

    `fatal` is the error that ended the build as a whole.
    """
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path or find_ci_system() != "github":
        return
    try:
        with Path(path).open("a", encoding="utf-8", errors="replace") as file:
            file.write(format_table(outcomes, fatal))
    except OSError as error:  # the images are built anyway
        print_info(f"cannot write the summary for GitHub: {path}: {error.strerror}")


def format_table(outcomes: Sequence[Outcome], fatal: str | None = None) -> str:
    """Return a markdown table with the outcome of each cell, failures first."""
    shown = [outcome for outcome in outcomes if outcome.status in ORDER]
    shown.sort(key=lambda outcome: ORDER.index(outcome.status))
    counts = Counter(outcome.status for outcome in shown)
    counts |= Counter(outcome.status for outcome in outcomes if outcome.status in DROPPED)
    totals = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no cells"
    lines = [f"### imagematrix: {totals}"]
    if fatal:
        lines += ["", _escape_cell(make_headline(fatal))]

    has_tests = any(outcome.test for outcome in shown)
    rows = []
    for outcome in shown:
        seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
        test = [describe_test(outcome)] if has_tests else []
        cells = (f"{outcome.image}:{outcome.version}", outcome.cell, outcome.status, *test, seconds)
        rows.append(f"| {' | '.join(map(_escape_cell, cells))} |")

    # The failures come first, so what does not fit into the summary are cells that were built.
    sizes = itertools.accumulate(len(row.encode(errors="replace")) for row in rows)
    count = sum(1 for _ in itertools.takewhile(lambda size: size <= SUMMARY, sizes))
    if count:
        head = ["| image | cell | | seconds |", "|---|---|---|--:|"]
        if has_tests:
            head = ["| image | cell | | test | seconds |", "|---|---|---|---|--:|"]
        lines += ["", *head, *rows[:count]]
    if count < len(rows):
        lines += ["", f"and {len(rows) - count} more"]
    return "\n".join([*lines, "", ""])


def describe_test(outcome: Outcome) -> str:
    """Return the outcome of an image's test, in words for a table."""
    if outcome.test == ImageTestOutcome.NOT_TESTED:
        return f"not tested here: {make_headline(outcome.test_why or '')}"
    return outcome.test or ""


def _escape_cell(text: str) -> str:
    """Return `text` escaped for a cell of a markdown table."""
    return "".join(
        f"&#{ord(letter)};" if letter in "|`<>&*_[]\\~\n" else letter for letter in strip_escapes(text)
    )


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
