"""The inputs of a warm-up: which folders are given, and what their digests depend on."""

import os

import pytest

from imagematrix.errors import UsageError
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.launcher.warm_up.input_folders import hash_folder, hash_inputs, parse_inputs

WARM_UP = WarmUp(command=("train",), inputs=(("model", "/models/m"), ("tokens", "/tokens")))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/weights.safetensors").write_bytes(b"w")
    (tmp_path / "link").symlink_to("a/b")
    return tmp_path


def test_each_input_gets_its_folder(folder):
    parsed = parse_inputs([f"model={folder}", f"tokens={folder}/a"], WARM_UP)
    assert parsed == {"model": folder, "tokens": folder / "a"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model"], "expected NAME=DIR"),
        (["model="], "expected NAME=DIR"),
        (["other={}"], "knows no input other: its inputs are model, tokens"),
        (["model={}", "model={}"], "given twice"),
        (["model={}/none"], "not a folder"),
        (["model={}"], "needs the input tokens"),
    ],
)
def test_other_inputs_are_refused(folder, options, message):
    with pytest.raises(UsageError, match=message) as raised:
        parse_inputs([option.format(folder) for option in options], WARM_UP)
    assert raised.value.remedy


def change(folder, what):
    path = folder / "a/b/weights.safetensors"
    if what == "content":
        path.write_bytes(b"v")
    elif what == "name":
        path.rename(path.with_name("other"))
    elif what == "place":
        path.rename(folder / "weights.safetensors")
    elif what == "folder":
        (folder / "empty").mkdir()
    else:
        (folder / "link").unlink()
        (folder / "link").symlink_to("a")


@pytest.mark.parametrize("what", ["content", "name", "place", "folder", "link"])
def test_a_digest_depends_on_everything_that_a_program_reads(folder, what):
    before = hash_folder(folder)
    assert before == hash_folder(folder)
    change(folder, what)
    assert hash_inputs({"model": folder})["model"] != before


def test_a_digest_does_not_depend_on_the_folder_s_own_place_and_times(folder):
    before = hash_folder(folder)
    os.utime(folder / "a", (0, 0))
    moved = folder.rename(folder.with_name("moved"))
    assert hash_folder(moved) == before


def test_a_compiler_in_an_input_is_refused(folder):
    (folder / "ptxas").write_text("")
    hash_folder(folder)
    (folder / "ptxas").chmod(0o755)
    with pytest.raises(UsageError, match="ptxas is a compiler"):
        hash_folder(folder)
