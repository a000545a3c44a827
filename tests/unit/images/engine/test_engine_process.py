"""Processes of engines: anybody can give a process the name of one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compiling import compiled

from imagematrix.images.engine import engine_process

WAITING = "int pause(void); int main(void) { return pause(); }"


@pytest.fixture
def start(tmp_path):
    """Call it with words, or with a prefix, to start a program that is called exampled."""
    program = compiled(tmp_path / "exampled", WAITING)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    started = []

    def run(*words, prefix=()):
        process = subprocess.Popen([*prefix, program, *words])
        started.append(process)
        while Path(f"/proc/{process.pid}/comm").read_text() != "exampled\n":
            time.sleep(0.01)
        return process.pid

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_the_command_lines_of_an_engine_s_processes(start):
    first, second = start("--label", "a=b"), start()
    found = engine_process.read_command_lines("exampled")
    assert found[first][1:] == ["--label", "a=b"]
    assert list(found) == sorted([first, second])


def test_a_name_in_the_arguments_is_no_evidence(tmp_path):
    words = ["exampled", "-c", "import time; print(flush=True); time.sleep(60)", "--data-root", str(tmp_path)]
    with subprocess.Popen(words, executable=sys.executable, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert engine_process.read_command_lines("exampled") == {}
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_root_believes_neither_another_user_nor_a_container(start):
    start("--data-root=/tmp/evil", prefix=("setpriv", "--reuid=4321", "--clear-groups"))
    start(prefix=("unshare", "--mount"))
    assert engine_process.read_command_lines("exampled") == {}
    own = start()
    assert list(engine_process.read_command_lines("exampled")) == [own]


def test_a_process_that_has_ended_is_left_out(start, monkeypatch):
    start()

    def fail(_):
        raise ProcessLookupError

    monkeypatch.setattr(engine_process.EngineProcess, "read_words", fail)
    assert engine_process.read_command_lines("exampled") == {}
