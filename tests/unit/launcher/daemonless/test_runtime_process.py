"""The process that becomes the runtime, up to the exec, and its errors."""

import fcntl
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, UsageError
from imagematrix.launcher.daemonless import namespace, runtime_process
from imagematrix.launcher.daemonless.gate import OwnGate, open_pipe
from imagematrix.launcher.daemonless.runtime import ContainerStart, RuntimeCommand
from imagematrix.launcher.daemonless.runtime_process import become_runtime
from imagematrix.launcher.daemonless.streams import Streams


class Left(BaseException):
    """In place of the end of this process."""


class Runtime:
    """A runtime that notes its place, and passes descriptors."""

    name = "fake"
    program = "/bin/fake"
    as_root = False
    becomes_process = True
    ends_with_keeper = True

    def __init__(self, *descriptors):
        self.descriptors = descriptors
        self.places = []

    def fit(self, container, root):
        self.places.append(root)
        return replace(container, folder="/fitted")

    def prepare(self, container, place):
        self.places += [container, place]
        return RuntimeCommand(
            words=["/bin/fake", container.folder],
            environment={"A": "b"},
            descriptors=self.descriptors,
            wait=lambda: self.places.append("waited"),
        )


@pytest.fixture
def launch(bare, stored, root, tmp_path, monkeypatch, kernel):
    """Call it to go up to the exec; it returns what is executed, or the exit code."""
    kernel()
    (root / "bin").mkdir()
    (root / "bin/sh").touch(0o755)
    taken: list[Any] = []

    def execute(*words):
        taken.append(words)
        raise Left

    def leave(code):
        taken.append(code)
        raise Left

    monkeypatch.setattr(os, "execve", execute)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(namespace, "enter_namespaces", lambda: None)
    monkeypatch.setattr(runtime_process, "mount_image", lambda *_, **__: str(root))
    monkeypatch.setattr(runtime_process, "_take_streams", lambda *_, **__: None)
    monkeypatch.setattr(runtime_process, "_close_all_but", lambda kept: taken.append(sorted(kept)))
    monkeypatch.setattr(runtime_process, "RESET", (signal.SIGUSR1,))

    def call(runtime, *, keeper=None, **changes):
        gate = OwnGate()
        container = replace(bare, **changes)
        launching = ContainerStart(
            container=container,
            image=stored(root),
            runtime=runtime,
            folder=str(tmp_path),
            gate=gate,
            squashfuse=None,
        )
        before = signal.getsignal(signal.SIGUSR1)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            with pytest.raises(Left):
                runtime_process._exec_runtime(launching, Streams(container), 2, mask, keeper or os.getppid())
        finally:
            signal.signal(signal.SIGUSR1, before)
            gate.close()
            for descriptor in gate.descriptors:
                os.close(descriptor)
        assert taken.pop(0) == sorted(
            {0, 1, 2, *gate.descriptors, *((3,) if "environment" in changes else ())}
        )
        return taken

    return call


def test_the_runtime_is_executed_when_all_is_ready(launch, root, tmp_path):
    passed = os.open("/", os.O_RDONLY)
    runtime = Runtime(passed)
    assert launch(runtime) == [("/bin/fake", ["/bin/fake", "/fitted"], {"A": "b"})]
    fitted, container, place, waited = runtime.places
    assert (fitted, container.folder, waited) == (str(root), "/fitted", "waited")
    assert (place.root, place.at, place.folder) == (str(root), f"{tmp_path}/files", str(tmp_path))
    assert (place.user, place.group) == (os.geteuid(), os.getegid())
    assert os.get_inheritable(passed)
    os.close(passed)


def test_a_start_whose_keeper_is_gone_ends(launch):
    runtime = Runtime()
    assert launch(runtime, keeper=os.getpid()) == [1]
    assert runtime.places == []


def test_a_connection_of_a_batch_system_gets_the_first_number(launch, monkeypatch):
    copied = []
    reader, writer = os.pipe()
    monkeypatch.setattr(os, "dup2", lambda *words, **_: copied.append(words))
    monkeypatch.setattr(os, "set_inheritable", lambda *words: copied.append(words))
    monkeypatch.setenv("PMI_FD", str(writer))
    runtime = Runtime()
    launch(runtime, environment={"PATH": "/bin", "PMI_FD": str(writer)})
    container = runtime.places[1]
    assert (container.descriptors, container.environment["PMI_FD"]) == (1, "3")
    (connection, number), inherited = copied
    assert (number, inherited) == (3, (3, True))
    assert os.path.sameopenfile(connection, writer)
    for descriptor in (connection, reader, writer):
        os.close(descriptor)


@pytest.mark.parametrize("text", ["", "2", "-1", "x", "\u0663", "987654"])
def test_what_names_no_connection_is_left_alone(bare, text, monkeypatch):
    monkeypatch.setenv("PMI_FD", text)
    container = replace(bare, environment={"PMI_FD": text})
    assert runtime_process._duplicate_connection(container) is None


def test_an_image_names_no_descriptor_to_pass(bare, monkeypatch):
    monkeypatch.delenv("PMI_FD", raising=False)
    reader, writer = os.pipe()
    assert runtime_process._duplicate_connection(replace(bare, environment={"PMI_FD": str(writer)})) is None
    for descriptor in (reader, writer):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (UsageError("wrong", remedy="right"), UsageError, "wrong"),
        (OSError(2, "No such file", "/x"), EngineError, "cannot start fake: /x No such file"),
        (ValueError("bad"), ValueError, "bad"),
        (None, None, None),
    ],
)
def test_an_error_is_told_to_the_keeper(bare, stored, monkeypatch, raised, kind, message):
    def start(*_):
        if raised:
            raise raised

    left: list[int] = []
    monkeypatch.setattr(runtime_process, "_exec_runtime", start)
    monkeypatch.setattr(os, "_exit", left.append)
    reader, writer = open_pipe()
    gate = OwnGate()
    runtime: Any = Runtime()
    launching = ContainerStart(
        container=bare, image=stored("/"), runtime=runtime, folder="/", gate=gate, squashfuse=None
    )
    become_runtime(launching, Streams(bare), writer, set(), 1)
    assert left == [1]
    gate.close()
    for descriptor in (*gate.descriptors, *(() if raised else (writer,))):
        os.close(descriptor)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    if kind is None:
        assert not text
        return
    error = pickle.loads(text)  # noqa: S301 - of this test
    assert (type(error), str(error)) == (kind, message)
    assert getattr(error, "remedy", None) == getattr(raised, "remedy", None)


def test_streams_are_taken_and_all_else_is_closed(bare, monkeypatch):
    calls = []
    given = os.open("/", os.O_RDONLY)
    streams = Streams(bare)
    streams.descriptors = (given, given, given)
    monkeypatch.setattr(os, "setsid", lambda: calls.append("setsid"))
    monkeypatch.setattr(os, "dup2", lambda _, number: calls.append(number))
    monkeypatch.setattr(fcntl, "ioctl", lambda *words: calls.append(words[0]))
    runtime_process._take_streams(streams, terminal=True)
    assert calls == ["setsid", 0, 1, 2, 0]
    runtime_process._close_all_but({int(one.name) for one in Path("/proc/self/fd").iterdir()} - {given})
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(given)
