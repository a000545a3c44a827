"""The scratch folder of a build is removed with it, or by the next build if it was killed."""

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from imagematrix.common.temp_folder import make_scratch_folder

ANOTHER = """\
import sys
from imagematrix.common.temp_folder import make_scratch_folder
with make_scratch_folder() as folder:
    (folder / "blob").write_text("data")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture
def another(place):
    """Another build, with its folder, in a process of its own."""
    command = [sys.executable, "-c", ANOTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, place / process.stdout.readline().strip()
        process.kill()


def test_folder_is_removed_at_exit(place):
    with contextlib.suppress(KeyboardInterrupt), make_scratch_folder() as folder:
        (folder / "blob").write_text("data")
        assert list(place.iterdir()) == [folder]
        raise KeyboardInterrupt
    assert not list(place.iterdir())


def test_folder_of_a_killed_build_is_removed_by_the_next(place, another):
    process, left = another
    with make_scratch_folder() as folder:
        assert set(place.iterdir()) == {folder, left}, "its build is running"
    process.kill()
    process.wait()
    assert list(left.iterdir())
    with make_scratch_folder() as folder:
        assert list(place.iterdir()) == [folder]


def test_default_location_is_on_disk(place, monkeypatch):
    monkeypatch.delenv("TMPDIR")
    with make_scratch_folder() as folder:
        assert folder.parent == Path("/var/tmp")
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with make_scratch_folder() as folder:
        assert folder.parent == place


def test_relative_tmpdir_is_resolved(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("TMPDIR", ".")
    with make_scratch_folder() as folder:
        assert folder.parent == place


def test_folder_of_another_user_is_kept(place, monkeypatch):
    left = place / "imagematrix-build-left"
    left.mkdir()
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    with make_scratch_folder():
        pass
    assert list(place.iterdir()) == [left]


def test_files_and_links_with_a_similar_name_are_kept(place):
    (place / "imagematrix-build-link").symlink_to(place)
    (place / "imagematrix-build-file").touch()
    with make_scratch_folder() as folder:
        pass
    assert not folder.exists()
    assert {path.name for path in place.iterdir()} == {"imagematrix-build-link", "imagematrix-build-file"}


def test_nothing_is_removed_without_file_locks(place, monkeypatch):
    def flock(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    left = place / "imagematrix-build-left"
    left.mkdir()
    with make_scratch_folder() as folder:
        assert set(place.iterdir()) == {folder, left}
    assert list(place.iterdir()) == [left]
