"""Stores on a file system that fails: clear errors, no half-written image, and all is well once it works."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from images import layout, tar
from processes import new_folder, remove_folder
from storing import listed, variant

from imagematrix.images.local_store import disk_reserve
from imagematrix.images.local_store.folder import ImageStore

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests/doubles/faulty_fs.c"
WAIT_S = 120
ERRORS = (2, 8)  # the store cannot be used; mksquashfs failed
FAULTS = (
    "write * EIO 3",
    "write * ESTALE 2",
    "write root.squashfs ENOSPC 1",
    "write * short 2",
    "write image.json short 1",
    "write locks EIO 1",
    "create * ESTALE 2",
    "create new EIO 1",
    "open * ESTALE 3",
    "open locks EIO 2",
    "read * EIO 2",
    "close new EIO 1",
    "fsync * EIO 1",
    "fsync image.json ESTALE 1",
    "write reserve EIO 2",
    "create reserve ENOSPC 1",
    "mkdir reserve ESTALE 1",
    "rename images lost 1",
    "rename images unanswered 1",
    "rename images EIO 1",
    "rename * ESTALE 1",
    "link * EIO 1",
    "link * unanswered 1",
    "mkdir new ESTALE 1",
    "mkdir images unanswered 1",
    "unlink locks EIO 1",
    "unlink locks lost 1",
    "utimens * EIO 1",
    "getattr * ESTALE 5",
    "getattr image EIO 3",
    "readdir new EIO 1",
    "statfs * EIO 1",
    "* * delay 5",
)
FILLING = ("write", "create", "close", "mkdir", "*")  # the calls by which folders and squashfs differ


class FaultyFolder:
    """A folder on a file system whose faults can be set."""

    def __init__(self, folder, program):
        self.path = folder / "mounted"
        self._faults = folder / "faults"
        for name in ("kept", "mounted"):
            (folder / name).mkdir()
        self.fail()
        words = [program, folder / "kept", self._faults, self.path, "-f", "-o", "max_threads=10"]
        self._process = subprocess.Popen(words)
        deadline = time.monotonic() + 30
        while not self.path.is_mount():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def fail(self, *faults):
        """Have these faults, and no others."""
        self._faults.write_text("".join(f"{line}\n" for line in faults))

    def end(self):
        subprocess.run(["umount", "--lazy", self.path], check=True)
        self._process.wait(30)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=False, capture_output=True, text=True
    )
    if flags.returncode:
        pytest.skip("needs pkg-config and libfuse3-dev")
    path = tmp_path_factory.mktemp("fuse") / "faulty_fs"
    subprocess.run(["gcc", "-O1", "-Wall", "-o", path, SOURCE, *flags.stdout.split()], check=True)
    return path


@pytest.fixture
def disk(program):
    folder = new_folder()
    made = FaultyFolder(folder, program)
    yield made
    made.end()
    remove_folder(folder)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """An image in a layout, and the layout's folder."""
    made, _ = variant(
        "cpu", tar(("a/b", os.urandom(300_000)), ("c", b"x" * 100_000)), tar("a/.wh.none", ("d", b""))
    )
    return made, layout(tmp_path_factory.mktemp("image") / "layout", made)


def started(disk, image, *more):
    store = disk.path / "store"
    words = ["pull", "training:v1", "--catalog", f"oci:{image[1]}", "--gpus", "none", "--to", store, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "imagematrix", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, codes=(0, *ERRORS)):
    """Wait for a pull to end with one of these codes; return it, after it has told why."""
    out, said = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in said
    assert (process.returncode == 0) == bool(out), said
    assert process.returncode in codes, said
    if process.returncode:
        assert "imagematrix: " in said or "error" in said, said
    return process.returncode


def require_whole(disk, image):
    """Require that the store has the whole image, or none."""
    found = ImageStore(disk.path / "store").find(image[0].digest)
    if found is not None and found.checksum:
        assert f"sha256:{hashlib.sha256(Path(found.root).read_bytes()).hexdigest()}" == found.checksum
        listing = subprocess.run(
            ["unsquashfs", "-lc", found.root], check=True, capture_output=True, text=True
        ).stdout
        assert listing.split() == [f"squashfs-root/{path}" for path in ("a/b", "c", "d")]
    elif found is not None:
        assert {path.name: path.stat().st_size for path in Path(found.root).rglob("?")}.items() >= {
            ("b", 300_000),
            ("c", 100_000),
            ("d", 0),
        }
    return found is not None


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        *((fault, ()) for fault in FAULTS),
        *((fault, ("--unpacked",)) for fault in FAULTS if fault.split()[0] in FILLING),
    ],
)
def test_a_fault_is_told_and_leaves_no_half_image(disk, image, fault, how):
    store = ImageStore(disk.path / "store")
    if "reserve" not in fault:  # its files would take the faults of others
        Path(store.path).mkdir()
        disk_reserve.fill_reserve(store)
    disk.fail(fault)
    code = ended(started(disk, image, *how))
    disk.fail()
    there = require_whole(disk, image)
    assert there or code
    both = [started(disk, image, *how) for _ in range(2)]
    for process in both:
        ended(process, codes=(0,))
    assert require_whole(disk, image)
    assert listed(store, "new") == listed(store, "partial") == []
    if "unlink" not in fault:  # who finds the image looks at no lock
        assert listed(store, "locks") == []


def test_two_pulls_among_faults_leave_no_half_image(disk, image):
    disk.fail("write * EIO 11", "rename * unanswered 3", "open * ESTALE 13", "* * delay 7", "link * EIO 4")
    for _ in range(3):
        for process in [started(disk, image), started(disk, image)]:
            ended(process)
    disk.fail()
    ended(started(disk, image), codes=(0,))
    assert require_whole(disk, image)


class SmallDisk:
    """A tmpfs, whose size can be set."""

    def __init__(self, folder):
        self.path = folder / "mounted"
        self.path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", self.path], check=True)

    def resize(self, kib):
        subprocess.run(["mount", "-o", f"remount,size={kib}k", self.path], check=True)

    def end(self):
        subprocess.run(["umount", "--lazy", self.path], check=True)


@pytest.fixture
def small_disk():
    folder = new_folder()
    made = SmallDisk(folder)
    yield made
    made.end()
    remove_folder(folder)


@pytest.mark.parametrize("how", [(), ("--unpacked",)])
def test_a_disk_that_fills_at_any_point_holds_no_half_image(small_disk, image, how):
    store = ImageStore(small_disk.path / "store")
    codes = []
    for kib in range(100, 1500, 100):
        small_disk.resize(kib)
        codes.append(ended(started(small_disk, image, *how)))
        assert require_whole(small_disk, image) == (codes[-1] == 0)
        if codes[-1] == 0:
            break
        new = Path(store.path, "new")
        assert not new.exists() or not [*new.iterdir()], "what a full disk ended takes no space"
    assert codes[0] != 0
    assert codes[-1] == 0
    assert listed(store, "new") == listed(store, "partial") == listed(store, "locks") == []
