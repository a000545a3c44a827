"""Tars as container engines read them: what they refuse is refused, and the end is the end."""

import io
import tarfile

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
