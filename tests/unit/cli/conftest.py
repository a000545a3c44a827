"""Commands that build, with a simulated engine."""

import io
import sys

import pytest

from imagematrix.build.stores import engine
from imagematrix.cli.shared.build_session import BuildSession


@pytest.fixture
def matrix(project, backend, monkeypatch):
    """The path of the valid matrix, whose images `backend` builds and stores."""
    monkeypatch.setattr(BuildSession, "builder", backend)
    monkeypatch.setattr(engine, "EngineStore", lambda: backend)
    path = project()
    (path.parent / ".dockerignore").write_text("*\n")  # files of the tests are not inputs
    return path


@pytest.fixture
def command(cli, project, matrix):  # noqa: ARG001 - for its effects
    """Call it with a command and its options, to run it on the valid matrix or a modified one."""

    def call(name, *options, changes=(), **files):
        return cli(name, *options, "-f", project(*changes, **files))

    return call


@pytest.fixture
def no_hosts(tmp_path, monkeypatch):
    """A list of no hosts on stdin and in none.ndjson of the current folder, as of a query that failed."""
    (tmp_path / "none.ndjson").write_text("[]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[]\n")))
