"""Reading a container's last lines where there is no engine, or one that has nothing to tell."""

from __future__ import annotations

import docker
import pytest

from imagematrix.launch import watch
from imagematrix.launch.watch import Watch


class Client:
    """An engine on which one container starts and says something."""

    def __init__(self, *said, failure=None):
        self.api = self
        self._said = said
        self._failure = failure

    def events(self, **asked):
        assert asked == {
            "since": 5,
            "filters": {"type": "container", "event": "start", "label": "a=b"},
            "decode": True,
        }
        return iter([{"id": "c1"}])

    def logs(self, name, **asked):
        assert (name, asked) == ("c1", {"stream": True, "follow": True})
        yield from self._said
        if self._failure:
            raise self._failure


def watched(monkeypatch, client):
    monkeypatch.setattr(watch.engine, "client", lambda: client)
    found = Watch("a=b", 5.9)
    found.start()
    return found


def test_the_last_lines_are_kept(monkeypatch):
    found = watched(monkeypatch, Client(b"one\ntw", b"o\n\xff"))
    assert found.last_lines() == ["one", "two", "\ufffd"]
    assert found.container == "c1"


def test_of_much_the_end_is_kept(monkeypatch):
    found = watched(monkeypatch, Client(*[b"x" * 1000 + b"\n"] * 100, b"end\n"))
    assert found.last_lines()[-1] == "end"
    assert sum(map(len, found.last_lines())) < watch.KEPT


@pytest.mark.parametrize("failure", [docker.errors.NotFound("gone"), OSError("reset")])
def test_a_container_that_is_gone(monkeypatch, failure):
    assert watched(monkeypatch, Client(b"one\n", failure=failure)).last_lines() == ["one"]


def test_no_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    found = Watch("a=b", 5.9)
    found.start()
    assert found.last_lines() == []
    assert found.container is None
