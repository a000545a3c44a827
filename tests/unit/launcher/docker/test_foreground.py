"""Running a command in the foreground: with real processes, signals and a real terminal."""

from __future__ import annotations

import errno
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from imagematrix.launcher.docker.foreground import run_in_foreground

INTERRUPTS = (signal.SIGINT, signal.SIGQUIT)
RUN = """
import sys
from imagematrix.launcher.docker.foreground import run_in_foreground
sys.exit(run_in_foreground(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _interrupts():
    """Let child processes receive these signals, even if a shell runs the tests in the background."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in INTERRUPTS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def started(script):
    """Start an interpreter without a terminal that runs a script in the foreground, and wait for `ready`."""
    command = [sys.executable, "-c", RUN, "sh", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_the_exit_code_is_returned(code):
    assert run_in_foreground(["sh", "-c", f"exit {code}"]) == code


def test_a_command_ended_by_a_signal():
    assert run_in_foreground(["sh", "-c", "kill -KILL $$"]) == 128 + signal.SIGKILL


def test_a_missing_command():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(FileNotFoundError):
        run_in_foreground(["/no/such/program"])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_the_end_is_noticed_if_another_thread_takes_its_signal(monkeypatch):
    """The kernel gives SIGCHLD to any thread that does not block it, where it is ignored."""
    ended = subprocess.Popen.poll

    def late(process):
        """Return the state before the command's end, after its end."""
        monkeypatch.setattr(subprocess.Popen, "poll", ended)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(subprocess.Popen, "poll", late)
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        assert run_in_foreground(["true"]) == 0
    finally:
        over.set()
        other.join()


def test_on_start_is_called():
    done = []
    assert run_in_foreground(["true"], lambda: done.append("it runs")) == 0
    assert done == ["it runs"]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"])
def test_signals_are_forwarded_and_do_not_end_this_process(name):
    script = f"trap 'echo got {name}; exit 7' {name}; echo ready; while :; do sleep 0.05; done"
    process = started(script)
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.communicate(timeout=120)[0] == f"got {name}\n"
    assert process.returncode == 7


COUNTING = (
    "trap 'echo got it' TERM; trap end=1 USR1; echo ready; while [ ! $end ]; do sleep 0.05; done; echo ended"
)


def test_a_signal_to_the_group_arrives_once():
    """Without a terminal, as timeout(1) and batch systems send it."""
    process = started(COUNTING)
    signal_group(process)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=120)[0] == "got it\nended\n"


@pytest.mark.parametrize("times", [1, 2, 3])
def test_signals_to_the_group_and_to_this_process_are_counted_as_without_it(times):
    """timeout(1) signals its child and then its own group."""
    process = started(COUNTING)
    for _ in range(times):
        signal_group(process)
        assert process.stdout.readline() == "got it\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "got it\n"
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=120)[0] == "ended\n"


def signal_group(process):
    """Send SIGTERM to the group and wait until this has replaced the witness, the last that it does then."""
    witness = next(path for path in Path("/proc").iterdir() if _is_witness(path, process.pid))
    os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + 120
    while witness.exists():
        assert time.monotonic() < end, "the witness did not see the signal"
        time.sleep(0.01)


def _is_witness(process, group):
    return _is_in_group(process, group) and (process / "comm").read_text() == "cat\n"


def test_stopping_and_continuing_the_command_and_this_process():
    process = started("echo ready; kill -STOP $$; echo on; exit 5")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=120)[0] == "on\n"
    assert process.returncode == 5


def test_no_process_is_left():
    process = started("echo ready; exec sleep 60")  # one process, which the signal ends
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


def test_killing_this_process_ends_the_command():
    script = "trap 'echo asked to end; exit' TERM; echo ready; while :; do sleep 0.05; done"
    process = started(script)
    process.kill()
    assert process.communicate(timeout=120)[0] == "asked to end\n"


def test_inheritable_descriptors_are_passed():
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        assert run_in_foreground(["sh", "-c", f"echo through > /proc/self/fd/{writing}"]) == 0
        assert os.read(reading, 100) == b"through\n"
    finally:
        os.close(reading)
        os.close(writing)


class Terminal:
    """A terminal with a session."""

    def __init__(self, script, before=""):
        self.master, end = pty.openpty()
        # Not pty.fork: after tests with gRPC in this process, the fork may hang in gRPC's handlers.
        command = ["setsid", "--ctty", sys.executable, "-c", before + RUN, "sh", "-c", script]
        self._process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end)
        os.close(end)
        self.pid = self._process.pid
        self.seen = ""

    def until(self, text):
        while text not in self.seen and select.select([self.master], [], [], 60)[0]:
            try:
                self.seen += os.read(self.master, 1000).decode()
            except OSError as error:
                if error.errno != errno.EIO:  # the other side has closed
                    raise
                break
        assert text in self.seen, self._process.poll()
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
        return self._process.wait(60)


def counting(count):
    """Return a script that ends some time after `count` signals, so that a signal too many is seen."""
    after = "sleep 0.1; " * 5
    return (
        "n=0; trap 'n=$((n+1)); echo asked $n' TERM; echo ready; "
        f"while [ $n -lt {count} ]; do sleep 0.1; done; {after}exit 9"
    )


@pytest.mark.parametrize("count", [1, 3])
def test_a_signal_to_the_group_on_a_terminal_arrives_once(count):
    terminal = Terminal(counting(count))
    terminal.until("ready")
    for number in range(1, count + 1):
        os.killpg(terminal.pid, signal.SIGTERM)
        terminal.until(f"asked {number}")
    assert terminal.code() == 9
    terminal.rest()
    assert terminal.seen.count("asked") == count


def test_a_signal_to_the_group_while_the_last_is_handled_arrives_once():
    slow = """\
import time
from imagematrix.launcher.docker import foreground
started = foreground._Witness._start_witness
foreground._Witness._start_witness = staticmethod(lambda: (time.sleep(0.4), started())[1])
"""
    terminal = Terminal(counting(2), before=slow)
    terminal.until("ready")
    for number in (1, 2):
        os.killpg(terminal.pid, signal.SIGTERM)
        terminal.until(f"asked {number}")
    assert terminal.code() == 9
    terminal.rest()
    assert terminal.seen.count("asked") == 2


def test_ctrl_c_on_a_terminal_arrives_once():
    terminal = Terminal("trap 'echo interrupted' INT; read a; echo got $a; sleep 0.3; read b; exit 9")
    terminal.type(b"hello\n")
    terminal.until("got hello")
    time.sleep(0.1)
    terminal.type(b"\x03")
    terminal.until("interrupted")
    terminal.type(b"x\n")
    assert terminal.code() == 9
    assert terminal.seen.count("interrupted") == 1


def test_a_resized_terminal_is_reported_to_the_command():
    import fcntl
    import struct
    import termios

    terminal = Terminal("trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.05; done")
    terminal.until("ready")
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    terminal.until("33 77")
    assert terminal.code() == 3
