"""Jobs that are given back to the queue, at most once."""

import subprocess

import pytest

from imagematrix.errors import EngineError
from imagematrix.integrations.slurm.requeue import is_requeueable, requeue_job

BATCH = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"SLURM_RESTART_COUNT": "0"}, True),
        ({"SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_RESTART_COUNT": "x"}, False),
        ({"SLURM_LOCALID": "1"}, False),
        ({"ENVIRONMENT": "INTERACTIVE"}, False),
        ({"ENVIRONMENT": ""}, False),
    ],
)
def test_a_batch_job_is_requeued_once_by_one_task(changes, expected):
    assert is_requeueable({**BATCH, **changes}) is expected


@pytest.fixture
def scontrol(monkeypatch):
    """Call it with what scontrol answers; it returns the commands."""
    commands: list[list[str]] = []

    def answer(result):
        def run(words, **_):
            commands.append(words)
            if isinstance(result, BaseException):
                raise result
            return subprocess.CompletedProcess(words, result[0], "", result[1])

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return answer


def test_scontrol_is_given_the_job(scontrol):
    commands = scontrol((0, ""))
    assert requeue_job(BATCH) == "7"
    assert commands == [["scontrol", "requeue", "7"]]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((1, "Requested operation is presently disabled\n"), "presently disabled"),
        (FileNotFoundError(2, "No such file or directory"), "scontrol: No such file"),
        (subprocess.TimeoutExpired("scontrol", 20), "no answer in 20 seconds"),
    ],
)
def test_what_scontrol_refuses_is_told(scontrol, answer, reason):
    scontrol(answer)
    with pytest.raises(EngineError, match=reason):
        requeue_job(BATCH)


def test_a_job_without_a_number_is_left(scontrol):
    commands = scontrol((0, ""))
    with pytest.raises(EngineError, match="its number is unknown"):
        requeue_job({**BATCH, "SLURM_JOB_ID": "7; x"})
    assert commands == []
