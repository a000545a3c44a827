"""The states of files in a folder of a container, and what a start changed in it."""

import io
import tarfile

import pytest

from imagematrix.errors import UsageError
from imagematrix.images.warm.layer import LATEST
from imagematrix.launcher.warm_up import folder_states
from imagematrix.launcher.warm_up.folder_states import (
    TooLargeError,
    find_changed,
    find_removed,
    read_states,
)

ROOT = "/var/cache/warm"


def tar(*members):
    """A tar of (name, type, content or target, time)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, kind, content, mtime in members:
            info = tarfile.TarInfo(name)
            info.type, info.mtime = kind, mtime
            if kind == tarfile.REGTYPE:
                info.size = len(content)
            else:
                info.linkname = content
            archive.addfile(info, io.BytesIO(content) if kind == tarfile.REGTYPE else None)
    raw.seek(0)
    return raw


FOLDER = ("warm", tarfile.DIRTYPE, "", 1)
FILE = ("warm/numba/a.nbc", tarfile.REGTYPE, b"\x7fELF code", 5)


def test_each_file_has_its_path_in_the_container_and_its_state():
    states = read_states(
        tar(
            FOLDER,
            FILE,
            ("warm/numba/l", tarfile.SYMTYPE, "a.nbc", 6),
            ("warm/h", tarfile.LNKTYPE, FILE[0], 5),
        ),
        ROOT,
    )
    assert [*states] == [ROOT, f"{ROOT}/numba/a.nbc", f"{ROOT}/numba/l", f"{ROOT}/h"]
    file = states[f"{ROOT}/numba/a.nbc"]
    assert (file.size, file.mtime, file.is_elf, len(file.content)) == (9, 5, True, 64)
    assert states[f"{ROOT}/numba/l"].content == "a.nbc"
    assert states[f"{ROOT}/h"] == file
    assert states[ROOT].is_folder


@pytest.mark.parametrize(
    "after",
    [
        ("warm/numba/a.nbc", tarfile.REGTYPE, b"\x7fELF CODE", 5),
        ("warm/numba/a.nbc", tarfile.REGTYPE, b"\x7fELF code", 6),  # the same, compiled anew
        ("warm/numba/a.nbc", tarfile.SYMTYPE, "elsewhere", 5),
    ],
)
def test_a_file_that_was_written_anew_is_seen(after):
    before = read_states(tar(FOLDER, FILE), ROOT)
    changed = read_states(tar(FOLDER, after), ROOT)
    assert find_changed(before, changed) == {f"{ROOT}/numba/a.nbc"}
    assert find_removed(before, changed) == set()


def test_new_and_removed_files_are_seen_and_folders_are_not():
    before = read_states(tar(FOLDER, FILE), ROOT)
    after = read_states(tar(("warm", tarfile.DIRTYPE, "", 9), ("warm/new", tarfile.DIRTYPE, "", 9)), ROOT)
    assert find_changed(before, after) == set()
    assert find_removed(before, after) == {f"{ROOT}/numba/a.nbc"}
    assert find_changed(after, before) == {f"{ROOT}/numba/a.nbc"}


def test_more_files_than_any_program_caches_are_refused(monkeypatch):
    monkeypatch.setattr(folder_states, "MOST", 1)
    with pytest.raises(UsageError, match="more than 1 files"):
        read_states(tar(FOLDER, FILE), ROOT)


@pytest.mark.parametrize(("mtime", "expected"), [(-3600, 0), (LATEST + 1, LATEST), (5.9, 5)])
def test_a_time_is_one_that_a_layer_can_have(mtime, expected):
    states = read_states(tar(FOLDER, (*FILE[:3], mtime)), ROOT)
    assert states[f"{ROOT}/numba/a.nbc"].mtime == expected


def test_files_that_are_too_large_are_not_read():
    other = ("warm/numba/b.nbc", tarfile.REGTYPE, bytes(1 << 24), 5)
    link = ("warm/numba/l.nbc", tarfile.LNKTYPE, FILE[0], 5)
    assert len(read_states(tar(FOLDER, FILE, link), ROOT, len(FILE[2]))) == 3
    stream = tar(FOLDER, FILE, other)
    with pytest.raises(TooLargeError):
        read_states(stream, ROOT, len(FILE[2]))
    assert stream.tell() < 1 << 22
