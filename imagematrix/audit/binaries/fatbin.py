"""NVIDIA's device code as toolkits store it: fatbins, cubins and PTX.

A fatbin has a header (magic, version, size of the header, size of the rest) and entries, each with its own
header. An entry's header has the targets, so of its code no more is decompressed than states the compiler's
release. From CUDA 13.4 on, `nvcc --concat` compresses the code for several targets into one entry, whose
header has a table of its parts.
NVIDIA documents none of this. The layout was derived from the output of fatbinary in CUDA 11.8 to 13.5, and
results were compared with cuobjdump.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice

from imagematrix.audit.binaries import cubin, kernels
from imagematrix.audit.binaries.device_code import NONE, DeviceCode, Fatbins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.binaries.window import Window

    Targets = tuple[frozenset[str], frozenset[tuple[str, str]], bool]

MAGIC = b"\x50\xed\x55\xba"
HEADER = struct.Struct("<IHHQ")  # magic, version, size of the header, bytes after it
ENTRY = struct.Struct("<HHIQ8sHHI8sQ")  # kind, version, size of header and payload, -, ISA, target, -, flags
SMALLEST = 48  # bytes of `ENTRY`, the smallest header of an entry
PTX, CUBIN = 1, 2  # kinds; the others are intermediate code, which no driver loads
CONCATENATED = 256  # kind of an entry with code for several targets
FIXED = 64  # bytes of an entry's header before its optional parts, such as options and a table of parts
TABLE = struct.Struct("<II")  # start of a table of parts: number of parts, bytes of the table
OPTIONS = struct.Struct("<IIB")  # place, size, -
SPECIFIC = 1 << 20  # flag: "a", for exactly one capability
FAMILY = 1 << 21  # flag: "f", for a family
LZ4 = 1 << 13  # flag: compressed with LZ4
ZSTD = 1 << 15  # flag: compressed with Zstandard
ALIGNED = 8  # fatbins of a section begin at multiples of this
PIECE = 1 << 16
NOTES = 16  # cubins of a section whose notes are read for the release: one compiler made nearly all
TRIED = 4  # entries of a fatbin that are read for the names of its kernels
MOST = 100_000  # entries of a fatbin; cuBLAS has a few hundred
BLANK = rb"(?:\s|//[^\n]*\n|/\*(?:[^*]|\*(?!/))*\*/)*"  # spaces and comments, to be read in one way only
# The directives that PTX begins with; old compilers wrote no size of addresses.
DIRECTIVES = re.compile(
    rb"%b\.version[ \t]+(\d{1,2}\.\d)\s%b\.target[ \t]+sm_(\d{2,3}[af]?)\b"
    rb"(?:[^\n.\0]*(?![^\n.\0])%b(\.address_size)\s+(?:32|64)\b)?" % (BLANK, BLANK, BLANK)
)


@dataclass(frozen=True, slots=True)
class FatbinEntry:
    """The device code for one target in a container: `size` bytes from `offset` on, including its header.

    `kind` is PTX, CUBIN or another number; `target` and `isa` are the compiler's names ("90a", "8.4").
    `whole`: the header is valid and the entry is not truncated. `parts` are the entries inside an entry of
    kind CONCATENATED; the `size` of each is its share of the stored bytes.
    """

    offset: int
    size: int
    kind: int
    target: str
    isa: str
    flags: int
    whole: bool
    parts: tuple[FatbinEntry, ...] = ()

    @property
    def code(self) -> tuple[FatbinEntry, ...]:
        """The entries for a single target: its parts, or itself."""
        return self.parts or (self,)


@dataclass(frozen=True, slots=True)
class Container:
    """A fatbin from `offset` to `end`, with the device code of one module for several targets.

    `whole` is False if it is truncated or has more than `MOST` entries.
    """

    offset: int
    end: int
    entries: tuple[FatbinEntry, ...]
    whole: bool


def read_fatbins(window: Window, project_kernels: re.Pattern[bytes] | None = None) -> DeviceCode:
    """Return the device code of all fatbins in a section or a file.

    `project_kernels` matches the names of the kernels of the file's own project, if that is known.
    """
    cubins: set[str] = set()
    texts: set[tuple[str, str]] = set()
    toolkits: set[str] = set()
    cubins_read = 0
    compressed = damaged = False
    parts: Counter[Targets] = Counter()
    sizes: Counter[str] = Counter()
    for container in list_containers(window):
        entries = [entry for entry in container.entries if entry.whole]
        damaged = damaged or not container.whole or len(entries) < len(container.entries)
        code = [part for entry in entries for part in entry.code if part.kind in (CUBIN, PTX)]
        native = frozenset(entry.target for entry in code if entry.kind == CUBIN)
        text = frozenset((entry.target, entry.isa) for entry in code if entry.kind == PTX)
        cubins |= native
        texts |= text
        compressed = compressed or any(entry.flags & ZSTD for entry in code)
        for entry in code:
            sizes[f"{'sm' if entry.kind == CUBIN else 'compute'}_{entry.target}"] += entry.size
        for entry in entries:
            if any(part.kind == CUBIN for part in entry.code):
                # Of several cubins, the release that made the first one counts.
                release = cubin.find_packed_release(
                    _get_payload(window, entry),
                    zstandard=bool(entry.flags & ZSTD),
                    notes=cubins_read < NOTES,
                )
                toolkits.update([release] if release else [])
                cubins_read += 1
        names = _list_kernel_names(window, entries) if code else None
        if names is not None:
            parts[
                native, text, project_kernels is not None and project_kernels.search(names) is not None
            ] += 1
    return DeviceCode(
        cubins=frozenset(cubins),
        ptx=frozenset(texts),
        toolkits=frozenset(toolkits),
        compressed=compressed,
        scattered=len({bool(text) for _, text, _ in parts}) > 1,
        damaged=damaged,
        sizes=tuple(sorted(sizes.items())),
        parts=tuple(
            Fatbins(count=count, cubins=native, ptx=text, of_project=ours)
            for (native, text, ours), count in parts.items()
        ),
    )


def _list_kernel_names(window: Window, entries: Iterable[FatbinEntry]) -> bytes | None:
    """Return names of the kernels in a fatbin; None if it has no kernels, "" if that cannot be read.

    All its code has the same kernels, and cubins are the quickest to read.
    """
    for entry in sorted(entries, key=lambda entry: entry.code[0].kind != CUBIN)[:TRIED]:
        payload = _get_payload(window, entry)
        zstandard = bool(entry.flags & ZSTD)
        head = payload.read_at(0, PIECE if zstandard else 2 * kernels.MOST)
        if zstandard or entry.flags & LZ4:
            head = cubin.unpack(head, kernels.MOST, zstandard=zstandard)
        if kernels.is_readable(head):
            return kernels.list_kernel_names(head)
    return b""


def list_containers(window: Window) -> Iterator[Container]:
    """Yield the fatbins in a section or a file. Older toolkits leave gaps between them."""
    at = 0
    while at < window.size:
        head = window.read_at(at, HEADER.size)
        if head[:4] != MAGIC:
            at = _find_magic(window, at)
            continue
        if len(head) < HEADER.size:
            yield Container(at, window.size, (), whole=False)
            return
        _, _, header_size, size = HEADER.unpack(head)
        end = at + header_size + size
        first = at + max(header_size, HEADER.size)
        entries = tuple(islice(_list_entries(window, first, min(end, window.size)), MOST + 1))
        whole = end <= window.size and len(entries) <= MOST
        end = min(end, window.size)
        yield Container(at, end, entries[:MOST], whole)
        at = -(-max(end, at + HEADER.size) // ALIGNED) * ALIGNED


def _list_entries(window: Window, at: int, end: int) -> Iterator[FatbinEntry]:
    remaining_parts = MOST
    while at + SMALLEST <= end:
        header = ENTRY.unpack(window.read_at(at, SMALLEST))
        kind, _, header_size, payload, _, minor, major, number, _, flags = header
        size = max(header_size, SMALLEST) + payload
        whole = header_size >= SMALLEST and at + size <= end
        valid = whole and (number in cubin.TARGETS or kind == CONCATENATED)
        target = _format_target(number, flags)
        entry = FatbinEntry(at, size, kind, target, f"{major}.{minor}", flags, valid)
        if kind == CONCATENATED and whole:
            parts = _read_parts(window.get_part(at + FIXED, header_size - FIXED), entry, remaining_parts)
            remaining_parts -= len(parts)
            entry = replace(entry, parts=parts, whole=bool(parts))
        yield entry
        at += size


def _read_parts(table: Window, entry: FatbinEntry, most: int) -> tuple[FatbinEntry, ...]:
    """Return the parts in an entry's table, none if the table is invalid or has more than `most` parts."""
    try:
        parts = list(_list_parts(table, most))
    except struct.error:  # it is truncated
        return ()
    total = sum(part.size for part in parts)
    if not total or not all(part.whole for part in parts):
        return ()
    compressed = entry.flags & ZSTD
    return tuple(
        replace(
            part,
            offset=entry.offset,
            size=entry.size * (part.offset + part.size) // total - entry.size * part.offset // total,
            flags=part.flags | compressed,
        )
        for part in parts
    )


def _list_parts(table: Window, most: int) -> Iterator[FatbinEntry]:
    """Yield the parts in a table, with offsets before compression; a part is not `whole` in an invalid table.

    A part's header has its offset and its size where an entry's header has the sizes of header and payload.
    """
    number_of_parts, end = TABLE.unpack(table.read_at(0, TABLE.size))
    valid = number_of_parts <= most and end == table.size
    at = TABLE.size
    while valid and at < end:
        head = table.read_at(at, FIXED + OPTIONS.size)
        kind, _, offset, size, more, minor, major, number, _, flags = ENTRY.unpack_from(head)
        at += FIXED
        if any(more[4:]):  # it has options
            _, options_size, _ = OPTIONS.unpack_from(head, FIXED)
            at += -(-(OPTIONS.size + options_size) // ALIGNED) * ALIGNED
        number_of_parts -= 1
        valid = number_of_parts >= 0 and (at < end or (at == end and not number_of_parts))
        target = _format_target(number, flags)
        whole = valid and number in cubin.TARGETS
        yield FatbinEntry(offset, size, kind, target, f"{major}.{minor}", flags, whole)


def _get_payload(window: Window, entry: FatbinEntry) -> Window:
    header_size = int.from_bytes(window.read_at(entry.offset + 4, 4), "little")
    return window.get_part(entry.offset + header_size, entry.size - header_size)


def _format_target(number: int, flags: int) -> str:
    if flags & SPECIFIC:
        return f"{number}a"
    return f"{number}f" if flags & FAMILY else str(number)


def _find_magic(window: Window, at: int) -> int:
    """Return the offset of the next fatbin at or after `at`, or the end of the window."""
    while at < window.size:
        piece = window.read_at(at, PIECE + len(MAGIC) - 1)
        offset = piece.find(MAGIC)
        while offset != -1 and (at + offset) % ALIGNED:
            offset = piece.find(MAGIC, offset + 1)
        if offset != -1:
            return at + offset
        at += PIECE
    return window.size


def read_ptx(window: Window) -> DeviceCode:
    """Return the device code of a PTX file, `NONE` if it is something else."""
    match = DIRECTIVES.match(window.read_at(0, PIECE))
    if match is None:
        return NONE
    target = match[2].decode()
    return DeviceCode(
        ptx=frozenset([(target, match[1].decode())]), sizes=((f"compute_{target}", window.size),)
    )
