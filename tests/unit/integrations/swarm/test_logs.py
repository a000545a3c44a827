"""The output of tasks: each line once, although the engine repeats lines."""

import threading

import pytest
from docker.errors import APIError
from double import Double

from imagematrix.integrations.swarm import logs as module
from imagematrix.integrations.swarm.logs import ServiceLogs


def line(task, text):
    ids = f"com.docker.swarm.node.id=n,com.docker.swarm.service.id=s,com.docker.swarm.task.id={task}"
    return f"{ids} {text}\n".encode()


class Client(Double):
    """An engine whose streams are `readings`, in order; an error among them is raised in its turn."""

    def __init__(self, *readings):
        self.api = self
        self._readings = list(readings)
        self.read = threading.Event()

    def service_logs(self, service, *, stdout=False, stderr=False, follow, **_):
        assert service == "s"
        if stderr and not stdout:
            return iter(())
        if follow and len(self._readings) == 1:
            self.read.set()
            return iter(())
        for one in self._readings.pop(0):
            if isinstance(one, Exception):
                raise one
            yield one


@pytest.fixture
def written(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    return []


def test_a_broken_stream_is_read_again(written):
    a, b, c = line("a", "1"), line("a", "1"), line("b", "2 3")
    client = Client([a, APIError("the manager restarts")], [a, b], [a, c, b, b"incomplete\n"])
    logs = ServiceLogs(client, "s", lambda *words: written.append(words))
    logs.follow()
    assert client.read.wait(10)
    assert written == [("stdout", "a", b"1\n"), ("stdout", "a", b"1\n")]
    logs.finish()
    assert written[2:] == [("stdout", "b", b"2 3\n"), ("stdout", None, b"incomplete\n")]


def test_output_that_cannot_be_read(written):
    logs = ServiceLogs(Client([APIError("no such driver")]), "s", lambda *words: written.append(words))
    with pytest.raises(APIError):
        logs.finish()
