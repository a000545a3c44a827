"""A driver from NVIDIA's installer or archive, made here around simulated libraries."""

import gzip
import hashlib
import io
import lzma
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import zstandard
from drivers import VERSION, library
from images import sparse

from imagematrix.build.plan import driver, installer
from imagematrix.build.plan.driver import expand_driver_source, read_driver_folder
from imagematrix.build.plan.installer import unpack_installer as unpack
from imagematrix.errors import UsageError

RUN = f"NVIDIA-Linux-x86_64-{VERSION}.run"
AMD64 = "linux/amd64"
MANIFEST = f"NVIDIA Accelerated Graphics Driver for Linux-x86_64\n{VERSION}\nnvidia\nnvidia\n"
COMPRESSED = {
    "xz": lzma.compress,
    "gzip": lambda raw: gzip.compress(raw, mtime=0),
    "zstd": lambda raw: zstandard.ZstdCompressor(write_checksum=True).compress(raw),
}
LIBCUDA = f"libcuda.so.{VERSION}"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The folder with unpacked drivers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "imagematrix" / "drivers"


@pytest.fixture
def tree(unpacked, tmp_path):
    """The content of an installer."""
    tree = shutil.copytree(unpacked, tmp_path / "tree")
    (tree / ".manifest").write_text(MANIFEST)
    (tree / "nvidia-installer").write_text("#!/bin/sh\ntouch /installed\n")
    (tree / "32").mkdir()
    (tree / "32" / LIBCUDA).write_text("for 32-bit programs")
    return tree


def tar(tree, *members, prefix="./"):
    """Return a tar of a folder, with further members."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(tree.rglob("*")):
            archive.add(path, f"{prefix}{path.relative_to(tree)}", recursive=False)
        for name, kind, link, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(content)
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def script(payload, *, quoted=False, lines=12):
    """Return an installer: NVIDIA's header names the payload's line, makeself's quotes the line before."""
    skip = f'skip="{lines}"' if quoted else f"skip={lines + 1}"
    head = ["#!/bin/sh", "# This script was generated using Makeself", skip, "touch /installed"]
    return "".join(f"{line}\n" for line in head + ["exit 0"] * (lines - len(head))).encode() + payload


def write(folder, raw, name=RUN):
    path = folder / name
    path.write_bytes(raw)
    return path


def pack(tree, *members):
    """Make an installer beside a folder with its content."""
    return write(tree.parent, script(lzma.compress(tar(tree, *members))))


def refusal(file, version=VERSION, platform=AMD64):
    with pytest.raises(UsageError) as caught:
        unpack(file, version, platform, lambda _: None)
    return str(caught.value).replace(f"{file.parent}/", "")


@pytest.mark.parametrize("quoted", [False, True], ids=["NVIDIA's header", "makeself's header"])
@pytest.mark.parametrize("compression", COMPRESSED)
def test_an_installer_gives_the_same_driver_as_a_folder(tree, tmp_path, compression, quoted):
    file = write(tmp_path, script(COMPRESSED[compression](tar(tree)), quoted=quoted))
    notes: list[str] = []
    folder = unpack(file, VERSION, AMD64, notes.append)
    assert notes == [f"unpacking {file}"]
    assert (
        read_driver_folder(folder, VERSION, AMD64).listing.digest
        == read_driver_folder(tree, VERSION, AMD64).listing.digest
    )
    assert {path.name for path in folder.iterdir()} == {path.name for path in tree.glob("lib*")}
    assert unpack(file, VERSION, AMD64, notes.append) == folder
    assert len(notes) == 1


@pytest.mark.skipif(shutil.which("makeself") is None, reason="makeself is not installed")
@pytest.mark.parametrize("compression", COMPRESSED)
def test_an_installer_of_makeself(tree, tmp_path, compression):
    file = tmp_path / RUN
    words = ["makeself", f"--{compression}", "--nox11", "--quiet", tree, file, "driver", "./nvidia-installer"]
    subprocess.run(words, check=True, capture_output=True)
    folder = unpack(file, VERSION, AMD64, lambda _: None)
    assert (
        read_driver_folder(folder, VERSION, AMD64).listing.digest
        == read_driver_folder(tree, VERSION, AMD64).listing.digest
    )


@pytest.mark.parametrize("compression", COMPRESSED)
def test_an_archive_has_the_libraries_in_lib(unpacked, tmp_path, compression):
    name = f"nvidia_driver-linux-x86_64-{VERSION}-archive"
    link = (f"{name}/lib/libcuda.so.1", tarfile.SYMTYPE, LIBCUDA, b"")
    other = (f"{name}/lib32/{LIBCUDA}", tarfile.REGTYPE, "", b"for 32-bit programs")
    raw = tar(unpacked, link, other, prefix=f"{name}/lib/")
    folder = unpack(write(tmp_path, COMPRESSED[compression](raw), f"{name}.tar"), VERSION, AMD64, print)
    assert {path.name for path in folder.iterdir()} == {path.name for path in unpacked.iterdir()}


def test_an_incomplete_or_other_driver_does_not_enter_the_cache(tree, tmp_path, cache):
    other = write(tmp_path, script(lzma.compress(tar(tree))), "other.run")
    assert refusal(other, "580.95.05") == f"other.run has the driver '{VERSION}', not 580.95.05"
    assert refusal(other, platform="linux/arm64").endswith("is not a library for aarch64")
    library(tree, "libcuda", VERSION, inside="575.57.08")
    assert refusal(pack(tree)) == (f"{RUN}/{LIBCUDA} is from the driver 575.57.08, not {VERSION}")
    (tree / LIBCUDA).unlink()
    assert f"in {RUN} is not complete: it lacks {LIBCUDA}" in refusal(pack(tree))
    (tree / ".manifest").unlink()
    assert refusal(pack(tree)).endswith("it has no .manifest")
    assert list(cache.iterdir()) == []


def test_a_damaged_installer_does_not_enter_the_cache(tree, tmp_path, cache):
    for compression, compress in COMPRESSED.items():
        raw = script(compress(tar(tree)))
        for cut in (len(raw) // 2, len(raw) - 5):
            message = refusal(write(tmp_path, raw[:cut]))
            assert message.startswith(f"{RUN} is damaged: "), (compression, cut)
        flipped = bytearray(raw)
        flipped[len(raw) * 2 // 3] ^= 0xFF
        assert refusal(write(tmp_path, bytes(flipped))), compression
    assert list(cache.iterdir()) == []


def test_members_that_climb_out_are_not_written(tree, tmp_path, cache):
    outside = tmp_path / "outside"
    outside.mkdir()
    hostile = (
        (f"../../{LIBCUDA}", tarfile.REGTYPE, "", b"climbs"),
        (f"/{outside}/{LIBCUDA}", tarfile.REGTYPE, "", b"absolute"),
        ("libnvidia-evil.so.1", tarfile.SYMTYPE, "/etc/passwd", b""),
        ("libnvidia-node.so.1", tarfile.CHRTYPE, "", b""),
    )
    folder = unpack(pack(tree, *hostile), VERSION, AMD64, print)
    assert (folder / LIBCUDA).read_bytes() == (tree / LIBCUDA).read_bytes()
    assert all(path.is_file() and not path.is_symlink() for path in folder.iterdir())
    assert not list(outside.iterdir())
    assert list(cache.iterdir()) == [folder]


def test_the_same_library_twice_is_refused(tree):
    twice = (f"./{LIBCUDA}", tarfile.REGTYPE, "", b"another")
    assert f"{LIBCUDA}: File exists" in refusal(pack(tree, twice))


def test_a_sparse_library_cannot_fill_the_disk(tree, cache):
    file = write(tree.parent, script(lzma.compress(sparse(1 << 30, name="libcuda.so.1"))))
    assert refusal(file).startswith(f"{RUN} is damaged: the sparse file libcuda.so.1 is too large")
    assert not list(cache.iterdir())


def test_expansion_is_limited(tree, monkeypatch, cache):
    bomb = ("./libnvidia-bomb.so.1", tarfile.REGTYPE, "", bytes(1 << 20))
    file = pack(tree, bomb)
    monkeypatch.setattr(installer, "MOST_BYTES", 1 << 20)
    assert refusal(file) == f"{RUN} is damaged: it expands to more than {1 << 20} bytes"
    monkeypatch.setattr(installer, "MOST_FILES", 3)
    assert refusal(file) == f"{RUN} is damaged: more than 3 files"
    monkeypatch.setattr(installer, "MEMORY", 1 << 10)
    assert "Memory usage limit" in refusal(file)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "is neither a folder nor one of NVIDIA's installers or archives"),
        (b"PK\3\4", "is neither a folder nor one of NVIDIA's installers or archives"),
        (b"#!/bin/sh\nexit 0\n", "is not an installer of a driver: no archive follows its script"),
        (
            b"#!/bin/sh\nskip=2\nnone\n",
            "is not an installer of a driver: no archive follows its script",
        ),
        (b"#!/bin/sh\nskip=999999\n", "is not an installer of a driver: no archive follows its script"),
        (b"#!/bin/sh\noffset=`head -n 600 x`\n", "is an installer of CUDA"),
        (b"#!/bin/sh\n" + b"skip=5\n" * 6000, "is damaged: its script has more than 16 lines `skip=`"),
        (b"#!/bin/sh\n" + b"\n" * (1 << 20), "no archive follows its script"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path, raw, expected):
    assert expected in refusal(write(tmp_path, raw))


def test_a_draft_of_a_killed_process_is_removed(tree, cache):
    leftover = cache / "draft-killed"
    leftover.mkdir(parents=True)
    cache.chmod(0o700)
    (leftover / LIBCUDA).write_text("half")
    folder = unpack(pack(tree), VERSION, AMD64, print)
    assert list(cache.iterdir()) == [folder]


def test_a_cache_that_others_can_change_is_not_used(tree, cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    file = pack(tree)
    assert "others can access this folder" in refusal(file)
    laid = cache / hashlib.sha256(file.read_bytes()).hexdigest()  # by somebody else
    laid.mkdir()
    assert "others can access this folder" in refusal(file)


def test_unpacking_twice_at_a_time(tree, cache, monkeypatch):
    file = pack(tree)

    def overtaken(*words, **options):
        monkeypatch.setattr(driver, "read_driver_folder", read_driver_folder)
        unpack(file, VERSION, AMD64, print)
        return read_driver_folder(*words, **options)

    monkeypatch.setattr(driver, "read_driver_folder", overtaken)
    folder = unpack(file, VERSION, AMD64, print)
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("name", "platform", "expected"),
    [
        ("NVIDIA-Linux-{arch}-{version}.run", AMD64, RUN),
        ("NVIDIA-Linux-{arch}-{version}.run", "linux/arm64", f"NVIDIA-Linux-aarch64-{VERSION}.run"),
        ("d-linux-{arch}-{version}-archive.tar.xz", "linux/arm64", f"d-linux-sbsa-{VERSION}-archive.tar.xz"),
        ("d-linux-{arch}-{version}-archive.tar.xz", AMD64, f"d-linux-x86_64-{VERSION}-archive.tar.xz"),
        ("drivers/{version}", AMD64, f"drivers/{VERSION}"),
    ],
)
def test_placeholders_are_filled_in_as_nvidia_names_files(name, platform, expected):
    assert expand_driver_source(name, VERSION, platform) == expected


def test_no_cache_folder(tree, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert "there is no folder to unpack" in refusal(pack(tree))
