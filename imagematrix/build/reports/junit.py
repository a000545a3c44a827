"""JUnit XML of a build, which CI systems show: one test case for each cell.

The format has no standard; this follows junit-10.xsd of Jenkins' xUnit plugin.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from imagematrix.build.executor.image_tester import ImageTestOutcome
from imagematrix.build.executor.result import BuildStatus
from imagematrix.build.reports.outcome import BUILT
from imagematrix.common.text import make_headline, strip_escapes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from imagematrix.build.reports.outcome import Outcome

SKIPPED: dict[str, str] = {
    BuildStatus.SKIPPED: "an image it builds on was not built",
    BuildStatus.STOPPED: "the build was stopped",
}
SHOWN = (BuildStatus.FAILED, *SKIPPED, *BUILT)


def format_junit(
    outcomes: Iterable[Outcome], excerpt: Callable[[Outcome], str], fatal: str | None = None
) -> bytes:
    """Return the JUnit document of `outcomes`; `excerpt` returns the end of a failed cell's log.

    If the error `fatal` ended the build as a whole, it is a test case of its own. Excluded and infeasible
    cells, and those of other shards, are not test cases. An image's own test is another one.
    """
    shown = [outcome for outcome in outcomes if outcome.status in SHOWN]
    tested = [outcome for outcome in shown if outcome.test is not None]
    untested = sum(outcome.test == ImageTestOutcome.NOT_TESTED for outcome in tested)
    counts = {
        "tests": str(len(shown) + len(tested) + (fatal is not None)),
        "failures": str(
            sum(outcome.status == BuildStatus.FAILED for outcome in shown)
            + sum(outcome.test == ImageTestOutcome.FAILED for outcome in tested)
        ),
        "errors": str(int(fatal is not None)),
        "time": _format_seconds(sum(outcome.seconds or 0 for outcome in shown)),
    }
    root = ET.Element("testsuites", {"name": "imagematrix", **counts})
    skipped = str(sum(outcome.status in SKIPPED for outcome in shown) + untested)
    suite = ET.SubElement(root, "testsuite", {"name": "imagematrix", **counts, "skipped": skipped})
    if fatal is not None:
        attributes = {"classname": "imagematrix", "name": "build", "time": _format_seconds(0)}
        error = ET.SubElement(
            ET.SubElement(suite, "testcase", attributes), "error", {"message": make_headline(fatal)}
        )
        error.text = strip_escapes(fatal)
    for outcome in shown:
        case = _add_case(suite, outcome, outcome.cell, outcome.seconds or 0)
        if outcome.status == BuildStatus.FAILED:
            failure = ET.SubElement(case, "failure", {"message": make_headline(outcome.error or "")})
            failure.text = strip_escapes(excerpt(outcome))
        elif outcome.status in SKIPPED:
            message = make_headline(outcome.error) if outcome.error else SKIPPED[outcome.status]
            ET.SubElement(case, "skipped", {"message": message})

        # What came of the image's own test.
        if outcome.test is not None:
            case = _add_case(suite, outcome, f"{outcome.cell} test", 0)
            why = make_headline(outcome.test_why or "")
            if outcome.test == ImageTestOutcome.FAILED:
                ET.SubElement(case, "failure", {"message": why})
            elif outcome.test == ImageTestOutcome.NOT_TESTED:
                ET.SubElement(case, "skipped", {"message": f"not tested here: {why}"})
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n".encode()


def _add_case(suite: ET.Element, outcome: Outcome, name: str, seconds: float) -> ET.Element:
    attributes = {
        "classname": strip_escapes(f"{outcome.image}:{outcome.version}"),
        "name": strip_escapes(name),
        "time": _format_seconds(seconds),
    }
    return ET.SubElement(suite, "testcase", attributes)


def _format_seconds(value: float) -> str:
    return f"{value:.3f}"
