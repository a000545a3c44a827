"""What the variables of a task say of its step."""

import time

import pytest

from imagematrix.errors import UsageError
from imagematrix.integrations.slurm.step import SlurmStep, find_step

IMAGE = "training:v1"
VARIABLES = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "a,b",
    "SLURMD_NODENAME": "a",
}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a,b", ["a", "b"]),
        ("gpu[08-11,3],login", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu3", "login"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
    ],
)
def test_lists_of_nodes_are_expanded(nodes, expected):
    variables = VARIABLES | {"SLURM_STEP_NODELIST": nodes, "SLURMD_NODENAME": expected[0]}
    step = find_step(IMAGE, variables)
    assert step is not None
    assert (step.nodes, step.node) == (tuple(expected), expected[0])


@pytest.mark.parametrize(
    ("changes", "restart", "start"),
    [
        ({}, "0", ""),
        ({"SLURM_JOB_START_TIME": "1795878794"}, "0", "1795878794"),
        ({"SLURM_JOB_START_TIME": "1795878818", "SLURM_RESTART_COUNT": "1"}, "1", "1795878818"),
    ],
)
def test_a_step_is_of_one_image_and_one_run_of_a_job(changes, restart, start):
    assert find_step(IMAGE, VARIABLES | changes) == SlurmStep(
        image=IMAGE, job="17", restart=restart, start=start, number="0", nodes=("a", "b"), node="a"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NODELIST": "a,../b"},
        {"SLURM_STEP_NODELIST": "a[1-"},
        {"SLURM_STEP_NODELIST": "a[1-999999999]"},
        {"SLURM_STEP_NODELIST": "a[]"},
        {"SLURM_STEP_NODELIST": "a[1-3]", "SLURMD_NODENAME": "a4"},
        {"SLURM_JOB_ID": "../1"},
        {"SLURM_STEP_ID": ""},
        {"SLURM_RESTART_COUNT": "one"},
        {"SLURM_RESTART_COUNT": "\udcff"},
        {"SLURM_JOB_START_TIME": "../1"},
        {"SLURM_JOB_START_TIME": "1" * 100_000},
        {"SLURM_JOB_START_TIME": "\u0663"},
    ],
)
def test_wrong_variables_are_refused(changes):
    started = time.monotonic()
    with pytest.raises(UsageError, match="SLURM") as caught:
        find_step(IMAGE, VARIABLES | changes)
    assert time.monotonic() - started < 10
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("changes", [{"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "a"}, None])
def test_a_step_on_one_node_needs_no_agreement(changes):
    assert find_step(IMAGE, {} if changes is None else VARIABLES | changes) is None
