"""Containers, images and a kernel for tests of the start of containers."""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from imagematrix.common import programs as node_programs
from imagematrix.common import settings
from imagematrix.images.local_store.folder import StoredImage
from imagematrix.launcher.daemonless.container import ContainerSpec

DIGEST = f"sha256:{'1' * 64}"
DRIVER = Path(__file__).with_name("start_fake.py")


@pytest.fixture
def bare():
    """A container without anything."""
    return ContainerSpec(
        name="n",
        args=("sh",),
        environment={"PATH": "/bin"},
        folder="/",
        binds=(),
        devices=(),
        annotations={},
    )


@pytest.fixture
def stored():
    """Call it with a path to get an image in a store that has its files there."""

    def made(root, kind="folder"):
        return StoredImage(
            digest=DIGEST,
            kind=kind,
            root=str(root),
            size=0,
            config={},
            names=(),
        )

    return made


@pytest.fixture
def root(tmp_path):
    """An empty folder for the files of an image."""
    made = tmp_path / "root"
    made.mkdir()
    return made


class Kernel:
    """System calls such as mount(2), which fail with `code` if that is set; `calls` are what was called."""

    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def __getattr__(self, name):
        def call(*words):
            self.calls.append((name, *words))
            return -1 if self.code else 0

        return call


@pytest.fixture
def kernel(monkeypatch):
    """Call it with an error number to get the Kernel of this test."""

    def made(code=0):
        found = Kernel(code)
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: found)
        monkeypatch.setattr(ctypes, "get_errno", lambda: code)
        return found

    return made


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Call it with the text of a script by its name, to have only these programs, as root too."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(settings, "FILE", str(tmp_path / "site.toml"))
    monkeypatch.setattr(node_programs, "_get_path", lambda: str(folder))

    def write(**scripts):
        for name, text in scripts.items():
            path = folder / name.replace("ch_run", "ch-run")
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        return folder

    return write


@pytest.fixture
def closing():
    """Call it with a gate, which is closed with its descriptors in the end."""
    with contextlib.ExitStack() as stack:

        def keep(gate):
            for descriptor in gate.descriptors:
                stack.callback(unless_closed, os.close, descriptor)
            stack.callback(unless_closed, gate.close)
            return gate

        yield keep


def unless_closed(close, *descriptor):
    with contextlib.suppress(OSError):
        close(*descriptor)


class Started:
    """A container that start_fake.py starts with the files in `work`, and the `process` of its keeper."""

    def __init__(self, work, given, options, before):
        self.work = work
        words = [sys.executable, str(DRIVER), json.dumps({"work": str(work), **given})]
        words = ["sh", "-c", f'{before} exec "$@"', "sh", *words] if before else words
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(work)}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(
            words, env=environment, start_new_session=True, text=True, **{**streams, **options}
        )

    def line(self):
        """Return the next line of the container's output, which tells that it runs."""
        return self.process.stdout.readline()

    def end(self, given=None, timeout=60):
        """Wait for the end; return the exit code, and all output that is left."""
        out, err = self.process.communicate(given, timeout=timeout)
        return self.process.returncode, out, err

    def leases(self):
        """Return the holders in the leases on the image."""
        return [json.loads(path.read_text()) for path in (self.work / "store/leases").glob("[!.]*")]


@pytest.fixture
def begin(tmp_path):
    """Call it with a script to start it as a container, and with the options of start_fake.py and Popen.

    The shell that starts it runs the script `before` first.
    """
    (tmp_path / "store").mkdir()
    (tmp_path / "root/bin").mkdir(parents=True)
    (tmp_path / "root/bin/sh").touch(0o755)
    made = []

    def call(script="", streams=None, before="", **given):
        made.append(Started(tmp_path, {"script": script, **given}, streams or {}, before))
        return made[-1]

    yield call
    for one in made:
        one.process.kill()
        one.process.wait()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            if stream:
                stream.close()
