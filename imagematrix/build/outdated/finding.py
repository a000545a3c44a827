"""What is outdated, or could not be asked, and which cells and hosts that concerns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.build.matrix.promised_variants import make_reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.build.plan.plan import Planned

SCHEMA = "imagematrix.outdated/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeFinding:
    """Something of a `kind` (base, driver, toolkit, wheel) that is outdated, or unknown if `now` is None.

    `used` is what the matrix uses, `now` what there is instead, `why` a sentence. `source` is what was asked,
    `date` the date of a table. `items` are the planned cells that it concerns, `list_hosts` those that would
    choose one of them. `remedy` is what to do about an unknown one, if more than to ask again later.
    """

    kind: str
    name: str
    used: str
    now: str | None
    why: str
    source: str
    date: str | None = None
    items: tuple[Planned, ...] = ()
    hosts: tuple[str, ...] = ()
    remedy: str | None = None

    @property
    def status(self) -> str:
        """`outdated` or `unknown`."""
        return "unknown" if self.now is None else "outdated"

    @property
    def images(self) -> tuple[str, ...]:
        """The versions that it concerns, as IMAGE:VERSION."""
        return tuple(
            dict.fromkeys(f"{item.cell.image.name}:{item.cell.image.version}" for item in self.items)
        )

    def to_json(self) -> dict[str, object]:
        """Return one element of the document's `findings`."""
        return {
            "kind": self.kind,
            "name": self.name,
            "status": self.status,
            "used": self.used,
            "now": self.now,
            "why": self.why,
            "source": self.source,
            "date": self.date,
            "cells": [
                {
                    "image": item.cell.image.name,
                    "version": item.cell.image.version,
                    "cell": item.cell.id,
                    "reference": item.reference if item.identity else None,
                }
                for item in self.items
            ],
            "hosts": list(self.hosts),
        }


def add_affected_hosts(
    findings: Iterable[AgeFinding], chosen: Mapping[str, Iterable[str]]
) -> list[AgeFinding]:
    """Return findings with the hosts that choose one of their cells; `chosen` has hosts by reference."""

    def list_hosts(item: Planned) -> Iterable[str]:
        cell = item.cell
        return chosen.get(make_reference(cell.image.name, cell.image.version, cell.id), ())

    return [
        replace(finding, hosts=tuple(sorted({host for item in finding.items for host in list_hosts(item)})))
        for finding in findings
    ]


def make_outdated_document(findings: Iterable[AgeFinding]) -> dict[str, object]:
    """Return the Outdated document."""
    return {"schema": SCHEMA, "findings": [finding.to_json() for finding in findings]}
