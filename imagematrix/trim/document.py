"""The result of trimming as a JSON document of the schema imagematrix.trim/v1 (schemas/trim.json)."""

from __future__ import annotations

from imagematrix.trim.rules import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.trim.examine import Amount, Finding
    from imagematrix.trim.trim import Report

__all__ = ["SCHEMA", "document"]

SCHEMA = "imagematrix.trim/v1"


def document(report: Report) -> dict[str, object]:
    """Return the document of a report."""
    rules = report.rules
    return {
        "schema": SCHEMA,
        "rules": VERSION,
        "computes": list(rules.computes),
        "keep_ptx": rules.keep_ptx,
        "drop_dead": rules.drop_dead,
        "include_nvidia": rules.nvidia,
        "dry_run": report.dry_run,
        "removed": sum(finding.removed for finding in report.findings),
        "files": [_file(finding) for finding in report.findings],
        "linked": list(report.linked),
    }


def _file(finding: Finding) -> dict[str, object]:
    return {
        "path": finding.path,
        "status": finding.status.value,
        "size": finding.size,
        "removed": finding.removed,
        "removed_compressed": finding.compressed,
        "fatbins": finding.containers,
        "dead_fatbins": finding.dead,
        "missing": list(finding.missing),
        "kept": _amounts(finding.kept),
        "dropped": _amounts(finding.dropped),
    }


def _amounts(amounts: Sequence[Amount]) -> list[dict[str, object]]:
    return [
        {"kind": one.kind, "target": one.target, "entries": one.entries, "size": one.size} for one in amounts
    ]
