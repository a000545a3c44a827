"""Compressing layers: the bytes do not depend on threads or on how the content arrives."""

import gzip
import random

import pytest
import zstandard

from imagematrix.images.oci.compression import DEFAULT, LEVELS, Compression, compress, get_libzstd_version

JOB = 8 << 20  # bytes that libzstd gives to one thread at level 3
NOISE = random.Random(0).randbytes(1 << 18)  # noqa: S311 - not a secret
TEXT = b"".join(b"line %d\n" % number for number in range(300_000))
LONG = (TEXT + NOISE) * 5 + bytes(JOB) + NOISE


def packed(content, wanted, workers, piece):
    pieces = (content[at : at + piece] for at in range(0, len(content), piece))
    return b"".join(compress(pieces, wanted, workers))


@pytest.mark.parametrize("content", [b"", b"a", LONG[:JOB], LONG], ids=["empty", "short", "one job", "long"])
@pytest.mark.parametrize("level", [1, 3, 9])
@pytest.mark.parametrize("kind", ["zstd", "gzip"])
def test_bytes_do_not_depend_on_threads_or_writes(kind, level, content):
    wanted = Compression(type=kind, level=level)
    expected = packed(content, wanted, 1, 1 << 20)
    for workers, piece in ((1, 999_983), (2, 1 << 20), (3, len(content) or 1), (5, 65_537)):
        assert packed(content, wanted, workers, piece) == expected
    assert packed(content, wanted, 0, 1 << 20) == expected if kind == "zstd" else True
    unpack = gzip.decompress if kind == "gzip" else unzstd
    assert unpack(expected) == content


def unzstd(raw):
    return zstandard.ZstdDecompressor().stream_reader(raw).read()


@pytest.mark.parametrize("kind", LEVELS)
def test_every_level_can_be_read(kind):
    for level in LEVELS[kind]:
        raw = packed(TEXT[:100_000], Compression(type=kind, level=level), 2, 10_000)
        assert (gzip.decompress if kind == "gzip" else unzstd)(raw) == TEXT[:100_000]


def test_levels_differ():
    sizes = [
        len(packed(TEXT, Compression(type=kind, level=level), 1, 1 << 20))
        for kind, level in (("zstd", 19), ("zstd", 3), ("gzip", 1))
    ]
    assert sizes == sorted(sizes)


def test_damaged_zstd_is_noticed_by_its_checksum():
    raw = bytearray(packed(NOISE, DEFAULT, 1, 1 << 20))
    raw[len(raw) // 2] ^= 1
    with pytest.raises(zstandard.ZstdError, match="checksum"):
        unzstd(bytes(raw))


def test_error_of_the_input_is_raised():
    def content():
        yield TEXT
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        list(compress(content(), DEFAULT, 2))


def test_compression_in_words():
    assert str(Compression(type="gzip", level=6)) == "gzip -6"
    assert DEFAULT.media_type == "application/vnd.oci.image.layer.v1.tar+zstd"
    assert get_libzstd_version().count(".") == 2
