"""The inputs of a warm-up: which folders are given, and what their digests depend on."""

import inspect
import os
import shlex
import subprocess
import sys

import pytest

from imagematrix.errors import UsageError
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.launcher.warm_up import input_folders
from imagematrix.launcher.warm_up.input_folders import (
    hash_folder,
    parse_inputs,
    read_inputs,
    require_unchanged,
)
from imagematrix.launcher.warm_up.warm_up_error import WarmUpError

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
    assert hash_folder(folder) != before


def test_a_digest_is_of_all_in_the_order_of_names(tmp_path):
    """Another order would be another digest, and another key of the same warm-up."""
    for path in ("b/c/d", "b/a", "b-", "c", "a/z"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    listed = [path.relative_to(tmp_path).as_posix() for path in input_folders._list_files(tmp_path)]
    assert listed == ["a", "a/z", "b", "b/a", "b/c", "b/c/d", "b-", "c"]


def test_folders_may_be_nested_deeper_than_python_recurses(tmp_path):
    (tmp_path / ("a/" * 300)).mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        assert hash_folder(tmp_path).startswith("sha256:")
    finally:
        sys.setrecursionlimit(limit)


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


@pytest.mark.parametrize("target", ["../../blobs/b", "/etc/passwd", "{folder}/file", "up/../../x"])
def test_a_link_that_leads_out_of_an_input_is_refused(tmp_path, target):
    """As of a snapshot of Hugging Face, whose files are links."""
    folder = tmp_path / "a model"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").touch()
    (folder / "sub/up").symlink_to("..")
    (folder / "sub/link").symlink_to(target.format(folder=folder))
    with pytest.raises(UsageError, match=r"sub/link is a link to .*, which is not in") as raised:
        hash_folder(folder)
    command = raised.value.remedy.partition(": ")[2]
    assert command == f"cp -rL '{folder}' 'a model-copy'"


def test_a_copy_without_links_is_taken(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/b").write_text("weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/weights").symlink_to("../blobs/b")
    with pytest.raises(UsageError) as raised:
        hash_folder(tmp_path / "snapshot")
    command = shlex.split(raised.value.remedy.partition(": ")[2])
    subprocess.run(command, cwd=tmp_path, check=True)
    hash_folder(tmp_path / "snapshot-copy")


@pytest.mark.parametrize("target", ["file", "../file", "./sub/../file", "up/file", "..name", "none", "link"])
def test_links_within_an_input_are_taken(tmp_path, target):
    (tmp_path / "sub/sub").mkdir(parents=True)
    for name in ("file", "sub/file", "sub/..name"):
        (tmp_path / name).touch()
    (tmp_path / "sub/up").symlink_to("..")
    (tmp_path / "sub/link").symlink_to(target)
    hash_folder(tmp_path)


def test_an_input_that_nobody_changes_stays_as_it_was_read(folder):
    read = read_inputs({"model": folder})
    assert read["model"].digest == hash_folder(folder)
    (folder / "a/lock").touch()  # of who reads it
    (folder / "a/lock").unlink()
    require_unchanged(read)


@pytest.mark.parametrize("what", ["content", "name", "place", "folder", "link"])
def test_an_input_that_was_changed_since_it_was_read_is_an_error(folder, what):
    os.utime(folder / "a/b/weights.safetensors", (0, 0))
    os.utime(folder / "link", (0, 0), follow_symlinks=False)
    read = read_inputs({"model": folder})
    change(folder, what)
    with pytest.raises(WarmUpError, match=f"the input model was changed meanwhile: {folder}/") as raised:
        require_unchanged(read)
    assert raised.value.remedy
