"""Gates: a container's first process exists and stands still behind one, until its lease names it.

The keeper opens the gate. If it dies before, the process comes to the end of a pipe, and ends without running
anything of the image.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os

from imagematrix.common.programs import find_program, get_search_path
from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    class Gate(Protocol):
        """What holds a first process still; made anew for each start, before the runtime's process is."""

        @property
        def descriptors(self) -> Sequence[int]:
            """The descriptors that the runtime's process needs."""
            ...

        @property
        def ready_pipe(self) -> int:
            """The end of a pipe that can be read once `find_first_process` can be called."""
            ...

        def find_first_process(self, runtime: int) -> int | None:
            """Return the first process, given that of the runtime; None if the runtime has ended.

            Raises EngineError if the runtime does not report it.
            """
            ...

        def open(self) -> None:
            """Let the process go on."""
            ...

        def close(self) -> None:
            """Close the keeper's descriptors; a process that still stands there ends."""
            ...


FREE = 100  # the first number of descriptors that are in nobody's way
ANSWER = 1 << 16  # bytes of one read of what a runtime reports of a process
GO = b"\1"
# A filter of seccomp(2) of one instruction, BPF_RET | BPF_K, that allows everything (SECCOMP_RET_ALLOW).
ALLOW = b"\x06\0\0\0\0\0\xff\x7f"


def open_pipe() -> tuple[int, int]:
    """Return the ends of a pipe, out of the way of the descriptors that a container gets."""
    reader, writer = os.pipe()
    moved = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, FREE), fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, FREE)
    os.close(reader)
    os.close(writer)
    return moved


class OwnGate:
    """The gate of a runtime whose process becomes the container's first, or ends it: it waits before."""

    def __init__(self) -> None:
        self.ready_pipe, self._ready = open_pipe()
        self._waiting, self._go = open_pipe()
        self.descriptors = (self._ready, self._waiting)

    def wait(self) -> None:
        """Wait in the runtime's process, and end it if the keeper is gone."""
        os.write(self._ready, GO)
        if os.read(self._waiting, 1) != GO:
            os._exit(1)

    def find_first_process(self, runtime: int) -> int | None:
        """See `Gate`."""
        return runtime if os.read(self.ready_pipe, 1) else None

    def open(self) -> None:
        """See `Gate`."""
        os.write(self._go, GO)

    def close(self) -> None:
        """See `Gate`."""
        os.close(self.ready_pipe)
        os.close(self._go)


class BubblewrapGate:
    """The gate of bwrap: its container reads a filter of system calls just before it executes the program.

    With `--block-fd`, which is made for waiting, it would go on when the keeper dies. An empty filter is an
    error, with which it ends; the keeper's filter allows everything.
    """

    def __init__(self) -> None:
        self.ready_pipe, self.info = open_pipe()
        self.filter, self._go = open_pipe()
        self.descriptors = (self.info, self.filter)

    def find_first_process(self, runtime: int) -> int | None:  # noqa: ARG002 - of the protocol
        """See `Gate`."""
        return _receive_process(self.ready_pipe, "child-pid")

    def open(self) -> None:
        """See `Gate`."""
        os.write(self._go, ALLOW)
        os.close(self._go)
        self._go = -1

    def close(self) -> None:
        """See `Gate`."""
        os.close(self.ready_pipe)
        if self._go >= 0:
            os.close(self._go)


class HookGate:
    """The gate of an OCI runtime: a hook that runs when the container is made (createRuntime of config.md).

    The hook passes the runtime's report on to the keeper. It finds the descriptors of the runtime in /proc.
    """

    def __init__(self) -> None:
        """Raise EngineError without a shell."""
        shell = find_program("sh")
        if shell is None:
            raise EngineError("this node has no sh, with which a container is told of")
        self._shell, self._path = shell, get_search_path()
        self.ready_pipe, self._ready = open_pipe()
        self._waiting, self._go = open_pipe()
        self.descriptors = (self._ready, self._waiting)

    def make_hook(self) -> dict[str, object]:
        """Return the hook for the runtime's configuration."""
        descriptors = "/proc/$PPID/fd"
        script = f'cat > "{descriptors}/{self._ready}" && read -r go < "{descriptors}/{self._waiting}"'
        return {"path": self._shell, "args": ["sh", "-c", script], "env": [f"PATH={self._path}"]}

    def find_first_process(self, runtime: int) -> int | None:  # noqa: ARG002 - of the protocol
        """See `Gate`."""
        return _receive_process(self.ready_pipe, "pid")

    def open(self) -> None:
        """See `Gate`."""
        os.write(self._go, b"go\n")

    def close(self) -> None:
        """See `Gate`."""
        os.close(self.ready_pipe)
        os.close(self._go)


def _receive_process(descriptor: int, key: str) -> int | None:
    """Return the process that a runtime reports; None if it has ended instead. Raises EngineError."""
    decoder, text = json.JSONDecoder(), ""
    # Other processes keep the pipe open, so the report ends where the object does.
    while part := os.read(descriptor, ANSWER):
        text += part.decode("utf-8", "replace")
        with contextlib.suppress(ValueError):
            report, _ = decoder.raw_decode(text.lstrip())
            if not isinstance(report, dict) or not isinstance(process := report.get(key), int):
                raise EngineError("the runtime does not tell which process its container has")
            return process
    return None
