"""Compressing in threads: one stream, whose bytes do not depend on the number of threads."""

import gzip
import random
import zlib

import pytest

from imagematrix.images.oci import deflate
from imagematrix.images.oci.deflate import BLOCK

NOISE = random.Random(0).randbytes(BLOCK // 4)  # noqa: S311 - not a secret
TEXT = b"".join(b"line %d\n" % number for number in range(BLOCK // 8))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a",
        NOISE,
        bytes(BLOCK),
        TEXT[:BLOCK],
        NOISE + bytes(5 * BLOCK) + TEXT,
        TEXT * 3 + bytes(7 * BLOCK),
    ],
)
def test_stream_decompresses_to_the_content(content):
    pieces = [content[at : at + 300_000] for at in range(0, len(content), 300_000)]
    one, many = (
        b"".join(deflate.compress_deflate(deflate.split_blocks(pieces), threads)) for threads in (1, 3)
    )
    assert one == many
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    assert inflater.decompress(one) + inflater.flush() == content
    assert inflater.eof
    assert inflater.unused_data == b""


@pytest.mark.parametrize("content", [b"", b"a", TEXT * 3 + bytes(7 * BLOCK)])
def test_gzip_file_has_neither_a_name_nor_a_time(content):
    one, many = (b"".join(deflate.compress_gzip([content[:9], content[9:]], workers)) for workers in (1, 3))
    assert one == many
    assert gzip.decompress(one) == content
    assert one[:10] == zlib.compress(b"", wbits=31)[:10]


def test_blocks_do_not_depend_on_chunk_sizes():
    content = TEXT * 3
    blocks = list(deflate.split_blocks([content]))
    assert blocks == list(deflate.split_blocks([content[:7], content[7 : BLOCK + 1], content[BLOCK + 1 :]]))
    assert {len(block) for block in blocks[:-1]} == {BLOCK}
    assert b"".join(blocks) == content


def test_blocks_use_the_previous_one_as_dictionary():
    """Content that repeats from block to block is compressed as in one stream."""
    noise = NOISE[: 1 << 14]
    stream = b"".join(deflate.compress_deflate(deflate.split_blocks([noise * (4 * BLOCK // len(noise))]), 2))
    assert len(stream) < 3 * len(noise)


def test_error_of_the_input_is_raised():
    def content():
        yield TEXT[:BLOCK]
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        list(deflate.compress_deflate(content(), 2))
