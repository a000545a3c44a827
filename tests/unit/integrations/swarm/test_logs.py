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


class Streams(Client):
    """Streams that both say the same, again and again."""

    def __init__(self, *lines):
        self.api, self._lines, self.readings = self, lines, 0
        self.read = threading.Event()

    def service_logs(self, service, **_):
        assert service == "s"
        self.readings += 1
        if self.readings > 8:
            self.read.set()
        return iter(self._lines)


def test_what_the_engine_says_itself_is_printed_once(written):
    said = b"Error grabbing logs: rpc error: warning: incomplete log stream\n"
    client = Streams(said)
    logs = ServiceLogs(client, "s", lambda *words: written.append(words[1:]))
    logs.follow()
    assert client.read.wait(10)
    logs.finish()
    assert written == [(None, said)]


def test_a_line_that_could_not_be_written_is_written_later(written):
    errors = [OSError(28, "no space left")]

    def write(*words):
        if errors:
            raise errors.pop()
        written.append(words)

    client = Client([line("a", "1")], [line("a", "1")])
    logs = ServiceLogs(client, "s", write)
    logs.follow()
    assert client.read.wait(10)
    logs.finish()
    assert written == [("stdout", "a", b"1\n")]


def test_the_other_stream_is_read_if_one_cannot_be(written):
    class OneBroken(Client):
        def service_logs(self, service, *, stdout=False, **_):
            assert service == "s"
            if stdout:
                raise APIError("no such driver")
            return [line("a", "1")]

    logs = ServiceLogs(OneBroken(), "s", lambda *words: written.append(words))
    with pytest.raises(APIError, match="no such driver"):
        logs.finish()
    assert written == [("stderr", "a", b"1\n")]
