"""The release of the compiler of a cubin: real cubins by NVRTC, plain and compressed, and damaged ones."""

import io
from pathlib import Path

import pytest
from fatbins import entry, fat
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.audit.binaries import cubin, fatbin
from imagematrix.audit.binaries.window import Window

DATA = Path(__file__).parents[1] / "data"
RELEASES = ("11.8", "12.4", "12.8", "13.0")


def window(raw):
    return Window(io.BytesIO(raw), 0, len(raw))


def raw_of(release):
    return (DATA / f"{release}.cubin").read_bytes()


@pytest.mark.parametrize("release", RELEASES)
def test_cubin_states_the_release_of_its_compiler(release):
    assert cubin.find_release(window(raw_of(release))) == release
    assert cubin.read_cubin(window(raw_of(release))).toolkits == {release}


@pytest.mark.parametrize("name", ["lz4", "zstd", "concatenated"])
def test_compressed_cubins_state_it(name):
    assert fatbin.read_fatbins(window((DATA / f"{name}.fatbin").read_bytes())).toolkits == {"12.9"}


def test_uncompressed_cubins_of_several_compilers_are_all_read():
    parts = [entry(payload=raw_of(release)) for release in RELEASES]
    assert fatbin.read_fatbins(window(fat(*parts))).toolkits == set(RELEASES)


@pytest.mark.parametrize(("release", "first"), [("12.8", "12.8"), ("13.0", "13.0")])
def test_without_its_note_a_new_cubin_is_of_the_first_release_that_writes_such(release, first):
    raw = raw_of(release).replace(b"Cuda compilation tools", b"?" * 22)
    assert cubin.find_release(window(raw)) == first
    literals = bytes([0xF0, 255, 0]) + raw[: 15 + 255]
    assert cubin.find_packed_release(window(literals), zstandard=False, notes=False) == first


def test_repeated_bytes_of_an_lz4_block_are_copied():
    """Three literals, seven bytes from three bytes back, then a last literal."""
    assert cubin._unpack_lz4(b"\x33abc\x03\x00\x10!", 64) == b"abcabcabca!"
    assert cubin._unpack_lz4(b"\x33abc\x03\x00\x10!", 5) == b"abcab"


@pytest.mark.parametrize("raw", [b"", b"\x7fELF", b"\x33abc\x09\x00", b"\x33abc\x03", b"\xff\xff\xff"])
@pytest.mark.parametrize("zstandard", [True, False])
def test_damaged_cubins_state_nothing(raw, zstandard):
    assert cubin.find_packed_release(window(raw), zstandard=zstandard, notes=True) is None


@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_random_bytes_raise_no_error(raw, zstandard, notes):
    for payload in (raw, b"\x7fELF" + raw, b"\xf0" + raw):
        cubin.find_packed_release(window(payload), zstandard=zstandard, notes=notes)
