"""Shell completion: names from the engine, axes from matrix or catalog, nothing if neither is reachable."""

import socket
from typing import Any

import pytest

from imagematrix.cli.shared import completion
from imagematrix.images.catalog import sources
from imagematrix.images.catalog.catalog import Catalog, Variant


@pytest.fixture
def bash(cli, monkeypatch):
    """Call it with words as bash splits them, the last one incomplete, to get the completions."""

    def ask(*words):
        monkeypatch.setenv("_IMAGEMATRIX_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["imagematrix", *map(str, words)]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        result = cli()
        assert result.err == ""
        return result.out.split()

    return ask


@pytest.fixture
def held(engine):
    variants = [
        Variant(
            reference=f"training:v1-cpu-{python}-0123456789ab",
            digest=None,
            platform="linux/amd64",
            axes=(("python", python),),
        )
        for python in ("3.9", "3.13")
    ]
    engine.add_catalog(Catalog(image="training", version="v1", variants=tuple(variants)))
    engine.add_catalog(Catalog(image="tools", version="v2", variants=(Variant(**TOOLS),)))


TOOLS: dict[str, Any] = {"reference": "tools:v2-cpu-0123456789ab", "digest": None, "platform": "linux/amd64"}


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize(
    "command",
    [
        *(("select",), ("explain",), ("ls",), ("doctor",), ("run",), ("run", "--rm")),
        ("kubernetes", "render", "job"),
    ],
)
def test_image_names_are_completed(bash, command):
    assert bash(*command, "t") == ["tools:v2", "training:v1"]
    assert bash(*command, "") == ["tools:v2", "training:v1"]
    assert bash(*command, "training", ":", "v") == ["v1"]
    assert bash(*command, "training", ":") == ["v1"]
    assert bash(*command, "training", ":", "v1-cpu-3.1") == ["v1-cpu-3.13-0123456789ab"]
    assert bash(*command, "x") == []


@pytest.mark.usefixtures("held")
def test_prune_completes_names_without_versions(bash):
    assert bash("prune", "t") == ["tools", "training"]
    assert bash("prune", "--keep", "1", "tr") == ["training"]


@pytest.mark.usefixtures("held")
def test_where_completes_axes_of_an_image(bash):
    for command in ("select", "run"):
        assert bash(command, "--where", "py") == ["python=3.9", "python=3.13"]
        assert bash(command, "--where", "python", "=", "3.1") == ["3.13"]
    assert bash("select", "--where", "=", "python", "=", "3.1") == ["3.13"]
    assert bash("select", "training", ":", "v1", "--where", "python", "=") == ["3.9", "3.13"]
    assert bash("select", "tools", "--where", "py") == []
    kind = ("kubernetes", "render", "job")
    assert bash(*kind, "training", ":", "v1", "--where", "python", "=") == ["3.9", "3.13"]
    assert bash(*kind, "tools", "--where", "py") == []
    assert bash("select", "tools", "--where", "cuda", "=", "none,plat") == ["none,platform=linux/amd64"]


def test_kinds_of_manifests_are_completed(bash):
    assert bash("kubernetes", "render", "j") == ["job", "jobset"]
    assert bash("kubernetes", "render", "job", "--no") == ["--nodes"]


def test_conditions_complete_axes_of_catalog_and_matrix(bash, catalog_file, shipped, tmp_path):
    line = ("select", "--catalog", catalog_file, "training", "--where", "driver")
    assert bash(*line) == ["driver=535.261.03", "driver=550.163.01"]
    assert bash("plan", "-f", shipped, "--only", "march", "=", "znver*,ima") == ["znver*,image=training"]
    assert bash("plan", "--file", shipped, "--only", "cuda") == ["cuda=none", "cuda=11.8", "cuda=12.4"]
    assert bash("plan", "-f", tmp_path / "nothing.yaml", "--only", "cuda") == []


def test_a_note_about_the_image_is_not_written_into_the_line(catalog_file, monkeypatch, capfd):
    def open_elsewhere(_image, on_fallback):
        on_fallback("using the engine's images")
        return sources.open_catalog(catalog_file)

    monkeypatch.setattr(sources, "open_stored_catalog", open_elsewhere)
    assert completion._complete_conditions("reg:5000/training", None, "march=znver4") == ["march=znver4"]
    assert capfd.readouterr() == ("", "")


def test_engines_are_completed(bash):
    assert bash("run", "--engine", "") == ["docker", "oci", "charliecloud", "apptainer"]
    assert bash("run", "--gpus", "1", "--engine", "ap") == ["apptainer"]
    assert bash("run", "--engine", "oci", "x") == []
    assert bash("run", "--rm", "--engine", "ap") == ["apptainer"]


def test_options_of_run_are_completed(bash):
    assert bash("run", "--mps") == ["--mps", "--mps-threads"]
    assert bash("run", "--gpus", "1", "--dry") == ["--dry-run"]


@pytest.mark.usefixtures("held")
def test_container_command_is_not_completed(bash):
    for line in (("run", "training:v1", "t"), ("run", "--gpus", "t"), ("run", "--host", "x", "y", "t")):
        assert bash(*line) == []


def test_missing_engine_completes_nothing_silently(bash):
    assert bash("select", "t") == []
    assert bash("run", "--where", "p") == []
    assert bash("sel") == ["select"]


def test_hanging_engine_does_not_block_completion(bash, docker_host, tmp_path, monkeypatch):
    monkeypatch.setattr(completion, "LIMIT_S", 0.01)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        docker_host(f"unix://{tmp_path / 's'}")
        assert bash("select", "t") == []


@pytest.mark.usefixtures("held")
def test_fish_completes_words_with_colons(cli, monkeypatch):
    monkeypatch.setenv("_IMAGEMATRIX_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "imagematrix select training:v1-cpu-3.9")
    assert cli().out.split() == ["training:v1-cpu-3.9-0123456789ab"]
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "imagematrix select training --where python=3.1")
    assert cli().out.split() == ["python=3.13"]
