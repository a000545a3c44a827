"""Reading one layer of an image from its tar: once, from the beginning to the end, in little memory."""

from __future__ import annotations

import base64
import errno
import hashlib
import posixpath
import re
import tarfile
import tempfile
from dataclasses import dataclass, replace

from imagematrix.audit.binaries import archives, driver_loading, elf, nvidia_names, objects
from imagematrix.audit.binaries.archives import HEAD
from imagematrix.audit.binaries.cpu.scan import is_decodable, scan_later
from imagematrix.audit.binaries.objects import File
from imagematrix.audit.binaries.window import Window
from imagematrix.audit.guards.package_sources import PackageSources
from imagematrix.audit.packages import packages
from imagematrix.audit.packages.installed_package import METADATA_FILES, RECORD, Database, list_recorded_files
from imagematrix.common.temp_folder import get_disk_folder
from imagematrix.errors import AuditError, UsageError
from imagematrix.hardware.vendors import guarded_files
from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.layer_entries import LayerListing, list_members, read_to_the_end, require_dense
from imagematrix.images.oci.tar import open_tar
from imagematrix.images.oci.tree import FOLDER, Folder, Hardlink, Symlink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO, BinaryIO

    from imagematrix.audit.binaries.cpu.scan import StartScan
    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.images.oci.byte_stream import ByteStream

PIECE = 1 << 20
# Text files that an audit reads: the loader's configuration, the distribution's name, and the metadata of
# Python packages.
TEXTS = re.compile(
    r"/etc/ld\.so\.(?:cache|conf|conf\.d/[^/]+\.conf)"
    r"|/(?:etc|usr/lib)/os-release"
    rf"|{METADATA_FILES.pattern}"
    r"|/.*/torch/version\.py|/.*/tensorflow/python/platform/build_info\.py",
)
LONGEST_TEXT = 8 << 20
ALL_TEXTS = 64 << 20  # bytes; an image with a few hundred packages has a tenth of that
# Larger files are not compared with packages, which have few such files. They are kept without the sections
# that have no code for the CPU, whose names begin with one of these.
WHOLE = 192 << 20  # bytes
BULKY = (".nv_fatbin", "__nv_relfatbin", ".hip_fatbin", ".debug_", ".nvFatBin")
PAGE = 4096  # files in the copy begin at pages, so that what is left out of them takes no space


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    """Any other entry: a regular file or a special file.

    `file` describes a file with code, `text` is the content of a text file that the audit reads, and
    `database` that of a package database.
    """

    file: File | None = None
    text: bytes | None = None
    database: Database | None = None
    layer: str = ""


OTHER = PlainFile()
NOTHING = Database()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer: its entries by path, the paths that it removes, and the folders that it empties.

    If the archive has several entries for a path, the last one counts.
    """

    digest: str
    entries: Mapping[str, Folder | Symlink | Hardlink | PlainFile]
    removed: frozenset[str]
    emptied: frozenset[str]


def read_layer(stream: ByteStream, digest: str, start_scan: StartScan = scan_later) -> Layer:
    """Return the layer in `stream`, a tar that may be compressed.

    Raises AuditError, and UsageError if the disk for large temporary files is full.
    """
    listing: LayerListing[PlainFile] = LayerListing()
    texts = 0
    try:
        expanded = DecompressedStream(stream)
        with (
            open_tar(expanded) as archive,
            tempfile.TemporaryFile(dir=get_disk_folder()) as copies,
            tempfile.TemporaryFile(dir=get_disk_folder()) as texts_file,
        ):
            pending, sources = _PendingScans(copies, start_scan), PackageSources(texts_file)
            for member in list_members(archive):
                path = listing.read_path(member)
                if path and path != "/":
                    entry = listing.read_link(member) or _read_entry(
                        archive, member, path, digest, pending, sources
                    )
                    listing.add(path, entry, alike=(OTHER,))
                    texts += len(entry.text or b"") if isinstance(entry, PlainFile) else 0
                    if texts > ALL_TEXTS:
                        raise tarfile.ReadError(f"more than {ALL_TEXTS} bytes of text files")
            read_to_the_end(archive, expanded, expanded)

            # The results of scans, and the sources that decide on device code, if no later entry of the
            # layer has replaced the file.
            for path, unscanned, file in pending.finish_scans():
                if listing.entries.get(path) == PlainFile(file=unscanned, layer=digest):
                    listing.entries[path] = PlainFile(file=file, layer=digest)
            for path, text in sources.choose_sources(_list_package_files(listing.entries)):
                listed = listing.entries.get(path)
                if isinstance(listed, PlainFile):
                    listing.entries[path] = replace(listed, text=text, layer=digest)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = get_disk_folder()
            raise UsageError(
                f"the disk of {folder} is full", remedy=f"free disk space in {folder}, or set TMPDIR"
            ) from error
        raise AuditError(f"the layer {digest} cannot be read: {error}") from error
    return Layer(
        digest=digest,
        entries=listing.entries,
        removed=frozenset(listing.removed),
        emptied=frozenset(listing.emptied),
    )


def rename_layer(layer: Layer, digest: str) -> Layer:
    """Return a layer under another digest."""
    entries = {
        path: replace(entry, layer=digest) if isinstance(entry, PlainFile) and entry.layer else entry
        for path, entry in layer.entries.items()
    }
    return replace(layer, digest=digest, entries=entries)


def _read_entry(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: str,
    digest: str,
    pending: _PendingScans,
    sources: PackageSources,
) -> Folder | PlainFile:
    if member.isdir():
        return FOLDER
    file = archive.extractfile(member) if member.isfile() else None
    if file and path.endswith(driver_loading.SOURCE) and not TEXTS.fullmatch(path):
        text = file.read(driver_loading.LONGEST)
        sources.keep(path, text)
        if not driver_loading.loads_driver_in_source(text):
            return OTHER
        return PlainFile(file=File(size=member.size, names_cuda=True), layer=digest)
    return _read_plain_file(file, path, member, digest, pending) if file else OTHER


def _read_plain_file(
    file: IO[bytes], path: str, member: tarfile.TarInfo, digest: str, pending: _PendingScans
) -> PlainFile:
    if reader := packages.find_database_reader(path):
        require_dense(member, path)
        database = pending.databases.add(reader(file, member.size))
        return PlainFile(database=database, layer=digest) if database != NOTHING else OTHER
    if TEXTS.fullmatch(path):
        return PlainFile(text=file.read(LONGEST_TEXT), layer=digest)
    head = file.read(HEAD)
    if not objects.is_interesting(path, head):
        return OTHER
    require_dense(member, path)
    with archives.copy_stream(file, member.size, head) as window:
        if window.size < member.size:
            raise EOFError(f"{path} is truncated")
        headers = elf.read_elf(window)
        examined = objects.examine_file(path, window, headers)
        if examined and guarded_files.is_listed(path):  # hashing takes as long as reading
            examined = replace(examined, recorded=_hash_as_recorded(window))
        if examined and headers:
            pending.add(path, examined, headers, window)
    return PlainFile(file=examined, layer=digest) if examined else OTHER


def _list_package_files(entries: Mapping[str, object]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield for each Python package in a layer the paths of its files, and those of them with device code."""
    for path, entry in entries.items():
        if isinstance(entry, PlainFile) and entry.text is not None and path.endswith(f".dist-info/{RECORD}"):
            site_packages = posixpath.dirname(posixpath.dirname(path))
            files = [name for name, _ in list_recorded_files(site_packages, entry.text)]
            listed = ((name, entries.get(name)) for name in files)
            yield (
                files,
                [
                    name
                    for name, file in listed
                    if isinstance(file, PlainFile) and file.file and file.file.code
                ],
            )


def _hash_as_recorded(window: Window) -> str:
    """Return the hash of a file as a RECORD states it."""
    checksum = hashlib.sha256()
    for piece in window.list_pieces(window.size, 0):
        checksum.update(piece)
    return f"sha256={base64.urlsafe_b64encode(checksum.digest()).decode().rstrip('=')}"


class _PendingScans:
    """The files of a layer whose code is to be scanned, kept in a `file`, and its package databases.

    They are scanned after the whole layer was read: only then is it known which of them belong to packages of
    a distribution, whose code is not decoded.
    """

    def __init__(self, file: BinaryIO, start_scan: StartScan) -> None:
        self.databases = packages.Databases()
        self._file = file
        self._start_scan = start_scan
        self._copies: dict[str, tuple[File, int]] = {}
        self._end = 0

    def add(self, path: str, file: File, headers: Elf, window: Window) -> None:
        """Copy a file for its scan if it has code for the CPU and is no library of NVIDIA's."""
        self._copies.pop(path, None)
        if (
            file.linked
            and is_decodable(headers, window)
            and not nvidia_names.is_nvidia_library(path, file.soname)
        ):
            self._copy(headers, window)
            self._copies[path] = (file, self._end)
            self._end += -(-window.size // PAGE) * PAGE

    def finish_scans(self) -> Iterator[tuple[str, File, File]]:
        """Yield each file's path, the File as it was added, and the File with the result of its scan."""
        self._file.flush()  # other processes may read it
        scans = []
        for path, (file, start) in sorted(self._copies.items(), key=lambda copy: -copy[1][0].size):
            window = Window(self._file, start, file.size)
            if file.size <= WHOLE and self.databases.has_file(window):
                yield path, file, replace(file, packaged=True)
            elif headers := elf.read_elf(window):
                scans.append((path, file, self._start_scan(path, headers, window)))
        for path, file, finish_scan in reversed(scans):  # the large files take longest
            yield path, file, replace(file, host=finish_scan())

    def _copy(self, headers: Elf, window: Window) -> None:
        omitted: list[tuple[int, int]] = []
        if window.size > WHOLE:
            omitted = sorted(
                (section.offset, section.offset + section.size)
                for section in headers.sections
                if section.name.startswith(BULKY)
            )
        self._file.truncate(self._end + window.size)  # omitted sections become holes, which take no space
        here = 0
        for start, end in [*omitted, (window.size, window.size)]:
            for at in range(here, start, PIECE):
                self._file.seek(self._end + at)
                self._file.write(window.read_at(at, min(PIECE, start - at)))
            here = max(here, end)
