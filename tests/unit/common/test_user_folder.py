"""Tests of folders of the user's own in places where others may write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from imagematrix.common.user_folder import list_user_folders, make_user_folder


def mode_of(folder: str) -> int:
    return Path(folder).stat().st_mode & 0o7777


def test_it_is_created_with_rights_for_the_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    for number, umask in enumerate((0o000, 0o027, 0o777)):
        before = os.umask(umask)
        try:
            folder = make_user_folder(str(tmp_path), f"own{number}")
        finally:
            os.umask(before)
        assert mode_of(folder) == 0o700
        assert list_user_folders(str(tmp_path), f"own{number}") == [folder]


@pytest.mark.parametrize("kind", ["file", "link", "foreign", "open", "fifo"])
def test_a_name_that_is_taken_gets_a_number(tmp_path: Path, kind: str) -> None:
    taken = tmp_path / "own"
    if kind == "file":
        taken.touch()
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(taken)
    else:
        taken.mkdir()
        taken.chmod(0o777 if kind == "open" else 0o700)
        if kind == "foreign":
            if os.geteuid():
                pytest.skip("only root can give a folder away")
            os.chown(taken, 65534, 65534)
    before = taken.lstat()

    folder = make_user_folder(str(tmp_path), "own")

    assert folder == str(tmp_path / "own.1")
    assert (taken.lstat().st_mode, taken.lstat().st_uid) == (before.st_mode, before.st_uid)
    # What exists goes before anything new, also when the first name is free again.
    if taken.is_dir() and not taken.is_symlink():
        taken.rmdir()
    else:
        taken.unlink()
    assert make_user_folder(str(tmp_path), "own") == folder


def test_rights_for_others_to_read_are_taken_away(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o755)
    folder = make_user_folder(str(tmp_path), "own")
    assert folder == str(tmp_path / "own")
    assert mode_of(folder) == 0o700


def test_names_end(tmp_path: Path) -> None:
    for number in range(16):
        (tmp_path / (f"own.{number}" if number else "own")).touch()
    with pytest.raises(FileExistsError):
        make_user_folder(str(tmp_path), "own")
    with pytest.raises(OSError, match="No such file") as caught:
        make_user_folder(str(tmp_path / "missing"), "own")
    assert caught.value.errno == errno.ENOENT


def test_a_folder_that_cannot_be_looked_at_is_an_error_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_user_folder(str(tmp_path), "own")
    real = os.open

    def fail(path: str, flags: int) -> int:
        if path == folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", fail)
    for find in (list_user_folders, make_user_folder):
        with pytest.raises(OSError, match="Input/output error"):
            find(str(tmp_path), "own")


def test_a_folder_that_is_as_it_should_be_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_user_folder(str(tmp_path), "own")
    monkeypatch.setattr(os, "fchmod", lambda *_: pytest.fail("its rights were set"))
    assert list_user_folders(str(tmp_path), "own") == [folder]
