"""The daemon of a step, found from a process in it."""

import os

import pytest

from imagematrix.integrations.slurm.step_daemon import find_step_daemon

PROCESSES = {
    7: ("systemd", 1),
    20: ("slurmd", 7),
    30: ("slurmstepd", 20),
    31: ("slurmstepd", 30),  # a task before it executes its program
    32: ("sh", 31),
    33: ("python3", 32),
    40: ("bash", 7),
}


@pytest.fixture
def proc(tmp_path):
    for pid, (name, parent) in PROCESSES.items():
        (tmp_path / str(pid)).mkdir()
        text = f"Name:\t{name}\nUmask:\t0022\nState:\tS (sleeping)\nPPid:\t{parent}\n"
        (tmp_path / str(pid) / "status").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("pid", "daemon"), [(33, 30), (31, 30), (30, 30), (20, None), (40, None), (99, None)]
)
def test_the_daemon_is_the_ancestor_of_all_tasks(proc, pid, daemon):
    assert find_step_daemon(pid, str(proc)) == daemon


def test_ancestors_that_are_hidden_from_users(proc):
    (proc / "30" / "status").unlink()
    assert find_step_daemon(33, str(proc)) == 31


def test_a_damaged_status_is_none(proc):
    (proc / "32" / "status").write_bytes(b"Name:\tsh\nPPid:\t\xff\n")
    assert find_step_daemon(33, str(proc)) is None
    assert find_step_daemon() is None or os.environ.get("SLURM_JOB_ID")
