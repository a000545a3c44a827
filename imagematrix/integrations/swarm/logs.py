"""The output of a service's tasks, printed as it comes and completed at the end.

The engine's stream of the output never ends by itself, and breaks when a manager restarts. So lines are
counted for each task: the next reading prints only lines that no earlier reading had. The engine's own lines,
such as that it cannot read a log, come with each reading and with both streams; each is printed once.
"""

from __future__ import annotations

import contextlib
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from docker import DockerClient

    Write = Callable[[str, str | None, bytes], None]

TASK = "com.docker.swarm.task.id="
PAUSE_S = 1.0


class ServiceLogs:
    """The output of a service; `write` gets a stream ("stdout" or "stderr"), a task's id, and a line.

    `follow` starts to read, `finish` reads the rest. A line without a task's id is the engine's own.
    """

    def __init__(self, client: DockerClient, service: str, write: Write) -> None:
        engine_lines = _EngineLines()
        self._streams = [
            _OutputStream(client, service, name, write, engine_lines) for name in ("stdout", "stderr")
        ]

    def follow(self) -> None:
        """Print lines as they come, in threads that end with this process."""
        for stream in self._streams:
            threading.Thread(target=stream.follow, daemon=True).start()

    def finish(self) -> None:
        """Print the rest; raises the last of docker's errors if it cannot all be read."""
        with contextlib.ExitStack() as stack:
            for stream in reversed(self._streams):  # the stack runs the last one first, and each of them
                stack.callback(stream.finish)


class _EngineLines:
    """The lines of the engine itself that are printed, of both streams. Thread-safe."""

    def __init__(self) -> None:
        self._lines: set[bytes] = set()
        self._lock = threading.Lock()

    def add_new(self, line: bytes) -> bool:
        """Add a line; return whether it is new."""
        with self._lock:
            is_new = line not in self._lines
            self._lines.add(line)
        return is_new


class _OutputStream:
    """One of the two streams of a service's output, and how many lines of each task are printed."""

    def __init__(
        self, client: DockerClient, service: str, name: str, write: Write, engine_lines: _EngineLines
    ) -> None:
        self._client, self._service, self._name, self._write = client, service, name, write
        self._engine_lines = engine_lines
        self._printed: dict[str, int] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()

    def follow(self) -> None:
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        while not self._done.is_set():
            with contextlib.suppress(DockerException, RequestException, OSError):  # `finish` reads the rest
                self._print(self._read_lines(follow=True))
            self._done.wait(PAUSE_S)

    def finish(self) -> None:
        try:
            self._print(self._read_lines(follow=False))
        finally:
            self._done.set()

    def _read_lines(self, *, follow: bool) -> Iterable[bytes]:
        options: dict[str, Any] = {self._name: True, "details": True, "is_tty": False, "follow": follow}
        lines: Iterable[bytes] = self._client.api.service_logs(self._service, **options)
        return lines

    def _print(self, lines: Iterable[bytes]) -> None:
        """Print the lines that no earlier reading had."""
        counts: dict[str, int] = {}
        for line in lines:
            task, text = _split_line(line)
            with self._lock:
                if self._done.is_set():
                    return
                if task is None:
                    if self._engine_lines.add_new(text):
                        self._write(self._name, task, text)
                    continue
                counts[task] = counts.get(task, 0) + 1
                if counts[task] > self._printed.get(task, 0):
                    self._write(self._name, task, text)
                    self._printed[task] = counts[task]  # now: the next reading repeats what was not written


def _split_line(line: bytes) -> tuple[str | None, bytes]:
    """Return the task's id in the details before a line, and the line."""
    details, blank, text = line.partition(b" ")
    for pair in details.decode(errors="replace").split(","):
        if blank and pair.startswith(TASK):
            return pair.removeprefix(TASK), text
    return None, line
