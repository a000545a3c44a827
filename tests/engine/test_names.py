"""Names of images, in both image stores: who may set them, and whose are never removed."""

import json
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / ".venv/bin/imagematrix"
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {image}: {{version: v1, template: own.j2, context: files, development: {development}}}
axes: {{cuda: [none], march: [x86-64-v2, x86-64]}}
properties:
  cuda: {{none: {{compiler: gcc-14}}}}
"""
GATE = "RUN --mount=type=cache,id={id},target=/gate "
WAIT = GATE + "touch /gate/{builder}; while [ ! -e /gate/open ]; do sleep 0.1; done\n"
# Opened when both builders wait: both have planned, and neither has stored an image.
OPEN = (
    "FROM debian:trixie\n"
    + GATE
    + "while [ $(ls /gate | wc -l) -lt 2 ]; do sleep 0.1; done; touch /gate/open\n"
)


@pytest.fixture(params=["containerd", "classic"])
def either(request):
    """An engine with each of the two image stores."""
    return request.getfixturevalue("engine" if request.param == "containerd" else "classic")


@pytest.fixture
def write(tmp_path):
    """Call it to write a matrix of two cells; it returns the folder."""

    def call(image, line, folder="", *, development="false"):
        where = tmp_path / folder
        (where / "templates").mkdir(parents=True, exist_ok=True)
        (where / "files").mkdir(exist_ok=True)
        (where / "matrix.yaml").write_text(MATRIX.format(image=image, development=development))
        (where / "templates/own.j2").write_text(f'FROM debian:trixie\n{line}\nCMD ["cat", "/made"]\n')
        return where

    return call


def build(engine, folder, **options):
    return engine.imagematrix("build", "--json", "-f", folder / "matrix.yaml", **options)


def cells(done):
    return {cell["cell"]: cell["reference"] for cell in json.loads(done.stdout)["cells"]}


def names(engine, repository):
    return sorted(engine.docker("images", "--format", "{{.Repository}}:{{.Tag}}", repository).stdout.split())


@pytest.mark.long
def test_one_of_two_builders_gets_all_cells_of_a_version(either, write, tmp_path):
    """Two folders, the same version, and another instruction, at the same time."""
    image = "contested"
    processes = {}
    for builder in ("one", "two"):
        wait = WAIT.format(id=image, builder=builder)
        folder = write(image, f"{wait}RUN echo {builder} > /made", builder)
        command = [*either.inside, PROGRAM, "build", "--json", "-f", folder / "matrix.yaml"]
        processes[builder] = subprocess.Popen(
            command, env=either.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    (tmp_path / "Dockerfile").write_text(OPEN.format(id=image))
    either.docker("build", "-q", "-f", str(tmp_path / "Dockerfile"), str(tmp_path / "one/files"))
    results = {}
    for builder, process in processes.items():
        out, err = process.communicate(timeout=300)
        results[builder] = process.returncode, out, err
    assert sorted(code for code, _, _ in results.values()) == [0, 7], results
    (winner,) = (builder for builder, (code, _, _) in results.items() if code == 0)
    (loser,) = results.keys() - {winner}
    built = {one["reference"] for one in json.loads(results[winner][1])["cells"]}
    assert set(names(either, image)) == built
    assert len(built) == 2
    assert "from other inputs" in results[loser][2]
    # Both of the loser's cells may end before the winner names its second image.
    assert any(name in results[loser][2] for name in built)
    assert either.imagematrix("run", "--rm", f"{image}:v1").stdout == f"{winner}\n"
    assert either.docker("volume", "ls", "-q").stdout == ""
    assert "imagematrix-held" not in either.docker("images").stdout
    again = build(either, tmp_path / winner)
    assert "nothing to build: 2 images up to date" in again.stderr
    assert build(either, tmp_path / loser).returncode == 7


@pytest.mark.long
@pytest.mark.parametrize("more", [["prod"], ["prod", "test"]])
def test_development_removes_only_its_own_name(either, write, more):
    """Whoever tagged or runs an image of an earlier build keeps it."""
    folder = write("devi", "RUN echo one > /made", development="true")
    first = cells(build(either, folder))
    kept, started = first["cpu-x86-64-v2"], first["cpu-x86-64"]
    others = [f"myapp{len(more)}:{tag}" for tag in more]
    for name in others:
        either.docker("tag", kept, name)
    ids = {name: either.inspect(name)["Id"] for name in others}
    container = either.docker("create", started).stdout.strip()
    write("devi", "RUN echo two > /made", development="true")
    second = cells(build(either, folder))
    assert names(either, "devi") == sorted(second.values())
    assert not set(first.values()) & set(second.values())
    assert {name: either.inspect(name)["Id"] for name in others} == ids
    assert either.docker("run", "--rm", others[0]).stdout == "one\n"
    assert either.docker("start", "--attach", container).stdout == "one\n"
    either.docker("rm", container)
    write("devi", "RUN echo three > /made", development="true")
    old = [either.inspect(name)["Id"] for name in second.values()]
    build(either, folder)
    listed = either.docker("images", "--all", "--quiet", "--no-trunc").stdout.split()
    assert not set(old) & set(listed), "nobody else uses them"


@pytest.mark.long
def test_name_that_somebody_has_taken_does_not_move(either, write):
    folder = write("taken", "RUN echo one > /made")
    references = cells(either.imagematrix("plan", "--json", "-f", folder / "matrix.yaml"))
    taken = references["cpu-x86-64"]
    either.docker("tag", "debian:trixie", taken)
    refused = build(either, folder)
    assert refused.returncode == 7, refused.stderr
    assert f"{taken} is another image, {either.inspect('debian:trixie')['Id']}" in refused.stderr
    assert either.inspect(taken)["Id"] == either.inspect("debian:trixie")["Id"]
    either.docker("rmi", taken)
    assert build(either, folder).returncode == 0


@pytest.mark.long
def test_image_that_took_the_name_of_its_variant_is_refused(engine, classic, write, tmp_path):
    """`FROM $REF` with another command, tagged $REF; an engine with the classic store has the image, too."""
    folder = write("derived", "RUN echo one > /made")
    built = cells(build(engine, folder))
    name = built["cpu-x86-64-v2"]
    saved = tmp_path / "saved.tar"
    engine.docker("save", "-o", str(saved), *built.values())
    classic.docker("load", "-i", str(saved))
    for either in (engine, classic):
        for words in (["select", "derived:v1"], ["ls", "derived:v1"], ["verify", name]):
            assert either.imagematrix(*words).returncode == 0
        assert either.imagematrix("run", "--rm", "derived:v1").stdout == "one\n"
        either.docker("build", "-t", name, "-", input=f'FROM {name}\nCMD ["echo", "two"]\n')
        for words in (
            ["select", "derived:v1"],
            ["run", "--rm", "derived:v1"],
            ["ls", "derived:v1"],
            ["verify", name],
            ["verify", "derived:v1"],
            ["plan", "-f", str(folder / "matrix.yaml")],
            ["build", "-f", str(folder / "matrix.yaml")],
        ):
            refused = either.imagematrix(*words)
            assert refused.returncode == 9, (words, refused)
            assert "built on the variant" in refused.stdout + refused.stderr
        either.docker("rmi", name)
    assert build(engine, folder).returncode == 0
    assert engine.imagematrix("run", "--rm", "derived:v1").stdout == "one\n"


def test_container_is_not_started_from_another_image_of_the_same_time(engine, write):
    """An engine's list does not tell it from the variant."""
    folder = write("timeless", "RUN echo one > /made")
    name = cells(build(engine, folder))["cpu-x86-64-v2"]
    text = f'FROM {name}\nCMD ["echo", "two"]\n'
    engine.docker("build", "-t", name, "--build-arg", "SOURCE_DATE_EPOCH=0", "-", input=text)
    refused = engine.imagematrix("run", "--rm", name)
    assert (refused.returncode, refused.stdout) == (9, "")
    assert "built on the variant" in refused.stderr
