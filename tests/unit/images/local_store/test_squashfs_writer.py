"""Writing a squashfs: what it has, that it always has the same bytes, and what goes wrong."""

import io
import os
import re
import stat
import subprocess
import tarfile
import time

import pytest
from images import hardlink, link, tar
from storing import NEEDS_SQUASHFS, layer_file

from imagematrix.errors import AuditError, EngineError, UsageError
from imagematrix.images.local_store.merged_image import MergedFile, MergedImage
from imagematrix.images.local_store.squashfs_writer import write_squashfs

pytestmark = NEEDS_SQUASHFS

LONG = "long/" + "n" * 150


def entry(path, **fields):
    info = tarfile.TarInfo(path)
    for name, value in fields.items():
        setattr(info, name, value)
    return info


def image(*members):
    return MergedImage([layer_file(tar(*members))])


def written(path, whole, **how):
    write_squashfs(path, whole.list_members(), whole.latest, **how)
    return path.read_bytes()


def program(tmp_path, monkeypatch, body):
    """Put a mksquashfs with another `body` first in PATH."""
    path = tmp_path / "bin" / "mksquashfs"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_it_has_modes_times_and_links_of_the_image_and_root_owns_all_files(tmp_path):
    whole = image(
        entry("./", type=tarfile.DIRTYPE, mode=0o750, mtime=5),
        entry("bin", type=tarfile.DIRTYPE, mode=0o2755, uid=3, gid=4, mtime=100),
        ("bin/su", b"x" * 9, 0o4755),
        hardlink("bin/sudo", "bin/su"),
        link("sbin", "bin"),
        entry(LONG, mode=0o600, uid=70_000, gid=80_000, mtime=200),
        entry("n\xe4me\udcff"),
    )
    written(tmp_path / "i.sqfs", whole)
    root = tmp_path / "root"
    subprocess.run(
        ["unsquashfs", "-q", "-n", "-d", root, tmp_path / "i.sqfs"], check=True, stdout=subprocess.DEVNULL
    )
    state = {path: (root / path).lstat() for path in (".", "bin", "bin/su", "bin/sudo", "sbin", LONG)}
    assert stat.S_IMODE(state["."].st_mode) == 0o750
    assert (stat.S_IMODE(state["bin"].st_mode), state["bin"].st_mtime) == (0o2755, 100)
    assert stat.S_IMODE(state["bin/su"].st_mode) == 0o4755
    assert state["bin/su"].st_ino == state["bin/sudo"].st_ino
    assert str((root / "sbin").readlink()) == "bin"
    assert state[LONG].st_mtime == 200
    assert {(one.st_uid, one.st_gid) for one in state.values()} == {(0, 0)}
    assert (root / "n\xe4me\udcff").exists()


def test_it_has_the_same_bytes_on_any_number_of_processors_and_at_any_time(tmp_path, monkeypatch):
    files = [
        (f"d{number % 7}/{number}", os.urandom(number * 50) + bytes(number * 99)) for number in range(400)
    ]
    files.append(("large", os.urandom(3_000_000)))
    first = written(tmp_path / "1", image(*files), processors=1)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "77")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert written(tmp_path / "2", image(*files), processors=2) == first
    time.sleep(1.1)  # the time of the root would be the current one
    assert written(tmp_path / "3", image(*files)) == first


def test_without_squashfs_tools_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="mksquashfs is not installed") as caught:
        written(tmp_path / "i", image("a"))
    assert "apt install squashfs-tools" in caught.value.remedy
    assert "--unpacked" in caught.value.remedy


@pytest.mark.parametrize("size", [1, 5_000_000])
def test_a_program_that_fails_says_why(tmp_path, monkeypatch, size):
    program(tmp_path, monkeypatch, 'echo "FATAL ERROR: \033[31mno tar support" >&2; exit 1')
    with pytest.raises(EngineError, match="mksquashfs: FATAL ERROR: no tar support"):
        written(tmp_path / "i", image(("a", bytes(size))))


def test_a_program_that_stops_reading_has_failed(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(EngineError, match="mksquashfs: failed"):
        written(tmp_path / "i", image(("a", bytes(5_000_000))))


def test_a_full_disk_is_an_error_of_the_disk(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, 'echo "Write failed because No space left on device" >&2; exit 1')
    with pytest.raises(OSError, match=re.escape("[Errno 28] No space left on device")):
        written(tmp_path / "i", image("a"))


def test_an_error_of_the_image_ends_the_program(tmp_path):
    def members():
        yield MergedFile(path="/", kind=tarfile.DIRTYPE)
        raise AuditError("damaged")

    with pytest.raises(AuditError, match="damaged"):
        write_squashfs(tmp_path / "i", members(), 0)


def test_a_file_that_ends_early_is_an_error(tmp_path):
    short = MergedFile(path="/f", kind=tarfile.REGTYPE, size=2, content=io.BytesIO(b"x"))
    with pytest.raises(AuditError, match="'/f' is truncated"):
        write_squashfs(tmp_path / "i", [MergedFile(path="/", kind=tarfile.DIRTYPE), short], 0)
