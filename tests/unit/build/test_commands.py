"""`imagematrix build` and `imagematrix plan` from the outside, with the fake engine behind them."""

import io
import json
import re
import sys

import pytest
from rich.console import Console

from imagematrix.build import buildx, local
from imagematrix.build.build import Result
from imagematrix.cli.progress import progress
from imagematrix.errors import BuildError, EngineError

CPU = ("--only", "cuda=none")


@pytest.fixture
def command(cli, project, backend, monkeypatch):
    """Call it with a command and its options, to run it on the good matrix or on a spoilt one."""
    monkeypatch.setattr(buildx, "Buildx", lambda *_: backend)
    monkeypatch.setattr(local, "Engine", lambda: backend)
    path = project()
    (path.parent / ".dockerignore").write_text("*\n")

    def call(name, *options, changes=(), **files):
        return cli(name, "-f", project(*changes, **files), *options)

    return call


def test_build_prints_the_new_references_and_tells_the_rest(command, backend, tmp_path):
    said = command("build", *CPU, "--jobs", "1")
    assert said.code == 0
    assert said.out.splitlines() == list(backend.images)
    note, *lines = said.err.splitlines()
    assert note.startswith("the engine has the classic image store")
    assert [re.sub(r" [0-9.]+ s$", "", line) for line in lines] == [
        "building cpu-x86-64-v3",
        "[1/2] built cpu-x86-64-v3",
        "building cpu-znver4",
        "[2/2] built cpu-znver4",
    ]
    assert (tmp_path / ".imagematrix" / "logs" / "training-v1-cpu-znver4.log").is_file()
    assert ("left",) in backend.calls

    again = command("build", *CPU)
    assert again == (0, "", "nothing to build: 2 images up to date\n")
    more = command("build", "--only", "march=znver4")
    assert more.code == 0
    assert "1 image more up to date" in more.err


def test_a_failed_build_ends_with_6_and_what_was_said(command, backend, tmp_path):
    backend.layers = []
    backend.errors["cpu-x86-64-v3"] = BuildError("ld: cannot find -lm", remedy="install it")
    said = command("build", *CPU, "--jobs", "1")
    assert said.code == 6
    assert said.out.splitlines() == list(backend.images)
    log = tmp_path / ".imagematrix" / "logs" / "training-v1-cpu-x86-64-v3.log"
    assert f"cpu-x86-64-v3 (log: {log})\nimagematrix: ld: cannot find -lm\n  install it\n" in said.err
    assert said.err.endswith("imagematrix: 1 of 2 builds failed: cpu-x86-64-v3\n")


def test_an_image_that_breaks_its_promise_ends_with_9(command, backend, tar):
    backend.layers = [tar(("usr/lib/libcuda.so.550.163.01", b""))]
    said = command("build", *CPU)
    assert (said.code, said.out) == (9, "")
    assert "the labels promise no user-mode driver, but there is /usr/lib/libcuda.so.550.163.01" in said.err
    assert not backend.images


def test_the_loss_of_the_engine_ends_with_8_and_is_told_once(command, backend):
    backend.errors["cpu-x86-64-v3"] = EngineError("the engine is gone", remedy="start it")
    said = command("build", *CPU)
    assert said.code == 8
    assert said.err.count("the engine is gone") == 1


def test_a_version_that_would_change_ends_both_commands_with_7(command, backend, conforms):
    command("build", *CPU)
    kept = dict(backend.images)
    changed = {"template": "FROM {{ base }}\n"}
    built, planned = command("build", *CPU, **changed), command("plan", *CPU, **changed)
    assert (built.code, built.out) == (7, "")
    assert "a version never changes, and these cells would:" in built.err
    assert planned.code == 7
    assert planned.out.count(" refused ") == 2
    assert "dockerfile changed" in planned.out
    assert "2 refused" in planned.err
    document = json.loads(command("plan", *CPU, "--json", **changed).out)
    conforms(document)
    assert {cell["status"] for cell in document["cells"]} == {"refused"}
    assert backend.images == kept


def test_the_report_is_the_document(command, backend, conforms):
    backend.errors["cpu-znver4"] = BuildError("no")
    said = command("build", *CPU, "--json")
    assert said.code == 6
    document = json.loads(said.out)
    conforms(document)
    assert [cell["status"] for cell in document["cells"]] == ["built", "failed"]


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit(143)])
def test_an_interrupt_says_what_stays(command, backend, signal):
    def interrupted(*_):
        raise signal

    backend.export = interrupted
    said = command("build", *CPU)
    assert said.code == (143 if isinstance(signal, SystemExit) else 130)
    assert "stopped: what is built stays, and the next build goes on from here" in said.err
    assert ("stop",) in backend.calls
    assert ("left",) in backend.calls


def test_a_plan_compares_with_what_is_there(command):
    command("build", "--only", "march=znver4,cuda=none")
    said = command("plan", *CPU)
    assert said.code == 0
    assert [line.split()[:2] for line in said.out.splitlines()[2:]] == [
        ["cpu-x86-64-v3", "build"],
        ["cpu-znver4", "up-to-date"],
    ]
    assert said.err == "1 build, 1 up-to-date\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_board_shows_what_runs(planned, monkeypatch):
    one, other = planned(only="cuda=none").items
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLORTERM", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with progress((one, other)) as board:
        board.started(one)
        board.started(other)
        board.step(one, "2/3 RUN [bold] make")
        running = io.StringIO()
        Console(file=running, width=60).print(board.render())
        board.finished(Result(item=one, status="built", seconds=1.25))
        board.step(one, "too late")
        board.finished(Result(item=other, status="failed", seconds=2))
    lines = [" ".join(line.split()) for line in running.getvalue().splitlines()]
    assert lines == ["cpu-x86-64-v3 2/3 RUN [bold] make", "cpu-znver4 begins", "0 of 2 done"]
    said = sys.stderr.getvalue()
    assert "[1/2]" in said
    assert "cpu-x86-64-v3 1.2 s" in said
    assert "\x1b[31mfailed\x1b[0m cpu-znver4 2.0 s" in said
    assert "2 of 2 done" in said
    assert "too late" not in said


def test_without_anything_to_build_there_is_no_board(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress(()):
        pass
    assert sys.stderr.getvalue() == ""
