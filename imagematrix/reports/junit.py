"""JUnit XML of a build, which CI systems show: one test case for each cell.

The format has no standard; this follows junit-10.xsd of Jenkins' xUnit plugin.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from imagematrix.builder.result import BuildStatus
from imagematrix.reports.outcome import BUILT
from imagematrix.text import headline, plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from imagematrix.reports.outcome import Outcome

__all__ = ["junit"]

SKIPPED: dict[str, str] = {
    BuildStatus.SKIPPED: "an image it builds on was not built",
    BuildStatus.STOPPED: "the build was stopped",
}
SHOWN = (BuildStatus.FAILED, *SKIPPED, *BUILT)


def junit(outcomes: Iterable[Outcome], excerpt: Callable[[Outcome], str], fatal: str | None = None) -> bytes:
    """Return the JUnit document of `outcomes`; `excerpt` returns the end of a failed cell's log.

    If the error `fatal` ended the build as a whole, it is a test case of its own. Excluded and infeasible
    cells, and those of other shards, are not test cases.
    """
    shown = [outcome for outcome in outcomes if outcome.status in SHOWN]
    counts = {
        "tests": str(len(shown) + (fatal is not None)),
        "failures": str(sum(outcome.status == BuildStatus.FAILED for outcome in shown)),
        "errors": str(int(fatal is not None)),
        "time": _seconds(sum(outcome.seconds or 0 for outcome in shown)),
    }
    root = ET.Element("testsuites", {"name": "imagematrix", **counts})
    skipped = str(sum(outcome.status in SKIPPED for outcome in shown))
    suite = ET.SubElement(root, "testsuite", {"name": "imagematrix", **counts, "skipped": skipped})
    if fatal is not None:
        whole = {"classname": "imagematrix", "name": "build", "time": _seconds(0)}
        error = ET.SubElement(ET.SubElement(suite, "testcase", whole), "error", {"message": headline(fatal)})
        error.text = plain(fatal)
    for outcome in shown:
        case = ET.SubElement(
            suite,
            "testcase",
            {
                "classname": plain(f"{outcome.image}:{outcome.version}"),
                "name": plain(outcome.cell),
                "time": _seconds(outcome.seconds or 0),
            },
        )
        if outcome.status == BuildStatus.FAILED:
            failure = ET.SubElement(case, "failure", {"message": headline(outcome.error or "")})
            failure.text = plain(excerpt(outcome))
        elif outcome.status in SKIPPED:
            message = headline(outcome.error) if outcome.error else SKIPPED[outcome.status]
            ET.SubElement(case, "skipped", {"message": message})
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n".encode()


def _seconds(value: float) -> str:
    return f"{value:.3f}"
