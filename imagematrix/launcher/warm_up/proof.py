"""Whether a start used the caches in its image: nothing was compiled, and each tool says that it hit."""

from __future__ import annotations

from imagematrix.common.text import shorten_lines
from imagematrix.images.warm.tools import may_change
from imagematrix.launcher.warm_up.compilers import parse_calls
from imagematrix.launcher.warm_up.folder_states import find_changed, find_removed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.images.warm.tools import CacheTool
    from imagematrix.launcher.warm_up.folder_states import FileState
    from imagematrix.launcher.warm_up.program_run import EndedRun

SHOWN = 10  # files, calls and variables in an error


class SignReader:
    """Counts in the output of a start what `tools` print when they use their caches, and when they do not."""

    def __init__(self, tools: Iterable[CacheTool]) -> None:
        self._signs = {tool.name: tool.sign for tool in tools if tool.sign}
        self._hits = dict.fromkeys(self._signs, 0)
        self._misses: dict[str, list[str]] = {name: [] for name in self._signs}

    @property
    def variables(self) -> dict[str, str]:
        """The variables with which the tools print it."""
        return {name: value for sign in self._signs.values() for name, value in sign.environment.items()}

    def read_line(self, line: str) -> None:
        """Take account of a line of output."""
        for name, sign in self._signs.items():
            if sign.miss.search(line):
                if len(self._misses[name]) < SHOWN:
                    self._misses[name].append(line)
            elif sign.hit.search(line):
                self._hits[name] += 1

    def list_doubts(self) -> list[str]:
        """Return a line for each tool that did not use its cache, or does not say that it did."""
        doubts = []
        for name, misses in self._misses.items():
            if misses:
                doubts += [f"{name} missed its cache:", *shorten_lines(misses, SHOWN)]
            elif not self._hits[name]:
                doubts.append(f"{name} does not say that it used its cache")
        return doubts


def list_failures(
    run: EndedRun,
    before: Mapping[str, FileState],
    signs: SignReader,
    tools: Iterable[CacheTool],
    cold: EndedRun,
    *,
    read_only: bool = False,
) -> list[str]:
    """Return lines that say why a start is no proof that `tools` used their caches; none if it is one.

    `before` are the states of the caches in its image, and `cold` is the start that filled them. Where the
    files are `read_only`, a tool without a sign proves nothing: it could add none if it compiled.
    """
    lines = [run.why] if run.why else []
    if calls := parse_calls(run.record):
        lines += ["it called compilers:", *shorten_lines(calls, SHOWN)]
    differing = find_changed(before, run.states) | find_removed(before, run.states) if run.has_states else ()
    changed = sorted(path for path in differing if not may_change(path))
    if changed:
        lines += ["files of its caches are new, changed or gone:", *shorten_lines(changed, SHOWN)]
    lines += signs.list_doubts()
    for tool in tools:
        if tool.in_process and tool.sign is None and tool.speedup is not None:
            most = cold.seconds * (1 - tool.speedup)
            if read_only:
                lines.append(f"{tool.name} has no sign of a hit but the files that it adds, and can add none")
            elif run.seconds > most:
                lines.append(
                    f"{tool.name}: it took {run.seconds:.1f} s, and at most {most:.1f} s prove a hit"
                )
    return lines


def list_differing_variables(run: EndedRun, cold: EndedRun, signs: SignReader) -> list[str]:
    """Return the names of variables that differ between two starts, sorted, without those of the signs."""
    names = {*run.variables, *cold.variables} - signs.variables.keys()
    return sorted(name for name in names if run.variables.get(name) != cold.variables.get(name))
