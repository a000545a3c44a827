"""The progress of a pull on stderr: on a terminal a line that changes, elsewhere a line now and then."""

from __future__ import annotations

import os
import sys
import time

from imagematrix.cli.shared.output import print_info, print_info_raw
from imagematrix.common.text import format_count
from imagematrix.common.units import format_megabytes
from imagematrix.errors import sanitize_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from imagematrix.images.engine.pull import PullProgress

LIVE_S, LINE_S = 0.2, 30.0  # between two updates
COLUMNS = 80  # if the terminal's width is unknown


class PullDisplay:
    """Call it with each PullProgress of the image `name`; it prints nothing if it is never called.

    It prints nothing either if it is `quiet`. It is a context manager, because the line on a terminal has to
    be removed at the end. `now` is the clock.
    """

    def __init__(self, name: str, *, quiet: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._quiet = quiet
        self._now = now
        self._live = bool(sys.stderr and sys.stderr.isatty())
        self._last: PullProgress | None = None
        self._began = self._shown = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._last is None:
            return
        if self._live:
            print_info_raw("\r\x1b[K", end="")
        if kind is None:
            size, seconds = format_megabytes(self._last.received), self._now() - self._began
            print_info(f"pulled {self._name}: {size} in {seconds:.1f} s")

    def __call__(self, progress: PullProgress) -> None:
        """Show the progress, unless the last was shown just before."""
        if self._quiet:
            return
        now = self._now()
        if self._last is None:
            self._began = self._shown = now
            if not self._live:
                print_info(f"pulling {self._name}")
        self._last = progress
        if now - self._shown < (LIVE_S if self._live else LINE_S):
            return
        self._shown = now
        if self._live:
            # A line up to the edge would wrap.
            text = f"{_format_state(progress)}: {self._name}"[: _count_columns() - 1]
            print_info_raw(f"\r\x1b[K{sanitize_line(text)}", end="")
        else:
            print_info(f"{_format_state(progress)}: {self._name}")


def _format_state(progress: PullProgress) -> str:
    if not progress.layers:
        return "asking the registry"
    layers = format_count(progress.layers, "layer")
    if progress.downloaded == progress.layers:
        return f"unpacking {layers}"
    return f"pulled {progress.downloaded} of {layers}, {format_megabytes(progress.received, 0)}"


def _count_columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS
