"""Jobs that are given back to the queue, at most once."""

import subprocess
from unittest.mock import Mock

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
def scontrol(tmp_path, write_site, monkeypatch):
    """Call it with the lines of a scontrol in a folder of the site's file; it returns the program's path."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def write(text):
        path = tmp_path / "opt" / "scontrol"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        write_site(f'program_folders = ["{path.parent}"]\n')
        return path

    return write


def test_scontrol_of_the_site_s_folders_is_given_the_job(scontrol, tmp_path):
    scontrol(f'echo "$@" > {tmp_path}/words')
    assert requeue_job(BATCH) == "7"
    assert (tmp_path / "words").read_text() == "requeue 7\n"


def test_what_scontrol_refuses_is_told(scontrol):
    scontrol("echo Requested operation is presently disabled >&2; exit 1")
    with pytest.raises(EngineError, match="presently disabled"):
        requeue_job(BATCH)


def test_scontrol_that_is_not_found_has_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="scontrol was not found") as caught:
        requeue_job(BATCH)
    assert "program_folders" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(13, "Permission denied"), "scontrol: Permission denied"),
        (subprocess.TimeoutExpired("scontrol", 20), "no answer in 20 seconds"),
    ],
)
def test_scontrol_that_does_not_answer_is_told(scontrol, monkeypatch, error, reason):
    scontrol("")
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=error))
    with pytest.raises(EngineError, match=reason):
        requeue_job(BATCH)


def test_a_job_without_a_number_is_left(scontrol, tmp_path):
    scontrol(f"touch {tmp_path}/started")
    with pytest.raises(EngineError, match="its number is unknown"):
        requeue_job({**BATCH, "SLURM_JOB_ID": "7; x"})
    assert not (tmp_path / "started").exists()
