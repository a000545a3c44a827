"""Wheels: examining the libraries inside, and rewriting the wheel with trimmed libraries."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import struct
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass

from imagematrix.audit.binaries import archives
from imagematrix.build.trim import edits, records
from imagematrix.build.trim.examination import FileResult, TrimStatus, is_candidate_file
from imagematrix.errors import UsageError
from imagematrix.images.oci import deflate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import IO

    from imagematrix.audit.binaries.window import Window

    Examine = Callable[[str, Window], FileResult | None]

SUFFIX = ".whl"
LOCAL = struct.Struct("<26xHH")  # a local header: lengths of the name and the extra field after it
GROWTH = 1.05  # upper bound for the growth of data by deflate


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """The results for the files in a wheel; `changed` are those of files to trim, by name."""

    window: Window
    results: tuple[FileResult, ...]
    changed: Mapping[str, FileResult]

    def write(self, target: IO[bytes]) -> None:
        """Write the wheel with the trimmed files; the compressed bytes of all others are copied.

        With the same zlib, the same wheel gives the same bytes. RECORD comes last.
        """
        digests: dict[str, str] = {}
        with (
            archives.open_zip(self.window) as source,
            zipfile.ZipFile(target, "w", compresslevel=deflate.LEVEL) as archive,
        ):
            record = _find_record(source)
            for entry in source.infolist():
                result = self.changed.get(entry.filename)
                if result:
                    # It is decompressed again: kept since the examination, all of them would take too much.
                    with source.open(entry) as file, archives.copy_stream(file, entry.file_size) as part:
                        digests[entry.filename] = _compress_file(part, result, entry, archive)
                elif entry is not record:
                    # Its compressed bytes are copied, which zipfile cannot do.
                    new = _copy_entry(entry)
                    new.CRC, new.compress_size = entry.CRC, entry.compress_size
                    with _append_file(archive, new) as target_file:
                        shutil.copyfileobj(_get_compressed(self.window, entry), target_file)
            updated = records.update_record(source.read(record).decode(), digests.get)
            archive.writestr(_copy_entry(record), updated)


def examine_wheel(path: str, window: Window, examine: Examine) -> Wheel:
    """Return the results for a wheel; `examine` examines each file. Raises UsageError if the wheel is signed.

    A file in it is named by the wheel's path, "!/" and its own path.
    """
    try:
        results = [*_examine_files(path, window, examine)]
        changed = {name: result for name, result in results if result.edits}
        if changed:
            _require_writable(path, window, changed)
    except archives.UNREADABLE as error:
        if isinstance(error, OSError) and error.errno:  # an error of the system, such as a full disk
            raise
        damaged = FileResult(path=path, status=TrimStatus.DAMAGED, size=window.size, why=str(error))
        return Wheel(window=window, results=(damaged,), changed={})
    return Wheel(window=window, results=tuple(result for _, result in results), changed=changed)


def _examine_files(path: str, window: Window, examine: Examine) -> Iterator[tuple[str, FileResult]]:
    """Yield the name of each file in a wheel that has device code, and its result."""
    for name, size, reader in archives.list_zip_files(window):
        with reader() as file:
            head = file.read(archives.HEAD)
            if not is_candidate_file(head):
                continue
            with archives.copy_stream(file, size, head) as part:
                result = examine(f"{path}!/{name}", part)
        if result:
            yield name, result


def _require_writable(path: str, window: Window, changed: Mapping[str, object]) -> None:
    """Raise ValueError if a zip is not a wheel that can be rewritten, UsageError if it is signed."""
    with archives.open_zip(window) as archive:
        names = archive.namelist()
        if any(map(records.SIGNATURE.fullmatch, names)):
            remedy = "sign the trimmed wheel yourself, or install the wheel and trim the folder"
            raise UsageError(f"{path}: the wheel is signed, and trimming breaks the signature", remedy=remedy)
        for entry in archive.infolist():
            _get_compressed(window, entry)
        record = _find_record(archive)
        records.require_small(record.file_size)
        listed: set[str] = set()
        records.update_record(archive.read(record).decode(), listed.add)
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise records.RecordError(f"it has {repeated[0]} twice")
        missing = sorted(changed.keys() - listed)
        if missing:
            raise records.RecordError(f"its RECORD does not list {missing[0]}")


def _find_record(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the wheel's own RECORD; those of vendored packages are in deeper folders."""
    found = [
        entry
        for entry in archive.infolist()
        if entry.filename.count("/") == 1 and records.NAME.fullmatch(entry.filename)
    ]
    if len(found) != 1:
        raise records.RecordError("it has no single RECORD")
    return found[0]


def _get_compressed(window: Window, entry: zipfile.ZipInfo) -> Window:
    """Return the compressed bytes of an entry; raise RecordError if they are not in the file."""
    header = window.read_at(max(entry.header_offset, 0), LOCAL.size)
    lengths = LOCAL.unpack(header) if len(header) == LOCAL.size else ()
    start = entry.header_offset + LOCAL.size + sum(lengths)
    if not lengths or entry.header_offset < 0 or start + entry.compress_size > window.size:
        raise records.RecordError(f"it ends before its {entry.filename}")
    return window.get_part(start, entry.compress_size)


def _copy_entry(entry: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """Return a new zip entry with the name, time, mode and size of another one."""
    new = zipfile.ZipInfo(entry.filename, entry.date_time)
    new.compress_type = entry.compress_type
    new.create_system = entry.create_system
    new.external_attr = entry.external_attr
    new.file_size = entry.file_size
    return new


def _compress_file(
    window: Window, result: FileResult, entry: zipfile.ZipInfo, archive: zipfile.ZipFile
) -> str:
    """Write a trimmed file to a zip with several threads, and return its hash in the encoding of a RECORD.

    zipfile would use a single thread.
    """
    new = _copy_entry(entry)
    new.compress_type = zipfile.ZIP_DEFLATED  # even if the original was stored, to compress the zeros
    new.CRC = 0
    digest = hashlib.sha256()

    def generate_pieces() -> Iterator[bytes]:
        for piece in edits.apply_edits(window, result.edits):
            yield from edits.generate_zeros(piece) if isinstance(piece, int) else (piece,)

    def generate_blocks() -> Iterator[bytes]:
        for block in deflate.split_blocks(generate_pieces()):
            new.CRC = zlib.crc32(block, new.CRC)
            digest.update(block)
            yield block

    with _append_file(archive, new) as file:
        start = file.tell()
        for piece in deflate.compress_deflate(generate_blocks(), deflate.count_threads()):
            file.write(piece)
        new.compress_size = file.tell() - start
    return records.encode_digest(digest.digest())


@contextlib.contextmanager
def _append_file(archive: zipfile.ZipFile, new: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
    """Yield a zip's file for writing the compressed content of `new`.

    The caller has to set the checksum and the compressed size of `new` before the context ends.
    """
    file = archive.fp
    assert file is not None  # noqa: S101 - it is open; this tells the type checker
    file.seek(archive.start_dir)
    new.header_offset = file.tell()
    # The header is written before the compressed size is known, and needs room for it.
    zip64 = new.file_size * GROWTH > zipfile.ZIP64_LIMIT
    file.write(new.FileHeader(zip64))
    yield file
    archive.start_dir = file.tell()
    file.seek(new.header_offset)
    file.write(new.FileHeader(zip64))
    archive.filelist.append(new)
    archive.NameToInfo[new.filename] = new
