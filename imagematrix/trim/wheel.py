"""Wheels: examining the libraries inside, and rewriting the wheel with trimmed libraries."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import struct
import zipfile
import zlib
from dataclasses import dataclass

from imagematrix import deflate
from imagematrix.audit import archives
from imagematrix.errors import UsageError
from imagematrix.trim import edits, records
from imagematrix.trim.examine import Finding, Status, interesting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import IO

    from imagematrix.audit.window import Window

    Look = Callable[[str, Window], Finding | None]

__all__ = ["SUFFIX", "Wheel", "opened"]

SUFFIX = ".whl"
LOCAL = struct.Struct("<26xHH")  # a local header: lengths of the name and the extra field after it
GROWTH = 1.05  # upper bound for the growth of data by deflate


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """The results for the files in a wheel; `changed` are the original bytes of files to trim, by name."""

    window: Window
    findings: tuple[Finding, ...]
    changed: Mapping[str, tuple[Window, Finding]]

    def write(self, target: IO[bytes]) -> None:
        """Write the wheel with the trimmed files; the compressed bytes of all others are copied.

        With the same zlib, the same wheel gives the same bytes. RECORD comes last.
        """
        digests: dict[str, str] = {}
        with (
            archives.opened(self.window) as source,
            zipfile.ZipFile(target, "w", compresslevel=deflate.LEVEL) as archive,
        ):
            record = _record(source)
            for one in source.infolist():
                if one.filename in self.changed:
                    digests[one.filename] = _deflate(*self.changed[one.filename], one, archive)
                elif one is not record:
                    _copy(self.window, one, archive)
            updated = records.updated(source.read(record).decode(), digests.get)
            archive.writestr(_like(record), updated)


@contextlib.contextmanager
def opened(path: str, window: Window, look: Look) -> Iterator[Wheel]:
    """Yield the results for a wheel; `look` examines each file. Raises UsageError if the wheel is signed.

    A file in it is named by the wheel's path, "!/" and its own path.
    """
    findings: list[Finding] = []
    changed: dict[str, tuple[Window, Finding]] = {}
    with contextlib.ExitStack() as stack:
        try:
            for name, size, reader in archives.zipped(window):
                with contextlib.ExitStack() as own:
                    file = own.enter_context(reader())
                    head = file.read(archives.HEAD)
                    if not interesting(head):
                        continue
                    part = own.enter_context(archives.copied(file, size, head))
                    finding = look(f"{path}!/{name}", part)
                    if finding:
                        findings.append(finding)
                    if finding and finding.edits:
                        changed[name] = part, finding
                        stack.push(own.pop_all())
            if changed:
                _require_writable(path, window, changed)
        except archives.UNREADABLE as error:
            if isinstance(error, OSError) and error.errno:  # an error of the system, such as a full disk
                raise
            findings, changed = [Finding(path=path, status=Status.DAMAGED, size=window.size)], {}
        yield Wheel(window=window, findings=tuple(findings), changed=changed)


def _require_writable(path: str, window: Window, changed: Mapping[str, object]) -> None:
    """Raise ValueError if a zip is not a wheel that can be rewritten, UsageError if it is signed."""
    with archives.opened(window) as archive:
        names = archive.namelist()
        if any(map(records.SIGNATURE.fullmatch, names)):
            remedy = "sign the trimmed wheel yourself, or install the wheel and trim the folder"
            raise UsageError(f"{path}: the wheel is signed, and trimming breaks the signature", remedy=remedy)
        listed: set[str] = set()
        records.updated(archive.read(_record(archive)).decode(), listed.add)
        if len(names) != len(set(names)) or not changed.keys() <= listed:
            raise ValueError("RECORD does not list the trimmed files, or names are repeated")


def _record(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Return the wheel's own RECORD; those of vendored packages are in deeper folders."""
    (record,) = (
        one
        for one in archive.infolist()
        if one.filename.count("/") == 1 and records.NAME.fullmatch(one.filename)
    )
    return record


def _bytes(window: Window, finding: Finding) -> Iterator[bytes]:
    for piece in edits.edited(window, finding.edits):
        yield from edits.zeros(piece) if isinstance(piece, int) else (piece,)


def _like(one: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """Return a new zip entry with the name, time, mode and size of another one."""
    new = zipfile.ZipInfo(one.filename, one.date_time)
    new.compress_type = one.compress_type
    new.create_system = one.create_system
    new.external_attr = one.external_attr
    new.file_size = one.file_size
    return new


def _deflate(window: Window, finding: Finding, one: zipfile.ZipInfo, archive: zipfile.ZipFile) -> str:
    """Write a trimmed file to a zip with several threads, and return its hash in the encoding of a RECORD.

    zipfile would use a single thread.
    """
    new = _like(one)
    new.compress_type = zipfile.ZIP_DEFLATED  # even if the original was stored, to compress the zeros
    new.CRC = 0
    digest = hashlib.sha256()

    def content() -> Iterator[bytes]:
        for block in deflate.blocks(_bytes(window, finding)):
            new.CRC = zlib.crc32(block, new.CRC)
            digest.update(block)
            yield block

    with _appended(archive, new) as file:
        start = file.tell()
        for piece in deflate.deflated(content(), deflate.threads()):
            file.write(piece)
        new.compress_size = file.tell() - start
    return records.encoded(digest.digest())


def _copy(window: Window, one: zipfile.ZipInfo, archive: zipfile.ZipFile) -> None:
    """Copy the compressed bytes of a file from one zip to another, which zipfile cannot do."""
    lengths = LOCAL.unpack(window.at(one.header_offset, LOCAL.size))
    data = window.part(one.header_offset + LOCAL.size + sum(lengths), one.compress_size)
    new = _like(one)
    new.CRC, new.compress_size = one.CRC, one.compress_size
    with _appended(archive, new) as file:
        shutil.copyfileobj(data, file)


@contextlib.contextmanager
def _appended(archive: zipfile.ZipFile, new: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
    """Yield a zip's file for writing the compressed content of `new`.

    The caller has to set the checksum and the compressed size of `new` before the context ends.
    """
    file = archive.fp
    assert file is not None  # noqa: S101 - it is open; this tells the type checker
    file.seek(archive.start_dir)
    new.header_offset = file.tell()
    zip64 = new.file_size * GROWTH > zipfile.ZIP64_LIMIT
    file.write(new.FileHeader(zip64))
    yield file
    archive.start_dir = file.tell()
    file.seek(new.header_offset)
    file.write(new.FileHeader(zip64))
    archive.filelist.append(new)
    archive.NameToInfo[new.filename] = new
