"""Running a command as if one had become it: with real processes, signals and a real terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imagematrix.launcher.foreground import attend

INTERRUPTS = (signal.SIGINT, signal.SIGQUIT)
ATTEND = "import sys; from imagematrix.launcher.foreground import attend; sys.exit(attend(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def _interrupts():
    """Let what the tests start hear these, also where a shell has the tests in its background."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in INTERRUPTS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def attended(script):
    """Start an interpreter without a terminal that attends to a shell script."""
    command = [sys.executable, "-c", ATTEND, "sh", "-c", script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_the_exit_code_comes_through(code):
    assert attend(["sh", "-c", f"exit {code}"]) == code


def test_a_command_that_a_signal_ends():
    assert attend(["sh", "-c", "kill -KILL $$"]) == 128 + signal.SIGKILL


def test_a_command_that_is_not_there():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(FileNotFoundError):
        attend(["/no/such/program"])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_what_is_done_meanwhile():
    done = []
    assert attend(["true"], lambda: done.append("it runs")) == 0
    assert done == ["it runs"]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"])
def test_signals_reach_the_command_and_do_not_end_us(name):
    script = f"trap 'echo got {name}; exit 7' {name}; echo ready; while :; do sleep 0.05; done"
    process = attended(script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.communicate(timeout=20)[0] == f"got {name}\n"
    assert process.returncode == 7


def test_a_signal_to_the_whole_group_reaches_it_once():
    """Without a terminal, as timeout(1) and batch systems send it."""
    script = "trap 'echo got it' TERM; echo ready; for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done"
    process = attended(script)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "got it\n"


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_both_the_group_and_we_get_reaches_it_as_often_as_it_would_without_us(times):
    """timeout(1) signals its child and then its own group."""
    script = "trap 'echo got it' TERM; echo ready; for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 0.1; done"
    process = attended(script)
    assert process.stdout.readline() == "ready\n"
    for _ in range(times):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "got it\n" * (times + 1)


def test_a_command_that_is_stopped_stops_us_and_goes_on_with_us():
    process = attended("echo ready; kill -STOP $$; echo on; exit 5")
    assert process.stdout.readline() == "ready\n"
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=20)[0] == "on\n"
    assert process.returncode == 5


def test_nobody_is_left_behind():
    process = attended("echo ready; sleep 60; true")
    assert process.stdout.readline() == "ready\n"
    group = [int(path.name) for path in Path("/proc").iterdir() if _is_in_group(path, process.pid)]
    assert len(group) >= 3
    process.kill()
    process.wait()
    while any(_is_in_group(Path(f"/proc/{pid}"), process.pid) for pid in group):
        time.sleep(0.01)
    process.stdout.close()


def _is_in_group(process, number):
    try:
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return state != "Z" and int(group) == number


def test_who_kills_us_ends_the_command():
    script = "trap 'echo asked to end; exit' TERM; echo ready; while :; do sleep 0.05; done"
    process = attended(script)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert process.communicate(timeout=20)[0] == "asked to end\n"


def test_descriptors_that_are_inheritable_are_passed_on():
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        assert attend(["sh", "-c", f"echo through > /proc/self/fd/{writing}"]) == 0
        assert os.read(reading, 100) == b"through\n"
    finally:
        os.close(reading)
        os.close(writing)


class Terminal:
    """A terminal with a session in it."""

    def __init__(self, script):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", ATTEND, "sh", "-c", script])  # noqa: S606
        self.seen = ""

    def until(self, text):
        while text not in self.seen and select.select([self.master], [], [], 20)[0]:
            try:
                self.seen += os.read(self.master, 1000).decode()
            except OSError:  # the other side has closed
                break
        assert text in self.seen
        return self

    def rest(self):
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.seen += os.read(self.master, 1000).decode()
            except OSError:
                return

    def type(self, text):
        os.write(self.master, text)

    def code(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("count", [1, 3])
def test_a_signal_to_the_whole_group_on_a_terminal_arrives_once(count):
    terminal = Terminal(
        f"n=0; trap 'n=$((n+1)); echo asked $n' TERM; echo ready; {'sleep 0.1; ' * 15} exit 9"
    )
    terminal.until("ready")
    for number in range(1, count + 1):
        os.killpg(terminal.pid, signal.SIGTERM)
        terminal.until(f"asked {number}")
    assert terminal.code() == 9
    terminal.rest()
    assert terminal.seen.count("asked") == count


def test_what_is_typed_at_a_terminal_arrives_once():
    terminal = Terminal("trap 'echo interrupted' INT; read a; echo got $a; sleep 0.3; read b; exit 9")
    terminal.type(b"hello\n")
    terminal.until("got hello")
    time.sleep(0.1)
    terminal.type(b"\x03")
    terminal.until("interrupted")
    terminal.type(b"x\n")
    assert terminal.code() == 9
    assert terminal.seen.count("interrupted") == 1


def test_a_terminal_s_new_size_is_the_command_s():
    import fcntl
    import struct
    import termios

    terminal = Terminal("trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.05; done")
    terminal.until("ready")
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    terminal.until("33 77")
    assert terminal.code() == 3
