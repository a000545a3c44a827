"""NVIDIA's device code as toolkits store it: fatbins, cubins and PTX.

A fatbin is a header (magic, version, size of the header, size of what follows) and entries, each with a
header of its own. That of an entry tells all there is to know, so nothing is decompressed. NVIDIA documents
neither; the layout was read from what fatbinary of CUDA 12.4 to 13.5 writes, and cuobjdump judges it.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass
from itertools import islice

from imagematrix.audit.device_code import NONE, DeviceCode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.window import Window

__all__ = [
    "CUBIN",
    "EM_CUDA",
    "HEADER",
    "MAGIC",
    "PTX",
    "Container",
    "Entry",
    "containers",
    "cubin",
    "fatbins",
    "ptx",
]

MAGIC = b"\x50\xed\x55\xba"
HEADER = struct.Struct("<IHHQ")  # magic, version, size of the header, bytes behind it
ENTRY = struct.Struct("<HHIQ8sHHI8sQ")  # kind, version, size of header and payload, -, ISA, target, -, flags
SMALLEST = 48  # bytes of an entry's header that `ENTRY` is
PTX, CUBIN = 1, 2  # kinds; others are intermediate code, which no driver loads
SPECIFIC = 1 << 20  # flags: "a", of exactly one capability
FAMILY = 1 << 21  # "f", of a family
ZSTD = 1 << 15
TARGETS = range(10, 1000)
ALIGNED = 8
PIECE = 1 << 16
MOST = 100_000  # entries of a fatbin; cuBLAS has some hundred

EM_CUDA = 190  # machine number of NVIDIA's device code in ELF headers
ELF_HEADER = 64
FLAGS = {1: 36, 2: 48}  # where e_flags are in an ELF header, by its class
NEW_ABI = 8  # of cubins, from CUDA 13's compilers on and for targets from 100 on
# Older code has no "a": that bit is set in cuBLAS's handwritten kernels for 50, 60 and 61.
FIRST_SPECIFIC = 90
NOTE = re.compile(rb"-arch[ =](?:sm|compute)_(\d{2,3}f)\b")  # how ptxas was called, in .note.nv.tkinfo
# What is before them are comments and empty lines.
DIRECTIVES = re.compile(
    rb"^\s*\.version\s+(\d+\.\d+)\s.*?^\s*\.target\s+sm_(\d{2,3}[af]?)\b", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Entry:
    """The device code for one target in a container: `size` bytes from `offset` on, its header included.

    `kind` is PTX, CUBIN or another number, `target` and `isa` are those of the compiler ("90a", "8.4"), and
    `whole` says whether the header makes sense and all of the entry is there.
    """

    offset: int
    size: int
    kind: int
    target: str
    isa: str
    flags: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Container:
    """A fatbin, from `offset` to `end`, with the device code of one module for several targets.

    `whole` is False where it is cut short or has more entries than any compiler writes.
    """

    offset: int
    end: int
    entries: tuple[Entry, ...]
    whole: bool


def fatbins(window: Window) -> DeviceCode:
    """Return what the fatbins in a section or a file have; those of older toolkits have gaps between them."""
    cubins: set[str] = set()
    texts: set[tuple[str, str]] = set()
    compressed = damaged = False
    with_ptx: set[bool] = set()
    sizes: Counter[str] = Counter()
    for container in containers(window):
        entries = [entry for entry in container.entries if entry.whole]
        damaged = damaged or not container.whole or len(entries) < len(container.entries)
        code = [entry for entry in entries if entry.kind in (CUBIN, PTX)]
        cubins.update(entry.target for entry in code if entry.kind == CUBIN)
        texts.update((entry.target, entry.isa) for entry in code if entry.kind == PTX)
        compressed = compressed or any(entry.flags & ZSTD for entry in code)
        for entry in code:
            sizes[f"{'sm' if entry.kind == CUBIN else 'compute'}_{entry.target}"] += entry.size
        if code:
            with_ptx.add(any(entry.kind == PTX for entry in code))
    return DeviceCode(
        cubins=frozenset(cubins),
        ptx=frozenset(texts),
        compressed=compressed,
        scattered=len(with_ptx) > 1,
        damaged=damaged,
        sizes=tuple(sorted(sizes.items())),
    )


def containers(window: Window) -> Iterator[Container]:
    """Yield the fatbins in a section or a file."""
    at = 0
    while at < window.size:
        head = window.at(at, HEADER.size)
        if head[:4] != MAGIC:
            at = _next(window, at)
            continue
        if len(head) < HEADER.size:
            yield Container(at, window.size, (), whole=False)
            return
        _, _, skipped, size = HEADER.unpack(head)
        end = at + skipped + size
        entries = tuple(
            islice(_entries(window, at + max(skipped, HEADER.size), min(end, window.size)), MOST + 1)
        )
        whole = end <= window.size and len(entries) <= MOST
        end = min(end, window.size)
        yield Container(at, end, entries[:MOST], whole)
        at = -(-max(end, at + HEADER.size) // ALIGNED) * ALIGNED


def _entries(window: Window, at: int, end: int) -> Iterator[Entry]:
    while at + SMALLEST <= end:
        kind, _, own, payload, _, minor, major, number, _, flags = ENTRY.unpack(window.at(at, SMALLEST))
        size = max(own, SMALLEST) + payload
        whole = own >= SMALLEST and at + size <= end and number in TARGETS
        suffix = "a" if flags & SPECIFIC else "f" if flags & FAMILY else ""
        yield Entry(at, size, kind, f"{number}{suffix}", f"{major}.{minor}", flags, whole)
        at += size


def _next(window: Window, at: int) -> int:
    """Return where the next fatbin begins, from `at` on, or the end."""
    while at < window.size:
        piece = window.at(at, PIECE + len(MAGIC) - 1)
        found = piece.find(MAGIC)
        while found != -1 and (at + found) % ALIGNED:
            found = piece.find(MAGIC, found + 1)
        if found != -1:
            return at + found
        at += PIECE
    return window.size


def cubin(window: Window) -> DeviceCode:
    """Return the target of a cubin that is a file of its own."""
    head = window.at(0, ELF_HEADER)
    place = FLAGS.get(head[4]) if len(head) == ELF_HEADER else None
    if place is None:
        return DeviceCode(damaged=True)
    flags = int.from_bytes(head[place : place + 4], "little")
    if head[8] >= NEW_ABI:
        number, specific = flags >> 8 & 0xFFFF, flags & 1 << 3
    else:
        number, specific = flags & 0xFF, flags & 1 << 11
    if number not in TARGETS:
        return DeviceCode(damaged=True)
    specific = specific and number >= FIRST_SPECIFIC
    # The flags of a family's code are those of plain code.
    family = NOTE.search(window.at(0, PIECE)) if head[8] >= NEW_ABI and not specific else None
    target = family[1].decode() if family else f"{number}{'a' if specific else ''}"
    return DeviceCode(cubins=frozenset([target]), sizes=((f"sm_{target}", window.size),))


def ptx(window: Window) -> DeviceCode:
    """Return what a file of PTX is made for; none where it is something else."""
    found = DIRECTIVES.search(window.at(0, PIECE))
    if found is None:
        return NONE
    target = found[2].decode()
    return DeviceCode(
        ptx=frozenset([(target, found[1].decode())]), sizes=((f"compute_{target}", window.size),)
    )
