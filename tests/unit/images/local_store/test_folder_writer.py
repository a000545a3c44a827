"""Writing an image's files into a folder, whatever modes they have, and nothing outside of it."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

import imagematrix
from imagematrix.errors import AuditError
from imagematrix.images.local_store.folder_writer import remove_tree, write_folder
from imagematrix.images.local_store.merged_image import MergedFile

# The user may read this checkout, wherever it is, and has no other right.
READS = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
ORDINARY = ["setpriv", "--reuid", "4711", "--regid", "4711", "--clear-groups", *READS]
USER = [] if os.geteuid() else ORDINARY  # root may write everywhere
AS_USER = """
import io, sys, tarfile
from pathlib import Path
from imagematrix.images.local_store.merged_image import MergedFile
from imagematrix.images.local_store.folder_writer import remove_tree, write_folder
root = Path(sys.argv[1], "root")
write_folder(root, [
    MergedFile(path="/", kind=tarfile.DIRTYPE, mode=0o555),
    MergedFile(path="/d", kind=tarfile.DIRTYPE, mode=0o555),
    MergedFile(path="/d/e", kind=tarfile.DIRTYPE, mode=0),
    MergedFile(path="/d/e/f", kind=tarfile.REGTYPE, mode=0o400, size=1, content=io.BytesIO(b"x")),
])
print(oct(root.stat().st_mode), oct((root / "d").stat().st_mode), oct((root / "d" / "e").stat().st_mode))
remove_tree(root)
print([*Path(sys.argv[1]).iterdir()])
"""


def file(path, content=b"", **fields):
    return MergedFile(
        path=path, kind=tarfile.REGTYPE, size=len(content), content=io.BytesIO(content), **fields
    )


def folder(path, **fields):
    return MergedFile(path=path, kind=tarfile.DIRTYPE, **{"mode": 0o755} | fields)


def symlink(path, target, **fields):
    return MergedFile(path=path, kind=tarfile.SYMTYPE, target=target, **fields)


def test_modes_and_times_are_those_of_the_image_without_setuid_bits(tmp_path):
    root = tmp_path / "root"
    write_folder(
        root,
        [
            folder("/", mtime=1),
            folder("/d", mode=0o3550, mtime=2),
            symlink("/l", "d/none", mtime=3),
            file("/d/f", b"x" * 3_000_000, mode=0o6755, mtime=4),
            MergedFile(path="/h", kind=tarfile.LNKTYPE, target="/d/f"),
        ],
    )
    states = {path: (root / path).lstat() for path in (".", "d", "l", "d/f", "h")}
    assert {path: int(state.st_mtime) for path, state in states.items()} == {
        ".": 1,
        "d": 2,
        "l": 3,
        "d/f": 4,
        "h": 4,
    }
    assert [oct(states[path].st_mode & 0o7777) for path in ("d", "d/f")] == ["0o550", "0o755"]
    assert states["h"].st_ino == states["d/f"].st_ino
    assert (root / "d/f").stat().st_size == 3_000_000
    assert str((root / "l").readlink()) == "d/none"


def test_everything_has_the_group_of_the_user_in_a_store_for_another_group(tmp_path):
    others = [group for group in os.getgroups() if group != os.getegid()] if os.geteuid() else [4712]
    if not others:
        pytest.skip("needs another group")
    os.chown(tmp_path, -1, others[0])
    tmp_path.chmod(0o2775)
    root = tmp_path / "root"
    write_folder(root, [folder("/"), folder("/d"), file("/d/f", b"x"), symlink("/d/l", "f")])
    assert {one.lstat().st_gid for one in (root, *root.rglob("*"))} == {os.getegid()}
    assert oct(root.stat().st_mode & 0o7777) == oct((root / "d").stat().st_mode & 0o7777) == "0o755"


@pytest.mark.parametrize("outside", ["link", "/etc"])
def test_no_member_is_written_through_a_link(tmp_path, outside):
    (tmp_path / "link").mkdir()
    members = [folder("/"), symlink("/l", str(tmp_path / outside)), file("/l/f", b"x")]
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        write_folder(tmp_path / "root", members)
    assert [*(tmp_path / "link").iterdir()] == []


def test_no_file_that_is_there_is_written_to(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    with pytest.raises(FileExistsError):
        write_folder(tmp_path / "root", [folder("/"), symlink("/l", str(target)), file("/l", b"x")])
    assert target.read_text() == "mine"


def test_a_hard_link_is_not_made_through_a_link(tmp_path):
    (tmp_path / "secret").write_text("s")
    members = [
        folder("/"),
        symlink("/l", str(tmp_path)),
        MergedFile(path="/h", kind=tarfile.LNKTYPE, target="/l/secret"),
    ]
    with pytest.raises(NotADirectoryError):
        write_folder(tmp_path / "root", members)


def test_a_file_that_ends_early_is_an_error(tmp_path):
    short = MergedFile(path="/f", kind=tarfile.REGTYPE, size=2, content=io.BytesIO(b"x"))
    with pytest.raises(AuditError, match="'/f' is truncated"):
        write_folder(tmp_path / "root", [folder("/"), short])


def test_folders_that_are_not_writable_are_filled_and_removed_by_their_owner(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o777)
    package = Path(imagematrix.__file__).parents[1]
    done = subprocess.run(
        [*USER, "env", f"PYTHONPATH={package}", "/usr/bin/python3", "-c", AS_USER, own],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "0o40555 0o40555 0o40000\n[]\n", done.stderr


def test_a_deep_tree_is_removed(tmp_path):
    root = tmp_path / "root"
    paths = ["/" + "/".join(["d"] * count) for count in range(1, 257)]
    write_folder(root, [folder("/"), *map(folder, paths), symlink("/d/l", "/etc")])
    remove_tree(root)
    assert not root.exists()
