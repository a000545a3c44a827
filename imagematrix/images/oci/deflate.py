"""Compressing in several threads; their number does not change a byte.

The content is cut into blocks. Each is compressed on its own, with the end of the block before it as its
dictionary and a byte boundary at its end, so together they are one stream. pigz does the same.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

LEVEL = 6  # gzip's own default
BLOCK = 1 << 20  # blocks of another size would give other bytes
ZEROS = bytes(BLOCK)
WINDOW = 1 << zlib.MAX_WBITS  # bytes that a stream can refer back
HEADER = bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 3])  # of gzip: deflate, no name, no time, written on Unix
TRAILER = struct.Struct("<II")  # CRC and size of the content, modulo 2^32


def count_threads() -> int:
    """Return how many threads this process can run at the same time."""
    return len(os.sched_getaffinity(0))  # a job may have only some of the processors


def split_blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of `pieces` in blocks of `BLOCK` bytes; the last one may be shorter."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= BLOCK:
            yield bytes(buffer[:BLOCK])
            del buffer[:BLOCK]
    if buffer:
        yield bytes(buffer)


def compress_gzip(pieces: Iterable[bytes], workers: int, level: int = LEVEL) -> Iterator[bytes]:
    """Yield the content of `pieces` in the format of gzip (RFC 1952), compressed by `workers` threads."""
    crc = size = 0

    def content() -> Iterator[bytes]:
        nonlocal crc, size
        for block in split_blocks(pieces):
            crc = zlib.crc32(block, crc)
            size += len(block)
            yield block

    yield HEADER
    yield from compress_deflate(content(), workers, level)
    yield TRAILER.pack(crc, size & 0xFFFFFFFF)


def compress_deflate(content: Iterable[bytes], workers: int, level: int = LEVEL) -> Iterator[bytes]:
    """Yield the raw deflate stream of `content`, which comes in blocks, compressed by `workers` threads."""
    waiting: deque[Future[bytes]] = deque()
    # Of a block of zeros after another one, of which trimmed files have many.
    zeros: Future[bytes] | None = None
    before = b""
    with ThreadPoolExecutor(workers) as pool:
        for block in content:
            if block == ZEROS and before == ZEROS[:WINDOW]:
                zeros = zeros or pool.submit(_compress_block, before, block, level)
                waiting.append(zeros)
            else:
                waiting.append(pool.submit(_compress_block, before, block, level))
            before = block[-WINDOW:]
            # Enough to keep all threads busy. Without a limit, all of the content could be in memory.
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        for compressed in waiting:
            yield compressed.result()
    # An empty block ends the stream.
    yield zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS).flush()


def _compress_block(before: bytes, block: bytes, level: int) -> bytes:
    """Return a block, compressed up to a byte boundary; `before` is the end of what comes before it."""
    compressor = zlib.compressobj(
        level, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY, before
    )
    return compressor.compress(block) + compressor.flush(zlib.Z_SYNC_FLUSH)
