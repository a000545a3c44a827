"""Real tools on CPUs, from a warm-up to a warm image that starts without compiling: Numba."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engines import Registry

SHIPPED = Path(__file__).parents[2]
PACKAGES = {"numba": "numba==0.68.1"}
# Python and a compiler; the packages are an input.
TEMPLATE = """\
FROM debian:trixie
{% import "macros.j2" as debian %}
RUN apt-get update -q && apt-get install -qy --no-install-recommends g++ python3 libpython3-dev && \\
    {{ debian.clean_apt() }}
{{ debian.warm_caches() }}
USER 1000
"""
# Each prints the seconds from its start, imports included, to its first result, and how long the model took.
PROGRAMS = {
    "numba": """\
import time
started = time.monotonic()
import numba
import numpy


@numba.njit(cache=True, parallel=False)
def price(paths, steps):
    total = numpy.zeros(paths)
    for path in range(paths):
        for step in range(steps):
            total[path] += numpy.sin(path + step) * numpy.exp(-step)
    return numpy.sort(total).mean() + numpy.median(total) + numpy.percentile(total, 90)

began = time.monotonic()
value = price(100, 10)
now = time.monotonic()
print(f"result {value:.4f} after {now - started:.1f} s, {now - began:.1f} s of the model")
""",
}
# What is left of the entries with each ending after the first start; later starts may not write them.
POISON = """
import glob, os
for path in glob.glob(os.environ["NUMBA_CACHE_DIR"] + "/*/*.{ending}"):
    with open(path, "r+b") as file:
        file.truncate({size})
"""
WAYS = {"image-user", "root", "uid-12345"}


@pytest.fixture(scope="module")
def registry(engine):
    started = Registry(engine, 5000)
    yield started
    started.remove()


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Call it with a framework to get the folder with it, for the Python of the image."""
    made = []

    def install(name):
        folder = tmp_path_factory.mktemp(name)
        made.append(folder)
        words = ("--python-version", "3.13", "--only-binary=:all:", "--no-compile", "--target", folder)
        pip = [sys.executable, "-m", "pip", "install", "-q", *words, PACKAGES[name]]
        subprocess.run(pip, check=True)
        folder.chmod(0o755)
        (folder / "program.py").write_text(PROGRAMS[name])
        return folder

    yield install
    for folder in made:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def version(engine, registry, tmp_path_factory):
    """Call it with a framework to get the name of a published version that warms its program up."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("context", "templates"):
        (folder / name).mkdir()
    (folder / "templates/it.j2").write_text(TEMPLATE)
    shutil.copy(SHIPPED / "templates/macros.j2", folder / "templates")
    images = {name: f"{registry.address}/ml/{name}" for name in PROGRAMS}
    matrix = {
        "schema": "imagematrix.matrix/v1",
        "images": {
            image: {
                "version": "v1",
                "template": "it.j2",
                "context": "context",
                "warm_up": {
                    "command": ["python3", "/opt/packages/program.py"],
                    "environment": {"PYTHONPATH": "/opt/packages"},
                    "inputs": {"packages": "/opt/packages"},
                },
            }
            for image in images.values()
        },
        "axes": {"march": ["any"]},
        "facts": {"march": {"any": {"flags": ["sse2"]}}},
    }
    (folder / "matrix.yaml").write_text(json.dumps(matrix))
    built = engine.imagematrix("build", "--push", cwd=folder)
    assert built.returncode == 0, built.stderr
    for image in images.values():
        published = engine.imagematrix("publish", f"{image}:v1")
        assert published.returncode == 0, published.stderr
    return {name: f"{image}:v1" for name, image in images.items()}


@pytest.mark.long
@pytest.mark.parametrize(("name", "tool"), [("numba", "numba")])
def test_what_it_compiles_is_compiled_once(engine, registry, version, packages, name, tool):
    folder = packages(name)
    mount = ("-v", f"{folder}:/opt/packages", "-e", "PYTHONPATH=/opt/packages")
    command = (version[name], "python3", "/opt/packages/program.py")
    # It writes the bytecode of what the program imports, so that no later start compiles Python.
    first = engine.imagematrix("run", "--rm", "--user", "root", *mount, *command)
    assert first.returncode == 0, first.stderr
    staging = f"{registry.address}/staging/{name}"
    words = (version[name], "--input", f"packages={folder}", "--staging", staging, "--json")
    warmed = engine.imagematrix("warm", *words)
    assert warmed.returncode == 0, warmed.stderr
    document = json.loads(warmed.stdout)
    assert tool in document["tools"]
    # With a root that is read-only, Numba fails whether it compiles or not.
    assert {way for way, proof in document["proofs"].items() if proof == "proved"} >= WAYS, document["proofs"]
    published = engine.imagematrix("publish", "--warm", document["reference"], "--yes", version[name])
    assert published.returncode == 0, published.stderr
    seconds = []
    for options in (("--no-warm",), ()):
        done = engine.imagematrix("run", *options, "--rm", *mount, *command)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout.partition(" after ")[2].partition(" s")[0]))
    assert seconds[1] < seconds[0] / 2, seconds


@pytest.mark.long
@pytest.mark.parametrize(("ending", "size"), [("nbc", 100), ("nbi", 40)])
def test_a_poisoned_entry_of_numba_is_found(engine, version, packages, ending, size):
    folder = packages("numba")
    with (folder / "program.py").open("a") as program:
        program.write(POISON.format(ending=ending, size=size))
    warmed = engine.imagematrix("warm", version["numba"], "--input", f"packages={folder}")
    assert warmed.returncode == 1, warmed.stderr
    assert "the caches are not used, so nothing is kept" in warmed.stderr
