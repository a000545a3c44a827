"""Tars as container engines read them: what they refuse is refused, and the end is the end."""

import contextlib
import io
import tarfile
import tracemalloc

import pytest
from images import tar

from imagematrix.images.oci.tar import open_tar

FILE = "f"


class CountedReads:
    """A stream that counts how often it is read."""

    def __init__(self, raw):
        self._stream = io.BytesIO(raw)
        self.reads = 0

    def read(self, size=-1, /):
        self.reads += 1
        return self._stream.read(size)


def described(**values):
    """Return a tar with one file, of which an extended header has these values."""
    member = tarfile.TarInfo(FILE)
    member.pax_headers = values
    return tar(member)


def names(raw):
    with open_tar(io.BytesIO(raw)) as archive:
        return [member.name for member in archive]


@pytest.mark.parametrize("size", [1 << 40, (1 << 63) - 1, 99999999999999999999])
def test_a_file_that_is_larger_than_its_tar_is_not_skipped_for_ever(size):
    stream = CountedReads(described(size=str(size)))
    with pytest.raises(tarfile.ReadError), open_tar(stream) as archive:
        list(archive)
    assert stream.reads < 5


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"size": str(1 << 63)}, "invalid size"),
        ({"size": "-512"}, "invalid size"),
        ({"mtime": "inf"}, "invalid time"),
        ({"mtime": "-inf"}, "invalid time"),
        ({"mtime": "1e999"}, "invalid time"),
        ({"path": "a\0b"}, "NUL"),
        ({"linkpath": "a\0b"}, "NUL"),
    ],
)
def test_values_that_no_file_can_have_are_refused(values, why):
    with pytest.raises(tarfile.ReadError, match=why):
        names(described(**values))


def test_a_tar_without_an_end_is_read_to_its_end():
    whole = tar("a", ("b", b"content"))
    assert names(whole) == names(whole[: 3 * tarfile.BLOCKSIZE]) == ["a", "b"]


def sparse_header(name, maps):
    """Return the header of a sparse file, as GNU tar writes it, with a map of `maps` further blocks."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[482] = maps > 0
    head[483:495] = b"00000000000\0"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    entry = b"00000000001\0" * 2
    block = (entry * 21).ljust(504, b"\0")
    return bytes(head) + b"".join(
        block + bytes([number < maps - 1]).ljust(8, b"\0") for number in range(maps)
    )


@pytest.mark.parametrize(("maps", "taken"), [(0, True), (100, True), (100_000, False)])
def test_a_map_of_a_sparse_file_takes_no_more_memory_than_a_header_may(maps, taken):
    raw = sparse_header("f", maps) + bytes(1024)
    tracemalloc.start()
    try:
        with contextlib.nullcontext() if taken else pytest.raises(tarfile.ReadError, match="too long"):
            (member,) = open_tar(io.BytesIO(raw))
            assert len(member.sparse) == 4 + 21 * maps
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_a_map_within_a_sparse_file_is_bounded_too():
    """Version 1.0 of the format in PAX headers has it before the content."""
    info = tarfile.TarInfo("f")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    lines = b"9000000\n" + b"1\n" * 9_000_000
    info.size = len(lines)
    raw = info.tobuf(tarfile.PAX_FORMAT) + lines + bytes(-len(lines) % 512) + bytes(1024)
    with pytest.raises(tarfile.ReadError, match="too long"):
        list(open_tar(io.BytesIO(raw)))
