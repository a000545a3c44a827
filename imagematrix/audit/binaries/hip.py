"""AMD's device code in clang's offload bundles: code objects, named by their targets.

LLVM's ClangOffloadBundler.rst describes the layout: a magic, the number of entries, and for each its offset,
its size, and an id with its length, such as "hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-". A compressed
bundle has another magic, followed by the bundle compressed with zlib or Zstandard.
"""

from __future__ import annotations

import io
import re
import struct
import zlib

from imagematrix.audit.binaries import cubin
from imagematrix.audit.binaries.device_code import DeviceCode
from imagematrix.audit.binaries.window import Window

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED = b"CCOB"
ENTRY = struct.Struct("<QQQ")  # offset, size, length of the id
LONGEST = 512  # bytes of an id
MOST = 4096  # entries of a bundle
HEADER = 1 << 18  # bytes to decompress of a bundle; usual bundles have all their ids there
READ = 16 * HEADER  # compressed bytes to read for that
ALIGNED = 4096  # the bundle of each translation unit begins at a page
TARGET = re.compile(r"amdgcn-amd-amdhsa-{1,2}(gfx[0-9a-z-]+(?::[a-z]+[+-])*)$", re.ASCII)
ZLIB, ZSTD = 0, 1
# Bytes of a compressed bundle's header, by version (version 1 has no file size, version 3 has longer sizes).
COMPRESSED_HEADER = {1: 20, 2: 24, 3: 32}


def list_bundle_targets(window: Window) -> DeviceCode:
    """Return the targets of all bundles in a section."""
    objects: set[str] = set()
    damaged = False
    for at in range(0, window.size, ALIGNED):
        head = window.read_at(at, len(MAGIC))
        targets: Iterator[str | None] = iter(())
        if head == MAGIC:
            targets = _list_targets(window, at, cut=False)
        elif head.startswith(COMPRESSED):
            targets = _list_compressed_targets(window.get_part(at, window.size - at))
        for target in targets:
            damaged = damaged or target is None
            objects.update([target] if target else [])
    return DeviceCode(objects=frozenset(objects), damaged=damaged)


def _list_compressed_targets(window: Window) -> Iterator[str | None]:
    version, method = struct.unpack("<HH", window.read_at(len(COMPRESSED), 4).ljust(4, b"\xff"))
    header_size = COMPRESSED_HEADER.get(version)
    raw = b""
    if header_size is not None and method in (ZLIB, ZSTD):
        raw = _unpack_beginning(window.read_at(header_size, READ), method)
    if not raw.startswith(MAGIC):
        yield None
        return
    yield from _list_targets(Window(io.BytesIO(raw), 0, len(raw)), 0, cut=True)


def _unpack_beginning(raw: bytes, method: int) -> bytes:
    """Return the first decompressed bytes, none if they are damaged."""
    if method == ZLIB:
        try:
            return zlib.decompressobj().decompress(raw, HEADER)
        except zlib.error:
            return b""
    return cubin.unpack(raw, HEADER, zstandard=True)


def _list_targets(window: Window, start: int, *, cut: bool) -> Iterator[str | None]:
    """Yield the target of each code object in a bundle, None for an invalid entry or a truncated code object.

    `cut` says that the window has only the beginning of the bundle, so code objects may lie beyond its end.
    """
    at = start + len(MAGIC) + 8
    count = int.from_bytes(window.read_at(at - 8, 8), "little")
    if count > MOST:
        yield None
        return
    for _ in range(count):
        entry = window.read_at(at, ENTRY.size)
        if len(entry) < ENTRY.size:
            yield None
            return
        offset, size, length = ENTRY.unpack(entry)
        if length > LONGEST or (start + offset + size > window.size and not cut):
            yield None
            return
        target = TARGET.search(window.read_at(at + ENTRY.size, length).decode("ascii", "replace"))
        if target:  # the entry with the host's code does not match
            yield target[1]
        at += ENTRY.size + length
