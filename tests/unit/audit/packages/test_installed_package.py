"""Packages in the databases of dpkg, apk and rpm, and what damaged databases give."""

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import tar

from imagematrix.audit.images import layer
from imagematrix.audit.packages import packages, rpm
from imagematrix.audit.packages.installed_package import Database, InstalledPackage, make_package


def header(fields):
    """Return the header of an rpm package: texts and numbers by tag."""
    rows, data = [], b""
    for tag, value in fields.items():
        if isinstance(value, int):
            data += bytes(-len(data) % 4)
            rows.append((tag, 4, len(data), 1))
            data += struct.pack(">I", value)
        else:
            rows.append((tag, 6, len(data), 1))
            data += value.encode() + b"\0"
    return (
        struct.pack(">II", len(rows), len(data)) + b"".join(struct.pack(">4I", *row) for row in rows) + data
    )


STATUS = "/var/lib/dpkg/status"
APK = "/lib/apk/db/installed"
DPKG = b"""\
Package: openssl
Status: install ok installed
Priority: optional
Architecture: amd64
Version: 3.5.4-1~deb13u1
Description: Secure Sockets Layer toolkit
 Version: 9
 .
 more

Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc
Version: 2.41-12

Package: libgcc-s1
Status: install ok installed
Source: gcc-14 (14.2.0-19)
Architecture: amd64
Version: 14.2.0-19+b1

Package: gone
Status: deinstall ok config-files
Version: 1

Package: never
Status: unknown ok not-installed

Package: half
Status: install reinstreq half-installed
Version: 1:2.0-3
Architecture: all
"""
ALPINE = b"""\
C:Q1abc=
P:libcrypto3
V:3.3.2-r0
A:x86_64
L:Apache-2.0
o:openssl
F:usr/lib
R:libcrypto.so.3
Z:Q1AAAAAAAAAAAAAAAAAAAAAAAAAAA=

P:musl
V:1.2.5-r0
A:x86_64
L:MIT
o:musl"""


def read(path, raw):
    """Return the Database at a path of an image."""
    entry = layer.read_layer(io.BytesIO(tar((path.lstrip("/"), raw))), "sha256:0").entries[path]
    assert isinstance(entry, layer.PlainFile)
    return entry.database


def test_dpkg_lists_what_is_installed():
    assert read(STATUS, DPKG) == Database(
        packages=(
            InstalledPackage(kind="deb", name="openssl", version="3.5.4-1~deb13u1", arch="amd64"),
            InstalledPackage(kind="deb", name="libc6", version="2.41-12", arch="amd64", source="glibc"),
            InstalledPackage(
                kind="deb",
                name="libgcc-s1",
                version="14.2.0-19+b1",
                arch="amd64",
                source="gcc-14",
                source_version="14.2.0-19",
            ),
            InstalledPackage(kind="deb", name="half", version="1:2.0-3", arch="all"),
        )
    )


def test_image_without_dpkg_has_a_database_for_each_package():
    raw = b"Package: tzdata\nVersion: 2025b-4\nArchitecture: all\n"
    (found,) = read("/var/lib/dpkg/status.d/tzdata", raw).packages
    assert (found.name, found.version) == ("tzdata", "2025b-4")


def test_groups_of_apk_are_no_packages():
    raw = b"P:.build-deps\nV:20240101.120000\nA:noarch\n\nP:musl\nV:1.2.5-r0\n\n"
    found = read(APK, raw)
    assert ([package.name for package in found.packages], found.unread) == (["musl"], 0)


def test_apk_lists_packages_between_checksums():
    assert read(APK, ALPINE) == Database(
        packages=(
            InstalledPackage(
                kind="apk",
                name="libcrypto3",
                version="3.3.2-r0",
                arch="x86_64",
                source="openssl",
                license="Apache-2.0",
            ),
            InstalledPackage(kind="apk", name="musl", version="1.2.5-r0", arch="x86_64", license="MIT"),
        )
    )


@pytest.mark.parametrize(
    "paragraph",
    [
        b"Package: name\n",
        b"Version: 1\n",
        b"Package: two words\nVersion: 1\n",
        b"Package: \x1b[31mred\nVersion: 1\n",
        b"Package: name\nVersion: 1 2\n",
        b"Package: " + b"n" * 201 + b"\nVersion: 1\n",
        b"Package: \xff\nVersion: 1\n",
        b"text\n",
    ],
)
def test_damaged_entries_are_counted_and_others_read(paragraph):
    found = read(STATUS, b"Package: a\nVersion: 1\n\n" + paragraph + b"\nPackage: b\nVersion: 2\n")
    assert ([one.name for one in found.packages], found.unread) == (["a", "b"], 1)


def test_longest_name_is_read():
    name = "n" * 200
    assert read(STATUS, f"Package: {name}\nVersion: 1\n".encode()).packages[0].name == name


def test_rest_of_an_endless_line_is_no_field(monkeypatch):
    monkeypatch.setattr(packages, "LONGEST_LINE", 16)
    found = read(STATUS, b"Package: a\nTag: xxxxxxxxxxxPackage: evil\nVersion: 1\n")
    assert found == Database(packages=(InstalledPackage(kind="deb", name="a", version="1"),))


def test_number_of_packages_of_a_layer_is_limited(monkeypatch):
    monkeypatch.setattr(packages, "MOST_PACKAGES", 2)
    raw = b"".join(f"Package: p{number}\nVersion: 1\n\n".encode() for number in range(5))
    found = read(STATUS, raw)
    assert (len(found.packages), found.unread) == (2, 3)


@pytest.mark.parametrize(("length", "kept"), [(500, True), (501, False)])
def test_text_of_a_license_is_no_name(length, kept):
    assert (make_package("apk", "a", "1", license="l" * length).license is not None) is kept


def test_invalid_details_are_left_out():
    found = make_package("deb", "a", "1", arch="Ä", source="../x", source_version="1", license="\x1b[2J")
    assert found == InstalledPackage(kind="deb", name="a", version="1")


def test_rpm_has_epoch_source_and_license():
    raw = header(
        {1000: "openssl-libs", 1001: "3.2.2", 1002: "6.el9", 1003: 1, 1014: "Apache-2.0", 1022: "x86_64"}
        | {1044: "openssl-3.2.2-6.el9.src.rpm"}
    )
    assert rpm._make_rpm_package(rpm._RpmHeader(raw)) == InstalledPackage(
        kind="rpm",
        name="openssl-libs",
        version="1:3.2.2-6.el9",
        arch="x86_64",
        source="openssl",
        license="Apache-2.0",
    )


def test_keys_in_an_rpm_database_are_no_packages():
    key = header({1000: "gpg-pubkey", 1001: "1", 1002: "2"})
    tool = header({1000: "tool", 1001: "1", 1002: "2"})
    found = list(rpm._read_database(lambda *_: iter([key, tool]), io.BytesIO(), 10_000))
    assert found == [InstalledPackage(kind="rpm", name="tool", version="1-2")]


@pytest.mark.parametrize("raw", [b"", struct.pack(">II", 1 << 30, 0), header({1000: "a"})])
def test_damaged_rpm_headers_are_counted(raw):
    assert list(rpm._read_database(lambda *_: iter([raw]), io.BytesIO(), 10_000)) == [None]


@pytest.mark.fuzz
@given(st.sampled_from([STATUS, APK, "/var/lib/dpkg/status.d/x", "/var/lib/rpm/Packages"]), st.binary())
def test_any_bytes_are_read(path, raw):
    for package in (read(path, raw) or Database()).packages:
        assert package.name.isprintable()
        assert package.version.isprintable()
