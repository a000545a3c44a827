"""The tests of images: they run in the built image, before it is tagged, where the variant fits."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {image}:
    version: v1
    template: it.j2
    device_code: claim
    test: {test}
axes:
  cuda: [none, "12.4"]
  compute: ["9.0"]
  driver: [host]
"""
TEMPLATE = """\
FROM debian:trixie
RUN echo 42 > /answer
ENTRYPOINT ["false"]
"""
FORM = """
      command: [sh, -c, "cat /data/x /run/secrets/token && ! echo y > /data/x && ls /sys/class/net"]
      network: true
      secrets: token
      mounts: {/data: shown}"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a matrix; call it with the image's name and its test."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/it.j2").write_text(TEMPLATE)

    def write(image, test):
        (tmp_path / "matrix.yaml").write_text(MATRIX.format(image=image, test=test))
        return tmp_path

    return write


@pytest.fixture
def build(engine, tmp_path):
    """Call it with options to build in the folder; it returns the cells, the exit code and what was said."""
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def call(*options):
        done = engine.imagematrix("build", "--json", *options, cwd=tmp_path, env=engine.environment | places)
        return json.loads(done.stdout)["cells"], done.returncode, done.stderr

    return call


def outcomes(cells):
    return [cell["test"] and cell["test"]["outcome"] for cell in cells]


def test_a_test_runs_where_the_variant_fits_and_is_no_part_of_the_identity(engine, folder, build, tmp_path):
    folder("tested", "grep -q 42 /answer && test $(ls /sys/class/net) = lo && test ! -e /run/secrets")
    cells, code, said = build("--junit", "junit.xml")
    assert code == 0, said
    assert [cell["status"] for cell in cells] == ["built"] * 2
    assert outcomes(cells) == ["passed", "not-tested"]
    assert "not tested here: cuda12.4-sm90-drvhost: " in said
    assert "the image needs a GPU" in cells[1]["test"]["why"]
    junit = (tmp_path / "junit.xml").read_text()
    assert len(re.findall(r'name="\S+ test"', junit)) == 2
    assert "not tested here: " in junit

    again, code, said = build()
    assert (code, outcomes(again)) == (0, ["passed", "not-tested"])
    assert [cell["status"] for cell in again] == ["up-to-date"] * 2
    (tmp_path / "templates/it.j2").touch()
    folder("tested", "[grep, -q, '43', /answer]")
    changed, code, said = build("--only", "cuda=none")
    assert (code, outcomes(changed)) == (6, ["failed"])
    assert "its test failed with exit code 1: grep -q 43 /answer" in said
    assert "the image stays" in said
    assert changed[0]["reference"] == cells[0]["reference"], "nothing was rebuilt"
    assert engine.inspect(cells[0]["reference"])["Id"] == cells[0]["digest"]
    folder("tested", "[grep, -q, '42', /answer]")
    mended, code, said = build()
    assert (code, outcomes(mended)) == (0, ["passed", "not-tested"]), said
    assert [cell["status"] for cell in mended] == ["tested", "tested"]
    assert outcomes(build("--retest")[0]) == ["passed", "not-tested"]
    assert engine.has_no_containers()


def test_a_failed_test_leaves_nothing_behind(engine, folder, build):
    before = {*engine.docker("images", "--all", "--quiet").stdout.split()}
    folder("failing", "echo wrong; exit 3")
    cells, code, said = build("--only", "cuda=none")
    assert (code, [cell["status"] for cell in cells], outcomes(cells)) == (6, ["failed"], ["failed"])
    assert "wrong\n" in said
    assert "its test failed with exit code 3: /bin/sh -c 'echo wrong; exit 3'" in said
    assert "nothing is tagged" in said
    folder("failing", "[no-such-program]")
    cells, code, said = build("--only", "cuda=none")
    assert (code, outcomes(cells)) == (6, ["failed"])
    assert "its test cannot be started" in said
    assert {*engine.docker("images", "--all", "--quiet").stdout.split()} == before
    assert engine.has_no_containers()


def test_a_test_has_what_the_matrix_says(folder, build, tmp_path):
    folder("allowed", FORM)
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown/x").write_text("shown\n")
    (tmp_path / "token").write_text("hidden\n")
    cells, code, said = build("--only", "cuda=none")
    assert (code, cells[0]["status"]) == (6, "failed")
    assert "the secret token is missing\n  pass --secret id=token,src=FILE" in said
    cells, code, said = build("--only", "cuda=none", "--secret", f"id=token,src={tmp_path}/token")
    assert (code, outcomes(cells)) == (0, ["passed"]), said
    log = Path(tmp_path, cells[0]["log"]).read_text()
    # Between the lines of one stream, the engine may write those of the other.
    assert "\nshown\n" in log
    assert "\nhidden\n" in log
    assert "eth0" in log


def test_a_pushed_image_is_tested_before_its_push(engine, folder, build, registry, tmp_path):
    image = f"{registry.address}/ml/pushed"
    folder(f'"{image}"', "exit 3")
    _, code, said = build("--push", "--only", "cuda=none")
    assert code == 6, said
    assert not (registry.data / "docker/registry/v2/repositories/ml/pushed/_manifests/tags").exists()
    folder(f'"{image}"', "grep 42 /answer")
    cells, code, said = build("--push", "--only", "cuda=none")
    assert (code, outcomes(cells)) == (0, ["passed"]), said
    assert image not in engine.docker("images").stdout
    (again,), code, said = build("--push", "--only", "cuda=none", "--retest")
    assert (code, again["status"], again["test"]["outcome"]) == (0, "tested", "passed"), said
    raised = (tmp_path / "matrix.yaml").read_text().replace("version: v1", "version: v2")
    (tmp_path / "matrix.yaml").write_text(raised)
    (taken,), code, said = build("--push", "--only", "cuda=none")
    assert (code, taken["status"], taken["test"]["outcome"]) == (0, "adopted", "passed"), said


def test_an_interrupted_test_is_stopped(engine, folder, tmp_path):
    folder("stopped", "sleep 1000")
    command = [*engine.inside, str(ROOT / ".venv/bin/imagematrix"), "build", "--only", "cuda=none"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=engine.environment, stderr=subprocess.PIPE, text=True
    ) as process:
        while not engine.docker("ps", "--quiet").stdout:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert engine.has_no_containers()
    assert "stopped:" not in engine.docker("images").stdout
