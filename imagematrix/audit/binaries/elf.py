"""The headers of ELF files, as far as an audit needs them: machine, names, libraries to load.

An image has thousands of ELF files, and none of them is trusted: each table is read in one piece, within the
bounds of the file. (For a system library, pyelftools takes 2 to 9 ms; this module takes 0.1 ms.) The layout
follows the System V ABI.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from imagematrix.audit.binaries.window import Window

MAGIC = b"\x7fELF"
HEADER = 64  # bytes of the longest header
RELOCATABLE = 1  # type of an object that is not linked yet
FIXED = 2  # type of a program that is loaded at one address
X86_64, AARCH64, CUDA = 62, 183, 190  # machines
CODE = 4  # flag of a section
NULL, NOBITS = 0, 8  # types of sections
# Types of sections that a linker fills with its own tables: symbols, names, relocations, hashes, tags,
# addresses, versions (System V ABI, and GNU's additions).
TABLES = frozenset([2, 3, 4, 5, 6, 9, 11, 14, 15, 16, 19, *range(0x6FFFFFF5, 0x70000000)])
INTERPRETER = ".interp"  # section with the path of the loader
LOAD, DYNAMIC = 1, 2  # types of segments
NEEDED, STRTAB, SONAME, RPATH, RUNPATH = 1, 5, 14, 15, 29  # tags of a dynamic section
FLAGS_1, PIE = 0x6FFFFFFB, 0x08000000  # another tag, and its bit for a position-independent program
EXTENDED = 0xFFFF  # in place of the index of the section with names: the first section header has the index
MOST = 200_000  # sections of an object: with one section for each function there are tens of thousands
MOST_SEGMENTS = 1024
MOST_TAGS = 4096
NAMES = 16 << 20  # bytes of a table of names
TEXT = 4096  # bytes of a name


class Section(NamedTuple):
    """A section with bytes in the file; `flags` come from its header, `address` is its address in memory.

    `table` means that the linker filled it with a table of its own. (A base image has 20,000 sections, and a
    frozen dataclass takes several times as long to make as a tuple.)
    """

    name: str
    offset: int
    size: int
    flags: int
    address: int = 0
    table: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Elf:
    """The headers of an ELF file. `machine` is 62 for x86-64, 183 for aarch64, 190 for CUDA.

    `linked` is False for an object that is not linked yet. `program`: the kernel starts it, not another file
    that loads it. `needed`, `rpath` and `runpath` are instructions
    for the loader; other files refer to this one by its `soname`. `entry` is the address of the first
    instruction. `damaged`: some headers point outside the file, so their contents are missing here.
    """

    machine: int
    linked: bool
    program: bool = False
    entry: int = 0
    sections: tuple[Section, ...] = ()
    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    damaged: bool = False

    def find_sections(self, *names: str) -> Iterator[Section]:
        """Yield the sections with one of these names."""
        return (section for section in self.sections if section.name in names)


@dataclass(frozen=True, slots=True)
class _Structures:
    """The layout of ELF structures for one class (32 or 64 bits) and one byte order."""

    header: struct.Struct  # type, machine, -, -, segments, sections, and their sizes and numbers
    segment: struct.Struct
    section: struct.Struct
    tag: struct.Struct
    # The fields of a segment: its type, offset, address and size in the file.
    fields: tuple[int, int, int, int]


def _make_structures(bits: int, end: str) -> _Structures:
    if bits == 1:
        header, segment, section, tag = "HHIIIIIHHHHHH", "IIIIIIII", "IIIIIIIIII", "iI"
        fields = (0, 1, 2, 4)
    else:
        header, segment, section, tag = "HHIQQQIHHHHHH", "IIQQQQQQ", "IIQQQQIIQQ", "qQ"
        fields = (0, 2, 3, 5)
    return _Structures(
        struct.Struct(end + header),
        struct.Struct(end + segment),
        struct.Struct(end + section),
        struct.Struct(end + tag),
        fields,
    )


LAYOUTS = {
    (bits, order): _make_structures(bits, end) for bits in (1, 2) for order, end in ((1, "<"), (2, ">"))
}


def read_elf(window: Window) -> Elf | None:
    """Return the headers of an ELF file, or None if it is something else."""
    head = window.read_at(0, HEADER)
    if head[:4] != MAGIC or len(head) < HEADER or (head[4], head[5]) not in LAYOUTS:
        return None
    layout = LAYOUTS[head[4], head[5]]
    kind, machine, _, entry, segments, sections, _, _, _, number_of_segments, width, count, names = (
        layout.header.unpack_from(head, 16)
    )
    damaged = elsewhere = False
    with_bytes: tuple[Section, ...] = ()
    dynamic: dict[int, list[str]] = {}
    try:
        if sections:
            rows, texts = _read_section_headers(window, layout, sections, width, count, names)
            with_bytes, damaged = _list_sections(window, rows, texts)
            elsewhere = _has_dynamic_elsewhere(rows, texts)
        dynamic = _read_dynamic(window, layout, segments, number_of_segments)
    except (ValueError, struct.error):
        damaged = not elsewhere
    return Elf(
        machine=machine,
        linked=kind != RELOCATABLE,
        # Libraries such as libc.so.6 and Qt's have a loader, too, with which they can be started.
        program=kind == FIXED
        or FLAGS_1 in dynamic
        or (SONAME not in dynamic and any(section.name == INTERPRETER for section in with_bytes)),
        entry=entry,
        sections=with_bytes,
        soname=next(iter(dynamic.get(SONAME, ())), None),
        needed=tuple(dynamic.get(NEEDED, ())),
        rpath=_split_paths(dynamic.get(RPATH, ())),
        runpath=_split_paths(dynamic.get(RUNPATH, ())),
        damaged=damaged,
    )


def _read_section_headers(
    window: Window, layout: _Structures, start: int, width: int, count: int, names: int
) -> tuple[list[tuple[int, ...]], bytes]:
    """Return the headers of all sections, and the table of their names."""
    if width != layout.section.size:
        raise ValueError(f"headers of sections with {width} bytes")
    first = layout.section.unpack(window.read_at(start, width))
    # Of more sections than a header can count, the first section states the number (System V ABI).
    count = count or first[5]
    names = first[6] if names == EXTENDED else names
    if count > MOST or names >= count:
        raise ValueError(f"{count} sections")
    table = window.read_at(start, count * width)
    rows = list(layout.section.iter_unpack(table[: len(table) // width * width]))
    if len(rows) < count:
        raise ValueError("headers of sections beyond the end")
    return rows, window.read_at(rows[names][4], min(rows[names][5], NAMES))


def _list_sections(
    window: Window, rows: Iterable[tuple[int, ...]], texts: bytes
) -> tuple[tuple[Section, ...], bool]:
    """Return the sections with bytes, and whether there are more than fit into the file side by side.

    Linkers let none overlap. Thousands of sections or names could each span the whole file, and what reads
    all sections would not end.
    """
    sections: list[Section] = []
    remaining, letters = window.size, NAMES
    for name, kind, flags, address, offset, size, *_ in rows:
        if kind in (NULL, NOBITS):
            continue
        section = Section(
            name=_text(texts, name),
            offset=offset,
            # A truncated section is examined as far as it goes.
            size=min(size, max(0, window.size - offset)),
            flags=flags,
            address=address,
            table=kind in TABLES,
        )
        remaining -= section.size
        letters -= len(section.name)
        if remaining < 0 or letters < 0:
            return tuple(sections), True
        sections.append(section)
    return tuple(sections), False


def _has_dynamic_elsewhere(rows: Iterable[tuple[int, ...]], texts: bytes) -> bool:
    """Whether the dynamic section has its bytes in another file.

    This is the case in files with separate debug information, whose segments describe the program.
    """
    return any(kind == NOBITS and texts.startswith(b".dynamic\0", name) for name, kind, *_ in rows)


def _read_dynamic(window: Window, layout: _Structures, start: int, count: int) -> dict[int, list[str]]:
    """Return the names in the dynamic section by tag, none if there is no such section."""
    if count > MOST_SEGMENTS:
        raise ValueError(f"{count} segments")
    # By segments, as the loader does: the section headers may have been stripped.
    table = window.read_at(start, count * layout.segment.size)
    if len(table) < count * layout.segment.size:
        raise ValueError("headers of segments beyond the end")
    rows = [[row[field] for field in layout.fields] for row in layout.segment.iter_unpack(table)]
    segment = next(((offset, size) for kind, offset, _, size in rows if kind == DYNAMIC), None)
    if segment is None:
        return {}
    raw = window.read_at(segment[0], min(segment[1], MOST_TAGS * layout.tag.size))
    tags = list(layout.tag.iter_unpack(raw[: len(raw) // layout.tag.size * layout.tag.size]))
    strings = next((value for tag, value in tags if tag == STRTAB), None)
    # The segment that the loader puts at the address of the names tells their offset in the file.
    offset = next(
        (
            strings - address + at
            for kind, at, address, size in rows
            if kind == LOAD and strings is not None and address <= strings < address + size
        ),
        None,
    )
    if offset is None:
        raise ValueError("a dynamic section without names")
    texts: dict[int, list[str]] = {}
    for tag, value in tags:
        if tag == NULL:
            break
        if tag == FLAGS_1 and value & PIE:
            texts[tag] = []
        elif tag in (NEEDED, SONAME, RPATH, RUNPATH):
            texts.setdefault(tag, []).append(_text(window.read_at(offset + value, TEXT), 0))
    return texts


def _text(raw: bytes, start: int) -> str:
    end = raw.find(b"\0", start, start + TEXT)
    return raw[start : end if end != -1 else start + TEXT].decode("utf-8", "replace")


def _split_paths(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(folder for path in paths for folder in path.split(":") if folder)
