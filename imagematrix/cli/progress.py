"""Progress of a build: a live board on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from imagematrix.build.naming import naming
from imagematrix.cli.output import console, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

    from imagematrix.build.build import Reporter, Result
    from imagematrix.build.plan import Item

__all__ = ["progress"]

MARKS = {
    "built": "[green]built[/]",
    "adopted": "[green]adopted[/]",
    "verified": "[green]verified[/]",
    "failed": "[red]failed[/]",
    "skipped": "[yellow]skipped[/]",
    "stopped": "[yellow]stopped[/]",
}


@contextlib.contextmanager
def progress(items: Sequence[Item]) -> Iterator[Reporter]:
    """Yield what is to be told of a build of `items`."""
    name = naming(items)
    if not (sys.stderr.isatty() and items):
        yield _Lines(len(items), name)
        return
    from rich.live import Live

    screen = console(sys.stderr)
    board = _Board(len(items), name, screen)
    with Live(console=screen, get_renderable=board.render, refresh_per_second=4, transient=True):
        yield board


def _summary(name: str, result: Result, number: int, total: int) -> tuple[str, str]:
    return f"[{number}/{total}]", f"{name} {result.seconds:.1f} s"


class _Lines:
    """Says one line when an image begins and one when it is done."""

    def __init__(self, total: int, name: Callable[[Item], str]) -> None:
        self._total = total
        self._name = name
        self._done = 0
        self._lock = threading.Lock()

    def started(self, item: Item) -> None:
        say(f"{'adopting' if item.status == 'adopt' else 'building'} {self._name(item)}")

    def step(self, item: Item, text: str) -> None:
        """Say nothing: the steps are in the log."""

    def finished(self, result: Result) -> None:
        with self._lock:
            self._done += 1
            count, text = _summary(self._name(result.item), result, self._done, self._total)
            say(f"{count} {result.status} {text}")


class _Board:
    """Shows what runs with the step it is at, and above it what is done."""

    def __init__(self, total: int, name: Callable[[Item], str], screen: Console) -> None:
        self._total = total
        self._name = name
        self._screen = screen
        self._done = 0
        self._running: dict[str, str] = {}
        self._begin = time.monotonic()
        self._lock = threading.Lock()

    def started(self, item: Item) -> None:
        with self._lock:
            self._running[self._name(item)] = "begins"

    def step(self, item: Item, text: str) -> None:
        with self._lock:
            if self._name(item) in self._running:
                self._running[self._name(item)] = text

    def finished(self, result: Result) -> None:
        from rich.markup import escape

        with self._lock:
            self._done += 1
            name = self._name(result.item)
            self._running.pop(name, None)
            count, text = _summary(name, result, self._done, self._total)
            self._screen.print(f"{escape(count)} {MARKS[result.status]} {escape(text)}")

    def render(self) -> RenderableType:
        from rich.markup import escape
        from rich.table import Table

        with self._lock:
            board = Table.grid(padding=(0, 2))
            board.add_column(no_wrap=True)
            board.add_column(no_wrap=True, overflow="ellipsis")
            for name, text in self._running.items():
                board.add_row(name, escape(text), style="dim")
            board.add_row(f"{self._done} of {self._total} done{self._left()}", "")
            return board

    def _left(self) -> str:
        if not self._done:
            return ""
        left = (time.monotonic() - self._begin) / self._done * (self._total - self._done)
        return f", about {left:.0f} s left"
