"""Reading one layer of an image from its tar: once, from the beginning to the end, in little memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import posixpath
import re
import tarfile
import tempfile
from dataclasses import dataclass, replace
from typing import Self

from imagematrix.audit.binaries import archives, driver_loading, elf, nvidia_names, objects
from imagematrix.audit.binaries.archives import HEAD
from imagematrix.audit.binaries.cpu.scan import is_decodable, scan_later
from imagematrix.audit.binaries.objects import File
from imagematrix.audit.binaries.window import Window
from imagematrix.audit.guards.package_sources import PackageSources
from imagematrix.audit.packages import packages
from imagematrix.audit.packages.installed_package import METADATA_FILES, RECORD, Database, list_recorded_files
from imagematrix.common.temp_folder import get_disk_folder
from imagematrix.errors import AuditError
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
    """Return the layer in `stream`, a tar that may be compressed; raise AuditError."""
    found: LayerListing[PlainFile] = LayerListing()
    texts = 0
    try:
        expanded = DecompressedStream(stream)
        with open_tar(expanded) as archive, _Decoding(start_scan) as decoding, PackageSources() as sources:
            for member in list_members(archive):
                path = found.read_path(member)
                if path and path != "/":
                    entry = found.read_link(member) or _entry(
                        archive, member, path, digest, decoding, sources
                    )
                    found.add(path, entry, alike=(OTHER,))
                    texts += len(entry.text or b"") if isinstance(entry, PlainFile) else 0
                    if texts > ALL_TEXTS:
                        raise tarfile.ReadError(f"more than {ALL_TEXTS} bytes of text files")
            read_to_the_end(archive, expanded, expanded)
            for path, kept, file in decoding.decoded():
                if found.entries.get(path) == PlainFile(
                    file=kept, layer=digest
                ):  # no later one has replaced it
                    found.entries[path] = PlainFile(file=file, layer=digest)
            for path, text in sources.needed(_of_packages(found.entries)):
                listed = found.entries.get(path)
                if isinstance(listed, PlainFile):  # no link or folder has replaced it
                    found.entries[path] = replace(listed, text=text, layer=digest)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise AuditError(f"the layer {digest} cannot be read: {error}") from error
    return Layer(
        digest=digest,
        entries=found.entries,
        removed=frozenset(found.removed),
        emptied=frozenset(found.emptied),
    )


def rename_layer(layer: Layer, digest: str) -> Layer:
    """Return a layer under another digest."""
    entries = {
        path: replace(entry, layer=digest) if isinstance(entry, PlainFile) and entry.layer else entry
        for path, entry in layer.entries.items()
    }
    return replace(layer, digest=digest, entries=entries)


def _entry(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: str,
    digest: str,
    decoding: _Decoding,
    sources: PackageSources,
) -> Folder | PlainFile:
    if member.isdir():
        return FOLDER
    file = archive.extractfile(member) if member.isfile() else None
    if file and path.endswith(driver_loading.SOURCE) and not TEXTS.fullmatch(path):
        text = file.read(driver_loading.LONGEST)
        sources.keep(path, text)
        return _names_cuda(member, digest) if driver_loading.sources_load(text) else OTHER
    return _plain(file, path, member, digest, decoding) if file else OTHER


def _names_cuda(member: tarfile.TarInfo, digest: str) -> PlainFile:
    return PlainFile(file=File(size=member.size, names_cuda=True), layer=digest)


def _plain(
    file: IO[bytes], path: str, member: tarfile.TarInfo, digest: str, decoding: _Decoding
) -> PlainFile:
    if reader := packages.find_database_reader(path):
        database = decoding.databases.add(reader(file, member.size))
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
            examined = replace(examined, recorded=_recorded(window))
        if examined and headers:
            decoding.keep(path, examined, headers, window)
    return PlainFile(file=examined, layer=digest) if examined else OTHER


def _of_packages(entries: Mapping[str, object]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield for each Python package in a layer the paths of its files, and those of them with device code."""
    for path, entry in entries.items():
        if isinstance(entry, PlainFile) and entry.text is not None and path.endswith(f".dist-info/{RECORD}"):
            listed = [
                own for own, _ in list_recorded_files(posixpath.dirname(posixpath.dirname(path)), entry.text)
            ]
            yield listed, [own for own in listed if _has_code(entries.get(own))]


def _has_code(entry: object) -> bool:
    return isinstance(entry, PlainFile) and entry.file is not None and bool(entry.file.code)


def _recorded(window: Window) -> str:
    """Return the hash of a file as a RECORD states it."""
    own = hashlib.sha256()
    for piece in window.pieces(window.size, 0):
        own.update(piece)
    return f"sha256={base64.urlsafe_b64encode(own.digest()).decode().rstrip('=')}"


class _Decoding:
    """The files of a layer to decode, and its package databases. Use as a context manager.

    They are decoded after the whole layer was read: only then is it known which of them belong to packages of
    a distribution, whose code is not decoded.
    """

    def __init__(self, start_scan: StartScan) -> None:
        self.databases = packages.Databases()
        self._start_scan = start_scan
        self._kept: dict[str, tuple[File, int]] = {}
        self._end = 0
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO

    def __enter__(self) -> Self:
        self._file = self._stack.enter_context(tempfile.TemporaryFile(dir=get_disk_folder()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keep(self, path: str, file: File, headers: Elf, window: Window) -> None:
        """Keep a file for decoding if it has code for the CPU and is no library of NVIDIA's."""
        self._kept.pop(path, None)
        if (
            file.linked
            and is_decodable(headers, window)
            and not nvidia_names.is_nvidia_library(path, file.soname)
        ):
            self._copy(headers, window)
            self._kept[path] = (file, self._end)
            self._end += -(-window.size // PAGE) * PAGE

    def decoded(self) -> Iterator[tuple[str, File, File]]:
        """Yield each kept file's path, the File as it was kept, and the File with the result of decoding."""
        self._file.flush()  # other processes may read it
        scans = []
        for path, (file, start) in sorted(self._kept.items(), key=lambda kept: -kept[1][0].size):
            window = Window(self._file, start, file.size)
            if file.size <= WHOLE and self.databases.has(window):
                yield path, file, replace(file, packaged=True)
            elif headers := elf.read_elf(window):
                scans.append((path, file, self._start_scan(path, headers, window)))
        for path, file, scanned in reversed(scans):  # the large files take longest
            yield path, file, replace(file, host=scanned())

    def _copy(self, headers: Elf, window: Window) -> None:
        self._file.truncate(self._end + window.size)  # omitted sections become holes, which take no space
        here = 0
        for start, end in [*_bulky(headers, window.size), (window.size, window.size)]:
            for at in range(here, start, PIECE):
                self._file.seek(self._end + at)
                self._file.write(window.at(at, min(PIECE, start - at)))
            here = max(here, end)


def _bulky(headers: Elf, size: int) -> list[tuple[int, int]]:
    if size <= WHOLE:
        return []
    return sorted(
        (section.offset, section.offset + section.size)
        for section in headers.sections
        if section.name.startswith(BULKY)
    )
