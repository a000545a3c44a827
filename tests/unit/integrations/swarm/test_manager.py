"""A manager whose services are removed during queries."""

import pytest
from docker.errors import NotFound
from double import Double

from imagematrix.integrations.swarm.garbage_collection import collect_garbage
from imagematrix.integrations.swarm.manager import Manager, RemovedError

JOB = {"ID": "gone", "Spec": {"Name": "gone", "Mode": {"ReplicatedJob": {"TotalCompletions": 1}}}}


class Client(Double):
    """An engine that lists a job which is removed before its tasks are listed; `refuses` answers 404."""

    def __init__(self, *, refuses):
        self.api = self
        self._refuses = refuses

    def info(self):
        return {"Swarm": {"LocalNodeState": "active", "ControlAvailable": True}}

    def services(self, filters):
        assert filters == {"label": "io.imagematrix.swarm=job"}
        return [JOB]

    def containers(self, **_):
        return []

    def tasks(self, filters):
        assert filters == {"service": "gone"}
        if self._refuses:
            raise NotFound("service gone not found")
        return []

    def inspect_service(self, service):
        raise NotFound(f"service {service} not found")


@pytest.fixture(params=[True, False])
def client(request):
    return Client(refuses=request.param)


def test_a_wait_ends_when_its_service_is_removed(client):
    with pytest.raises(RemovedError, match="the service was removed"):
        Manager(client).wait("gone", 1, lambda _: None)


def test_a_service_that_another_manager_removes_does_not_stop_cleaning(client):
    assert collect_garbage(client).services == ()
