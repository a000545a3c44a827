"""`make quickstart` on an engine that is already running, twice: of some cells, and at last of all."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def quickstart(engine, **environment):
    done = subprocess.run(
        [ROOT / "ci/quickstart"],
        env=engine.environment | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def images(engine):
    return sorted(engine.docker("images", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}").stdout.splitlines())


# The cells of one march: of all CUDA releases, drivers and GPUs, and built in half the time.
SOME = {"ONLY": "march=x86-64-v3"}


@pytest.fixture(scope="module")
def first(engine, kept_archive):
    done = quickstart(engine, **SOME)
    kept_archive(engine)  # for the tests of another worker
    return done


@pytest.fixture(scope="module")
def whole(first, engine):  # noqa: ARG001 - it builds some of the images
    return quickstart(engine)


def program_output(text):
    return json.loads(next(line for line in text.splitlines() if line.startswith('{"march"')))


def runs_the_fitting_image(done, engine):
    chosen = engine.imagematrix("select", "training:v1").stdout.strip()
    assert f"$ imagematrix select training:v1\n{chosen}\n" in done.stdout
    ran = program_output(done.stdout)
    assert chosen.startswith(f"training:v1-cpu-{ran['march']}-")
    assert ran["final_loss"] < ran["initial_loss"]


def variants(engine):
    return json.loads(engine.imagematrix("ls", "training:v1", "--json").stdout)["variants"]


def test_quickstart_builds_the_shipped_matrix_and_runs_the_fitting_image(first, engine):
    built = variants(engine)
    assert {variant["march"] for variant in built} == {"x86-64-v3"}
    assert {variant["cuda"] for variant in built} == {None, "11.8", "12.4"}
    runs_the_fitting_image(first, engine)


def test_a_second_run_builds_nothing_and_reports_it(first, engine):
    before = images(engine)
    again = quickstart(engine, **SOME)
    assert "nothing to build" in again.stderr
    assert images(engine) == before
    assert program_output(again.stdout)["final_loss"] == program_output(first.stdout)["final_loss"]


def test_error_on_a_mixed_node_names_gpus_that_fit_one_image(first, engine):  # noqa: ARG001
    host = ROOT / "tests/hosts/mixed.json"
    refused = engine.imagematrix("select", "training:v1", "--host", host)
    assert refused.returncode == 3
    assert refused.stdout == ""
    assert "--gpus" in refused.stderr
    chosen = engine.imagematrix("select", "training:v1", "--host", host, "--gpus", "device=1")
    assert chosen.returncode == 0, chosen.stderr


@pytest.mark.long
def test_the_whole_matrix_is_built(whole, engine):
    assert len(variants(engine)) >= 20
    runs_the_fitting_image(whole, engine)


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("broadwell-m60", "cuda11.8-drv535.261.03-sm52-broadwell"),
        ("skylake-v100", "cuda12.4-drv535.261.03-sm70-skylake-avx512"),
        ("rome-a100", "cuda12.4-drv550.163.01-sm80-znver2"),
        ("milan-a10", "cuda12.4-drv535.261.03-sm86-znver3"),
        ("icelake-l40s", "cuda12.4-drv550.163.01-sm89-icelake-server"),
        ("sapphirerapids-h100", "cuda12.4-drv550.163.01-sm90-sapphirerapids"),
        ("genoa-h200", "cuda12.4-drv550.163.01-sm90-znver4"),
        ("masked", "cuda12.4-drv550.163.01-sm89-icelake-server"),
        ("laptop", "cpu-broadwell"),
    ],
)
def test_each_kind_of_node_gets_its_image(whole, engine, host, expected):  # noqa: ARG001 - it builds the images
    result = engine.imagematrix("select", "training:v1", "--host", ROOT / f"tests/hosts/{host}.json")
    assert result.stdout.startswith(f"training:v1-{expected}-"), result.stderr
