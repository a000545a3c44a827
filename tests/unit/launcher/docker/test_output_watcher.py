"""Reading a container's last lines: without an engine, and from one with little, much or no output."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time

import pytest

from imagematrix.launcher.docker import output_watcher
from imagematrix.launcher.docker.output_watcher import OutputWatcher

HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"
STARTED = json.dumps({"Type": "container", "Action": "start", "Actor": {"ID": "c1"}}).encode() + b"\n"


def piece(text):
    return struct.pack(">BxxxL", 1, len(text)) + text


class Engine:
    """A server at a socket: each resource that begins with a key of `answers` gets pieces of bytes.

    A function among the pieces is called instead. `asked` are the requested resources.
    """

    def __init__(self, path):
        self.answers = {"/events": [HEAD, STARTED, self.wait]}
        self.requests = []
        self.over = threading.Event()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def wait(self):
        self.over.wait(60)

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection, contextlib.suppress(OSError):
            resource = connection.recv(4096).decode().split()[1]
            self.requests.append(resource)
            for part in next(parts for start, parts in self.answers.items() if resource.startswith(start)):
                part() if callable(part) else connection.sendall(part)

    def close(self):
        self.over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr(output_watcher, "EVERY_S", 0.01)
    result = Engine(tmp_path / "docker.sock")
    yield result
    result.close()


def watched(*, removed=True):
    result = OutputWatcher("a=b", 5.9, removed=removed)
    result.start()
    return result


def until(holds):
    while not holds():
        time.sleep(0.001)


def test_the_log_of_a_removed_container_is_read_while_it_runs(engine):
    engine.answers["/containers/c1/logs"] = [HEAD, piece(b"one\ntw"), engine.wait, piece(b"o\n\xff\n")]
    result = watched()
    until(lambda: len(engine.requests) == 2)
    assert result.container == "c1"
    engine.over.set()
    assert result.get_last_lines() == ["one", "two", "\ufffd"]
    events, logs = engine.requests
    assert events.startswith("/events?since=5&filters=")
    assert "follow=1" in logs


def test_a_finished_log_is_not_read_again(engine):
    engine.answers["/containers/c1/logs"] = [HEAD, piece(b"one\n")]
    result = watched()
    until(lambda: not result._thread.is_alive())
    assert result.get_last_lines() == ["one"]


def test_a_fast_log_is_not_followed(engine):
    """The log is reopened at its end, and earlier output is skipped."""
    opened = []

    def flood():
        opened.append(engine.requests[-1])

    lines = [piece(b"x" * 1000 + b"\n") for _ in range(100)] * 50
    engine.answers["/containers/c1/logs"] = [flood, HEAD, *lines, engine.wait, piece(b"end\n")]
    results = watched()
    until(lambda: len(opened) > 3)
    engine.over.set()
    result = results.get_last_lines()
    assert sum(map(len, result)) <= output_watcher.KEPT


def test_the_end_of_a_long_log_is_read(engine):
    lines = [piece(b"x" * 1000 + b"\n") for _ in range(1000)]
    engine.answers["/containers/c1/logs"] = [engine.wait, HEAD, *lines, piece(b"end\n")]
    result = watched()
    until(lambda: len(engine.requests) == 2)
    engine.over.set()
    assert result.get_last_lines()[-1] == "end"


def test_reading_an_endless_log_times_out(engine, monkeypatch):
    monkeypatch.setattr(output_watcher, "PATIENCE_S", 1)
    engine.answers["/containers/c1/logs"] = [HEAD, piece(b"one\n"), engine.wait]
    result = watched()
    until(lambda: len(engine.requests) == 2)
    assert result.get_last_lines() in (["one"], [])


def test_the_log_of_a_kept_container_is_read_afterwards(engine):
    engine.answers["/containers/json"] = [HEAD, b'[{"Id": "c1"}]']
    engine.answers["/containers/c1/logs"] = [HEAD, piece(b"one\n"), piece(b"two\n")]
    result = watched(removed=False)
    until(lambda: result.container == "c1")
    assert result.get_last_lines() == ["one", "two"]
    assert "follow" not in engine.requests[-1]


@pytest.mark.parametrize("removed", [True, False])
def test_a_removed_container(engine, removed):
    engine.answers["/containers/json"] = [HEAD, b"[]"]
    engine.answers["/containers/c1/logs"] = []
    assert watched(removed=removed).get_last_lines() == []


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.0 500 Oops\r\n\r\n", HEAD + b"[]\n", HEAD + b"{}\n", b"\xff"]
)
def test_invalid_events(engine, answer):
    engine.answers["/events"] = [answer]
    result = watched()
    assert result.get_last_lines() == []
    assert result.container is None


@pytest.mark.parametrize("removed", [True, False])
def test_no_engine(monkeypatch, tmp_path, removed):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    result = watched(removed=removed)
    assert result.get_last_lines() == []
    assert result.container is None


def test_a_remote_engine_is_queried_afterwards(remote_engine):
    remote_engine.responses["GET", "/containers/json"] = 200, b'[{"Id": "c1"}]'
    remote_engine.responses["GET", "/containers/c1/logs"] = 200, piece(b"one\n") + piece(b"two\n")
    assert watched(removed=False).get_last_lines() == ["one", "two"]
    assert "all=1" in remote_engine.requests[-2]
    assert f"tail={output_watcher.LINES}" in remote_engine.requests[-1]
    remote_engine.requests.clear()
    assert watched(removed=True).get_last_lines() == []  # it is gone by then
    assert remote_engine.requests == []
    remote_engine.responses["GET", "/containers/json"] = 200, b"[]"
    assert watched(removed=False).get_last_lines() == []
