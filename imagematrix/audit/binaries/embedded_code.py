"""Device code in the data of a program: cubins, fatbins and PTX that it passes to the driver itself.

They are arrays or texts of its source, at any place of a section. A header is only believed if what it states
lies within the section.
"""

from __future__ import annotations

import re
import struct
from itertools import islice

from imagematrix.audit.binaries import cubin, device_code, elf, fatbin
from imagematrix.audit.binaries.device_code import NONE, DeviceCode
from imagematrix.audit.binaries.window import PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.window import Window

ALLOCATED = 2  # flag of a section that the loader puts into memory
FATBIN = fatbin.MAGIC + struct.pack("<HH", 1, fatbin.HEADER.size)
TEXT = b".version"
# The directives that PTX begins with, apart from comments.
PTX = re.compile(
    rb"\.version[ \t]+(\d{1,2}\.\d)\s+(?://[^\n]*\n\s*)*\.target[ \t]+sm_(\d{2,3}[af]?)\b[^\n.\0]*\s*"
    rb"(?://[^\n]*\n\s*)*\.address_size\s+(?:32|64)\b"
)
DRIVER = b"libcuda.so"
DIRECTIVES = 4096  # bytes
LONGEST = 1 << 16  # bytes of PTX that are searched for its end
MOST = 10_000  # places of a section that may be code
WRONG = 100  # headers of a section that turn out to be none
EVERYTHING = 1 << 40  # more bytes than any section has


def find_device_code(headers: Elf, window: Window) -> DeviceCode:
    """Return the device code in the data sections of a program or a library."""
    return device_code.merge_device_code(
        part for section in _data(headers, window) for part in islice(_code(section), MOST)
    )


def names_driver(headers: Elf, window: Window) -> bool:
    """Whether the data sections have the name of libcuda, which a program may load by it."""
    return any(True for section in _data(headers, window) for _ in _found(section, DRIVER))


def _data(headers: Elf, window: Window) -> Iterator[Window]:
    left = window.size
    for section in headers.sections:
        if section.flags & ALLOCATED and not section.flags & elf.CODE and not section.table:
            left -= section.size
            if left < 0:  # sections overlap
                return
            yield window.part(section.offset, section.size)
    if not headers.sections:  # the section headers were stripped
        yield window


def _code(section: Window) -> Iterator[DeviceCode]:
    readers = {cubin.BEGINNING: _cubin, FATBIN: _fatbin, TEXT: _ptx}
    reached = wrong = 0
    for offset, word in _found(section, *readers):
        read = readers[word]
        if offset < reached or wrong == WRONG:  # a fatbin may contain cubins
            continue
        own, size = read(section.part(offset, section.size))
        if own.cuda and not own.damaged:
            yield own
            reached = offset + size
        else:
            wrong += read is not _ptx


def _found(section: Window, *words: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the offsets of words in a section in ascending order, up to MOST of each word."""
    overlap = max(map(len, words)) - 1
    left = dict.fromkeys(words, MOST)
    for index, piece in enumerate(section.pieces(EVERYTHING, overlap)):
        offsets = []
        for word in words:
            at = piece.find(word)
            # What begins in the overlap is found in the next piece.
            while 0 <= at < PIECE and left[word]:
                left[word] -= 1
                offsets.append((index * PIECE + at, word))
                at = piece.find(word, at + 1)
        yield from sorted(offsets)


def _cubin(window: Window) -> tuple[DeviceCode, int]:
    """Return the cubin at the beginning of `window`, and its size; `NONE` if it is something else."""
    size = cubin.measure_cubin(window)
    return (cubin.read_cubin(window.part(0, size)), size) if size else (NONE, 0)


def _fatbin(window: Window) -> tuple[DeviceCode, int]:
    container = next(fatbin.list_containers(window))
    return fatbin.read_fatbins(window.part(0, container.end)), container.end


def _ptx(window: Window) -> tuple[DeviceCode, int]:
    match = PTX.match(window.at(0, DIRECTIVES))
    if match is None:
        return NONE, 0
    text = window.at(0, LONGEST)
    end = text.find(b"\0")
    size = end if end != -1 else len(text)
    target, isa = match[2].decode(), match[1].decode()
    return DeviceCode(ptx=frozenset([(target, isa)]), sizes=((f"compute_{target}", size),)), size
