"""Files that are written whole or not at all."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from imagematrix.common import files

OLD, NEW = b"old" * 100_000, b"new" * 100_000


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(OLD)
    return path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def full(monkeypatch):
    """No file reaches the disk."""

    def fsync(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("write", [files.replace_file, files.write_output])
def test_readers_see_all_or_nothing(path, write):
    seen, ended = set(), threading.Event()

    def read():
        while not ended.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for content in (NEW, OLD) * 20:
        write(path, content)
    ended.set()
    reader.join()
    assert seen <= {OLD, NEW}
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("write", [files.replace_file, files.write_output])
def test_a_full_disk_leaves_the_file_as_it_was(path, write):
    with pytest.raises(OSError, match="No space left"):
        write(path, NEW)
    assert path.read_bytes() == OLD
    assert [*path.parent.iterdir()] == [path]


def test_a_failed_check_leaves_the_file_as_it_was(path):
    def check(draft):
        assert draft.read_bytes() == NEW
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        files.replace_file(path, NEW, check=check)
    assert path.read_bytes() == OLD
    assert [*path.parent.iterdir()] == [path]


def test_the_umask_decides_unless_a_mode_is_given(tmp_path):
    before = os.umask(0o027)
    try:
        files.replace_file(tmp_path / "a", b"")
        files.replace_file(tmp_path / "b", b"", 0o755)
    finally:
        os.umask(before)
    assert (mode(tmp_path / "a"), mode(tmp_path / "b")) == (0o640, 0o755)


@pytest.fixture
def owners(monkeypatch):
    """The owners and groups that files are given; root alone may give an owner."""
    given = []

    def fchown(_descriptor, uid, gid):
        if uid == 7:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        given.append((uid, gid))

    monkeypatch.setattr(os, "fchown", fchown)
    return given


def own(monkeypatch, path, uid, gid=50):
    """Let the file at `path` belong to a user and a group."""
    lstat = Path.lstat

    def lie(self):
        status = lstat(self)
        if self != path:
            return status
        return os.stat_result((*status[:4], uid, gid, *status[6:]))

    monkeypatch.setattr(Path, "lstat", lie)


@pytest.mark.parametrize("write", [files.replace_file, files.write_output])
@pytest.mark.parametrize(("uid", "given"), [(1000, (1000, 50)), (7, (-1, 50))])
def test_a_file_that_is_replaced_keeps_mode_and_owner(path, monkeypatch, owners, write, uid, given):
    path.chmod(0o4604)
    own(monkeypatch, path, uid)
    write(path, NEW)
    assert (path.read_bytes(), mode(path)) == (NEW, 0o604)
    assert owners == [given]


def test_an_owner_is_not_kept_where_anybody_may_put_a_file(path, monkeypatch, owners):
    path.chmod(0o666)
    path.parent.chmod(0o1777)
    own(monkeypatch, path, os.geteuid() + 1)
    before = os.umask(0o027)
    try:
        files.replace_file(path, NEW)
    finally:
        os.umask(before)
    assert (mode(path), owners) == (0o640, [])


def test_a_link_that_is_replaced_has_no_mode_to_keep(path, owners):
    path.chmod(0o600)
    link = path.with_name("link")
    link.symlink_to(path)
    before = os.umask(0o027)
    try:
        files.replace_file(link, NEW)
    finally:
        os.umask(before)
    assert not link.is_symlink()
    assert (mode(link), path.read_bytes(), owners) == (0o640, OLD, [])


def test_output_keeps_the_mode_and_follows_links(path):
    path.chmod(0o604)
    link = path.with_name("link")
    link.symlink_to(path.name)
    files.write_output(link, NEW)
    assert link.is_symlink()
    assert (path.read_bytes(), mode(path)) == (NEW, 0o604)


def test_output_to_a_link_that_leads_nowhere_creates_its_file(tmp_path):
    link = tmp_path / "link"
    link.symlink_to("new")
    files.write_output(link, NEW)
    assert (tmp_path / "new").read_bytes() == NEW


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EACCES])
def test_output_is_written_in_place_where_it_cannot_be_replaced(path, monkeypatch, error):
    """Such as a file that is a mount of its own, or is in somebody else's folder."""

    def replace(_self, _target):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "replace", replace)
    files.write_output(path, NEW)
    assert path.read_bytes() == NEW
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("output", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_output_to_a_file_that_a_shell_has_open_is_added_to_it(tmp_path, output):
    code = "import pathlib, sys; from imagematrix.common.files import write_output; "
    code += "write_output(pathlib.Path(sys.argv[1]), b'second')"
    path = tmp_path / "a"
    with path.open("ab") as file:
        file.write(b"first ")
        file.flush()
        subprocess.run([sys.executable, "-c", code, output], stdout=file, check=True)
        subprocess.run(["echo", " third"], stdout=file, check=True)
    assert b"second third" in path.read_bytes()


def test_output_to_a_pipe_is_written_to_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        files.write_output(pipe, b"new")
        assert reader.stdout.read() == b"new"
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_to_itself_is_replaced(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    files.write_output(loop, NEW)
    assert loop.read_bytes() == NEW


def test_error_without_a_name_gets_one(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, files.name_file_in_errors(tmp_path / "a"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a")
    with pytest.raises(FileNotFoundError) as caught, files.name_file_in_errors(tmp_path / "a"):
        (tmp_path / "b").read_bytes()
    assert caught.value.filename == str(tmp_path / "b")
