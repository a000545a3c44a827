"""The classic image store, which most nodes still have: no manifests, no rewritten timestamps."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from engines import Registry

H200 = Path(__file__).parents[2] / "tests/hosts/genoa-h200.json"
CUBIN = Path(__file__).parents[1] / "unit" / "audit" / "data" / "80.cubin"
LABELLED = """\
schema: imagematrix.matrix/v1
images:
  labelled: {version: v1, template: it.j2, context: files, device_code: claim}
axes:
  cuda: ["12.4"]
  compute: ["8.0"]
"""
# The table has the flags of a compiler that is named here, so no image needs one.
PLAIN = """\
schema: imagematrix.matrix/v1
images:
  old: {version: v1, template: it.j2}
axes:
  march: [x86-64, x86-64-v2]
properties:
  march: {x86-64: {compiler: gcc-14}, x86-64-v2: {compiler: gcc-14}}
"""

STACKED = """\
schema: imagematrix.matrix/v1
images:
  underlying: {version: v1, template: base.j2, development: true, prefer: cpu-vendor, warm_up: {command: a}}
  stacked: {version: v1, template: app.j2}
axes:
  march: [x86-64]
properties:
  march: {x86-64: {compiler: gcc-14}}
"""


def test_build_warns_that_images_are_not_reproducible(classic, tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "it.j2").write_text("FROM debian:trixie\nRUN echo {{ march }} > /march\n")
    (tmp_path / "matrix.yaml").write_text(PLAIN)
    done = classic.imagematrix("build", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "classic image store" in done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert {(cell["status"], cell["reproducible"]) for cell in cells} == {("built", False)}
    again = classic.imagematrix("build", cwd=tmp_path)
    assert "nothing to build: 2 images up to date" in again.stderr
    chosen = classic.imagematrix("select", "old:v1").stdout.strip()
    assert chosen.startswith("old:v1-x86-64-v2-")
    ran = classic.imagematrix("run", "--rm", "old:v1", "cat", "/march")
    assert ran.stdout == "x86-64-v2\n"
    listed = json.loads(classic.imagematrix("ls", "old:v1", "--json").stdout)
    assert [variant["digest"] for variant in listed["variants"]] == [
        classic.inspect(variant["reference"])["Id"] for variant in listed["variants"]
    ]


@pytest.mark.parametrize(
    ("store", "facts"),
    [("containerd", {"cubins": "bytes", "driver": "bytes"}), ("classic", {"cubins": "claim"})],
)
def test_one_build_gives_an_image_its_labels(engine, classic, store, facts, tmp_path):
    """The matrix claims the device code, and only an audit shows that the bytes have it."""
    builder = engine if store == "containerd" else classic
    (tmp_path / "files").mkdir()
    (tmp_path / "templates").mkdir()
    shutil.copy(CUBIN, tmp_path / "files")
    (tmp_path / "templates" / "it.j2").write_text("FROM debian:trixie\nCOPY 80.cubin /opt/\n")
    (tmp_path / "matrix.yaml").write_text(LABELLED)
    result = builder.imagematrix("build", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (cell,) = json.loads(result.stdout)["cells"]
    log = Path(tmp_path, cell["log"]).read_text()
    assert log.count("transferring dockerfile: ") == 1, log
    own = builder.inspect(cell["reference"])["Config"]["Labels"]
    variant = json.loads(own["io.imagematrix.variant"])
    assert (variant["cubins"], variant["facts"]) == (["80"], facts)
    assert builder.imagematrix("verify", cell["reference"]).returncode == 0


@pytest.mark.parametrize("store", ["containerd", "classic"])
def test_an_image_has_no_labels_of_the_image_that_it_builds_on(engine, classic, store, tmp_path):
    builder = engine if store == "containerd" else classic
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "base.j2").write_text("FROM debian:trixie\nRUN touch /base\n")
    (tmp_path / "templates" / "app.j2").write_text('FROM {{ images["underlying"] }}\nRUN touch /app\n')
    (tmp_path / "matrix.yaml").write_text(STACKED)
    result = builder.imagematrix("build", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    references = {cell["image"]: cell["reference"] for cell in json.loads(result.stdout)["cells"]}
    own, base = (builder.inspect(references[name])["Config"]["Labels"] for name in ("stacked", "underlying"))
    for label in ("development", "prefer", "warm_up"):
        assert base[f"io.imagematrix.{label}"]
        assert not own.get(f"io.imagematrix.{label}")
    assert builder.imagematrix("select", "stacked:v1").stdout.strip() == references["stacked"]
    assert builder.imagematrix("verify", references["stacked"]).returncode == 0


@pytest.fixture
def registry(classic):
    """A registry beside the engine with the classic store."""
    started = Registry(classic, 5000)
    yield started
    started.remove()


def test_an_image_of_the_classic_store_is_audited_before_its_push(classic, registry, tmp_path):
    (tmp_path / "templates").mkdir()
    line = "RUN echo > /usr/lib/libcuda.so.550.163.01"
    (tmp_path / "templates" / "it.j2").write_text(f"FROM debian:trixie\n{line}\n")
    image = f"{registry.address}/ml/claims"
    (tmp_path / "matrix.yaml").write_text(PLAIN.replace("old:", f"{image}:"))
    done = classic.imagematrix("build", "--push", "--json", cwd=tmp_path)
    assert done.returncode == 9, done.stderr
    assert "promise no user-mode driver, but /usr/lib/libcuda.so.550.163.01" in done.stderr
    assert not classic.docker("images", "-q", image).stdout
    assert classic.imagematrix("ls", image).returncode == 4


def test_an_image_of_the_classic_store_is_verified(classic):
    done = classic.imagematrix("verify", "--json", "debian:trixie")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["digest"] == classic.inspect("debian:trixie")["Id"]
    assert (document["platform"], document["size"], document["drivers"]) == ("linux/amd64", None, [])


@pytest.fixture
def gpu_node():
    """A node with the number of a GPU's, which no driver serves."""
    path = Path("/dev/nvidia6")
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(195, 6))
    yield path
    path.unlink()


def test_containers_of_another_engine_use_their_gpus(engine, classic, gpu_node):
    """Neither engine knows the other's containers."""

    def used(asked):
        return [use["name"] for gpu in asked.list_gpus(H200) if gpu["minor"] == 6 for use in gpu["used_by"]]

    words = ("--device", gpu_node, "debian:trixie", "sleep", "300")
    number = classic.docker("run", "-d", "--name", "near", *words).stdout.strip()
    assert used(classic) == ["near (debian:trixie)"]
    pid = classic.inspect("near")["State"]["Pid"]
    assert used(engine) == [f"{number[:12]} (sleep, pid {pid}, of another engine)"]
    classic.docker("rm", "-f", "near")
    classic.docker("run", "-d", "--privileged", "debian:trixie", "sleep", "300")
    classic.docker("run", "-d", "debian:trixie", "sleep", "300")
    assert used(engine) == []
