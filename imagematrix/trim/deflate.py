"""Deflating in several threads; their number does not change a byte.

The content is cut into blocks. Each is compressed on its own, with the end of the block before it as its
dictionary and a byte boundary at its end, so together they are one stream. pigz does the same.
"""

from __future__ import annotations

import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

__all__ = ["BLOCK", "LEVEL", "blocks", "deflated"]

LEVEL = 6
BLOCK = 1 << 20
ZEROS = bytes(BLOCK)
WINDOW = 1 << zlib.MAX_WBITS  # bytes that a stream can refer back


def blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the content of `pieces` in blocks of `BLOCK` bytes; the last one may be shorter."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= BLOCK:
            yield bytes(buffer[:BLOCK])
            del buffer[:BLOCK]
    if buffer:
        yield bytes(buffer)


def deflated(content: Iterable[bytes], threads: int) -> Iterator[bytes]:
    """Yield the raw deflate stream of `content`, which comes in blocks, compressed by `threads` threads."""
    waiting: deque[Future[bytes]] = deque()
    zeros: Future[bytes] | None = (
        None  # of a block of zeros after another one, of which trimmed files have many
    )
    before = b""
    with ThreadPoolExecutor(threads) as pool:
        for block in content:
            if block == ZEROS and before == ZEROS[:WINDOW]:
                zeros = zeros or pool.submit(_compressed, before, block)
                waiting.append(zeros)
            else:
                waiting.append(pool.submit(_compressed, before, block))
            before = block[-WINDOW:]
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        for one in waiting:
            yield one.result()
    yield zlib.compressobj(
        LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS
    ).flush()  # an empty block, which ends the stream


def _compressed(before: bytes, block: bytes) -> bytes:
    """Return a block, compressed up to a byte boundary; `before` is the end of what comes before it."""
    compressor = zlib.compressobj(
        LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY, before
    )
    return compressor.compress(block) + compressor.flush(zlib.Z_SYNC_FLUSH)
