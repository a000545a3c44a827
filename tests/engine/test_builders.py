"""Building on other engines than the one that keeps the images."""

import json
import subprocess

import pytest

MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {image}: {{version: v1, template: small.j2}}
axes:
  part: [one, two, three, four]
"""
TEMPLATE = "FROM debian:trixie\nRUN sleep 2 && uname -a > /dev/null && echo {{ part }} > /part\n"


@pytest.fixture
def second(start_engine, engine):
    """Another engine with the same bases, which the context "second" names."""
    found = start_engine()
    found.docker("rmi", "--force", "debian:trixie", "debian:bookworm")
    save = subprocess.Popen(
        ["docker", "save", "debian:trixie"], env=engine.environment, stdout=subprocess.PIPE
    )
    subprocess.run(["docker", "load"], env=found.environment, stdin=save.stdout, check=True)
    save.stdout.close()
    assert save.wait() == 0
    engine.docker("context", "create", "second", "--docker", f"host={found.host}")
    engine.docker("context", "create", "first", "--docker", f"host={engine.host}")
    yield found
    engine.docker("context", "rm", "--force", "first", "second")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "templates").mkdir()
    (tmp_path / ".dockerignore").write_text("*\n")
    (tmp_path / "templates/small.j2").write_text(TEMPLATE)
    return tmp_path


def built_by(engine):
    """Return how many steps an engine's BuildKit has run."""
    said = engine.docker("buildx", "du", "--builder", "default", "--verbose").stdout
    return said.count("sleep 2")


def test_other_engines_build_what_this_one_keeps(engine, folder, second):
    (folder / "matrix.yaml").write_text(MATRIX.format(image="elsewhere"))
    built = engine.imagematrix("build", "--builder", "second", "--only", "part=one", cwd=folder)
    assert built.returncode == 0, built.stderr
    (reference,) = built.stdout.split()
    assert engine.docker("run", "--rm", reference, "cat", "/part").stdout == "one\n"
    assert (built_by(engine), built_by(second)) == (0, 1)
    assert not second.docker("images", "--quiet", reference).stdout

    here = engine.imagematrix("build", "--verify-reproducible", "--only", "part=one", "--json", cwd=folder)
    (cell,) = json.loads(here.stdout)["cells"]
    assert (
        cell["digest"]
        == json.loads(engine.imagematrix("ls", "elsewhere:v1", "--json").stdout)["variants"][0]["digest"]
    )

    both = engine.imagematrix("build", "--builder", "first=1", "--builder", "second=2", cwd=folder)
    assert both.returncode == 0, both.stderr
    assert len(both.stdout.split()) == 3
    assert built_by(engine) >= 2
    assert built_by(second) >= 2
    for name in both.stdout.split():
        assert engine.docker("run", "--rm", name, "cat", "/part").stdout.strip() in ("two", "three", "four")


def test_a_builder_that_is_not_there_ends_with_2(engine, folder):
    (folder / "matrix.yaml").write_text(MATRIX.format(image="nowhere"))
    said = engine.imagematrix("build", "--builder", "nobody", cwd=folder)
    assert said.returncode == 2
    assert "there is no builder 'nobody'" in said.stderr
