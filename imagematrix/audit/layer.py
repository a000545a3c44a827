"""Reading one layer of an image from its tar: once, from the beginning to the end, in little memory."""

from __future__ import annotations

import posixpath
import re
import tarfile
from dataclasses import dataclass, replace

from imagematrix.audit import archives, objects, packages
from imagematrix.audit.later import Later
from imagematrix.audit.objects import HEAD, File
from imagematrix.errors import AuditError
from imagematrix.oci.expanded import Expanded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import IO, Self

    from imagematrix.oci.expanded import Stream

__all__ = [
    "FOLDER",
    "OTHER",
    "Folder",
    "Hardlink",
    "Layer",
    "Plain",
    "Symlink",
    "opened",
    "read",
    "read_file",
    "renamed",
]

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
PIECE = 1 << 20
BUFFER = 1 << 16  # bytes; tarfile copies the rest of its buffer at each read
MOST = 4_000_000  # entries of a layer
LONGEST = 1 << 20  # bytes of an extended header; names have at most 4096
# Types of extended headers, which describe the next member and are read in one piece.
EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
# The extended headers that a member may have: global ones, then a PAX header and GNU long names, each at most
# once. If a PAX header with names comes before a GNU long name, tarfile uses it and engines do not.
ORDERLY = re.compile(rb"g{0,9}(?!.*(.).*\1)[LKx]*")
NAMES = frozenset({"path", "linkpath"})
# Only a POSIX header has a prefix of the name in this place; a GNU header has times there, in octal digits.
MAGIC, USTAR = 257, b"ustar\0"
PREFIX, TIMES = slice(345, 500), re.compile(rb"[0-7 ]+")
# Text files that an audit reads: the loader's configuration, and the metadata of Python packages.
TEXTS = re.compile(
    r"/etc/ld\.so\.(?:cache|conf|conf\.d/[^/]+\.conf)"
    r"|/.*\.dist-info/(?:METADATA|RECORD)"
    r"|/.*/torch/version\.py|/.*/tensorflow/python/platform/build_info\.py",
)
LONGEST_TEXT = 8 << 20
ALL_TEXTS = 64 << 20  # bytes; an image with a few hundred packages has a tenth of that
LONGEST_PATH = 4096  # bytes of a path, or of the target of a link (PATH_MAX)
RATIO = 100  # limit for the size of a sparse file, as a multiple of its stored bytes


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder."""


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class Hardlink:
    """A hard link: another name for the file at the path `target`."""

    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Any other entry: a regular file or a special file.

    `file` describes a file with code, `text` is the content of a text file that the audit reads.
    """

    file: File | None = None
    text: bytes | None = None
    layer: str = ""


FOLDER = Folder()
OTHER = Plain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer: its entries by path, the paths that it removes, and the folders that it empties.

    If the archive has several entries for a path, the last one counts.
    """

    digest: str
    entries: Mapping[str, Folder | Symlink | Hardlink | Plain]
    removed: frozenset[str]
    emptied: frozenset[str]


class _Archive(tarfile.TarFile):
    """An archive that records the types of the extended headers of the current member."""

    extended = b""
    whole = True  # the member and all its extended headers were read


class _Member(tarfile.TarInfo):
    """A member that tarfile and container engines, which use Go's archive/tar, read in the same way.

    Headers that they would read differently raise an error, as do invalid headers, which tarfile would take
    for the end of the archive.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        return super().frombuf(buf, encoding, errors).without_prefix(buf)

    @classmethod
    def _frombuf(cls, buf: bytes, encoding: str, errors: str, *, dircheck: bool = True) -> _Member:
        # Newer releases of tarfile, and Debian 12's, call this in place of frombuf.
        member: _Member = super()._frombuf(buf, encoding, errors, dircheck=dircheck)  # type: ignore[misc]
        return member.without_prefix(buf)

    def without_prefix(self, buf: bytes | bytearray) -> Self:
        """Remove the prefix of the name that tarfile reads and engines do not."""
        prefix = bytes(buf[PREFIX]).partition(b"\0")[0]
        if prefix and not buf.startswith(USTAR, MAGIC) and self.type not in tarfile.GNU_TYPES:
            if not TIMES.fullmatch(prefix):
                raise tarfile.InvalidHeaderError("a name prefix in a non-POSIX header")  # type: ignore[attr-defined]
            self.name = self.name.removeprefix(f"{prefix.decode()}/")
        return self

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(archive)
        except (tarfile.EmptyHeaderError, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error

    def _proc_member(self, archive: _Archive) -> tarfile.TarInfo:
        """Check a header before tarfile reads its data. This is tarfile's hook for subclasses."""
        if self.size < 0 or (self.type in EXTENDED and self.size > LONGEST):
            raise tarfile.ReadError(f"invalid size of a header: {self.size} bytes")
        # tarfile applies sizes from global headers, which engines ignore. If a member has several headers of
        # another type, tarfile uses the first, engines use the last.
        archive.pax_headers = {}
        before = b"" if archive.whole else archive.extended
        archive.extended = before + (self.type if self.type in EXTENDED else b"")
        archive.whole = self.type not in EXTENDED
        orderly = ORDERLY.fullmatch(archive.extended)
        member: tarfile.TarInfo = super()._proc_member(archive) if orderly else self  # type: ignore[misc]
        _, named, after = archive.extended.partition(tarfile.XHDTYPE)
        if not orderly or (named and after and NAMES & member.pax_headers.keys()):
            raise tarfile.ReadError(f"extended headers {archive.extended.decode()} for one file")
        return member


def opened(stream: Stream) -> tarfile.TarFile:
    """Open a stream as an archive whose members are read in order; reading it raises tarfile.TarError."""
    return _Archive.open(  # type: ignore[call-overload,no-any-return]  # it only reads
        fileobj=stream, mode="r|", bufsize=BUFFER, tarinfo=_Member
    )


def read(stream: Stream, digest: str) -> Layer:
    """Return the layer in `stream`, a tar that may be compressed; raise AuditError."""
    entries: dict[str, Folder | Symlink | Hardlink | Plain] = {}
    removed: set[str] = set()
    emptied: set[str] = set()
    used: set[str] = set()  # paths that other entries depend on: their folders, the targets of hard links
    texts = 0
    try:
        expanded = Expanded(stream)
        with opened(expanded) as archive, Later() as later:
            for number, member in enumerate(archive):
                archive.members = []  # type: ignore[attr-defined]  # it keeps them all
                if number > MOST:
                    raise tarfile.ReadError(f"more than {MOST} files")
                path = _absolute(member.name)
                folder, name = posixpath.split(path)
                if name == OPAQUE:
                    emptied.add(folder)
                elif name.startswith(WHITEOUT):
                    removed.add(posixpath.join(folder, name.removeprefix(WHITEOUT)))
                elif path != "/":
                    entry = _entry(archive, member, path, digest, later)
                    _put(entries, used, path, entry)
                    texts += len(entry.text or b"") if isinstance(entry, Plain) else 0
                    if texts > ALL_TEXTS:
                        raise tarfile.ReadError(f"more than {ALL_TEXTS} bytes of text files")
            _ended(archive, expanded)
            for path, kept, file in later.decoded():
                if entries.get(path) == Plain(file=kept, layer=digest):  # no later entry has replaced it
                    entries[path] = Plain(file=file, layer=digest)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise AuditError(f"the layer {digest} cannot be read: {error}") from error
    return Layer(digest=digest, entries=entries, removed=frozenset(removed), emptied=frozenset(emptied))


def read_file(path: Path) -> Layer:
    """Return the layer in the file `path`; raise AuditError."""
    try:
        with path.open("rb") as file:
            return read(file, path.name)
    except OSError as error:
        raise AuditError(f"the layer {path.name} cannot be read: {error}") from error


def renamed(layer: Layer, digest: str) -> Layer:
    """Return a layer under another digest."""
    entries = {
        path: replace(entry, layer=digest) if isinstance(entry, Plain) and entry.layer else entry
        for path, entry in layer.entries.items()
    }
    return replace(layer, digest=digest, entries=entries)


def _ended(archive: tarfile.TarFile, expanded: Expanded) -> None:
    """Read to the end of the stream, to verify that it is complete: tarfile accepts any end."""
    if archive.offset > expanded.produced:
        raise EOFError("it is truncated")
    while expanded.read(PIECE):
        pass


def _entry(
    archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, digest: str, later: Later
) -> Folder | Symlink | Hardlink | Plain:
    if member.isdir():
        return FOLDER
    if member.issym():
        return Symlink(_short(member.linkname))
    if member.islnk():
        return Hardlink(_absolute(member.linkname))
    file = archive.extractfile(member) if member.isfile() else None
    return _plain(file, path, member, digest, later) if file else OTHER


def _put(
    entries: dict[str, Folder | Symlink | Hardlink | Plain],
    used: set[str],
    path: str,
    entry: Folder | Symlink | Hardlink | Plain,
) -> None:
    """Add an entry, replacing an earlier one at its path.

    Raises tarfile.ReadError if other entries depend on the earlier one.
    """
    old = entries.get(path)
    if old != entry:
        entries.pop(path, None)
    if path in used and old not in (None, FOLDER, OTHER) and (old != entry or isinstance(old, Plain)):
        raise tarfile.ReadError(f"{path} is replaced after another entry that depends on it")
    entries[path] = entry
    for needed in (posixpath.dirname(path), *((entry.target,) if isinstance(entry, Hardlink) else ())):
        here = needed
        while here not in used and here != "/":
            used.add(here)
            here = posixpath.dirname(here)


def _plain(file: IO[bytes], path: str, member: tarfile.TarInfo, digest: str, later: Later) -> Plain:
    if reader := packages.database(path):
        later.sums.add(reader(file, member.size))
        return OTHER
    if TEXTS.fullmatch(path):
        return Plain(text=file.read(LONGEST_TEXT), layer=digest)
    head = file.read(HEAD)
    if not objects.interesting(path, head):
        return OTHER
    parts: Iterable[tuple[int, int]] = member.sparse or ()  # type: ignore[assignment]  # places and sizes
    if member.issparse() and member.size > RATIO * (tarfile.BLOCKSIZE + sum(size for _, size in parts)):
        raise tarfile.ReadError(f"the sparse file {path} is too large: {member.size} bytes")
    with archives.copied(file, member.size, head) as window:
        if window.size < member.size:
            raise EOFError(f"{path} is truncated")
        examined = objects.examine(path, window)
        if examined:
            later.keep(path, examined, window)
    return Plain(file=examined, layer=digest) if examined else OTHER


def _absolute(name: str) -> str:
    if ".." in name.split("/"):
        raise tarfile.ReadError(f"the path {name[:200]!r} leads out of the image")
    return posixpath.normpath("/" + _short(name).lstrip("/"))


def _short(name: str) -> str:
    if len(name) > LONGEST_PATH:  # no file system allows it, and handling it costs time
        raise tarfile.ReadError(f"the path {name[:80]!r}… has {len(name)} characters")
    return name
