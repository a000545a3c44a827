"""What is outdated in the matrix of a fleet, read from an Outdated document."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.common import json_documents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = "imagematrix.outdated/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessFinding:
    """One finding: something of a `kind` that is outdated, or unknown if `now` is None.

    `cells` is the number of cells that it concerns, in these `images`; `hosts` are the hosts, by name.
    """

    kind: str
    name: str
    used: str
    now: str | None
    why: str
    source: str
    date: str | None
    cells: int
    images: tuple[str, ...]
    hosts: tuple[str, ...]


def load_findings(path: Path) -> tuple[StalenessFinding, ...]:
    """Return the findings in the document of `outdated --json`; raise UsageError if it is not one."""
    fields = json_documents.Fields(json_documents.read_json(path), str(path))
    fields.require_schema(SCHEMA)
    findings = []
    for finding in fields.list_objects("findings"):
        cells = [
            f"{cell.get_text('image')}:{cell.get_text('version')}" for cell in finding.list_objects("cells")
        ]
        findings.append(
            StalenessFinding(
                kind=finding.get_text("kind"),
                name=finding.get_text("name"),
                used=finding.get_text("used"),
                now=finding.get_text_or_none("now"),
                why=finding.get_text("why"),
                source=finding.get_text("source"),
                date=finding.get_text_or_none("date"),
                cells=len(cells),
                images=tuple(dict.fromkeys(cells)),
                hosts=finding.get_texts("hosts"),
            )
        )
    return tuple(findings)
