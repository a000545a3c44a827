"""Files of distribution packages, recognised by the checksums in package databases."""

import base64
import contextlib
import hashlib
import io
import sqlite3
import struct

import pytest
from compiling import compiled
from images import tar

from imagematrix.audit.images import layer
from imagematrix.audit.packages import packages

SOURCE = "double a; int main(int n, char **v) { return a * n + v[0][0] * 0.5; }"
PATH = "usr/bin/tool"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A program that requires AVX."""
    return compiled(tmp_path_factory.mktemp("program") / "tool", SOURCE, "-mavx").read_bytes()


def read(*members):
    return layer.read_layer(io.BytesIO(tar(*members)), "sha256:0").entries


def dpkg(raw):
    return f"{hashlib.md5(raw, usedforsecurity=False).hexdigest()}  {PATH}\n0123  odd\n".encode()


def apk(raw):
    return b"P:tool\nF:usr/bin\nR:tool\nZ:Q1" + base64.b64encode(
        hashlib.sha1(raw, usedforsecurity=False).digest()
    )


def rpm(raw):
    """Return rpm's database with one package of one file."""
    checksum = hashlib.sha256(raw).hexdigest().encode() + bytes(4)
    index = struct.pack(">10I", 2, 72, 1035, 8, 0, 1, 5011, 4, 68, 1)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE Packages (hnum INTEGER PRIMARY KEY, blob BLOB NOT NULL)")
        database.execute("INSERT INTO Packages VALUES (1, ?)", (index + checksum + struct.pack(">I", 8),))
        database.commit()
        return database.serialize()


@pytest.mark.parametrize(
    ("database", "content"),
    [
        ("var/lib/dpkg/info/tool.md5sums", dpkg),
        ("var/lib/dpkg/status.d/tool.md5sums", dpkg),
        ("lib/apk/db/installed", apk),
        ("usr/lib/apk/db/installed", apk),
        ("var/lib/rpm/rpmdb.sqlite", rpm),
        ("usr/lib/sysimage/rpm/rpmdb.sqlite", rpm),
    ],
)
def test_packaged_files_are_not_decoded(program, database, content):
    for members in (
        ((PATH, program), (database, content(program))),
        ((database, content(program)), (PATH, program)),
    ):
        file = read(*members)[f"/{PATH}"].file
        assert file.packaged
        assert file.host is None


def test_modified_packaged_file_is_decoded(program):
    entries = read((PATH, program), ("var/lib/dpkg/info/tool.md5sums", dpkg(program[:-1])))
    assert not entries[f"/{PATH}"].file.packaged
    assert entries[f"/{PATH}"].file.host.required == {"avx"}


def test_last_file_at_a_path_counts(program):
    sums = ("var/lib/dpkg/info/tool.md5sums", dpkg(program))
    file = read((PATH, program), sums, (PATH, program + b"\0"))[f"/{PATH}"].file
    assert not file.packaged
    assert read((PATH, program), sums, (PATH, b"text"))[f"/{PATH}"] is layer.OTHER


def test_bulky_sections_of_large_files_are_not_kept(program, monkeypatch):
    whole = read((PATH, program))[f"/{PATH}"].file
    monkeypatch.setattr(layer, "WHOLE", 100)
    monkeypatch.setattr(layer, "BULKY", (".rodata", ".comment"))
    entries = read((PATH, program), ("var/lib/dpkg/info/tool.md5sums", dpkg(program)))
    assert entries[f"/{PATH}"].file == whole  # but it is not compared with packages


def test_number_of_checksums_is_limited(monkeypatch):
    monkeypatch.setattr(packages, "MOST", 1)
    databases = packages.Databases()
    databases.add([("md5", b"a"), ("sha1", b"b")])
    assert databases._by_algorithm == {"md5": {b"a"}}


@pytest.mark.parametrize(
    "path", ["var/lib/dpkg/status", "var/lib/dpkg/info/a.md5sums", "lib/apk/db/installed"]
)
def test_oversized_database_is_not_read(path, monkeypatch):
    monkeypatch.setattr(packages, "LARGEST", 10)
    database = read((path, b"Package: tool\nVersion: 1\n\n"))[f"/{path}"].database
    assert (database.packages, database.unread) == ((), 1)
