"""States of tasks, and when a job has ended."""

import pytest

from imagematrix.integrations.swarm.tasks import (
    SwarmTask,
    find_latest,
    get_replicas,
    has_job_ended,
    parse_timestamp,
    summarize_states,
)

STATES = (
    *("new", "pending", "assigned", "accepted", "preparing", "ready", "starting", "running"),
    *("complete", "shutdown", "failed", "rejected", "remove", "orphaned"),
)


def task(slot, state, since=0.0, reason="", code=None):
    return SwarmTask(
        id=f"t{slot}", slot=slot, node="n", state=state, reason=reason, exit_code=code, since=since
    )


@pytest.mark.parametrize("state", STATES)
def test_a_job_has_ended_only_when_no_task_can_run_any_more(state):
    over = STATES.index(state) >= STATES.index("complete")
    assert has_job_ended([task(1, "complete"), task(2, state)], 2) is over


def test_a_task_in_an_unknown_state_may_still_run():
    assert not has_job_ended([task(1, "paused")], 1)


def test_tasks_that_do_not_exist_yet_count():
    assert not has_job_ended([], 1)
    assert not has_job_ended([task(1, "complete")], 2)


def test_the_running_task_of_a_slot_counts():
    first, second, third = task(1, "shutdown", 5), task(1, "running", 1), task(2, "failed", 2)
    assert find_latest([second, first, third]) == [second, third]
    assert find_latest([task(1, "failed", 3), first]) == [first]


def test_the_summary_of_states():
    reason = "no suitable node (insufficient resources on 1 node)"
    tasks = [task(n, "pending", reason=reason) for n in range(4)]
    tasks += [task(n, "running") for n in range(4, 10)]
    assert summarize_states(tasks) == f"4 waiting, 6 running: {reason}"
    assert summarize_states([task(1, "preparing"), task(2, "complete"), task(3, "failed")]) == (
        "1 starting, 1 complete, 1 failed"
    )


def test_a_task_as_the_engine_describes_it():
    status = {
        "Timestamp": "2026-11-22T12:00:00.5Z",
        "State": "failed",
        "Message": "started",
        "Err": "task: non-zero exit (3)",
        "ContainerStatus": {"ContainerID": "c", "PID": 0, "ExitCode": 3},
    }
    parsed = SwarmTask.from_engine({"ID": "t", "Slot": 2, "NodeID": "n", "Status": status})
    assert (parsed.slot, parsed.state, parsed.exit_code) == (2, "failed", 3)
    assert parsed.reason == "task: non-zero exit (3)"
    assert parsed.since == parse_timestamp("2026-11-22T12:00:00Z") + 0.5
    running = {**status, "State": "running"}
    assert SwarmTask.from_engine({"ID": "t", "Status": running}).exit_code is None


def test_times():
    assert parse_timestamp("1970-01-02T00:00:00.250000000Z") == 86400.25
    assert parse_timestamp("0001-01-01T00:00:00Z") < 0
    assert parse_timestamp("") == 0


def test_jobs_and_other_services():
    job = {"Spec": {"Mode": {"ReplicatedJob": {"TotalCompletions": 10}}}}
    assert get_replicas(job) == 10
    assert get_replicas({"Spec": {"Mode": {"ReplicatedJob": {}}}}) == 1
    assert get_replicas({"Spec": {"Mode": {"Replicated": {"Replicas": 1}}}}) is None
