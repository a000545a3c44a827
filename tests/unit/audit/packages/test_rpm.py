"""rpm's databases: a real one in each format, and malicious ones.

`data/rpm` says how the real ones were made.
"""

import gzip
import hashlib
import io
import itertools
import os
import random
import sqlite3
import struct
import time
from pathlib import Path

import pytest

from imagematrix.audit.packages import rpm

DATA = Path(__file__).parents[1] / "data" / "rpm"
FUZZED = int(os.environ.get("IMAGEMATRIX_FUZZ", "10000"))
FORMATS = {"rpmdb.sqlite": rpm.read_sqlite, "Packages.db": rpm.read_ndb, "Packages": rpm.read_berkeley}
CONTENTS = (b"one\n", b"two\n", b"three\n", *(f"more {number}\n".encode() for number in range(1, 41)))


def digests(*contents, algorithm="sha256"):
    return [(algorithm, hashlib.new(algorithm, one, usedforsecurity=False).digest()) for one in contents]


def header(*texts, algorithm=8, tag=1035):
    """Return a package's header with checksums of files, and optionally their algorithm."""
    data = b"\0".join(texts) + b"\0"
    data += bytes(-len(data) % 4)
    rows = [(tag, 8, 0, len(texts))]
    if algorithm is not None:
        rows.append((5011, 4, len(data), 1))
        data += struct.pack(">I", algorithm)
    return (
        struct.pack(">II", len(rows), len(data)) + b"".join(struct.pack(">4I", *row) for row in rows) + data
    )


def database(path, *headers, schema="CREATE TABLE Packages (hnum INTEGER PRIMARY KEY, blob BLOB NOT NULL)"):
    """Return a database of SQLite with these headers."""
    with sqlite3.connect(path) as made:
        made.execute(schema)
        made.executemany("INSERT INTO Packages (blob) VALUES (?)", [(one,) for one in headers])
    made.close()
    return path.read_bytes()


def entries(reader, raw):
    return list(reader(io.BytesIO(raw), len(raw)))


def read(reader, raw):
    """Return the checksums in a database."""
    return [entry for entry in entries(reader, raw) if isinstance(entry, tuple)]


def real(name):
    return gzip.decompress((DATA / f"{name}.gz").read_bytes())


@pytest.mark.parametrize("name", FORMATS)
def test_checksums_are_read_from_a_real_database(name):
    assert sorted(read(FORMATS[name], real(name))) == sorted(digests(*CONTENTS))


@pytest.mark.parametrize(
    ("algorithm", "name"), [(8, "sha256"), (10, "sha512"), (2, "sha1"), (1, "md5"), (None, "md5")]
)
def test_every_checksum_algorithm_is_supported(tmp_path, algorithm, name):
    expected = digests(*CONTENTS, algorithm=name)
    texts = [checksum.hex().encode() for _, checksum in expected]
    raw = database(
        tmp_path / "db", header(*texts, b"", b"odd", algorithm=algorithm), header(b"", algorithm=8)
    )
    assert read(rpm.read_sqlite, raw) == expected


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"text",
        header(b"aa", algorithm=99),
        header(b"aa", tag=1),
        header(b"aa")[:-1],
        struct.pack(">II", 1, 4) + struct.pack(">4I", 1035, 8, 1 << 31, 1 << 31) + b"aa\0\0",
        struct.pack(">II", 1 << 31, 4),
    ],
)
def test_damaged_headers_have_no_checksums(tmp_path, blob):
    good = header(*(checksum.hex().encode() for _, checksum in digests(*CONTENTS)))
    assert read(rpm.read_sqlite, database(tmp_path / "db", blob, good, "text")) == digests(*CONTENTS)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS hnum,"


@pytest.mark.parametrize(
    "schema",
    [
        f"CREATE VIEW Packages AS {ENDLESS} zeroblob(1000000) AS blob FROM n",
        f"CREATE VIEW Packages AS {ENDLESS} x'00' AS blob FROM n WHERE i < 0",
        "CREATE VIEW Packages AS SELECT zeroblob(2000000000) AS blob",
        "CREATE TABLE other (blob)",
    ],
)
def test_endless_or_huge_database_gives_no_checksums(tmp_path, schema):
    with sqlite3.connect(tmp_path / "db") as made:
        made.execute(schema)
    made.close()
    started = time.monotonic()
    assert read(rpm.read_sqlite, (tmp_path / "db").read_bytes()) == []
    assert time.monotonic() - started < 20


# One instruction of SQLite's machine that would take hours.
SEARCH = "instr(zeroblob(30000000), CAST(CAST(zeroblob(15000000) AS TEXT) || 'a' AS BLOB))"


@pytest.mark.parametrize(
    "schema",
    [
        f"CREATE VIEW Packages AS SELECT {SEARCH} AS blob",
        f"CREATE TABLE Packages (hnum INTEGER PRIMARY KEY, blob AS ({SEARCH}))",
        f"CREATE TABLE Packages (hnum INTEGER PRIMARY KEY, blob AS ({SEARCH}) STORED)",
        "CREATE VIEW Packages AS SELECT x'00' AS blob",
        "CREATE TABLE other (blob); CREATE VIEW Packages AS SELECT blob || blob AS blob FROM other",
    ],
)
def test_only_a_plain_table_of_sqlite_is_read(tmp_path, schema):
    with sqlite3.connect(tmp_path / "db") as made:
        made.executescript(schema)
    made.close()
    assert entries(rpm.read_sqlite, (tmp_path / "db").read_bytes()) == [None]


def test_number_of_checksums_of_a_database_is_limited(tmp_path, monkeypatch):
    texts = [checksum.hex().encode() for _, checksum in digests(*CONTENTS)]
    raw = database(tmp_path / "db", header(*texts[:2], b"", b""), header(*texts[2:4]))
    monkeypatch.setattr(rpm, "MOST_TEXTS", 3)
    assert read(rpm.read_sqlite, raw) == digests(*CONTENTS[:2])


def test_texts_of_a_header_are_not_kept():
    """They may be millions, so they are an iterator, and no list."""
    assert next(rpm._RpmHeader(header(b"ab", b"cd")).list_texts(1035)) == b"ab"


def test_header_with_more_entries_than_rpm_allows_is_damaged():
    entry = struct.pack(">4I", 1, 4, 0, 1)
    assert rpm._RpmHeader(struct.pack(">II", 0xFFFF, 4) + 0xFFFF * entry + bytes(4)).get_number(1) == 0
    assert rpm._RpmHeader(struct.pack(">II", 0x10000, 4) + 0x10000 * entry + bytes(4)).get_number(1) is None


def test_number_of_empty_headers_is_limited(monkeypatch):
    monkeypatch.setattr(rpm, "MOST_HEADERS", 3)
    listed = rpm._read_database(lambda *_: itertools.repeat(b"", 10), io.BytesIO(), 0)
    assert list(listed) == [None] * 4


@pytest.mark.parametrize("name", FORMATS)
def test_other_files_are_not_databases(name):
    for raw in (
        b"",
        b"text",
        bytes(8192),
        b"RpmP",
        b"SQLite format 3\0",
        bytes(12) + struct.pack("<I", 0x061561),
    ):
        assert read(FORMATS[name], raw) == []


@pytest.mark.parametrize("name", FORMATS)
def test_oversized_database_is_not_read(name, monkeypatch):
    monkeypatch.setattr(rpm, "LARGEST", 1000)
    assert read(FORMATS[name], real(name)) == []


def test_header_shared_by_many_slots_is_read_to_a_limit():
    raw = bytearray(real("Packages.db"))
    slot = next(raw[at : at + 16] for at in range(32, 4096, 16) if raw[at + 4 : at + 8] != bytes(4))
    for at in range(32, 4096, 16):
        raw[at : at + 16] = slot
    assert 0 < len(read(rpm.read_ndb, bytes(raw))) < 100


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_databases_never_crash(name):
    """With changed bytes; `make fuzz` tries more. SQLite's developers fuzz SQLite itself."""
    raw = real(name)
    chance = random.Random(14)  # noqa: S311 - nothing is secret
    used = [at for at, byte in enumerate(raw) if byte]
    for _ in range(FUZZED // 100 if name == "rpmdb.sqlite" else FUZZED // 10):
        spoilt = bytearray(raw)
        for _ in range(chance.randint(1, 6)):
            spoilt[chance.choice(used)] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        assert {one for one, _ in read(FORMATS[name], bytes(spoilt))} <= set(rpm.ALGORITHMS.values())
