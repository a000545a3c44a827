"""Progress of a build: a live board on a terminal, a line for each event elsewhere.

On request, the lines are whole logs, or JSON for other programs.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time

from imagematrix.build.executor.result import BuildStatus
from imagematrix.build.plan.plan import PlanStatus, make_item_namer
from imagematrix.cli.shared.output import escape_text, make_console, print_info, print_info_raw
from imagematrix.common.text import strip_escapes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

    from imagematrix.build.executor.result import Result
    from imagematrix.build.plan.plan import Planned

SCHEMA = "imagematrix.progress/v1"
AUTO, PLAIN, JSON = "auto", "plain", "json"
KINDS = (AUTO, PLAIN, JSON)

COLOURS: dict[str, str] = {
    BuildStatus.BUILT: "green",
    BuildStatus.ADOPTED: "green",
    BuildStatus.VERIFIED: "green",
    BuildStatus.TESTED: "green",
    BuildStatus.FAILED: "red",
    BuildStatus.SKIPPED: "yellow",
    BuildStatus.STOPPED: "yellow",
}


@contextlib.contextmanager
def show_progress(items: Sequence[Planned], kind: str = AUTO) -> Iterator[Progress]:
    """Yield a Reporter for a build of `items`, of one of the KINDS.

    By itself it is a live board on a terminal, else a line when a build starts and one when it ends.
    """
    name = make_item_namer(items)
    if kind != AUTO:
        yield _EventLines(len(items), name) if kind == JSON else _LoggedLines(len(items), name)
        return
    if not (sys.stderr and sys.stderr.isatty() and items):
        yield _Lines(len(items), name)
        return
    from rich.live import Live

    screen = make_console(sys.stderr)
    board = _Board(len(items), name, screen)
    with Live(console=screen, get_renderable=board.render, refresh_per_second=4, transient=True):
        yield board


class Progress:
    """A Reporter that keeps the `results` so far, also if the build is interrupted."""

    def __init__(self, total: int, name: Callable[[Planned], str]) -> None:
        self.results: list[Result] = []
        self._total = total
        self._name = name
        self._lock = threading.Lock()

    def on_start(self, item: Planned) -> None:
        """Record that the build of `item` has started."""

    def on_step(self, item: Planned, text: str) -> None:
        """Record the current instruction of `item`."""

    def on_output(self, item: Planned, text: str) -> None:
        """Record lines of the log of `item`."""

    def on_finish(self, result: Result) -> None:
        """Record a result."""
        with self._lock:
            self.results.append(result)
            count = f"[{len(self.results)}/{self._total}]"
            self.show_result(result, count, f"{self._name(result.item)} {result.seconds:.1f} s")

    def show_result(self, result: Result, count: str, text: str) -> None:
        """Show a result; `count` is its number among all, and `text` its item with the duration."""
        raise NotImplementedError


class _Lines(Progress):
    """Prints a line when a build starts and one when it ends; the steps are in the log."""

    def on_start(self, item: Planned) -> None:
        print_info(f"{'adopting' if item.status is PlanStatus.ADOPT else 'building'} {self._name(item)}")

    def show_result(self, result: Result, count: str, text: str) -> None:
        print_info(f"{count} {result.status} {text}")


class _LoggedLines(_Lines):
    """Prints the logs as well, each line with its cell."""

    def on_output(self, item: Planned, text: str) -> None:
        name = self._name(item)
        for line in strip_escapes(text).splitlines():
            print_info(f"{name}: {line}")


class _EventLines(Progress):
    """Prints a JSON document for each event, in one line."""

    def on_start(self, item: Planned) -> None:
        self._print_event("started", item)

    def on_step(self, item: Planned, text: str) -> None:
        self._print_event("step", item, text=strip_escapes(text))

    def on_output(self, item: Planned, text: str) -> None:
        for line in strip_escapes(text).splitlines():
            self._print_event("output", item, text=line)

    def show_result(self, result: Result, count: str, text: str) -> None:  # noqa: ARG002 - for people
        error = strip_escapes(str(result.error)) if result.error else None
        seconds = round(result.seconds, 3)
        self._print_event("finished", result.item, status=result.status, seconds=seconds, error=error)

    @staticmethod
    def _print_event(event: str, item: Planned, **details: object) -> None:
        image, cell = item.cell.image, item.cell.id
        names = {"image": image.name, "version": image.version, "cell": cell}
        print_info_raw(json.dumps({"schema": SCHEMA, "event": event, **names, **details}))


class _Board(Progress):
    """Shows running builds with their current step, and above them the finished ones."""

    def __init__(self, total: int, name: Callable[[Planned], str], screen: Console) -> None:
        super().__init__(total, name)
        self._screen = screen
        self._running: dict[str, str] = {}
        self._begin = time.monotonic()

    def on_start(self, item: Planned) -> None:
        with self._lock:
            self._running[self._name(item)] = "starting"

    def on_step(self, item: Planned, text: str) -> None:
        with self._lock:
            if self._name(item) in self._running:
                self._running[self._name(item)] = strip_escapes(text)

    def show_result(self, result: Result, count: str, text: str) -> None:
        self._running.pop(self._name(result.item), None)
        status = f"[{COLOURS[result.status]}]{result.status}[/]"
        self._screen.print(f"{escape_text(count)} {status} {escape_text(text)}")

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        # A line up to the edge would wrap as soon as the terminal echoes Ctrl-C after it.
        width = self._screen.width - 3
        with self._lock:
            longest = max(map(len, self._running), default=0)
            rows = []
            for name, step in self._running.items():
                # The full name identifies a row, so only the step is truncated to fit.
                row = Text(f"{name:<{longest}}  {step}" if longest < width else name, style="dim")
                if longest < width:
                    row.truncate(width, overflow="ellipsis")
                rows.append(row)

            count = len(self.results)
            estimate = ""
            if count:
                seconds = (time.monotonic() - self._begin) / count * (self._total - count)
                estimate = f", about {seconds:.0f} s left"
            return Group(*rows, Text(f"{count} of {self._total} done{estimate}"))
