"""What a container changed in its caches, from folders as overlayfs leaves them."""

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.warm_up.folder_states import read_states
from imagematrix.launcher.warm_up.overlay_changes import (
    OPAQUE,
    list_changed_paths,
    measure_caches,
    read_caches,
    read_changes,
)

A, B, C = f"{ROOT}/numba/a", f"{ROOT}/numba/b", f"{ROOT}/triton/c"


def put(root, *paths, text="text"):
    for path in paths:
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def mark_opaque(folder):
    try:
        os.setxattr(folder, OPAQUE, b"y")
    except OSError:
        pytest.skip("the file system of the tests has no attributes of users")


def remove_as_overlay(path):
    """Make a whiteout, which an ordinary user may, too."""
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(0, 0))


@pytest.fixture
def before(tmp_path):
    """The states of the files of an image."""
    put(tmp_path / "image", A, B, C, text="old")
    return read_caches(str(tmp_path / "image"))


@pytest.fixture
def upper(tmp_path):
    """The folder with changes."""
    made = tmp_path / "upper"
    made.mkdir()
    return made


def read(upper, copy=None):
    descriptor = os.open(upper, os.O_RDONLY)
    try:
        return read_changes(descriptor, copy)
    finally:
        os.close(descriptor)


def files(states):
    return {path for path, state in states.items() if not state.is_folder}


def test_an_image_without_the_folder_has_no_caches(tmp_path):
    assert read_caches(str(tmp_path)) == {}


def test_what_was_written_is_over_what_the_image_has(before, upper):
    put(upper, A, f"{ROOT}/numba/new")
    after = read(upper).apply(before)
    assert files(after) == {A, B, C, f"{ROOT}/numba/new"}
    assert after[B] == before[B]
    assert after[A].content != before[A].content


def test_nothing_written_is_no_change(before, upper):
    put(upper, "/var/other")
    assert read(upper).apply(before) == before


def test_the_tar_is_as_engines_write_it(upper):
    put(upper, A)
    copy = io.BytesIO()
    changes = read(upper, copy)
    copy.seek(0)
    assert read_states(copy, ROOT) == changes.states
    copy.seek(0)
    with tarfile.open(fileobj=copy) as archive:
        assert not any(member.pax_headers for member in archive), "times without fractions need none"
    empty = io.BytesIO()
    read(upper / "var", empty)
    empty.seek(0)
    assert read_states(empty, ROOT) == {}


def test_what_was_removed_is_gone_and_in_no_tar(before, upper):
    put(upper, f"{ROOT}/numba/new")
    remove_as_overlay(upper / A.lstrip("/"))
    remove_as_overlay(upper / ROOT.lstrip("/") / "triton")
    assert files(read(upper).apply(before)) == {B, f"{ROOT}/numba/new"}
    descriptor = os.open(upper, os.O_RDONLY)
    assert A not in list_changed_paths(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("folder", [f"{ROOT}/numba", "/var/cache"])
def test_a_folder_that_was_made_anew_has_only_what_is_new(before, upper, folder):
    put(upper, f"{ROOT}/numba/new")
    mark_opaque(upper / folder.lstrip("/"))
    assert files(read(upper).apply(before)) == {f"{ROOT}/numba/new"} | (
        {C} if folder.startswith(ROOT) else set()
    )


def test_a_file_or_a_link_in_the_place_of_a_folder_hides_it(before, upper):
    put(upper, f"{ROOT}/numba")
    (upper / ROOT.lstrip("/") / "triton").symlink_to("/etc")
    assert files(read(upper).apply(before)) == {f"{ROOT}/numba", f"{ROOT}/triton"}


@pytest.mark.parametrize("place", ["var", "var/cache", "var/cache/warm"])
def test_no_link_leads_to_files_of_the_node(before, upper, tmp_path, place):
    put(tmp_path / "node", *(f"{name}/secret" for name in ("", "/cache/warm", "/warm")))
    (upper / place).parent.mkdir(parents=True, exist_ok=True)
    (upper / place).symlink_to(tmp_path / "node")
    assert read(upper).apply(before) == {}
    descriptor = os.open(upper, os.O_RDONLY)
    assert measure_caches(descriptor) == 0
    assert not any("secret" in path for path in list_changed_paths(descriptor))
    os.close(descriptor)


def test_files_that_their_owner_may_not_read_are_read(upper):
    put(upper, A)
    for path in (A, ROOT + "/numba", ROOT):
        Path(upper, path.lstrip("/")).chmod(0)
    assert files(read(upper).states) == {A}


def test_the_size_is_that_of_what_was_written(upper):
    put(upper, A, text="x" * 1000)
    put(upper, "/var/other", text="x" * 50)
    descriptor = os.open(upper, os.O_RDONLY)
    assert measure_caches(descriptor) == 1000
    assert sorted(list_changed_paths(descriptor))[-2:] == [A, "/var/other"]
    os.close(descriptor)
