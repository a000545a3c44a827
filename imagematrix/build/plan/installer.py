"""A driver in NVIDIA's installer, archive or package: its libraries, unpacked without running anything of it.

An installer, NVIDIA-Linux-ARCH-VERSION.run, is a shell script of makeself followed by a compressed tar, with
the libraries at its root and a description in `.manifest`. An archive, nvidia_driver-linux-ARCH-VERSION-
archive.tar.xz, has them in `lib`. A package of cuda-compat, a .deb, is an archive of ar(5) with a compressed
tar, data.tar, which has them in `compat`. All are untrusted: only regular files with names of the driver's
libraries are written, under these names.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import lzma
import os
import posixpath
import re
import shutil
import tarfile
import zlib

from imagematrix.audit.binaries.archives import AR, list_members
from imagematrix.audit.binaries.window import Window
from imagematrix.build.matrix.axis_values import COMPAT_DRIVER, COMPAT_FROM, DRIVER_FROM
from imagematrix.build.plan import driver
from imagematrix.common import files
from imagematrix.common.temp_folder import lock_abandoned, make_owned_folder
from imagematrix.errors import UsageError
from imagematrix.images.oci.decompression import GZIP, ZSTD, DecompressedStream
from imagematrix.images.oci.layer_entries import require_dense
from imagematrix.images.oci.tar import open_tar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from imagematrix.images.oci.byte_stream import ByteStream

XZ = b"\xfd7zXZ\0"
MAGIC = (XZ, GZIP, ZSTD)
SCRIPT = b"#!"
HEAD = 1 << 20  # bytes; a header of makeself has some 20 KB
# The line of the payload, in NVIDIA's own makeself; the last line of the header, in others'.
LINE = re.compile(rb'^[ \t]*skip="?(\d{1,6})"?[ \t\r]*$', re.MULTILINE)
MOST_LINES = 16  # of these in a header, which has one
NESTED = re.compile(rb"^offset=`head -n \d", re.MULTILINE)  # a CUDA installer, which contains one of a driver
MANIFEST = ".manifest"
DATA = "data.tar"  # the member of a package with its files; its name may go on with that of a compression
MEMORY = 256 << 20  # bytes for decompression; xz -9 needs 65 MiB
MOST_FILES = 20_000  # a driver of branch 550 has some 500
MOST_BYTES = 8 << 30  # of the tar; that of a driver has some 1 GB
PIECE = 1 << 20
ROOT = ""
DRAFT = "draft-"


def unpack_installer(
    file: Path, version: str, platform: str, on_progress: Callable[[str], None], digest: str | None = None
) -> Path:
    """Return the folder with the libraries of the driver in the installer, archive or package `file`.

    `digest` is that of the file, if it is known.

    They are unpacked once, to the cache, if they are a complete driver `version` for `platform`, or for
    COMPAT_DRIVER a complete cuda-compat; `on_progress` is told before that, because it takes up to a minute.
    Raises UsageError if they are not, or if `file` is damaged: then the cache stays as it was.
    """
    cache = files.get_cache_folder("drivers")
    if cache is None:
        raise UsageError(f"there is no folder to unpack {file} to", remedy="set XDG_CACHE_HOME")
    try:
        with file.open("rb") as stream:
            name = digest or hashlib.file_digest(stream, "sha256").hexdigest()
            target = cache / name.removeprefix("sha256:")
            # Before its content is believed: no lock has the digest of a local file.
            files.make_private(cache)
            if not target.is_dir():
                on_progress(f"unpacking {file}")
                _unpack_to_cache(target, file, stream, version, platform)
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, ValueError) as error:
        raise UsageError(f"{file} is damaged: {error}", remedy="download it again") from error
    except OSError as error:
        raise UsageError(f"{error.filename or file}: {error.strerror or error}") from error
    return target


def _unpack_to_cache(target: Path, file: Path, stream: BinaryIO, version: str, platform: str) -> None:
    """Unpack `stream` to the new folder `target`, which has all of the driver or does not exist."""
    for leftover in lock_abandoned(DRAFT, target.parent):
        shutil.rmtree(leftover, ignore_errors=True)
    with make_owned_folder(DRAFT, target.parent) as draft, contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, draft, ignore_errors=True)
        _unpack(stream, file, version, draft)
        driver.read_driver_folder(draft, version, platform, source=file)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # another process has unpacked it meanwhile
                raise
        else:
            undo.pop_all()


def _unpack(stream: BinaryIO, file: Path, version: str, folder: Path) -> None:
    payload, place = (
        _find_package_data(stream, file) if version == COMPAT_DRIVER else _find_payload(stream, file)
    )
    is_script = place == ROOT
    has_description = not is_script
    start = payload.tell()
    magic = payload.read(len(XZ))
    payload.seek(start)
    content = _BoundedStream(_XzStream(payload) if magic == XZ else DecompressedStream(payload))
    with open_tar(content) as archive:
        for count, member in enumerate(archive):
            if count > MOST_FILES:
                raise tarfile.ReadError(f"more than {MOST_FILES} files")
            folder_name, name = posixpath.split(posixpath.normpath(member.name))
            is_there = posixpath.basename(folder_name) == place
            content_file = archive.extractfile(member) if is_there and member.isfile() else None
            require_dense(member, name)
            if content_file and is_script and name == MANIFEST:
                # The second line is the driver's version.
                lines = content_file.read(PIECE).decode("utf-8", "replace").splitlines()
                actual = lines[1].strip() if len(lines) > 1 else ""
                if actual != version:
                    raise UsageError(f"{file} has the driver {actual[:40]!r}, not {version}")
                has_description = True
            elif content_file and driver.DRIVER_LIBRARY.fullmatch(name):
                with files.name_file_in_errors(folder / name), (folder / name).open("xb") as copy:
                    os.fchmod(copy.fileno(), 0o755 if member.mode & 0o100 else 0o644)
                    shutil.copyfileobj(content_file, copy, PIECE)
    while content.read(PIECE):  # the checksums come last
        pass
    if not has_description:
        raise UsageError(f"{file} is not an installer of a driver: it has no {MANIFEST}")


def _find_package_data(stream: BinaryIO, file: Path) -> tuple[BinaryIO, str]:
    """Return the compressed tar in a package, at its begin, and the name of the folder with the libraries."""
    window = Window(stream, 0, file.stat().st_size)
    if window.read_at(0, len(AR)) != AR:
        raise UsageError(
            f"{file} is neither a folder nor a package of cuda-compat",
            remedy="such as cuda-compat-12-8_VERSION_amd64.deb",
        )
    parts = [part for name, part in list_members(window) if name.startswith(DATA)]
    if len(parts) != 1:
        raise tarfile.ReadError(f"it has {len(parts)} members {DATA}")
    return io.BufferedReader(parts[0]), "compat"


def _find_payload(stream: BinaryIO, file: Path) -> tuple[BinaryIO, str]:
    """Return `stream` at its compressed tar, and the name of the folder in it with the libraries.

    This is ROOT if a script comes before the tar.
    """
    stream.seek(0)
    head = stream.read(HEAD)
    if head.startswith(AR):
        raise UsageError(
            f"{file} is a package of Debian, not one of NVIDIA's installers or archives",
            remedy=f"{DRIVER_FROM} takes the driver of a node, {COMPAT_FROM} takes cuda-compat",
        )
    if not head.startswith(SCRIPT):
        if not head.startswith(MAGIC):
            raise UsageError(
                f"{file} is neither a folder nor one of NVIDIA's installers or archives",
                remedy="such as NVIDIA-Linux-x86_64-VERSION.run",
            )
        stream.seek(0)
        return stream, "lib"
    offset = next((at for at in _find_payloads(head) if head.startswith(MAGIC, at)), None)
    if offset is None and NESTED.search(head):
        raise UsageError(
            f"{file} is an installer of CUDA",
            remedy="use that of the driver, or unpack this one's with --extract",
        )
    if offset is None:
        raise UsageError(f"{file} is not an installer of a driver: no archive follows its script")
    stream.seek(offset)
    return stream, ROOT


def _find_payloads(head: bytes) -> Iterator[int]:
    """Yield the offsets at which the payload may begin: in line N of a header that says N, or after it.

    Raises ValueError if the header says it too often.
    """
    ends = [end.end() for end in re.finditer(rb"\n", head)]
    for count, match in enumerate(LINE.finditer(head)):
        if count == MOST_LINES:
            raise ValueError(f"its script has more than {MOST_LINES} lines `skip=`")
        line = int(match[1])
        yield from ends[max(0, line - 2) : line]


class _BoundedStream:
    """A stream of at most MOST_BYTES."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._remaining = MOST_BYTES

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self._remaining -= len(data)
        if self._remaining < 0:
            raise tarfile.ReadError(f"it expands to more than {MOST_BYTES} bytes")
        return data


class _XzStream:
    """The content of an xz stream, decompressed in bounded memory; what follows it is not read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, MEMORY)

    def read(self, size: int = PIECE, /) -> bytes:
        parts = []
        while size and not self._decompressor.eof:
            more = self._stream.read(PIECE) if self._decompressor.needs_input else b""
            if self._decompressor.needs_input and not more:
                raise EOFError("it is cut short")
            parts.append(self._decompressor.decompress(more, size))
            size -= len(parts[-1])
        return b"".join(parts)
