"""Device code in the data of a program: cubins, fatbins and PTX that it passes to the driver itself.

They are arrays or texts of its source, at any place of a section. A header is only believed if what it states
lies within the section.
"""

from __future__ import annotations

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
DRIVER = b"libcuda.so"
FIRST = 4096  # bytes of PTX that have its directives
LONGEST = 1 << 16  # bytes of PTX that are searched for its end
MOST = 10_000  # places of a section that may be code
WRONG = 100  # headers of a section that turn out to be none
EVERYTHING = 1 << 40  # more bytes than any section has


def find_device_code(headers: Elf, window: Window) -> DeviceCode:
    """Return the device code in the data sections of a program or a library."""
    return device_code.merge_device_code(
        part
        for section in _list_data_sections(headers, window)
        for part in islice(_list_device_code(section), MOST)
    )


def names_driver(headers: Elf, window: Window) -> bool:
    """Whether the data sections have the name of libcuda, which a program may load by it."""
    sections = _list_data_sections(headers, window)
    return any(True for section in sections for _ in _find_words(section, DRIVER))


def _list_data_sections(headers: Elf, window: Window) -> Iterator[Window]:
    for section in headers.sections:
        if section.flags & ALLOCATED and not section.flags & elf.CODE and not section.table:
            yield window.get_part(section.offset, section.size)
    if not headers.sections:  # the section headers were stripped
        yield window


def _list_device_code(section: Window) -> Iterator[DeviceCode]:
    readers = {cubin.BEGINNING: _read_cubin, FATBIN: _read_fatbin, TEXT: _read_ptx}
    end = wrong = 0
    for offset, word in _find_words(section, *readers):
        read_code = readers[word]
        if offset < end or wrong == WRONG:  # a fatbin may contain cubins
            continue
        code, size = read_code(section.get_part(offset, section.size))
        if code.cuda and not code.damaged:
            yield code
            end = offset + size
        else:
            wrong += read_code is not _read_ptx


def _find_words(section: Window, *words: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the offsets of words in a section in ascending order, up to MOST of each word."""
    overlap = max(map(len, words)) - 1
    remaining = dict.fromkeys(words, MOST)
    for index, piece in enumerate(section.list_pieces(EVERYTHING, overlap)):
        offsets = []
        for word in words:
            at = piece.find(word)
            # What begins in the overlap is found in the next piece.
            while 0 <= at < PIECE and remaining[word]:
                remaining[word] -= 1
                offsets.append((index * PIECE + at, word))
                at = piece.find(word, at + 1)
        yield from sorted(offsets)


def _read_cubin(window: Window) -> tuple[DeviceCode, int]:
    """Return the cubin at the beginning of `window`, and its size; `NONE` if it is something else."""
    size = cubin.measure_cubin(window)
    return (cubin.read_cubin(window.get_part(0, size)), size) if size else (NONE, 0)


def _read_fatbin(window: Window) -> tuple[DeviceCode, int]:
    container = next(fatbin.list_containers(window))
    return fatbin.read_fatbins(window.get_part(0, container.end)), container.end


def _read_ptx(window: Window) -> tuple[DeviceCode, int]:
    match = fatbin.DIRECTIVES.match(window.read_at(0, FIRST))
    if match is None or match[3] is None:  # other texts may have the rest
        return NONE, 0
    text = window.read_at(0, LONGEST)
    end = text.find(b"\0")
    size = end if end != -1 else len(text)
    target, isa = match[2].decode(), match[1].decode()
    return DeviceCode(ptx=frozenset([(target, isa)]), sizes=((f"compute_{target}", size),)), size
