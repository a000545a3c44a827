"""Clamping the timestamps of a tar; all its other bytes stay as they are.

The formats are described in POSIX.1-2017 (pax, "ustar Interchange Format" and "pax Extended Header") and in
the GNU tar manual ("Basic Tar Format").
"""

from __future__ import annotations

from imagematrix.errors import BuildError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.images.oci.byte_stream import ByteStream

BLOCK = 512
PIECE = 1 << 20  # bytes to read at once
KIND, MAGIC = slice(156, 157), slice(257, 265)
SIZE, CHECKSUM, MTIME = slice(124, 136), slice(148, 156), slice(136, 148)
GNU, GNU_TIMES = b"ustar  \0", (slice(345, 357), slice(357, 369))
EXTENDED, GLOBAL = b"x", b"g"
WITHOUT_DATA = b"123456"  # links, devices, folders and pipes, whatever their size field
SPARSE = b"S"
TIMES = (b"mtime", b"atime", b"ctime")
BASE_256, NEGATIVE = 0x80, 0xFF  # the first byte of a number that is not octal


def clamp_mtimes(tar: ByteStream, latest: int) -> Iterator[bytes]:
    """Yield `tar` with times after `latest` (seconds since 1970) set to it; raise BuildError."""
    long: int | None = None  # the next entry's size, if an extended header has it
    late = False  # whether an extended header has a time of the next entry after `latest`
    while head := tar.read(BLOCK):
        if not any(head):  # the end of the archive, and padding
            yield head
            yield from iter(lambda: tar.read(PIECE), b"")
            return
        if len(head) < BLOCK:
            raise _make_damage_error("it is truncated")
        kind, size = head[KIND], _parse_number(head[SIZE])
        if kind == SPARSE:
            raise _make_damage_error("it has a sparse file in GNU's old format")
        if kind in (EXTENDED, GLOBAL):
            records = list(_parse_records(b"".join(_copy_data(tar, size))[:size]))
            in_time = [record for record in records if not _is_late(record[0], record[1], latest)]
            kept = b"".join(raw for _, _, raw in in_time)
            if kind == EXTENDED:
                long = next((int(value) for key, value, _ in records if key == b"size"), None)
                late = any(key == b"mtime" and _is_late(key, value, latest) for key, value, _ in records)
            if kept:
                yield _clamp_header(head, latest, size=len(kept))
                yield kept + bytes(-len(kept) % BLOCK)
            continue
        yield _clamp_header(head, latest, late=late)
        if kind not in WITHOUT_DATA:
            yield from _copy_data(tar, size if long is None else long)
        long, late = None, False


def _clamp_header(head: bytes, latest: int, *, size: int | None = None, late: bool = False) -> bytes:
    """Return a header with clamped times, and with another size if given.

    `late`: an extended header had the entry's time, which was after `latest` and was removed.
    """
    made = bytearray(head)
    for field in (MTIME, *(GNU_TIMES if head[MAGIC] == GNU else ())):
        if _parse_number(head[field]) > latest or (late and field == MTIME):
            made[field] = b"%011o\0" % latest
    if size is not None and size != _parse_number(head[SIZE]):
        made[SIZE] = b"%011o\0" % size
    if made != head:
        made[CHECKSUM] = b" " * 8
        made[CHECKSUM] = b"%06o\0 " % sum(made)
    return bytes(made)


def _copy_data(tar: ByteStream, size: int) -> Iterator[bytes]:
    """Yield the data of an entry with its padding."""
    remaining = size + -size % BLOCK
    while remaining:
        piece = tar.read(min(remaining, PIECE))
        if not piece:
            raise _make_damage_error("it is truncated")
        remaining -= len(piece)
        yield piece


def _parse_records(data: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield key, value and raw bytes of each record of an extended header (length, KEY=VALUE, newline)."""
    while data:
        digits = data.partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        key, sign, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not sign or data[length - 1 : length] != b"\n" or (key == b"size" and not value.isdigit()):
            raise _make_damage_error(f"it has an invalid record in an extended header at {data[:20]!r}")
        yield key, value, data[:length]
        data = data[length:]


def _is_late(key: bytes, value: bytes, latest: int) -> bool:
    """Whether a record is a time after `latest`."""
    try:
        return key in TIMES and float(value) > latest
    except ValueError as error:
        raise _make_damage_error(f"{value[:20]!r} is not a time") from error


def _parse_number(field: bytes) -> int:
    """Return a number in a header: octal digits, or for larger numbers two's complement (GNU)."""
    if field[0] & BASE_256:
        sign = -1 if field[0] == NEGATIVE else 0
        return (sign << 8 * len(field[1:])) | int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError as error:
        raise _make_damage_error(f"{field!r} is not a number") from error


def _make_damage_error(why: str) -> BuildError:
    return BuildError(f"a layer is not a readable tar: {why}")
