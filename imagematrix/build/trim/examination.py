"""Examining one file: the edits that trim it, and the device code that they remove."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from imagematrix.audit.binaries import archives, elf, fatbin, nvidia_names
from imagematrix.build.trim.edits import Edit
from imagematrix.hardware.vendors import device_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.fatbin import Container, FatbinEntry
    from imagematrix.audit.binaries.window import Window
    from imagematrix.build.trim.rules import Rules

HEAD = 16  # bytes at the start of a file that tell whether it may have fatbins
SECTIONS = frozenset({".nv_fatbin", "__nv_relfatbin"})
KINDS = {fatbin.CUBIN: "cubin", fatbin.PTX: "ptx"}
OTHER = "other"
MOST = 1_000_000  # fatbins and entries of a file; PyTorch's libtorch_cuda.so has 3,000
ALIGNED = 8  # sizes of entries are multiples of this
FORMAT = 1  # version in the header of a fatbin


class TrimStatus(StrEnum):
    """The result for a file with device code.

    `TRIMMED`: device code was removed. All others are unchanged. `UNCHANGED`: there was nothing to remove.
    `UNSUPPORTED`: none of its device code runs on any of the GPUs. `NVIDIA`: it is a library of NVIDIA's,
    which is not to be trimmed, or has its code outside of fatbins. `DAMAGED`: its device code is invalid.
    """

    TRIMMED = "trimmed"
    UNCHANGED = "unchanged"
    UNSUPPORTED = "unsupported"
    NVIDIA = "nvidia"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Amount:
    """The device code of one kind ("cubin", "ptx" or "other") for one target: number of entries and bytes."""

    kind: str
    target: str
    entries: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """The result of examining a file of `size` bytes.

    `containers` is the number of its fatbins, `dead` the number of fatbins without code for any of the GPUs.
    `missing` are the capabilities for which the file has no code. `compressed` is the size of the removed
    bytes after compression, None if it was not measured. `why` is what is damaged, if it is a wheel.
    """

    path: str
    status: TrimStatus
    size: int
    containers: int = 0
    dead: int = 0
    missing: tuple[str, ...] = ()
    kept: tuple[Amount, ...] = ()
    dropped: tuple[Amount, ...] = ()
    edits: tuple[Edit, ...] = ()
    compressed: int | None = None
    why: str | None = None

    @property
    def removed_size(self) -> int:
        """The bytes that become zeros."""
        return sum(edit.removed_size for edit in self.edits)

    def to_json(self) -> dict[str, object]:
        """Return one element of the Trim document's `files`."""
        return {
            "path": self.path,
            "status": self.status.value,
            "size": self.size,
            "removed": self.removed_size,
            "removed_compressed": self.compressed,
            "fatbins": self.containers,
            "dead_fatbins": self.dead,
            "missing": list(self.missing),
            "kept": [asdict(amount) for amount in self.kept],
            "dropped": [asdict(amount) for amount in self.dropped],
            "why": self.why,
        }


class _DamagedError(Exception):
    """Some of a file's device code is invalid."""


def is_candidate_file(head: bytes) -> bool:
    """Whether a file that begins with `head` may have fatbins."""
    return head.startswith((elf.MAGIC, archives.AR, fatbin.MAGIC))


def examine_file(path: str, window: Window, rules: Rules) -> FileResult | None:
    """Return the result for a file, or None if it has no fatbins.

    A file is trimmed only if all of its device code is valid: each fatbin is complete, consists of entries
    without gaps, and lies in a section that does not overlap another one.
    """
    head = window.read_at(0, HEAD)
    headers = elf.read_elf(window) if head.startswith(elf.MAGIC) else None
    is_nvidia = nvidia_names.is_nvidia_library(path, headers.soname if headers else None)
    untouched = FileResult(path=path, status=TrimStatus.NVIDIA, size=window.size)
    tally = _Tally(rules)
    try:
        if is_nvidia and not rules.nvidia:
            has_sections = any(True for _ in _find_sections(window, head, headers))
            return untouched if has_sections else None
        for section in _find_sections(window, head, headers):
            for container in fatbin.list_containers(section):
                tally.add(container, section, section.start - window.start)
    except _DamagedError:
        return FileResult(path=path, status=TrimStatus.DAMAGED, size=window.size)
    result = tally.make_result(path, window.size) if tally.containers else None
    if is_nvidia and result and result.status is TrimStatus.UNSUPPORTED:
        return untouched  # cuFFT, for one, has an empty cubin for 5.2 in its fatbin, and its code elsewhere
    # A file without any code for these GPUs stays whole: emptied, it would only fail later, and less clearly.
    if rules.drop_dead and result and result.status is TrimStatus.UNSUPPORTED:
        return examine_file(path, window, replace(rules, drop_dead=False))
    return result


def _find_sections(window: Window, head: bytes, headers: Elf | None) -> Iterator[Window]:
    """Yield the parts of a file that may have fatbins; raise _DamagedError."""
    if headers:
        yield from _find_object_sections(window, headers)
    elif head.startswith(archives.AR):
        yield from _find_member_sections(window)
    elif head.startswith(fatbin.MAGIC):
        yield window


def _find_member_sections(window: Window) -> Iterator[Window]:
    """Yield those of the objects in a static library; raise _DamagedError, at last if its end is missing."""
    has_sections = False
    for _, member in archives.list_objects(window):
        headers = elf.read_elf(member)
        for section in _find_object_sections(member, headers) if headers else ():
            has_sections = True
            yield section
    if has_sections and not archives.is_whole(window):
        raise _DamagedError


def _find_object_sections(window: Window, headers: Elf) -> Iterator[Window]:
    """Yield the sections of an object with fatbins; raise _DamagedError."""
    if not any(headers.find_sections(*SECTIONS)):
        # The headers of sections are at the end of a file: one that was cut off lacks them, not its fatbins.
        pieces = window.list_pieces(window.size, len(fatbin.MAGIC) - 1)
        if headers.damaged and any(fatbin.MAGIC in piece for piece in pieces):
            raise _DamagedError
        return
    if headers.damaged:
        raise _DamagedError
    last_end = last_code_end = 0
    for section in sorted(headers.sections, key=lambda section: (section.offset, section.size)):
        end = section.offset + section.size
        is_code = section.name in SECTIONS
        if section.size and section.offset < (last_end if is_code else last_code_end):
            raise _DamagedError
        last_end = max(last_end, end)
        if is_code:
            last_code_end = max(last_code_end, end)
            yield window.get_part(section.offset, section.size)


@dataclass(slots=True)
class _Tally:
    """The counts and edits of a file, collected fatbin by fatbin."""

    rules: Rules
    containers: int = 0
    dead: int = 0
    entries: int = 0
    served: set[str] = field(default_factory=set)
    kept: dict[tuple[str, str], Amount] = field(default_factory=dict)
    dropped: dict[tuple[str, str], Amount] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)

    def add(self, container: Container, window: Window, offset: int) -> None:
        """Add a fatbin of `window`, which begins at `offset` of the file; raise _DamagedError."""
        self.containers += 1
        self.entries += len(container.entries)
        head = window.read_at(container.offset, fatbin.HEADER.size)
        if self.containers + self.entries > MOST or not _is_valid(container, head):
            raise _DamagedError
        verdict = self.rules.judge(container.entries)
        self.served |= verdict.served
        code = [inner for entry in container.entries for inner in entry.code]
        self.dead += not verdict.served and any(entry.kind in KINDS for entry in code)
        staying = {entry.offset for entry in verdict.kept}
        for entry in code:
            amounts = self.kept if entry.offset in staying else self.dropped
            key = KINDS.get(entry.kind, OTHER), entry.target
            amount = amounts.get(key) or Amount(*key, 0, 0)
            amounts[key] = Amount(*key, amount.entries + 1, amount.size + entry.size)
        if len(staying) < len(container.entries):
            ranges = tuple(_merge_ranges(verdict.kept, offset))
            size = sum(size for _, size in ranges)
            magic, version, header_size, _ = fatbin.HEADER.unpack(head)
            self.edits.append(
                Edit(
                    offset + container.offset,
                    offset + container.end,
                    fatbin.HEADER.pack(magic, version, header_size, size),
                    ranges,
                )
            )

    def make_result(self, path: str, size: int) -> FileResult:
        """Return the result for the file at `path`, which has `size` bytes."""
        code = any(kind != OTHER for kind, _ in (*self.kept, *self.dropped))
        status = TrimStatus.TRIMMED if self.edits else TrimStatus.UNCHANGED
        return FileResult(
            path=path,
            status=TrimStatus.UNSUPPORTED if code and not self.served else status,
            size=size,
            containers=self.containers,
            dead=self.dead,
            missing=tuple(compute for compute in self.rules.computes if code and compute not in self.served),
            kept=_sort_amounts(self.kept),
            dropped=_sort_amounts(self.dropped),
            edits=tuple(self.edits),
        )


def _is_valid(container: Container, head: bytes) -> bool:
    """Whether a fatbin consists of a known header and of entries without gaps up to its end."""
    if not container.whole:
        return False
    _, version, header_size, _ = fatbin.HEADER.unpack(head)
    at = container.offset + fatbin.HEADER.size
    for entry in container.entries:
        if not entry.whole or entry.size % ALIGNED:
            return False
        at += entry.size
    return version == FORMAT and header_size == fatbin.HEADER.size and at == container.end


def _merge_ranges(entries: Iterable[FatbinEntry], offset: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets and sizes of entries; adjacent entries are merged into one range."""
    start = end = -1
    for entry in entries:
        if offset + entry.offset != end:
            if end > start:
                yield start, end - start
            start = offset + entry.offset
        end = offset + entry.offset + entry.size
    if end > start:
        yield start, end - start


def _sort_amounts(amounts: dict[tuple[str, str], Amount]) -> tuple[Amount, ...]:
    return tuple(
        sorted(amounts.values(), key=lambda amount: (amount.kind, device_code.make_sort_key(amount.target)))
    )
