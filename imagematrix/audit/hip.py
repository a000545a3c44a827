"""AMD's device code as clang bundles it: code objects, named by their targets.

The layout is that of ClangOffloadBundler.rst of LLVM: a magic, a number of entries, and for each its offset,
its size, and the length of an id such as "hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-". A compressed
bundle has another magic, and the bundle compressed with zlib or Zstandard.
"""

from __future__ import annotations

import io
import re
import struct
import zlib

from imagematrix.audit.device_code import DeviceCode
from imagematrix.audit.window import Window

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bundles"]

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED = b"CCOB"
ENTRY = struct.Struct("<QQQ")  # offset, size, length of the id
LONGEST = 512  # bytes of an id
MOST = 4096  # entries of a bundle
HEADER = 1 << 18  # bytes that a compressed bundle is decompressed to: what has all the ids of usual ones
READ = 16 * HEADER  # bytes that are read for that, whatever the size of the bundle
ALIGNED = 4096  # bundles of several translation units begin at pages
TARGET = re.compile(r"amdgcn-amd-amdhsa-{1,2}(gfx[0-9a-z-]+(?::[a-z]+[+-])*)$", re.ASCII)
ZLIB, ZSTD = 0, 1
# Of a compressed bundle: how long its header is, by version (1 has no size of the file, 3 has longer sizes).
COMPRESSED_HEADER = {1: 20, 2: 24, 3: 32}


def bundles(window: Window) -> DeviceCode:
    """Return the targets of all bundles in a section."""
    objects: set[str] = set()
    damaged = False
    for at in range(0, window.size, ALIGNED):
        head = window.at(at, len(MAGIC))
        targets: Iterator[str | None] = iter(())
        if head == MAGIC:
            targets = _targets(window, at, cut=False)
        elif head.startswith(COMPRESSED):
            targets = _compressed(window.part(at, window.size - at))
        for target in targets:
            damaged = damaged or target is None
            objects.update([target] if target else [])
    return DeviceCode(objects=frozenset(objects), damaged=damaged)


def _compressed(window: Window) -> Iterator[str | None]:
    version, method = struct.unpack("<HH", window.at(len(COMPRESSED), 4).ljust(4, b"\xff"))
    head = COMPRESSED_HEADER.get(version)
    if head is None or method not in (ZLIB, ZSTD):
        yield None
        return
    try:
        raw = _inflated(window.at(head, READ), method)
    except ValueError:
        raw = b""
    if not raw.startswith(MAGIC):
        yield None
        return
    yield from _targets(Window(io.BytesIO(raw), 0, len(raw)), 0, cut=True)


def _inflated(raw: bytes, method: int) -> bytes:
    """Return the beginning of what was compressed; raise ValueError where it is damaged."""
    if method == ZLIB:
        try:
            return zlib.decompressobj().decompress(raw, HEADER)
        except zlib.error as error:
            raise ValueError(str(error)) from error
    import zstandard

    try:
        return zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw).read(HEADER)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _targets(window: Window, start: int, *, cut: bool) -> Iterator[str | None]:
    """Yield the target of each code object in a bundle; None where one is cut off.

    Of a bundle that is `cut`, the code objects themselves are not all there.
    """
    at = start + len(MAGIC) + 8
    count = int.from_bytes(window.at(at - 8, 8), "little")
    if count > MOST:
        yield None
        return
    for _ in range(count):
        entry = window.at(at, ENTRY.size)
        if len(entry) < ENTRY.size:
            yield None
            return
        offset, size, length = ENTRY.unpack(entry)
        if length > LONGEST or (start + offset + size > window.size and not cut):
            yield None
            return
        target = TARGET.search(window.at(at + ENTRY.size, length).decode("ascii", "replace"))
        if target:  # the host's own part is another
            yield target[1]
        at += ENTRY.size + length
