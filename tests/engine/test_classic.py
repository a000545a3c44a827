"""The classic image store, which most nodes still have: no manifests, no rewritten timestamps."""

import json

import pytest

AXES = {"cuda": ["none"], "march": ["x86-64", "x86-64-v2"]}


@pytest.fixture(scope="module")
def classic(start_engine):
    return start_engine("classic")


def test_build_warns_that_images_are_not_reproducible(classic, project):
    folder = project(AXES, image="old")
    done = classic.imagematrix("build", "--json", "-f", folder / "matrix.yaml")
    assert done.returncode == 0, done.stderr
    assert "classic image store" in done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert {(cell["status"], cell["reproducible"]) for cell in cells} == {("built", False)}
    again = classic.imagematrix("build", "-f", folder / "matrix.yaml")
    assert "nothing to build: 2 images up to date" in again.stderr
    chosen = classic.imagematrix("select", "old:v1").stdout.strip()
    assert chosen.startswith("old:v1-cpu-x86-64-v2-")
    ran = classic.imagematrix("run", "--rm", "old:v1", "train", "--steps", "50")
    assert json.loads(ran.stdout)["march"] == "x86-64-v2"
    listed = json.loads(classic.imagematrix("ls", "old:v1", "--json").stdout)
    assert [variant["digest"] for variant in listed["variants"]] == [
        classic.inspect(variant["reference"])["Id"] for variant in listed["variants"]
    ]


def test_an_image_of_the_classic_store_is_verified(classic):
    done = classic.imagematrix("verify", "--json", "debian:trixie")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["digest"] == classic.inspect("debian:trixie")["Id"]
    assert (document["platform"], document["size"], document["drivers"]) == ("linux/amd64", None, [])
