"""Waiting for a job: its output on this command's streams."""

import pytest
from double import Double

from imagematrix.cli.swarm.run import JobWait
from imagematrix.errors import EngineError
from imagematrix.integrations.swarm.reservation import Reservation
from imagematrix.integrations.swarm.service import SwarmService
from imagematrix.integrations.swarm.tasks import SwarmTask

OUTPUT = [("a", b"one\n"), ("a", b"two"), ("b", b"\xff"), ("a", b"a piece of a long line"), ("b", b"\n")]


class Client(Double):
    """An engine that has the output of all tasks."""

    def __init__(self):
        self.api = self

    def service_logs(self, service, *, stdout=False, **_):
        assert service == "id"
        return [b"com.docker.swarm.task.id=%s %s" % (task.encode(), text) for task, text in OUTPUT * stdout]


class Manager(Double):
    def list_tasks(self, _):
        return [
            SwarmTask(id=name, slot=slot, node="n", state="complete", reason="", exit_code=0, since=0)
            for slot, name in enumerate("ab")
        ]

    def wait(self, identifier, *_):
        return self.list_tasks(identifier)


def wait(manager, replicas):
    """Wait for a job, and return the exit code."""
    service = SwarmService(
        name="job", image="i", command=(), job=True, replicas=replicas, reservation=Reservation()
    )
    return JobWait(manager=manager, service=service, identifier="id", remove=False).run(Client())


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (1, b"one\ntwo\xffa piece of a long line\n"),
        (2, b"job.0 | one\njob.0 | two\njob.1 | \xff\njob.0 | a piece of a long line\njob.1 | \n"),
    ],
)
def test_each_line_of_several_tasks_begins_with_the_name_of_its_task(capfdbinary, replicas, expected):
    assert wait(Manager(), replicas) == 0
    assert capfdbinary.readouterr().out == expected


def test_lines_have_the_id_of_their_task_while_no_manager_answers(capfdbinary):
    class Away(Manager):
        def list_tasks(self, _):
            raise EngineError("the engine cannot be reached")

        def wait(self, *_):
            return []

    assert wait(Away(), 2) == 0
    printed = capfdbinary.readouterr().out
    assert printed.startswith(b"job.a | one\njob.a | two\njob.b | \xff\n")
    assert len(printed.splitlines()) == len(OUTPUT)
