"""Layers are read once and in little memory; hostile ones are rejected."""

import errno
import gzip
import io
import os
import struct
import subprocess
import tarfile
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from images import hardlink, link, sparse, special, tar

from imagematrix.audit.binaries import archives
from imagematrix.audit.images import layer
from imagematrix.audit.images.layer import OTHER, PlainFile
from imagematrix.errors import AuditError, UsageError
from imagematrix.images.oci import decompression, layer_entries
from imagematrix.images.oci.tree import FOLDER, Hardlink, Symlink

DATA = Path(__file__).parents[1] / "data"
CUBIN = (DATA / "80.cubin").read_bytes()


def read(raw):
    return layer.read_layer(io.BytesIO(raw), "sha256:0")


def code(raw, path):
    return read(raw).entries[path].file.code


@pytest.mark.parametrize("packed", [bytes, gzip.compress, zstandard.compress])
def test_layer_compressions_are_supported(packed):
    raw = packed(tar(("opt/k.cubin", CUBIN), ("opt/readme", b"text")))
    result = read(raw)
    assert result.entries["/opt/readme"] is OTHER
    assert result.entries["/opt/k.cubin"].file.code.cubins == {"80"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_no_damage_of_a_layer(monkeypatch, tmp_path, code):
    """Files of a layer that are looked into later are copied."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(UsageError, match=r"the disk of .* is full") as caught:
        read(tar("f"))
    assert caught.value.remedy == f"free disk space in {tmp_path}, or set TMPDIR"


def test_entries_of_all_types_are_read():
    result = read(
        tar(
            special("etc", tarfile.DIRTYPE),
            link("etc/l", "../x"),
            hardlink("etc/h", "./etc/l"),
            special("dev/null", tarfile.CHRTYPE),
            "etc/.wh.gone",
            "opt/.wh..wh..opq",
        )
    )
    assert result.entries["/etc"] is FOLDER
    assert result.entries["/etc/l"] == Symlink("../x")
    assert result.entries["/etc/h"] == Hardlink("/etc/l")
    assert result.entries["/dev/null"] is OTHER
    assert (result.removed, result.emptied) == ({"/etc/gone"}, {"/opt"})


def test_static_library_is_read(tmp_path):
    (tmp_path / "a.cubin").write_bytes(CUBIN)
    (tmp_path / "odd").write_bytes(b"odd")
    subprocess.run(["ar", "rc", "libk.a", "odd", "a.cubin"], cwd=tmp_path, check=True)
    raw = (tmp_path / "libk.a").read_bytes()
    result = read(tar(("usr/lib/libk.a", raw), ("usr/lib/cut.a", raw[:-2000]), ("usr/lib/none.a", raw[:80])))
    assert result.entries["/usr/lib/libk.a"].file.code.cubins == {"80"}
    assert not result.entries["/usr/lib/libk.a"].file.linked
    assert result.entries["/usr/lib/none.a"] is OTHER


def sections(name, count, size):
    """Return a library with many sections of this name, each of which spans the whole file."""
    names = f"\0{name}\0.shstrtab\0".encode()
    start = 64 + size + len(names)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, start, 0, 64, 56, 0, 64, count + 2, count + 1)
    row = struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, 0, start, 0, 0, 8, 0)
    texts = struct.pack("<IIQQQQIIQQ", len(name) + 2, 3, 0, 0, 64 + size, len(names), 0, 0, 1, 0)
    return header + bytes(size) + names + bytes(64) + row * count + texts


@pytest.mark.parametrize("name", [".nv_fatbin", ".hip_fatbin", ".rodata", ".note.gnu.property", ".text"])
def test_overlapping_sections_are_read_to_a_limit(name):
    """50,000 sections of 8 MB would be 400 GB."""
    raw = sections(name, 50_000, 8 << 20)
    result = read(tar(("lib.so", raw))).entries["/lib.so"].file
    assert result.damaged


def zipped(*members, method=zipfile.ZIP_DEFLATED):
    """Return a zip of members, each a name and its bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, raw in members:
            archive.writestr(name, raw)
    return buffer.getvalue()


def test_library_in_a_wheel_is_read():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("pkg/k.cubin", CUBIN)
        wheel.writestr("pkg/__init__.py", "")
        wheel.writestr("pkg/note.txt", "text")
    raw = buffer.getvalue()
    result = read(tar(("w/p-1-py3-none-any.whl", raw), ("w/bad.whl", raw[:-30]), ("w/p.bin", raw)))
    ((path, inner),) = result.entries["/w/p-1-py3-none-any.whl"].file.inner
    assert (path, inner.code.cubins) == ("pkg/k.cubin", {"80"})
    assert result.entries["/w/bad.whl"].file.damaged
    assert result.entries["/w/p.bin"] is OTHER


def test_nested_archives_are_opened_to_a_depth_of_two():
    once = zipped(("k.cubin", CUBIN))
    twice = zipped(("p.whl", once))
    result = read(tar(("two.zip", twice), ("three.zip", zipped(("two.zip", twice))))).entries
    ((_, wheel),) = result["/two.zip"].file.inner
    assert wheel.inner[0][1].code.cubins == {"80"}
    assert result["/three.zip"] is OTHER


def test_zip_bomb_is_damaged(monkeypatch):
    wheel = zipped(("pkg/zeros", bytes(2 << 20)))
    monkeypatch.setattr(archives, "INFLATED", 1 << 20)
    assert read(tar(("p.whl", wheel))).entries["/p.whl"].file.damaged


def test_zip_of_zip_bombs_is_damaged(monkeypatch):
    """Each alone is within the limit."""
    inner = zipped(("a.so", b"\x7fELF" + bytes(1 << 19)))
    monkeypatch.setattr(archives, "INFLATED", 1 << 20)
    one, many = (zipped(*((f"{n}.zip", inner) for n in range(number))) for number in (1, 3))
    result = read(tar(("one.zip", one), ("many.zip", many))).entries
    assert (result["/one.zip"].file.damaged, result["/many.zip"].file.damaged) == (False, True)


@pytest.mark.parametrize("spoilt", [b"", b"\xff" * 99], ids=["whole", "spoilt"])
def test_zip_with_an_unusual_compression_is_damaged(spoilt):
    raw = zipped(("a.so", CUBIN), method=zipfile.ZIP_LZMA)
    raw = raw[:60] + spoilt + raw[60 + len(spoilt) :]
    assert read(tar(("p.whl", raw))).entries["/p.whl"].file.damaged


def test_irrelevant_zip_members_are_not_inflated():
    """An archive of 16 zip bombs of 64 MB each."""
    wheel = zipped(("zeros", bytes(64 << 20)))
    outer = io.BytesIO()
    with zipfile.ZipFile(outer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(16):
            archive.writestr(f"{number}.whl", wheel)
    tracemalloc.start()
    try:
        assert read(tar(("bomb.zip", outer.getvalue()))).entries["/bomb.zip"] is OTHER
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_large_file_is_not_kept_in_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    elf = b"\x7fELF\x02\x01\x01" + bytes(57)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        info = tarfile.TarInfo("large")
        info.size = 64 << 20
        archive.addfile(info, io.BytesIO(elf + bytes(info.size - len(elf))))
    tracemalloc.start()
    try:
        assert read(raw.getvalue()).entries["/large"].file.size == 64 << 20
        assert tracemalloc.get_traced_memory()[1] < 64 << 20 + 24 << 20
    finally:
        tracemalloc.stop()
    assert not list(tmp_path.iterdir())


def header(name, kind=tarfile.REGTYPE, data=b"", *, prefix=b"", magic=tarfile.POSIX_MAGIC):
    """Return the bytes of a header, followed by its data."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    raw = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    raw[257:265], raw[345 : 345 + len(prefix)] = magic, prefix
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw) + data + bytes(-len(data) % 512)


def pax(kind=tarfile.XHDTYPE, **facts):
    records = "".join(f"{len(key) + len(value) + 5} {key}={value}\n" for key, value in facts.items())
    return header("pax", kind, records.encode())


HIDING = "opt/.wh.k.cubin"  # removes a file, if this name is used


def test_global_headers_are_ignored_as_by_engines():
    """podman 4.3.1 unpacks the whole file."""
    raw = pax(tarfile.XGLTYPE, size="0", path="opt/other") + tar(("opt/k.cubin", CUBIN))
    assert code(raw, "/opt/k.cubin").cubins == {"80"}


def test_gnu_long_name_overrides_other_names():
    long = header("long", tarfile.GNUTYPE_LONGNAME, b"opt/k\0")
    end = header("a") + bytes(1024)
    assert list(read(long + pax(path="opt/other") + end).entries) == ["/opt/k"]
    assert list(read(pax(comment="none") + long + end).entries) == ["/opt/k"]


@pytest.mark.parametrize(
    "raw",
    [
        pax(path=HIDING) + pax(path="opt/k") + header("a"),
        pax(path=HIDING) + header("long", tarfile.GNUTYPE_LONGNAME, b"opt/k\0") + header("a"),
        pax(path=HIDING) + pax(tarfile.XGLTYPE, comment="none") + header("a"),
        2 * header("long", tarfile.GNUTYPE_LONGNAME, b"opt/k\0") + header("a"),
        2000 * pax(tarfile.XGLTYPE, comment="none") + header("a"),
        pax(tarfile.SOLARIS_XHDTYPE, path=HIDING) + header("a"),
    ],
)
def test_headers_that_engines_read_differently_are_rejected(raw):
    with pytest.raises(AuditError, match=r"extended headers [gxLX]+ for one file"):
        read(raw + bytes(1024))


def test_name_prefix_is_read_only_where_engines_read_it():
    end = bytes(1024)
    assert list(read(header("k", prefix=b"opt") + end).entries) == ["/opt/k"]
    gnu = header("k", prefix=b"14717123456\x0014717123456", magic=tarfile.GNU_MAGIC)
    assert list(read(gnu + end).entries) == ["/k"]
    for magic in (tarfile.GNU_MAGIC, bytes(8)):
        with pytest.raises(AuditError, match="a name prefix in a non-POSIX header"):
            read(header(".wh.k.cubin", prefix=b"opt", magic=magic) + end)


WHOLE = tar(("a", b"x" * 3000), ("b", b"y" * 3000))
LAST = 512 + 3072 + 512 + 3000  # where the data of the last file end


@pytest.mark.parametrize("end", [LAST, LAST + 1, 7168, 7168 + 100, 7168 + 512, 7168 + 1024])
def test_archive_may_end_with_its_last_file(end):
    """As umoci writes layers, and engines take them."""
    for packed in (WHOLE[:end], gzip.compress(WHOLE[:end])):
        assert list(read(packed).entries) == ["/a", "/b"]


def test_files_of_an_archive_without_an_end_are_whole():
    raw = tar(("k.cubin", CUBIN))[: 512 + len(CUBIN)]
    entry = read(raw).entries["/k.cubin"]
    assert isinstance(entry, PlainFile)
    assert entry.file is not None
    assert (entry.file.size, entry.file.code.cubins) == (len(CUBIN), {"80"})


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (tar("../../etc/passwd"), "leads out"),
        (tar(hardlink("a", "../../etc/passwd")), "leads out"),
        (tar(link("a", "b/" * 3000)), "6000 characters"),
        (tar("b/" * 3000 + "a"), "6001 characters"),
        (WHOLE[:2000], "unexpected end of data|truncated"),
        (WHOLE[: LAST - 1], "unexpected end of data"),
        (WHOLE[: 512 + 3072 + 300], "unexpected end of data"),
        (WHOLE[:3600] + b"\xff" * 512 + WHOLE[4096:], "bad checksum|invalid header"),
        (gzip.compress(WHOLE, mtime=0)[:-20], "end"),
        (zstandard.compress(WHOLE)[:-4], "empty|end"),
        (b"", "empty"),
        (b"no archive", "bad checksum"),
    ],
)
def test_hostile_layers_are_rejected(raw, why):
    with pytest.raises(AuditError, match=why) as raised:
        read(raw)
    assert "the layer sha256:0" in str(raised.value)


def test_compression_bomb_is_rejected(monkeypatch):
    monkeypatch.setattr(decompression, "FREE", 1 << 20)
    info = tarfile.TarInfo("zeros")
    info.size = 32 << 20
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    for packed in (gzip.compress, zstandard.compress):
        with pytest.raises(AuditError, match="expand to more"):
            read(packed(raw.getvalue()))


def test_overlong_name_is_rejected():
    info = tarfile.TarInfo("x" * (3 << 20))
    with pytest.raises(AuditError, match="invalid size of a header"):
        read(tar(info))


def test_huge_sparse_file_is_accepted():
    assert read(sparse(1 << 60)).entries["/giant"] is OTHER


def test_huge_sparse_program_is_not_written_out(tmp_path):
    with (tmp_path / "giant").open("wb") as file:
        file.write(b"\x7fELF\x02\x01\x01")
        file.truncate(1 << 40)
    for form in ("gnu", "posix"):
        raw = subprocess.run(
            ["tar", "-S", "-C", tmp_path, f"--format={form}", "-c", "giant"], check=True, capture_output=True
        ).stdout
        with pytest.raises(AuditError, match="the sparse file /giant is too large: 1099511627776 bytes"):
            read(raw)


@pytest.mark.parametrize(
    "path",
    [
        "var/lib/dpkg/status",
        "var/lib/dpkg/status.d/base",
        "var/lib/dpkg/info/base.md5sums",
        "lib/apk/db/installed",
        "var/lib/rpm/Packages.db",
    ],
)
def test_huge_sparse_package_database_is_not_read(path):
    with pytest.raises(AuditError, match=f"the sparse file /{path} is too large: {1 << 60} bytes"):
        read(sparse(1 << 60, name=path))


def test_sparse_program_is_read(tmp_path):
    (tmp_path / "k.cubin").write_bytes(CUBIN)
    with (tmp_path / "k.cubin").open("r+b") as file:
        file.truncate(300_000)
    raw = subprocess.run(
        ["tar", "-S", "-C", tmp_path, "-c", "k.cubin"], check=True, capture_output=True
    ).stdout
    result = read(raw).entries["/k.cubin"].file
    assert (result.size, result.code.cubins) == (300_000, {"80"})


def test_total_size_of_texts_is_limited(monkeypatch):
    monkeypatch.setattr(layer, "ALL_TEXTS", 1000)
    record = ("p-1.dist-info/RECORD", b"x" * 600)
    assert read(tar(record)).entries["/p-1.dist-info/RECORD"].text == record[1]
    with pytest.raises(AuditError, match="more than 1000 bytes of text files"):
        read(tar(record, ("q-1.dist-info/RECORD", record[1])))


def test_number_of_entries_is_limited(monkeypatch):
    monkeypatch.setattr(layer_entries, "MOST", 2)
    with pytest.raises(AuditError, match="more than 2 files"):
        read(tar("a", "b", "c", "d"))


@given(st.binary(max_size=600), st.integers(0, 2000))
def test_damaged_layer_raises_at_most_one_error(raw, place):
    whole = tar(("k.cubin", CUBIN), link("l", "k"), ("w.whl", b"PK\x03\x04"))
    for packed in (bytes, gzip.compress):
        spoilt = packed(whole)
        spoilt = spoilt[:place] + raw + spoilt[place + len(raw) :]
        try:
            read(spoilt)
        except AuditError:
            continue
