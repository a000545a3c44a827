"""Input and output of a container, which never shares its caller's terminal.

A process that has a terminal open can type into it (TIOCSTI of ioctl_tty(2)), and so run commands as its
user. So with `--tty` a container gets a terminal of its own, whose other end is here. Without it, a pipe
stands in for each of input, output and errors that is a terminal; files and pipes of the caller are passed as
they are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
import threading
import tty

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from imagematrix.launcher.daemonless.container import ContainerSpec

PIECE = 1 << 16
INPUT, OUTPUT, ERRORS = range(3)


class Streams:
    """The streams of a container, and their relays in this process; use it as a context.

    `descriptors` are those that the container gets as input, output and errors. `terminal` is its own, if it
    has one.
    """

    def __init__(self, container: ContainerSpec) -> None:
        self._interactive = container.interactive
        self._terminal = container.terminal
        self._relays: list[threading.Thread] = []
        self._from: list[tuple[int, int]] = []  # what is read here, and where it goes
        self._ours: list[int] = []
        self._settings: list[Any] | None = None
        self.terminal: int | None = None
        self.descriptors: tuple[int, int, int] = (INPUT, OUTPUT, ERRORS)

    def __enter__(self) -> Self:
        if self._terminal:
            self._open_terminal()
        else:
            self.descriptors = (
                self._open_input() if self._interactive else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC),
                self._open_output(OUTPUT),
                self._open_output(ERRORS),
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        for descriptor in self._ours:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def start(self) -> None:
        """Relay from now on: the container's process has its descriptors."""
        for descriptor in {*self.descriptors} - {INPUT, OUTPUT, ERRORS}:
            os.close(descriptor)
        self.take_terminal()
        kept = (INPUT, OUTPUT, ERRORS, self.terminal)
        for source, target in self._from:
            # What a relay closes at its end: of the two, the pipe; the terminal is both, and closed at exit.
            pipe = next((descriptor for descriptor in (source, target) if descriptor not in kept), None)
            relay = threading.Thread(target=self._relay, args=(source, target, pipe), daemon=True)
            relay.start()
            if source != INPUT:
                self._relays.append(relay)

    def finish(self) -> None:
        """Wait until everything that the container has written is relayed; it has ended."""
        for relay in self._relays:
            relay.join()

    def take_terminal(self) -> None:
        """Pass each key of the caller's terminal to the container's, which knows what Ctrl-C is."""
        if self.terminal is None:
            return
        if self._interactive and os.isatty(INPUT):
            self._settings = termios.tcgetattr(INPUT)
            tty.setraw(INPUT, termios.TCSADRAIN)
        self.resize()

    def restore(self) -> None:
        """Give the caller's terminal its settings again."""
        if self._settings is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(INPUT, termios.TCSADRAIN, self._settings)
            self._settings = None

    def resize(self) -> None:
        """Give the container's terminal the size of the caller's; the kernel signals its processes."""
        if self.terminal is not None:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(INPUT, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, size)

    def hang_up(self) -> None:
        """Tell the container that the caller's terminal is gone."""
        if self.terminal is not None:
            # A relay may be using the number, so it has to stay taken.
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self.terminal, inheritable=False)
            os.close(null)
            self.terminal = None

    def _open_terminal(self) -> None:
        self.terminal, inner = os.openpty()
        self._ours.append(self.terminal)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(inner, termios.TCSANOW, termios.tcgetattr(INPUT))
        self.descriptors = (inner, inner, inner)
        self._from.append((self.terminal, OUTPUT))
        if self._interactive:
            self._from.append((INPUT, self.terminal))

    def _open_input(self) -> int:
        if not os.isatty(INPUT):
            return INPUT
        reader, writer = os.pipe()
        self._from.append((INPUT, writer))
        self._ours.append(writer)
        return reader

    def _open_output(self, stream: int) -> int:
        if not os.isatty(stream):
            return stream
        reader, writer = os.pipe()
        self._from.append((reader, stream))
        return writer

    def _relay(self, source: int, target: int, pipe: int | None) -> None:
        """Write to `target` what comes from `source` until it ends, and close the pipe of the two."""
        with contextlib.suppress(OSError):  # of a terminal whose other end is closed
            while piece := os.read(source, PIECE):
                try:
                    while piece:
                        piece = piece[os.write(target, piece) :]
                except OSError:  # of a reader that has gone
                    if source == self.terminal:
                        self.hang_up()  # otherwise the container would wait until somebody reads it
                    break
        if pipe is not None:
            with contextlib.suppress(ValueError):
                self._ours.remove(pipe)
            os.close(pipe)
