"""The headers of ELF files: compared with readelf, and malformed ones."""

import io
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.elf import Elf
from imagematrix.audit.binaries.window import Window

FUZZED = int(os.environ.get("IMAGEMATRIX_FUZZ", "10000"))


def read(raw):
    return elf.read_elf(Window(io.BytesIO(raw), 0, len(raw)))


def compiled(folder, *options):
    path = folder / "built"
    (folder / "it.c").write_text("int it(void) { return 1; }\n")
    subprocess.run(["gcc", str(folder / "it.c"), "-o", str(path), *options], check=True)
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    options = [
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-Wl,-rpath,/opt/a:$ORIGIN/b",
        "-Wl,--no-as-needed",
    ]
    return compiled(folder, *options, "-lm")


def test_soname_needed_libraries_and_runpath_are_read(library):
    result = read(library.read_bytes())
    assert result.soname == "libcuda.so.1"
    assert result.needed == ("libm.so.6", "libc.so.6")
    assert result.runpath == ("/opt/a", "$ORIGIN/b")
    assert (result.machine, result.linked, result.damaged) == (elf.X86_64, True, False)


def test_file_of_debug_information_is_not_damaged(tmp_path):
    """Its segments describe the program, including the dynamic section, which is not in this file."""
    program = compiled(tmp_path, "-shared", "-fPIC", "-g")
    subprocess.run(["objcopy", "--only-keep-debug", program, program.with_suffix(".debug")], check=True)
    raw = program.with_suffix(".debug").read_bytes()
    result = read(raw)
    assert (result.linked, result.damaged, result.needed) == (True, False, ())
    assert any(result.find_sections(".debug_info"))
    other = bytearray(raw)  # eu-strip leaves the sizes of segments as they were
    segment = next(at for at in range(64, len(raw), 56) if raw[at : at + 4] == b"\x02\0\0\0")
    other[segment + 32] = 64
    assert not read(bytes(other)).damaged


def test_rpath_is_read(tmp_path):
    result = read(
        compiled(tmp_path, "-shared", "-fPIC", "-Wl,--disable-new-dtags,-rpath,/opt/a").read_bytes()
    )
    assert (result.rpath, result.runpath) == (("/opt/a",), ())


def test_object_file_is_not_linked(tmp_path):
    assert not read(compiled(tmp_path, "-c").read_bytes()).linked


def test_stripped_section_headers_are_tolerated(library):
    raw = bytearray(library.read_bytes())
    raw[40:48] = bytes(8)
    result = read(bytes(raw))
    assert (result.soname, result.sections) == ("libcuda.so.1", ())


def test_sections_match_those_of_readelf(library):
    output = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    rows = [line.split("]")[1].split() for line in output.splitlines() if re.match(r" *\[ *[1-9]", line)]
    seen = {row[0]: row for row in rows if row[1] != "NOBITS"}
    result = {one.name: (one.address, one.offset, one.size) for one in read(library.read_bytes()).sections}
    assert result == {name: tuple(int(word, 16) for word in row[2:5]) for name, row in seen.items()}


def with_sections(names, *sections):
    """Return a library with a table of names, and sections, each the offset of its name and its size."""
    rows = [(0, 3, 0, 0, 64, len(names)), *((name, 1, 6, 1 << 20, 64, size) for name, size in sections)]
    head = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64 + len(names), 0, 64, 56, 0, 64, len(rows), 0)
    table = b"".join(struct.pack("<IIQQQQIIQQ", *row, 0, 0, 0, 0) for row in rows)
    return elf.MAGIC + b"\2\1\1".ljust(12, b"\0") + head + names + table


def test_sections_that_overlap_are_listed_to_the_size_of_the_file():
    """Thousands of them would each be decoded."""
    raw = with_sections(bytes(10_000), *[(1, 5_000)] * 1_000)
    result = read(raw)
    assert result.damaged
    assert sum(section.size for section in result.sections) <= len(raw)
    assert len(result.sections) == 1 + (len(raw) - 10_000) // 5_000


def test_names_that_overlap_are_kept_to_the_size_of_a_table(monkeypatch):
    monkeypatch.setattr(elf, "NAMES", 10_000)
    raw = with_sections(b"n" * 9_000, *((index, 0) for index in range(1, 1_000)))
    result = read(raw)
    assert result.damaged
    assert sum(len(section.name) for section in result.sections) <= 10_000


@pytest.mark.parametrize("path", ["/bin/sh", sys.executable, "/lib/x86_64-linux-gnu/libc.so.6"])
def test_system_files_are_not_damaged(path):
    raw = Path(path).read_bytes()
    assert not read(raw).damaged


@pytest.mark.parametrize("raw", [b"", b"\x7fELF", b"\x7fELF" + bytes(60), b"MZ" + bytes(100)])
def test_other_files_are_not_elf(raw):
    assert read(raw) is None


@pytest.mark.fuzz
def test_mutated_headers_never_crash(library):
    """Every mutated header is read quickly and without an exception; `make fuzz` tries more of them."""
    raw = library.read_bytes()
    chance = random.Random(14)  # noqa: S311 - nothing is secret
    tables = int.from_bytes(raw[40:48], "little")
    damaged = 0
    for _ in range(FUZZED):
        spoilt = bytearray(raw)
        for _ in range(chance.randint(1, 6)):
            parts = ((16, 64), (64, 1024), (tables, len(raw)))
            place = chance.randrange(*chance.choice(parts))
            spoilt[place] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        result = read(bytes(spoilt))
        damaged += result is None or result.damaged
    assert 0 < damaged < FUZZED


@settings(max_examples=300)
@given(st.binary(min_size=48, max_size=600), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_arbitrary_bytes_after_the_magic_never_crash(raw, bits, order):
    head = b"\x7fELF" + bytes([bits, order, 1]) + bytes(9)
    assert isinstance(read((head + raw).ljust(64, b"\0")), Elf)
