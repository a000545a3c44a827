"""The page of results: a table for each group of rows, with the commit and the machine that it is of."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from measure import cells, duration
from samples import ROOT

from imagematrix import probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from measure import Pace, Row

PAGE = ROOT / "docs" / "benchmark-results.md"
PLACE = re.compile(r"<!-- measured: ([\w-]+) -->\n(.*?)<!-- end -->\n", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What results are of: a commit, a day, a machine and its Python."""

    commit: str
    day: str
    machine: str

    @classmethod
    def here(cls) -> Origin:
        """Return the origin of what is measured now."""
        commit = _git("rev-parse", "--short=12", "HEAD")
        if _git("status", "--porcelain", "--", ":!docs/benchmark-results.md"):
            commit += " with changes"
        processor = f"{os.cpu_count()} x {probe(nvml=False).cpu.model}"
        system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
        return cls(commit=commit, day=datetime.now(UTC).date().isoformat(), machine=f"{processor}, {system}")

    def told(self, pace: Pace) -> str:
        """Return a line with the origin of a table, and the time of `pass` before it."""
        return f"Commit {self.commit}, {self.day}, {self.machine}; `pass` took {duration(pace.seconds)}."


def require_places(groups: Iterable[str]) -> None:
    """Raise SystemExit unless the page has a place for each group, and no other."""
    places = sorted(match[1] for match in PLACE.finditer(PAGE.read_text()))
    if places != sorted(groups):
        wrong = ", ".join(sorted({*places} ^ {*groups})) or "a group twice"
        raise SystemExit(f"{PAGE.relative_to(ROOT)} has other groups than this: {wrong}")


def write(group: str, origin: Origin, pace: Pace, rows: Sequence[Row]) -> None:
    """Replace the table of a group in the page."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] != group:
            return match[0]
        lines = [
            f"<!-- measured: {group} -->",
            "",
            origin.told(pace),
            "",
            *_table(rows),
            "",
            "<!-- end -->",
            "",
        ]
        return "\n".join(lines)

    PAGE.write_text(PLACE.sub(replaced, PAGE.read_text()))


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| what | ours | ratio | instead | limit | met |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        yield f"| {' | '.join(cells(row))} |"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
