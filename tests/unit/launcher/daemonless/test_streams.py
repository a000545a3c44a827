"""The terminal of a container, which is never its caller's, and the pipes in place of a terminal."""

import contextlib
import fcntl
import os
import signal
import struct
import termios
import threading

import pytest
from machines import wait_until

from imagematrix.common.record import replace
from imagematrix.launcher.daemonless import streams
from imagematrix.launcher.daemonless.streams import Streams

WAITING = "while :; do sleep 0.05; done"
ECHO = termios.ECHO


class Terminal:
    """A terminal of the caller: what `text` has was shown there, what is typed goes to its input."""

    def __init__(self):
        self._outer, self.inner = os.openpty()
        self.text = ""
        self.resize(30, 90)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with contextlib.suppress(OSError):
            while piece := os.read(self._outer, 4096):
                self.text += piece.decode()

    def type(self, text):
        os.write(self._outer, text)

    def resize(self, rows, columns):
        fcntl.ioctl(self._outer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def shows(self, text):
        wait_until(lambda: text in self.text, text, 30)

    @property
    def settings(self):
        return termios.tcgetattr(self.inner)

    def close(self):
        os.close(self.inner)
        self._reader.join(30)
        os.close(self._outer)


@pytest.fixture
def terminal():
    """A terminal, with a container's streams there by `on`."""
    made = Terminal()
    yield made
    made.close()


@pytest.fixture
def on(begin, terminal):
    """Call it with a script to start it as a container with the streams of the terminal."""

    def call(script, **given):
        return begin(script, dict.fromkeys(("stdin", "stdout", "stderr"), terminal.inner), **given)

    return call


def test_what_is_typed_reaches_the_container_s_own_terminal(on, terminal):
    before = terminal.settings
    container = on("tty; stty size; read line; echo got $line; exit 3", terminal=True)
    terminal.shows("30 90")
    assert os.ttyname(terminal.inner) not in terminal.text
    assert not terminal.settings[3] & ECHO
    terminal.type(b"a line\r")
    terminal.shows("got a line")
    assert container.end()[0] == 3
    assert terminal.settings == before


def test_keys_are_signals_for_the_container_alone(on, terminal):
    container = on(f"trap 'echo got; exit 5' INT; echo ready; {WAITING}", terminal=True)
    terminal.shows("ready")
    terminal.type(b"\x03")
    terminal.shows("got")
    assert container.end()[0] == 5


def test_the_terminal_of_the_container_has_the_size_of_the_caller_s(on, terminal):
    container = on(f"trap 'stty size' WINCH; trap 'exit 0' TERM; echo ready; {WAITING}", terminal=True)
    terminal.shows("ready")
    terminal.resize(40, 100)
    container.process.send_signal(signal.SIGWINCH)
    terminal.shows("40 100")
    container.process.send_signal(signal.SIGTERM)
    assert container.end()[0] == 0


def test_a_terminal_without_interactive_is_not_typed_into(on, terminal):
    before = terminal.settings
    container = on("tty; stty size", terminal=True, interactive=False)
    assert container.end()[0] == 0
    terminal.shows("30 90")
    assert terminal.settings == before


def test_a_caller_s_terminal_that_hangs_up_is_the_container_s_end(on, terminal):
    container = on("echo ready; exec sleep 600", terminal=True)
    terminal.shows("ready")
    container.process.send_signal(signal.SIGHUP)
    assert container.end()[0] == 129, terminal.text


def test_a_stop_leaves_a_container_with_a_terminal_running(on, terminal):
    container = on(f"trap 'exit 4' TERM; echo ready; {WAITING}", terminal=True)
    terminal.shows("ready")
    container.process.send_signal(signal.SIGTSTP)
    container.process.send_signal(signal.SIGTERM)
    assert container.end()[0] == 4


def test_without_a_terminal_of_its_own_a_container_has_pipes(on, terminal):
    script = "for n in 0 1 2; do test -t $n && echo terminal; done; cat; echo error >&2; sleep 0.1; echo end"
    container = on(script)
    terminal.type(b"a line\n\x04")
    assert container.end()[0] == 0
    terminal.shows("end")
    assert "terminal" not in terminal.text
    assert terminal.text.count("a line") == 2  # the terminal's echo, and the output
    assert "error" in terminal.text


def test_a_stop_gives_the_caller_its_terminal(on, terminal):
    """Pipes leave the caller's terminal as it is."""
    before = terminal.settings
    container = on("trap 'exit 6' TERM; echo ready; while :; do sleep 0.05; done")
    terminal.shows("ready")
    assert terminal.settings == before
    container.process.send_signal(signal.SIGTERM)
    assert container.end()[0] == 6


def test_a_reader_that_is_gone_does_not_keep_the_container(begin):
    reader, writer = os.pipe()
    container = begin("yes; echo $? >&2", {"stdout": writer})
    os.close(writer)
    os.close(reader)
    assert container.end()[0] == 0


def test_a_reader_that_is_gone_does_not_keep_a_container_with_a_terminal(begin, terminal):
    reader, writer = os.pipe()
    container = begin("yes", {"stdin": terminal.inner, "stdout": writer}, terminal=True)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    assert container.end()[0] == 129  # its terminal hangs up


def test_files_and_pipes_are_passed_as_they_are(bare, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda _: False)
    with Streams(replace(bare, interactive=True)) as made:
        assert made.descriptors == (0, 1, 2)
        made.start()
        made.resize()
        made.hang_up()
        made.finish()
    assert made.terminal is None


@pytest.fixture
def here(monkeypatch, terminal):
    """The descriptor of a terminal that is the input of this process, and of a file that is its output."""
    output = os.memfd_create("output")
    monkeypatch.setattr(streams, "INPUT", terminal.inner)
    monkeypatch.setattr(streams, "OUTPUT", output)
    yield terminal.inner, output
    os.close(output)


def test_the_settings_of_a_terminal_are_restored_once(bare, terminal, here):
    before = terminal.settings
    with Streams(replace(bare, interactive=True, terminal=True)) as made:
        assert here[0] not in made.descriptors
        assert termios.tcgetattr(made.descriptors[0])[3] == before[3]
        made.take_terminal()
        assert not terminal.settings[3] & ECHO
        made.restore()
        assert terminal.settings == before
        made.take_terminal()
        os.close(made.descriptors[0])
    assert terminal.settings == before


def test_all_is_relayed_that_was_written_before_the_end(bare, here):
    with Streams(replace(bare, terminal=True)) as made:
        inner = os.dup(made.descriptors[0])
        made.start()
        os.write(inner, b"shown")
        os.close(inner)
        made.finish()
        assert os.pread(here[1], 9, 0) == b"shown"
        made.hang_up()
        made.hang_up()
        made.resize()
        made.take_terminal()
        assert made.terminal is None
