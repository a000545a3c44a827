"""The logs of builds: their paths, and the end of a failed one as text that is safe to print.

Beside each is the Dockerfile of the image that is stored.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from imagematrix.common.text import strip_escapes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import ReadableBuffer

# Image names do not contain these, so that folders are unique; their names cannot get too long.
QUOTED = str.maketrans("/:", "+=")
# In BuildKit's output: the number of a step, the seconds since it began, and the line before its summary.
VARYING = re.compile(r"^#\d+ (?=\S)|(?:^|(?<= ))\d+\.\d+s?(?= |$)", re.MULTILINE)
SUMMARY = "------"
DOCKERFILE = ".Dockerfile"
KEPT = 64 * 1024  # bytes of a log's end: about 500 lines, a small part of what CI systems keep of a job


def get_log_path(folder: Path, image: str, version: str, cell: str) -> Path:
    """Return the path of a cell's log below the folder of all logs."""
    return folder / image.translate(QUOTED) / f"{version}-{cell}.log"


def open_log(path: Path, on_output: Callable[[str], None]) -> io.TextIOWrapper:
    """Open a new log, of which `on_output` is told what is written; any later OSError names the log, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _FollowedLog(_NamedFile(path, "w"), on_output)


def record_dockerfile(log: Path, dockerfile: str) -> None:
    """Keep the Dockerfile of a stored image beside its log, so that a later plan can name changed lines."""
    with contextlib.suppress(OSError):  # nothing else needs it
        log.with_suffix(DOCKERFILE).write_bytes(dockerfile.encode())


def load_dockerfile(log: Path) -> str | None:
    """Return the Dockerfile beside a log, if there is one."""
    try:
        return log.with_suffix(DOCKERFILE).read_bytes().decode()
    except (OSError, ValueError):
        return None


class _FollowedLog(io.TextIOWrapper):
    """Text that somebody else reads, too, once it is written."""

    def __init__(self, file: io.FileIO, on_output: Callable[[str], None]) -> None:
        super().__init__(io.BufferedWriter(file), encoding="utf-8", write_through=True)
        self._on_output = on_output

    def write(self, text: str, /) -> int:
        written = super().write(text)
        self._on_output(text)
        return written


class _NamedFile(io.FileIO):
    """A file whose errors all name it; by default, the error of a full disk does not."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self.name
            raise


def shorten_log(log: str | Path | None, error: str) -> str:
    """Return the text to show for a failed cell: the end of its log, with the error if the log lacks it."""
    text = ""
    try:
        if log:
            with Path(log).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - KEPT))
                text = file.read().decode(errors="replace")
            # The first line is complete only if nothing was cut, or if it is the only one.
            text = strip_escapes(text if size <= KEPT else text.partition("\n")[2] or text).strip("\n")
    except OSError as log_error:
        text = f"{log}: {log_error.strerror}"
    text, error = _trim_line(text), _trim_line(strip_escapes(error))
    return text if error in text else f"{text}\n{error}".strip("\n")


def summarize_error(error: str) -> str:
    """Return the part of a build's error that is the same for another cell with the same cause."""
    lines = error.split("\n")
    start = lines.index(SUMMARY) if SUMMARY in lines else 0
    return VARYING.sub("", "\n".join(lines[start:]))


def _trim_line(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.expandtabs().split("\n"))
