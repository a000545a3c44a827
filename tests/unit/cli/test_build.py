"""`imagematrix build` and `imagematrix plan` with a simulated engine."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import building
import pytest
from rich.console import Console

from imagematrix.build.executor.result import BuildStatus, Result
from imagematrix.build.plan import context
from imagematrix.cli.shared.build_session import BuildOptions
from imagematrix.cli.shared.progress import _Board, show_progress
from imagematrix.cli.shared.progress import _Lines as Reporter
from imagematrix.errors import BuildError, EngineError, UsageError

CPU = ("--only", "cuda=none")


def test_build_prints_references_to_stdout_and_progress_to_stderr(command, backend, tmp_path):
    result = command("build", *CPU, "--jobs", "1")
    assert result.code == 0
    assert result.out.splitlines() == list(backend.images)
    note, *lines = result.err.splitlines()
    assert note.startswith("the engine has the classic image store")
    assert [re.sub(r" [0-9.]+ s$", "", line) for line in lines] == [
        "building cpu-x86-64-v3",
        "[1/2] built cpu-x86-64-v3",
        "building cpu-znver4",
        "[2/2] built cpu-znver4",
        "compression of new layers: engine",
    ]
    assert (tmp_path / ".imagematrix" / "logs" / "training" / "v1-cpu-znver4.log").is_file()
    assert ("left",) in backend.calls

    again = command("build", *CPU)
    assert again == (0, "", "nothing to build: 2 images up to date\n")
    more = command("build", "--only", "march=znver4")
    assert more.code == 0
    assert "1 image more up to date" in more.err


def test_failed_build_exits_with_6_and_shows_its_output(command, backend, tmp_path):
    backend.layers = []
    backend.errors["cpu-x86-64-v3"] = BuildError("ld: cannot find -lm", remedy="install it")
    result = command("build", *CPU, "--jobs", "1")
    assert result.code == 6
    assert result.out.splitlines() == list(backend.images)
    log = tmp_path / ".imagematrix" / "logs" / "training" / "v1-cpu-x86-64-v3.log"
    assert f"cpu-x86-64-v3 (log: {log})\nimagematrix: ld: cannot find -lm\n  install it\n" in result.err
    assert result.err.endswith("imagematrix: 1 of 2 builds failed: cpu-x86-64-v3\n")


def buildkit(time, reason="main.c:1: error"):
    """Return BuildKit's last lines about a step that failed after `time` seconds."""
    return BuildError(
        f"#{time[0]} {time} {reason}",
        f"#{time[0]} ERROR: process did not complete successfully: exit code: 1",
        "------",
        " > [program 2/2] RUN make:",
        f"{time} {reason}",
        "------",
        "ERROR: failed to solve: exit code: 1",
    )


def test_equal_failures_are_shown_once_with_their_cells(command, backend, tmp_path):
    backend.errors = {"cpu-x86-64-v3": buildkit("7.123"), "cpu-znver4": buildkit("9.5")}
    result = command("build", *CPU)
    assert result.err.count("main.c:1: error\n------") == 1
    logs = tmp_path / ".imagematrix" / "logs" / "training"
    assert f"\ncpu-x86-64-v3, cpu-znver4 (log: {logs / 'v1-cpu-x86-64-v3.log'})\n" in result.err
    backend.errors["cpu-znver4"] = buildkit("9.5", "main.c:2: error")
    assert command("build", *CPU).err.count(": error\n------") == 2


def test_audit_contradiction_exits_with_9(command, backend, tar):
    backend.layers = [tar(("usr/lib/libcuda.so.550.163.01", b""))]
    command("build", *CPU).refuses(
        9, "the labels promise no user-mode driver, but /usr/lib/libcuda.so.550.163.01"
    )
    assert not backend.images


def test_lost_engine_exits_with_8_and_is_reported_once(command, backend):
    backend.errors["cpu-x86-64-v3"] = EngineError("the engine is gone", remedy="start it")
    result = command("build", *CPU)
    assert result.code == 8
    assert result.err.count("the engine is gone") == 1


def test_changed_version_exits_with_7_in_build_and_plan(command, backend, conforms):
    command("build", *CPU)
    kept = dict(backend.images)
    changed = {"template": "FROM {{ base }}\n"}
    built, planned = command("build", *CPU, **changed), command("plan", *CPU, **changed)
    assert (built.code, built.out) == (7, "")
    assert "a version never changes, and these cells would change:" in built.err
    assert planned.code == 7
    assert planned.out.count(" refused ") == 2
    assert "dockerfile changed" in planned.out
    assert "2 refused" in planned.err
    document = conforms(json.loads(command("plan", *CPU, "--json", **changed).out))
    assert {cell["status"] for cell in document["cells"]} == {"refused"}
    assert backend.images == kept


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit(143), ZeroDivisionError])
def test_reports_are_written_however_a_build_ends(command, backend, tmp_path, conforms, signal, monkeypatch):
    """Finished cells are built and others stopped, in all reports: stdout, JUnit and GitHub."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))

    class Ended(Reporter):
        def on_finish(self, result):
            super().on_finish(result)
            raise signal

    make = backend.make

    def second(order, *words):
        if "znver4" in order.reference:
            assert backend.stopped.wait(10)
        return make(order, *words)

    backend.make = second
    monkeypatch.setattr("imagematrix.cli.shared.progress._Lines", Ended)
    words = ("build", *CPU, "--jobs", "1", "--json", "--junit", tmp_path / "junit.xml")
    if signal is ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            command(*words)
        return
    done = command(*words)
    assert done.code == (143 if isinstance(signal, SystemExit) else 130)
    document = conforms(json.loads(done.out))
    assert [cell["status"] for cell in document["cells"]] == ["built", "stopped"]
    assert "stopped: finished images are kept, and the next build continues from here" in done.err
    assert (tmp_path / "junit.xml").read_text().count("<testcase") == 2
    assert ("stop",) in backend.calls
    assert ("left",) in backend.calls


def test_unreadable_context_fails_only_its_own_image(command, conforms, monkeypatch, tmp_path):
    (tmp_path / "deep").mkdir()
    real = context.list_context_paths

    def names(folder):
        if folder.name == "deep":
            raise RecursionError("too deep")
        return real(folder)

    monkeypatch.setattr(context, "list_context_paths", names)
    other = "  app: {version: v1, template: training.j2, context: deep}\n"
    other += "  on: {version: v1, template: on.j2}\naxes:"
    (tmp_path / "templates" / "on.j2").write_text("FROM {{ images['app'] }}\n")
    changes = [("axes:", other)]
    planned = command("plan", *CPU, "--json", changes=changes)
    assert planned.code == 2
    conforms(json.loads(planned.out))
    result = command("build", *CPU, "--json", changes=changes)
    assert result.code == 6
    document = conforms(json.loads(result.out))
    results = {(cell["image"], cell["status"]) for cell in document["cells"]}
    assert results == {("training", "built"), ("app", "failed"), ("on", "failed")}
    assert f"{tmp_path / 'deep'}: cannot be read: too deep" in result.err
    assert "it builds on app: " in result.err
    assert command("export", "bake", *CPU, changes=changes).code == 2
    assert " failed " in command("plan", *CPU, changes=changes).out


def test_missing_base_fails_only_its_own_image(command, backend, conforms, tmp_path):
    (tmp_path / "templates" / "app.j2").write_text("FROM other:1\n")
    changes = [("axes:", "  app: {version: v1, template: app.j2}\naxes:")]
    backend.missing = {"other:1"}
    planned = command("plan", *CPU, changes=changes)
    assert (planned.code, planned.out.count(" failed ")) == (2, 2)
    result = command("build", *CPU, "--json", "--junit", tmp_path / "junit.xml", changes=changes)
    assert result.code == 6
    document = conforms(json.loads(result.out))
    results = {(cell["image"], cell["status"], cell["error"]) for cell in document["cells"]}
    assert results == {("training", "built", None), ("app", "failed", "other:1 is nowhere")}
    assert document["error"] is None
    assert 'tests="4" failures="2" errors="0"' in (tmp_path / "junit.xml").read_text()
    assert result.err.count("imagematrix: other:1 is nowhere") == 1, "once for both cells"
    assert "\napp:v1 cpu-x86-64-v3, app:v1 cpu-znver4\n" in result.err


def test_base_whose_registry_is_down_exits_with_8_after_the_other_builds(command, backend, tmp_path):
    (tmp_path / "templates" / "app.j2").write_text("FROM other:1\n")
    changes = [("axes:", "  app: {version: v1, template: app.j2}\naxes:")]
    resolve = backend.resolve

    def down(name):
        if name == "other:1":
            raise EngineError("its registry cannot be reached", remedy="try again")
        return resolve(name)

    backend.resolve = down
    command("plan", *CPU, changes=changes).fails(8, "\n  try again\n")
    result = command("build", *CPU, changes=changes)
    assert result.code == 8
    assert len(result.out.splitlines()) == 2
    assert result.err.endswith("imagematrix: its registry cannot be reached\n  try again\n")
    stopped = command(
        "build", *CPU, "--fail-fast", "--json", changes=[*changes, ("version: v1", "version: v2")]
    )
    assert [cell["status"] for cell in json.loads(stopped.out)["cells"]] == [
        "stopped",
        "stopped",
        "failed",
        "failed",
    ]


def test_lock_stays_if_a_registry_is_down(command, backend, tmp_path):
    assert command("lock").code == 0
    kept = (tmp_path / "imagematrix.lock").read_bytes()

    def newest(name):
        if name == "debian:trixie":
            raise EngineError("its registry cannot be reached", remedy="try again")
        return f"sha256:{'1' * 64}"

    backend.resolve_newest = newest
    result = command("lock", "--upgrade", "--json")
    assert (result.code, result.out) == (8, "")
    assert result.err == "imagematrix: its registry cannot be reached\n  try again\n"
    assert (tmp_path / "imagematrix.lock").read_bytes() == kept


def test_fatal_error_is_in_all_reports(command, backend, conforms, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    reports = ("--json", "--junit", tmp_path / "junit.xml")

    def gone(*_):
        raise EngineError("the engine is gone")

    backend.list_variants = gone
    result = command("build", *CPU, *reports, "--shard", "1/2")
    assert result.code == 8
    document = conforms(json.loads(result.out))
    assert document == {
        "schema": "imagematrix.build/v1",
        "shard": "1/2",
        "error": "the engine is gone",
        "for": None,
        "cells": [],
    }
    junit = (tmp_path / "junit.xml").read_text()
    assert 'tests="1" failures="0" errors="1"' in junit
    assert '<error message="the engine is gone">the engine is gone</error>' in junit
    assert "no cells\n\nthe engine is gone\n" in (tmp_path / "summary.md").read_text()
    (tmp_path / "build.json").write_text(result.out)
    assert command("build", *CPU, *reports, changes=[("images:", "imagse:")]).code == 2
    assert 'errors="1"' in (tmp_path / "junit.xml").read_text()


def test_changed_version_is_in_the_report(command, conforms, tmp_path):
    command("build", *CPU)
    words = ("build", "--json", "--junit", tmp_path / "junit.xml")
    result = command(*words, template="FROM {{ base }}\n")
    assert result.code == 7
    document = conforms(json.loads(result.out))
    assert {"refused", "stopped"} <= {cell["status"] for cell in document["cells"]}


PROCESS = """\
import pathlib, sys
sys.path.insert(0, {doubles!r})
import building
from imagematrix.build.stores import engine as local
from imagematrix.cli import main
from imagematrix.cli.shared.build_session import BuildSession
backend = building.FakeBackend(pathlib.Path(sys.argv.pop(1)))
backend.hold = True
BuildSession.builder = backend
local.EngineStore = lambda: backend
main()
"""


HEARS = ("env", "--default-signal=HUP")  # also if nohup runs the tests


@pytest.fixture
def held_build(project, tmp_path, tmp_path_factory):
    """The command line of a build whose engine finishes nothing."""
    (tmp_path / ".dockerignore").write_text("*\n")
    script = PROCESS.format(doubles=str(Path(building.__file__).parent))
    options = ["build", "-f", project(), "--json", "--jobs", "2", "--junit", tmp_path / "junit.xml"]
    return [sys.executable, "-c", script, tmp_path_factory.mktemp("layouts"), *options]


def ended(process):
    """Return the output of a process, which is killed if it does not end."""
    try:
        return process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signal_ends_a_build_with_a_report(held_build, tmp_path, conforms, number, code):
    with subprocess.Popen(
        [*HEARS, *held_build], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if line.startswith("building"):
                break
        process.send_signal(number)
        out, err = ended(process)
    assert process.returncode == code, err
    document = conforms(json.loads(out))
    assert {cell["status"] for cell in document["cells"]} == {"stopped", "excluded", "infeasible"}
    assert (tmp_path / "junit.xml").read_text().count("<skipped") == 12
    assert "Traceback" not in err


def test_closed_terminal_ends_a_build_with_a_report(held_build, tmp_path):
    master, terminal = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", *HEARS, *held_build],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        seen = b""
        while b"RUN true" not in seen:
            seen += os.read(master, 1000)
        os.close(master)
        assert process.wait(60) == 129
    assert (tmp_path / "junit.xml").read_text().count("<skipped") == 12


def test_build_under_nohup_survives_its_terminal(held_build):
    with subprocess.Popen(["nohup", *held_build], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for line in process.stderr:
            if line.startswith(b"building"):
                break
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        ended(process)
    assert process.returncode == 143


@pytest.mark.parametrize("words", [("build", "--json"), ("build",), ("plan",), ("plan", "--json")])
def test_full_disk_behind_stdout_is_a_single_error(command, words, monkeypatch):
    result = []
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        result = command(*words)
    assert result.code == 1
    assert result.err.endswith(
        "imagematrix: cannot write the answer: No space left on device\n"
        "  free disk space where stdout goes, or set TMPDIR to another folder\n"
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_board_shows_running_cells(planned, monkeypatch):
    one, other = planned(only="cuda=none").items
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLORTERM", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with show_progress((one, other)) as board:
        board.on_start(one)
        board.on_start(other)
        board.on_step(one, "2/3 RUN [bold] make")
        running = io.StringIO()
        assert isinstance(board, _Board)
        Console(file=running, width=60).print(board.render())
        board.on_finish(Result(item=one, status=BuildStatus.BUILT, seconds=1.25))
        board.on_step(one, "too late")
        board.on_finish(Result(item=other, status=BuildStatus.FAILED, seconds=2))
    lines = [" ".join(line.split()) for line in running.getvalue().splitlines()]
    assert lines == ["cpu-x86-64-v3 2/3 RUN [bold] make", "cpu-znver4 starting", "0 of 2 done"]
    result = terminal.getvalue()
    assert "[1/2]" in result
    assert "cpu-x86-64-v3 1.2 s" in result
    assert "\x1b[31mfailed\x1b[0m cpu-znver4 2.0 s" in result
    assert "2 of 2 done" in result
    assert "too late" not in result


@pytest.mark.parametrize("width", [100, 80, 40, 12])
def test_progress_board_never_truncates_names_and_time_left(planned, monkeypatch, width):
    items = planned(only="cuda=12.4,march=znver4").with_status("build")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    with show_progress(items) as board:
        for item in items:
            board.on_start(item)
            board.on_step(item, f"2/3: RUN {'make ' * 99}")
        board.on_finish(Result(item=items[0], status=BuildStatus.BUILT, seconds=60))
        running = io.StringIO()
        assert isinstance(board, _Board)
        Console(file=running, width=width).print(board.render())
    shown = running.getvalue()
    *rows, last = shown.splitlines()
    joined = shown.replace("\n", "")
    assert all(item.cell.id in joined for item in items[1:])
    assert "s left" in last.replace("\n", "") or width == 12
    if width >= 80:
        assert len(rows) == len(items) - 1
        assert all(len(row) < width - 2 and row.endswith("…") for row in rows)


def test_no_progress_board_without_builds(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress(()):
        pass
    assert terminal.getvalue() == ""


def test_progress_as_plain_text_has_the_logs(command, backend):
    make = backend.make

    def talking(order, log, step):
        log.write("#5 0.1 hello\n#5 0.2 ::error::pwned\x1b[31m\n")
        return make(order, log, step)

    backend.make = talking
    result = command("build", "--only", "march=znver4,cuda=none", "--progress", "plain")
    assert result.code == 0
    assert "\ncpu-znver4: #5 0.1 hello\n" in result.err
    assert not re.search("\x1b|(?<!\\S)::error", result.err)
    assert re.search(r"^\[1/1\] built cpu-znver4 [0-9.]+ s$", result.err, re.MULTILINE)


def test_progress_as_json_is_a_document_for_each_event(command, backend, conforms):
    backend.errors["cpu-x86-64-v3"] = BuildError("##[error]no")
    result = command("build", *CPU, "--jobs", "1", "--progress", "json")
    assert result.code == 6
    lines = [line for line in result.err.splitlines() if line.startswith("{")]
    events = [conforms(json.loads(line)) for line in lines]
    shown = [(event["cell"], event["event"], event.get("text"), event.get("status")) for event in events]
    assert shown == [
        ("cpu-x86-64-v3", "started", None, None),
        ("cpu-x86-64-v3", "output", "making cpu-x86-64-v3", None),
        ("cpu-x86-64-v3", "step", "1/1 RUN true", None),
        ("cpu-x86-64-v3", "finished", None, "failed"),
        ("cpu-znver4", "started", None, None),
        ("cpu-znver4", "output", "making cpu-znver4", None),
        ("cpu-znver4", "step", "1/1 RUN true", None),
        ("cpu-znver4", "finished", None, "built"),
    ]
    assert not any("##[" in line for line in lines)
    unknown = command("build", *CPU, "--progress", "jso")
    assert (unknown.code, unknown.err) == (
        2,
        "imagematrix: invalid progress: 'jso'\n  did you mean 'json'?\n",
    )


def test_platform_selects_cells_wherever_a_condition_does(command, backend):
    assert command("build", *CPU, "--platform", "linux/amd64").code == 0
    assert len(backend.images) == 2
    for words in (["plan"], ["build"], ["render"], ["outdated"], ["export", "bake"], ["export", "github"]):
        command(*words, "--platform", "linux/amd64,linux/arm46").refuses(
            2, "--platform: this matrix has no cell for linux/arm46\n  it has linux/amd64\n"
        )


def test_options_of_caches_that_cannot_be_meant_are_refused(command, backend):
    command("build", *CPU, "--no-cache", "--cache-from", "reg/c").refuses(
        2, "--no-cache and --cache-from contradict each other\n  pass one of them\n"
    )
    command("build", *CPU, "--cache-to", "type=s3,bucket=x").refuses(
        2, "--cache-to: caches of the type 's3' are not supported\n"
    )
    assert not backend.images


def test_without_cache_a_new_version_is_not_taken_over(command, backend):
    backend.layers = []
    assert command("build", *CPU).code == 0
    raised = [("version: v1", "version: v2")]
    planned = command("plan", *CPU, changes=raised)
    assert planned.out.count(" adopt ") == 2
    assert command("build", *CPU, "--no-cache", changes=raised).code == 0
    assert len(backend.called("make")) == 4


def test_builder_option_accepts_name_and_jobs():
    options = BuildOptions(push=False, jobs=2, builders=("big=8", "small"))
    assert options.parse_builders() == [("big", 8), ("small", 2)]


@pytest.mark.parametrize("text", ["", "=2", "big=", "big=0", "big=-1", "big=x", "big=\u00b2"])
def test_invalid_builder_option_is_rejected(text):
    with pytest.raises(UsageError, match="expected NAME or NAME=JOBS"):
        BuildOptions(push=False, jobs=2, builders=(text,)).parse_builders()
