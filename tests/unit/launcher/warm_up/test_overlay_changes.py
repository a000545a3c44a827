"""What a container changed in its caches, from folders as overlayfs leaves them."""

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from imagematrix.errors import AuditError
from imagematrix.images.oci.layer_entries import DEEPEST
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.warm_up import overlay_changes
from imagematrix.launcher.warm_up.folder_states import read_states
from imagematrix.launcher.warm_up.overlay_changes import (
    OPAQUE,
    list_changed_paths,
    measure_caches,
    open_folder,
    read_caches,
    read_changes,
)

NOBODY = 65534
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


@pytest.fixture
def opened_by_user(upper):
    """Call it once the folder with changes is complete, to get a descriptor of it for an ordinary user."""
    user, descriptors = os.geteuid(), []

    def call():
        descriptors.append(os.open(upper, os.O_RDONLY))
        if user == 0:
            for path in (upper, *upper.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        return descriptors[0]

    yield call
    os.seteuid(user)
    for descriptor in descriptors:
        os.close(descriptor)


def nest(folder, levels):
    """Make folders in each other."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=inner)
        outer, inner = inner, os.open("a", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)


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


@pytest.mark.parametrize("closed", [0, 0o100, 0o400])
def test_what_is_in_a_folder_that_a_user_may_not_list_is_counted_and_named(upper, opened_by_user, closed):
    """The program is root in its container, where modes keep nothing from it."""
    put(upper, A, text="x" * 1000)
    put(upper, "/opt/tool/file")
    for path in ("opt/tool", "opt", f"{ROOT}/numba".lstrip("/"), "var/cache"):
        (upper / path).chmod(closed)
    descriptor = opened_by_user()
    assert measure_caches(descriptor) == 1000
    assert {A, "/opt/tool/file"} <= {*list_changed_paths(descriptor)}
    assert files(read_changes(descriptor, io.BytesIO()).states) == {A}


def test_modes_of_what_is_open_to_the_user_stay(upper, opened_by_user):
    put(upper, A)
    (upper / ROOT.lstrip("/") / "numba").chmod(0o555)
    descriptor = opened_by_user()
    assert measure_caches(descriptor) == len("text")
    assert stat.S_IMODE(os.stat(f"{ROOT}/numba".lstrip("/"), dir_fd=descriptor).st_mode) == 0o555


def test_a_link_in_the_place_of_a_folder_gives_no_modes_to_what_it_leads_to(upper, tmp_path):
    (tmp_path / "secret").mkdir(mode=0)
    (upper / "link").symlink_to(tmp_path / "secret")
    descriptor = os.open(upper, os.O_RDONLY)
    with pytest.raises(NotADirectoryError):
        open_folder("link", descriptor)
    os.close(descriptor)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0


@pytest.mark.parametrize(
    "read_all",
    [measure_caches, lambda upper: read_changes(upper, None)],
    ids=["measure", "read"],
)
def test_folders_that_are_nested_too_deeply_for_an_image_are_an_error(upper, read_all):
    put(upper, A)
    nest(upper / ROOT.lstrip("/"), DEEPEST)
    descriptor = os.open(upper, os.O_RDONLY)
    opened = [*Path("/proc/self/fd").iterdir()]
    with pytest.raises(AuditError, match=r"the path '/var/cache/warm/a/.* has more than 256 levels"):
        read_all(descriptor)
    assert [*Path("/proc/self/fd").iterdir()] == opened
    os.close(descriptor)


def test_folders_outside_the_caches_may_be_nested_more_deeply(upper):
    """No layer has them, so they are only named."""
    put(upper, A)
    (upper / "tmp").mkdir()
    nest(upper / "tmp", DEEPEST + 20)
    descriptor = os.open(upper, os.O_RDONLY)
    paths = [*list_changed_paths(descriptor)]
    os.close(descriptor)
    assert A in paths
    assert max(path.count("/") for path in paths) == DEEPEST + 1
    assert files(read(upper).states) == {A}


def test_a_folder_that_is_removed_while_it_is_measured_counts_nothing(upper, monkeypatch):
    put(upper, A, C)
    descriptor = os.open(upper, os.O_RDONLY)
    opening = overlay_changes.open_folder

    def remove_first(name, parent):
        if name == "triton":
            (upper / C.lstrip("/")).unlink()
            os.rmdir(name, dir_fd=parent)
        return opening(name, parent)

    monkeypatch.setattr(overlay_changes, "open_folder", remove_first)
    assert measure_caches(descriptor) == len("text")
    os.close(descriptor)
