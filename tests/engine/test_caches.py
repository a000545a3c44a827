"""Caches that outlive an engine: another one, which is empty, has the results of steps from there.

Steps write random bytes, so an image has the same digest only if no step ran again.
"""

import json
import re

import pytest
from engines import Registry

pytestmark = pytest.mark.long

RANDOM = "RUN head -c 16 /dev/urandom >"
TEMPLATE = f"""\
FROM 127.0.0.1:5000/base:1 AS tools
{RANDOM} /tool
FROM 127.0.0.1:5000/base:1
COPY --from=tools /tool /tool
{RANDOM} /shared
RUN cat /shared > /{{{{ part }}}} && head -c 16 /dev/urandom >> /{{{{ part }}}}
"""
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {image}: {version: v1, template: it.j2}
axes:
  part: [one, two]
"""


@pytest.fixture
def runners(start_engine, tmp_path):
    """Two engines, each with the same registry, which has the base that they lack."""
    data = tmp_path / "registry"
    started = [start_engine() for _ in range(2)]
    registries = [Registry(engine, 5000, data=data) for engine in started]
    started[0].docker("tag", "debian:trixie", "127.0.0.1:5000/base:1")
    started[0].docker("push", "127.0.0.1:5000/base:1")
    for engine in started:
        empty(engine)
    for engine, registry in zip(started, registries, strict=True):
        engine.registry = registry
    yield started
    for engine, registry in zip(started, registries, strict=True):
        registry.remove()
        engine.stop()


@pytest.fixture
def job(tmp_path):
    """Call it with an engine to build on it, and get the cells of the report and what was said."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/it.j2").write_text(TEMPLATE)

    def build(engine, *options, image="cached"):
        (tmp_path / "matrix.yaml").write_text(MATRIX.replace("{image}", f"'{image}'"))
        places = {"XDG_CACHE_HOME": str(engine.folder / "cache")}
        words = ("build", "--json", *options)
        done = engine.imagematrix(*words, cwd=tmp_path, env=engine.environment | places)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["cells"], done.stderr

    return build


def empty(engine):
    names = engine.docker("images", "--quiet", "--no-trunc").stdout.split()
    engine.docker("rmi", "--force", *names, check=False)
    engine.docker("builder", "prune", "--all", "--force")


def digests(cells):
    return {cell["reference"]: cell["digest"] for cell in cells}


def test_an_empty_engine_builds_the_same_bytes_from_a_cache(runners, job, tmp_path):
    one, other = runners
    repository, folder = "127.0.0.1:5000/cache:main", tmp_path / "cache"
    places = ("--cache-to", repository, "--cache-to", f"type=local,dest={folder}")
    first, said = job(one, *places, "--cache-from", repository, "--cache-from", f"type=local,src={folder}")
    assert [cell["imported_cache"] for cell in first] == [False, False], "there is none yet"
    assert "imported" not in said
    for source in (repository, f"type=local,src={folder}"):
        again, said = job(other, "--cache-from", source)
        assert digests(again) == digests(first)
        assert [cell["imported_cache"] for cell in again] == [True, True]
        assert "2 images with results of steps from an imported cache" in said
        other.docker("rmi", "--force", *digests(again))
        if source == repository:
            empty(other)
    fresh, said = job(other, "--no-cache")
    assert digests(fresh).keys() == digests(first).keys(), "a cache is no part of the identity"
    assert set(digests(fresh).values()).isdisjoint(digests(first).values()), "every step has run"
    assert [cell["imported_cache"] for cell in fresh] == [False, False]


def test_a_second_run_on_an_empty_engine_pulls_nothing_but_manifests(runners, job):
    one, other = runners
    image = "127.0.0.1:5000/ml/pushed"
    first, _ = job(one, "--push", image=image)
    assert [cell["status"] for cell in first] == ["built"] * 2
    before = other.registry.log
    again, said = job(other, "--push", image=image)
    assert [cell["status"] for cell in again] == ["up-to-date"] * 2, said
    asked = re.findall(r'"(?:GET|HEAD|POST|PUT) (/v2/\S*)', other.registry.log.removeprefix(before))
    assert asked
    assert [path for path in asked if not re.search("/manifests/|/tags/|^/v2/$", path)] == []
    assert not other.docker("images", "--quiet").stdout
