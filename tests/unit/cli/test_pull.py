"""pull: its answer, its progress, and its errors."""

import io
import json
import sys
import time

import pytest

from imagematrix.cli.shared import pull_image, run_docker
from imagematrix.cli.shared.pull_image import PullDisplay
from imagematrix.images.catalog.catalog import Catalog, Variant
from imagematrix.images.engine.pull import PullProgress
from imagematrix.launcher.docker.options import parse_run_args

DIGEST = f"sha256:{'1' * 64}"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Call it to make stderr a terminal, and get what it shows; pytest replaces stderr before the test."""

    def make():
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        return screen

    return make


@pytest.fixture
def pulled(monkeypatch):
    """The references that are pulled, with the options; the engine has none of them before."""
    calls = []

    def pull(selection, *, policy, report, before_pull):  # noqa: ARG001 - as the real one
        assert policy is None, "no line of these tests gives one"
        calls.append(selection.selected)
        report(PullProgress(layers=2, downloaded=1, received=5_000_000))
        return f"{selection.selected}@{DIGEST}"

    monkeypatch.setattr("imagematrix.launcher.docker.pull.pull_start_image", pull)
    monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: None)
    return calls


def words(profiles, catalog_file, host="genoa-h200"):
    return ("pull", "training:v1", "--host", profiles[host], "--catalog", catalog_file)


@pytest.mark.parametrize("present", [False, True])
def test_a_wait_at_random_comes_before_a_pull_only(cli, profiles, catalog_file, monkeypatch, present):
    done: list[str] = []
    waited: list[float] = []
    monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: None)
    monkeypatch.setattr(
        "imagematrix.images.engine.images.inspect_image",
        lambda *_, **__: {"Id": "sha256:1"} if present or "pull" in done else None,
    )
    monkeypatch.setattr("imagematrix.launcher.docker.pull.require_unpackable", lambda *_: None)
    monkeypatch.setattr(
        "imagematrix.launcher.docker.pull.pull_into_engine", lambda *_, **__: done.append("pull")
    )
    monkeypatch.setattr(time, "sleep", lambda wait: (done.append("wait"), waited.append(wait)))
    assert cli(*words(profiles, catalog_file), "--spread", "2m").code == 0
    assert done == ([] if present else ["wait", "pull"])
    assert all(0 <= wait <= 120 for wait in waited)


def test_the_variant_of_the_host_is_pulled(cli, profiles, catalog_file, pulled):
    result = cli(*words(profiles, catalog_file))
    (reference,) = pulled
    assert reference == "training:v1-cuda12.4-drv550.163.01-sm90-znver4-0123456789ab"
    assert (result.code, result.out) == (0, f"{reference}@{DIGEST}\n")
    first, last = result.err.splitlines()
    assert first == f"pulling {reference}"
    assert last.startswith(f"pulled {reference}: 5.0 MB in ")


def test_the_document_is_the_selection_with_the_digest(cli, profiles, catalog_file, pulled, conforms):
    document = conforms(json.loads(cli(*words(profiles, catalog_file), "--json").out))
    assert (document["selected"], document["digest"]) == (pulled[0], DIGEST)
    result = cli(*words(profiles, catalog_file, "grace-hopper"), "--json")
    assert result.code == 3
    assert conforms(json.loads(result.out))["selected"] is None
    assert len(pulled) == 1, "nothing is pulled if nothing fits"


def test_options_are_those_of_select(cli, profiles, catalog_file, pulled):
    assert cli(*words(profiles, catalog_file, "mixed")).code == 3
    assert "for GPU 0 (Tesla T4)" in cli(*words(profiles, catalog_file, "mixed"), "--gpus", "1").err
    assert cli(*words(profiles, catalog_file), "--gpus", "none").code == 0
    assert pulled[-1].startswith("training:v1-cpu-znver4-")
    assert cli(*words(profiles, catalog_file), "--where", "pyton=3.13").code == 2
    assert cli("pull").code == 2
    assert cli("pull", "other:v1", *words(profiles, catalog_file)[2:]).code == 4


def test_another_machine_s_engine_needs_a_host(cli, profiles, catalog_file, pulled, monkeypatch):
    monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: "node7")
    result = cli("pull", "training:v1", "--catalog", catalog_file)
    assert (result.code, result.out, pulled) == (2, "", [])
    assert "the engine runs on node7" in result.err
    assert cli(*words(profiles, catalog_file)).code == 0


def test_without_an_engine_nothing_is_selected(cli, profiles, catalog_file):
    cli(*words(profiles, catalog_file)).refuses(8, "cannot reach the Docker engine")


def test_an_image_that_only_the_engine_has_stays_as_it_is(cli, engine, profiles):
    local = Variant(reference="training:v1-cpu-x-0123456789ab", digest=None, platform="linux/amd64")
    engine.add_catalog(Catalog(image="training", version="v1", variants=(local,)))
    shown = json.dumps({"Id": DIGEST, "RepoDigests": [f"training@{DIGEST}"]}).encode()
    engine.responses["GET", f"/images/{local.reference}/json"] = 200, shown
    result = cli("pull", "training:v1", "--host", profiles["laptop"])
    assert result == (0, f"{local.reference}@{DIGEST}\n", "")
    assert not any("create" in resource or "tag" in resource for resource in engine.requests)


def progresses(display, clock, *steps):
    """Report steps of 1 MB, each at a time."""
    with display:
        for number, time in enumerate(steps):
            clock.append(time)
            display(PullProgress(layers=4, downloaded=number, received=number * 1_000_000))
        clock.append(100.0)


def test_a_registry_that_does_not_answer_shows(terminal):
    screen = terminal()
    clock = [0.0]
    with PullDisplay("t:v1", now=lambda: clock[-1]) as display:
        for time in (0.0, 1.0):
            clock.append(time)
            display(PullProgress(layers=0, downloaded=0, received=0))
    assert screen.getvalue().startswith("\r\x1b[Kasking the registry: t:v1")


def test_lines_without_a_terminal_are_few(capsys):
    clock: list[float] = []
    progresses(PullDisplay("t:v1", now=lambda: clock[-1]), clock, 0.0, 1.0, 31.0, 32.0, 62.0)
    assert capsys.readouterr().err.splitlines() == [
        "pulling t:v1",
        "pulled 2 of 4 layers, 2 MB: t:v1",
        "unpacking 4 layers: t:v1",
        "pulled t:v1: 4.0 MB in 100.0 s",
    ]


def test_the_line_on_a_terminal_is_removed_at_the_end(terminal):
    screen = terminal()
    clock: list[float] = []
    progresses(PullDisplay("t:v1\x1b", now=lambda: clock[-1]), clock, 0.0, 0.1, 0.4)
    shown, end = screen.getvalue().split("\r\x1b[K")[1:]
    assert shown == "pulled 2 of 4 layers, 2 MB: t:v1\N{REPLACEMENT CHARACTER}"
    assert end == "pulled t:v1\N{REPLACEMENT CHARACTER}: 2.0 MB in 100.0 s\n"


def test_a_long_line_does_not_wrap(terminal, monkeypatch):
    screen = terminal()
    monkeypatch.setattr(pull_image, "COLUMNS", 40)
    clock: list[float] = []
    progresses(PullDisplay("t" * 100, now=lambda: clock[-1]), clock, 0.0, 1.0)
    assert len(screen.getvalue().split("\r\x1b[K")[1]) == 39


@pytest.mark.parametrize(("stream", "shown"), [(io.StringIO, "pulling t:v1\n"), (Terminal, "\r\x1b[K")])
def test_an_interrupted_pull_leaves_no_line(monkeypatch, stream, shown):
    def interrupted():
        with PullDisplay("t:v1") as display:
            display(PullProgress(layers=1, downloaded=0, received=0))
            raise KeyboardInterrupt

    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert written.getvalue() == shown


def test_a_pull_with_nothing_to_do_says_nothing(capsys):
    with PullDisplay("t:v1"):
        pass
    with PullDisplay("t:v1", quiet=True) as display:
        display(PullProgress(layers=1, downloaded=0, received=0))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("line", ["training:v1", "--pull never training:v1", "-d training:v1"])
def test_run_pulls_by_digest_before_docker_starts(monkeypatch, profiles, line):
    """A policy other than to pull what is missing is docker's."""
    reference = "registry:5000/training:v1-x"
    variant = Variant(reference=reference, digest=DIGEST, platform="linux/amd64")
    catalog = Catalog(image="registry:5000/training", version="v1", variants=(variant,))
    done = []
    monkeypatch.setattr(run_docker, "find_catalog", lambda *_: catalog)
    monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: None)
    monkeypatch.setattr("imagematrix.images.engine.system.get_architecture", lambda: "amd64")
    monkeypatch.setattr("imagematrix.images.engine.images.inspect_image", lambda _: None)
    monkeypatch.setattr("imagematrix.launcher.docker.zstd_check.require_unpackable", lambda _: None)
    monkeypatch.setattr(
        "imagematrix.launcher.docker.pull.pull_unless_present", lambda *words, **_: done.append(words)
    )

    def run_command(_self, _selection, launch):
        done.append(launch.reference)
        return 0

    for command in (run_docker.DockerCommand, run_docker.DetachedCommand):
        monkeypatch.setattr(command, "_run_command", run_command)
    arguments = parse_run_args(["--host", str(profiles["laptop"]), *line.split()])
    assert run_docker.run_with_docker(arguments, "training:v1") == 0
    name = f"{reference}@{DIGEST}"
    pulled = [] if "never" in line else [(name, DIGEST, "linux/amd64")]
    assert done[: len(pulled) + 1] == [*pulled, name]
