"""Streams of gzip, by each of the ways to decompress them."""

import gzip
import io
import itertools
import random
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import Lost, pieces

from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.ungzip import ungzip

CONTENT = random.Random(0).randbytes(300_000) + bytes(3_000_000)  # noqa: S311 - no secret
PACKED = gzip.compress(CONTENT, mtime=0)
NAMED = 8  # the flag in the fourth byte: a name follows the header


@pytest.fixture(autouse=True, params=["library", "standard"])
def way(request, monkeypatch):
    """Only one way to decompress."""
    if request.param == "standard":
        monkeypatch.setitem(sys.modules, "isal", None)


@pytest.mark.parametrize("size", [7_001, 1 << 20, 1 << 25])
def test_members_are_one_stream(size):
    stream = ungzip(io.BytesIO(PACKED + gzip.compress(b"more")))
    assert pieces(stream, size) == CONTENT + b"more"
    assert stream.read(1) == stream.read(1) == b""
    assert ungzip(io.BytesIO(PACKED)).read(-1) == CONTENT


@given(
    members=st.lists(st.tuples(st.binary(), st.integers(0, 5000), st.sampled_from([0, 1, 512, 70_000]))),
    size=st.integers(1, 5000),
    step=st.integers(1, 100_000),
)
def test_any_members_with_zeros_between_them_in_pieces_of_any_size(members, size, step):
    class Slow(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, step))

    packed = b"".join(gzip.compress(part * times) + bytes(zeros) for part, times, zeros in members)
    content = b"".join(part * times for part, times, _ in members)
    packed, content = gzip.compress(b"first") + packed, b"first" + content
    assert pieces(ungzip(Slow(packed)), size) == content == gzip.decompress(packed)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (PACKED + b"garbage behind it", "header|wrapper"),
        (PACKED[:150_000] + b"damage" + PACKED[150_006:], r"\w"),
        (PACKED[:-8] + bytes(8), "check"),
        (PACKED[:-4] + bytes(4), "length|check"),
        (PACKED[:2] + b"\x07" + PACKED[3:], r"method"),
    ],
)
def test_what_is_damaged_is_an_error(raw, said):
    with pytest.raises(ValueError, match=said):
        pieces(ungzip(io.BytesIO(raw)), 1 << 20)


@pytest.mark.parametrize("lost", [1, 8, 9, 1000, len(PACKED) - 2])
def test_what_is_truncated_is_an_error(lost):
    with pytest.raises(EOFError, match="end"):
        pieces(ungzip(io.BytesIO(PACKED[:-lost])), 1 << 20)


def test_the_source_s_own_error_is_raised():
    with pytest.raises(ConnectionResetError, match="went away"):
        pieces(ungzip(Lost(PACKED)), 1 << 20)


def test_a_name_without_end_takes_no_memory():
    header = PACKED[:3] + bytes([NAMED]) + PACKED[4:10]
    name = itertools.chain([header], itertools.repeat(b"n" * (1 << 16), 1000))

    class Endless:
        def read(self, _=-1, /):
            return next(name, b"")

    tracemalloc.start()
    try:
        with pytest.raises(EOFError):
            ungzip(Endless()).read(10)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_layers_are_decompressed_by_it():
    assert pieces(DecompressedStream(io.BytesIO(PACKED)), 1 << 16) == CONTENT
