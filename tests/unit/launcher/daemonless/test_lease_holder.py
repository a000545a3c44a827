"""The keeper of a container: its exit code, its signals, its leases, and what it leaves behind."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from machines import wait_until

WAITING = "while :; do sleep 0.05; done"


def state(pid):
    """Return the state of a process as proc_pid_stat(5) has it, "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def text_at(path):
    """Return the text of a file that will be there."""
    wait_until(lambda: path.exists() and path.read_text(), str(path), 30)
    return path.read_text().strip()


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("true", 0)])
def test_the_exit_code_is_the_command_s(begin, script, code):
    assert begin(script).end() == (code, "", "")


def test_the_streams_of_the_caller_are_the_container_s(begin):
    container = begin("cat; echo error >&2")
    assert container.end("all of it\n") == (0, "all of it\n", "error\n")


def test_without_interactive_there_is_no_input(begin):
    assert begin("cat; readlink /proc/self/fd/0", interactive=False).end("lost") == (0, "/dev/null\n", "")


def test_a_container_gets_no_descriptor_but_its_streams(begin):
    assert begin("ls /proc/$$/fd; :").end() == (0, "0\n1\n2\n", "")  # the shell has a descriptor for a pipe


def test_the_connection_of_a_batch_system_is_passed_as_descriptor_3(begin, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setenv("PMI_FD", str(writer))
    container = begin(
        "echo $PMI_FD; echo told > /proc/self/fd/$PMI_FD",
        {"pass_fds": [writer]},
        environment={"PMI_FD": str(writer)},
    )
    os.close(writer)
    with os.fdopen(reader) as file:
        assert container.end() == (0, "3\n", "")
        assert file.read() == "told\n"
    assert not list((tmp_path / "imagematrix/containers").iterdir())


def test_the_lease_names_the_first_process_before_it_runs_anything(begin, tmp_path):
    container = begin(f"cat {tmp_path}/store/leases/*; echo; echo $$; {WAITING}")
    assert container.line()
    (lease,) = container.leases()
    first = int(container.line())
    assert lease["pid"] == first
    assert lease["keeper"]["pid"] == container.process.pid
    assert lease["mounts"]
    assert (tmp_path / "claimed").read_text().split()[0] == str(first)
    container.process.send_signal(signal.SIGTERM)
    assert container.end()[0] == 143
    assert container.leases() == []
    assert not list((tmp_path / "imagematrix/containers").iterdir())


def test_a_container_with_processes_of_its_own_ends_with_the_first(begin, tmp_path):
    container = begin(f"cat {tmp_path}/store/leases/*; echo; {WAITING}", isolates=True)
    assert '"mounts": ""' in container.line()
    container.process.send_signal(signal.SIGTERM)
    assert container.end()[0] == 143


def test_the_lease_gets_a_mount_namespace_that_is_entered_later(begin, tmp_path):
    container = begin(f"echo $$; {WAITING}", enters=True)
    first = container.line().strip()
    lines = [f"{first} mnt:[1]", f"{first} mnt:[2]"]
    wait_until(lambda: (tmp_path / "claimed").read_text().splitlines() == lines, "the second", 30)
    assert [lease["mounts"] for lease in container.leases()] == ["mnt:[2]"]
    container.process.send_signal(signal.SIGKILL)
    container.end()


def test_the_lease_gives_signs_of_life(begin, tmp_path):
    container = begin(f"echo ready; {WAITING}", isolates=True)
    container.line()
    (path,) = (tmp_path / "store/leases").iterdir()
    os.utime(path, (0, 0))
    wait_until(lambda: path.stat().st_mtime > 0, "a sign of life", 30)


@pytest.mark.parametrize("whole_group", [True, False])
def test_a_signal_reaches_the_command_once(begin, whole_group):
    container = begin(f"trap 'echo got' TERM; trap 'exit 5' USR1; echo ready; {WAITING}")
    container.line()
    send = os.killpg if whole_group else os.kill
    send(container.process.pid, signal.SIGTERM)
    assert container.line() == "got\n"
    send(container.process.pid, signal.SIGUSR1)
    assert container.end() == (5, "", "")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR2])
def test_the_command_ends_by_a_signal_to_the_keeper(begin, number):
    container = begin("ulimit -c 0; echo ready; exec sleep 600")
    container.line()
    container.process.send_signal(number)
    assert container.end()[0] == 128 + number


def test_a_stop_stops_the_command_and_the_keeper(begin):
    container = begin("echo $$; exec sleep 600")
    first = int(container.line())
    container.process.send_signal(signal.SIGTSTP)
    for process in (container.process.pid, first):
        wait_until(lambda process=process: state(process) == "T", "the stop", 30)
    container.process.send_signal(signal.SIGCONT)
    wait_until(lambda: state(first) == "S", "the continuation", 30)
    container.process.send_signal(signal.SIGTERM)
    assert container.end()[0] == 143


def test_a_stop_does_not_stop_a_runtime_that_is_not_the_first_process(begin):
    script = 'sleep 600 & printf \'{"pid": %s}\' $! | sh -c "$HOOK"; echo $!; wait $!'
    container = begin(script, hook=True)
    first = int(container.line())
    container.process.send_signal(signal.SIGTSTP)
    container.process.send_signal(signal.SIGTERM)
    assert container.end()[0] == 143
    assert not state(first)


@pytest.mark.parametrize("how", ["sleep 600 &", "setsid sleep 600 &", "(trap '' TERM HUP; exec sleep 600) &"])
def test_what_the_command_leaves_behind_is_ended(begin, tmp_path, how):
    container = begin(f"{how} echo $! > {tmp_path}/left; exit 3")
    assert container.end() == (3, "", "")
    assert not state(text_at(tmp_path / "left"))


def test_children_from_before_the_container_are_left_alone(begin, tmp_path):
    """Those of a shell that executed this program."""
    before = f"sleep 600 > /dev/null 2>&1 & echo $! > {tmp_path}/monitor; (exit 5) &"
    container = begin(f"sleep 600 & echo $! > {tmp_path}/left; exit 3", before=before)
    monitor = text_at(tmp_path / "monitor")
    try:
        assert container.end() == (3, "", "")
        assert state(monitor)
        assert not state(text_at(tmp_path / "left"))
    finally:
        os.kill(int(monitor), signal.SIGKILL)


@pytest.mark.parametrize(
    "slow",
    [
        False,
        pytest.param(True),
    ],
)
def test_a_runtime_that_waits_for_the_pipes_of_what_is_left_ends(begin, tmp_path, slow):
    first = f"sh -c 'read go < {tmp_path}/go; sleep 600 & echo $! > {tmp_path}/left' > {tmp_path}/pipe &"
    hook = 'printf \'{"pid": %s}\' $! | sh -c "$HOOK"'
    fifos = f"mkfifo {tmp_path}/pipe {tmp_path}/go"
    pause = "" if slow else "sleep 0.3; "
    go = f"{{ {hook}; {pause}echo > {tmp_path}/go; }} &"
    container = begin(f"{fifos}; {first} {go} cat {tmp_path}/pipe; exit 4", hook=True, slow=slow)
    try:
        assert container.end(timeout=10)[0] == 4
        assert not state(text_at(tmp_path / "left"))
    finally:
        for name in ("left", "prepared"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(text_at(tmp_path / name)), signal.SIGKILL)


def test_the_first_process_ends_when_its_runtime_is_killed(begin):
    script = 'sleep 600 & printf \'{"pid": %s}\' $! | sh -c "$HOOK"; echo $! $$; wait $!'
    container = begin(script, hook=True)
    first, runtime = map(int, container.line().split())
    os.kill(runtime, signal.SIGKILL)
    assert container.end()[0] == 137
    assert not state(first)


def test_the_command_ends_with_the_keeper(begin):
    container = begin("echo $$; exec sleep 600")
    first = int(container.line())
    container.process.kill()
    container.end()  # its output ends with the command
    wait_until(lambda: state(first) in ("", "Z"), "the end of the command", 30)


def test_a_signal_before_the_first_process_exists_ends_the_start(begin, tmp_path):
    container = begin(fails="never")
    runtime = text_at(tmp_path / "prepared")
    container.process.send_signal(signal.SIGTERM)
    assert container.end() == (143, "", "")
    assert not state(runtime)
    assert container.leases() == []
    assert not list((tmp_path / "imagematrix/containers").iterdir())


def test_a_keeper_that_is_killed_takes_a_start_with_it(begin, tmp_path):
    container = begin(fails="never")
    runtime = text_at(tmp_path / "prepared")
    container.process.kill()
    container.end()
    wait_until(lambda: state(runtime) in ("", "Z"), "the end of the start", 30)


def test_a_runtime_that_ends_before_there_is_a_first_process_has_its_exit_code(begin, tmp_path):
    assert begin(fails="exit").end() == (9, "", "")
    assert not (tmp_path / "claimed").exists()
    assert begin("exit 8", hook=True).end() == (8, "", "")


def test_an_error_of_the_runtime_s_process_is_the_start_s(begin):
    code, _, err = begin(fails="error").end()
    assert (code, err) == (8, "EngineError: cannot start fake: /place No such file or directory\n")
    container = begin(program="none")
    assert container.end() == (127, "", "ProgramNotFoundError: none not found in the image\n")
    assert container.leases() == []


def test_a_runtime_that_cannot_be_executed_is_an_error(begin):
    code, _, err = begin(fails="program").end()
    assert (code, err.startswith("EngineError: cannot start fake: ")) == (8, True)
