"""A layer of compiled caches: written from a container's files, and checked when somebody else wrote it.

The layer of the same files is the same bytes, wherever they were read from: sorted, owned by root, readable
by all, in folders where any user may write and replace files, with whole seconds, and without attributes. A
cache is code that other nodes run, so whoever publishes a layer believes nothing of it. The check reads each
entry, writes the tar anew from what it understood, and compares the digests: a tar that has anything else,
such as an extended header that programs read differently, is refused.
"""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
from dataclasses import dataclass, replace

from imagematrix.errors import AuditError
from imagematrix.images.oci import deflate
from imagematrix.images.oci.compression import compress
from imagematrix.images.oci.decompression import DecompressedStream, HashedStream
from imagematrix.images.oci.layer_entries import LONGEST_NAME, LONGEST_PATH, WHITEOUT, list_members
from imagematrix.images.oci.tar import open_tar
from imagematrix.images.warm.tools import KEPT, ROOT, classify_path, find_tool
from imagematrix.images.warm.warm_file import (
    FOLDER_MODE,
    KINDS,
    LINK_MODE,
    LINKS,
    MOST,
    PLAIN_MODE,
    PROGRAM_MODE,
    WarmFile,
    extract_member,
    make_sort_key,
    read_content,
    require_inside,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO

    from imagematrix.images.oci.byte_stream import ByteStream
    from imagematrix.images.oci.compression import Compression

PIECE = 1 << 20
HEADERS = 256 << 20  # bytes of a layer's headers and padding, at most: its paths are in memory
LATEST = 8**11 - 1  # seconds since 1970 that a header can have without an extended one
END = bytes(2 * tarfile.BLOCKSIZE)
XATTRS = ("SCHILY.xattr.", "LIBARCHIVE.xattr.", "SCHILY.acl.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmLayer:
    """A layer: its digest and size as it is compressed, and the digest of its tar.

    `unpacked` are the bytes of its files, `paths` their absolute paths, sorted, and `tools` the names of the
    tools whose files they are.
    """

    digest: str
    size: int
    diff_id: str
    unpacked: int
    paths: tuple[str, ...]
    tools: tuple[str, ...]


def write_layer(files: Iterable[WarmFile], to: IO[bytes], compression: Compression) -> WarmLayer:
    """Write the layer of files that `select_files` returned; raise OSError, AuditError if one has changed."""
    paths: list[str] = []
    unpacked = 0
    tar = hashlib.sha256()

    def list_pieces() -> Iterator[bytes]:
        nonlocal unpacked
        for file in files:
            yield _make_header(file)
            if file.kind != tarfile.DIRTYPE:
                paths.append(file.path)
            if file.kind == tarfile.REGTYPE:
                unpacked += file.size
                yield from read_content(file)
                yield bytes(-file.size % tarfile.BLOCKSIZE)
        yield END

    def list_hashed() -> Iterator[bytes]:
        for piece in list_pieces():
            tar.update(piece)
            yield piece

    compressed, size = hashlib.sha256(), 0
    for piece in compress(list_hashed(), compression, deflate.count_threads()):
        compressed.update(piece)
        size += to.write(piece)
    return WarmLayer(
        digest=f"sha256:{compressed.hexdigest()}",
        size=size,
        diff_id=f"sha256:{tar.hexdigest()}",
        unpacked=unpacked,
        paths=tuple(paths),
        tools=tuple(sorted({found[0].name for found in map(find_tool, paths) if found})),
    )


def check_layer(stream: ByteStream, digest: str, max_size: int) -> WarmLayer:
    """Return the layer with a digest in `stream`, compressed; raise AuditError unless every byte is allowed.

    It is what `write_layer` writes, of files of tools of the table, of at most `max_size` bytes.
    """
    limited = _LimitedStream(stream, max_size + HEADERS)
    raw = HashedStream(limited, digest)
    check = _LayerCheck(max_size)
    try:
        expanded = DecompressedStream(raw)
        content = HashedStream(expanded)
        with open_tar(content) as archive:
            for member in list_members(archive):
                check.add(member, archive)
        check.finish(expanded, content)
        raw.finish()
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise AuditError(f"the layer {digest} cannot be read: {error}") from error
    except AuditError as error:
        raise AuditError(f"the layer {digest} is refused: {error}") from error
    if not check.paths:
        raise AuditError(f"the layer {digest} is refused: it has no file")
    return WarmLayer(
        digest=digest,
        size=limited.produced,
        diff_id=content.digest,
        unpacked=check.unpacked,
        paths=tuple(check.paths),
        tools=tuple(sorted(check.tools)),
    )


class _LayerCheck:
    """The entries of a layer as they are read, and what `write_layer` would have `written` for them."""

    def __init__(self, max_size: int) -> None:
        self.paths: list[str] = []
        self.tools: set[str] = set()
        self.unpacked = 0
        self.written = hashlib.sha256()
        self.length = 0
        self._max_size = max_size
        self._last: tuple[str, ...] = ()
        self._kinds: dict[str, bytes] = {}  # by path, so that links and folders are found

    def add(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        """Check an entry and read its content; raise AuditError, and what reading raises."""
        path = f"/{member.name}"
        self._require_place(path, member)
        _require_plain(path, member)
        file = self._describe(path, member)
        header = _make_header(file)
        if (member.offset, member.offset_data) != (self.length, self.length + len(header)):
            raise AuditError(f"{path[:200]!r} has an extended header that no file needs")
        self._write(header)
        if self.length - self.unpacked > HEADERS:
            raise AuditError(f"its entries take more than {HEADERS} bytes besides their contents")
        self._kinds[path] = file.kind
        if file.kind == tarfile.DIRTYPE:
            return
        self.paths.append(path)
        if file.kind == tarfile.REGTYPE:
            self.unpacked += file.size
            if self.unpacked > self._max_size:
                raise AuditError(f"its files have more than {self._max_size} bytes")
            for piece in read_content(replace(file, open=lambda: extract_member(archive, member))):
                self._write(piece)
            self._write(bytes(-file.size % tarfile.BLOCKSIZE))

    def finish(self, expanded: DecompressedStream, content: HashedStream) -> None:
        """Read the end; raise AuditError if the tar, `content`, differs from what would have been written."""
        self._write(END)
        while expanded.produced <= self.length and content.read(PIECE):
            pass
        if content.digest != f"sha256:{self.written.hexdigest()}":
            raise AuditError("it is no tar as imagematrix writes it, or something follows its end")

    def _require_place(self, path: str, member: tarfile.TarInfo) -> None:
        """Raise AuditError unless an entry is in a folder of the layer, after all entries before it."""
        parts = path.split("/")
        if member.name.startswith("/") or {"", ".", ".."} & {*parts[1:]} or len(path) > LONGEST_PATH:
            raise AuditError(f"the path {member.name[:200]!r} is absolute, leads upwards, or is too long")
        # No file system has such a name, and the patterns of the table take the square of its length.
        if max(map(len, parts)) > LONGEST_NAME:
            raise AuditError(f"{path[:200]!r} has a name of more than {LONGEST_NAME} characters")
        if not path.isprintable():
            raise AuditError(f"the path {path[:200]!r} has characters that cannot be shown")
        if path != ROOT and not path.startswith(f"{ROOT}/"):
            raise AuditError(f"{path[:200]!r} is outside {ROOT}")
        if parts[-1].startswith(WHITEOUT):
            raise AuditError(f"{path[:200]!r} removes something of the image")
        if path in self._kinds:
            raise AuditError(f"{path[:200]!r} is there twice")
        if path != ROOT and self._kinds.get(posixpath.dirname(path)) != tarfile.DIRTYPE:
            raise AuditError(f"{path[:200]!r} is in no folder of the layer")
        if self._last >= make_sort_key(path):
            raise AuditError(f"{path[:200]!r} is not in order")
        self._last = make_sort_key(path)
        if len(self._kinds) >= MOST:
            raise AuditError(f"it has more than {MOST} entries")

    def _describe(self, path: str, member: tarfile.TarInfo) -> WarmFile:
        """Return an entry, whose kind, link and tool are allowed."""
        mode, size, target = member.mode, 0, member.linkname
        if member.isdir():
            return _require_mode(
                WarmFile(path=path, kind=tarfile.DIRTYPE, mode=mode, mtime=int(member.mtime))
            )
        found = classify_path(path)
        if found is None or found[1] != KEPT:
            raise AuditError(f"{path[:200]!r} is no file that a tool of the table keeps")
        self.tools.add(found[0].name)
        kind = member.type
        if member.isreg():
            kind, size, target = tarfile.REGTYPE, member.size, ""
        file = WarmFile(path=path, kind=kind, mode=mode, mtime=int(member.mtime), size=size, target=target)
        if kind == tarfile.SYMTYPE:
            require_inside(file)
        if kind == tarfile.LNKTYPE:
            file = replace(file, target=f"/{target}")
            if self._kinds.get(file.target) != tarfile.REGTYPE:
                raise AuditError(f"{path[:200]!r} is a hard link to {target[:200]!r}, no file of the layer")
        return _require_mode(file)

    def _write(self, piece: bytes) -> None:
        self.written.update(piece)
        self.length += len(piece)


class _LimitedStream:
    """A stream of at most `limit` bytes; reading more raises ValueError."""

    def __init__(self, stream: ByteStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self.produced = 0

    def read(self, size: int = -1, /) -> bytes:
        piece = self._stream.read(size)
        self.produced += len(piece)
        if self.produced > self._limit:
            raise ValueError(f"it has more than {self._limit} bytes")
        return piece


def _require_plain(path: str, member: tarfile.TarInfo) -> None:
    """Raise AuditError for anything but a file, a folder or a link of root without attributes."""
    if member.issparse() or not (member.isreg() or member.isdir() or member.type in LINKS):
        kind = "a sparse file" if member.issparse() else KINDS.get(member.type, "of an unknown kind")
        raise AuditError(f"{path[:200]!r} is {kind}")
    if (member.uid, member.gid) != (0, 0):
        raise AuditError(f"{path[:200]!r} belongs to {member.uid}:{member.gid}, not to 0:0")
    if any(key.startswith(XATTRS) for key in member.pax_headers):
        raise AuditError(f"{path[:200]!r} has extended attributes")
    if not 0 <= member.mtime <= LATEST or member.mtime != int(member.mtime):
        raise AuditError(f"{path[:200]!r} has the time {member.mtime}, no whole second since 1970")


def _require_mode(file: WarmFile) -> WarmFile:
    modes = {tarfile.DIRTYPE: (FOLDER_MODE,), tarfile.SYMTYPE: (LINK_MODE,)}
    if file.mode not in modes.get(file.kind, (PLAIN_MODE, PROGRAM_MODE)):
        raise AuditError(f"{file.path[:200]!r} has the mode {file.mode:o}")
    return file


def _make_header(file: WarmFile) -> bytes:
    info = tarfile.TarInfo(file.path.lstrip("/"))
    info.type, info.mode, info.mtime = file.kind, file.mode, min(max(file.mtime, 0), LATEST)
    info.size = file.size
    info.linkname = file.target.lstrip("/") if file.kind == tarfile.LNKTYPE else file.target
    return info.tobuf(tarfile.PAX_FORMAT)
