"""One layer of an image, read from its archive: once, from the beginning to the end, in little memory."""

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
BUFFER = 1 << 16  # bytes; tarfile copies what is left of it at each read
MOST = 4_000_000  # entries of a layer
LONGEST = 1 << 20  # bytes of an extended header: names have 4096
# Headers that hold what belongs to the next one, and are read in one piece.
EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
# Types of those for one member: global ones, then one of PAX and long names of GNU, each once. Names in the
# former count for tarfile where they come first, and never for engines.
ORDERLY = re.compile(rb"g{0,9}(?!.*(.).*\1)[LKx]*")
NAMES = frozenset({"path", "linkpath"})
# In a header that is not POSIX's, the prefix of a name is something else: in GNU's, times in octal digits.
MAGIC, USTAR = 257, b"ustar\0"
PREFIX, TIMES = slice(345, 500), re.compile(rb"[0-7 ]+")
# Texts that an audit reads: what the loader goes by, and what Python's packages say of themselves.
TEXTS = re.compile(
    r"/etc/ld\.so\.(?:cache|conf|conf\.d/[^/]+\.conf)"
    r"|/.*\.dist-info/(?:METADATA|RECORD)"
    r"|/.*/torch/version\.py|/.*/tensorflow/python/platform/build_info\.py",
)
LONGEST_TEXT = 8 << 20
ALL_TEXTS = 64 << 20  # bytes: those of some hundred packages have a tenth of that
LONGEST_PATH = 4096  # bytes of a path, or of what a link leads to (PATH_MAX)
RATIO = 100  # bytes that a sparse file may have for each that is there


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder."""


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class Hardlink:
    """Another name of the file at the path `target`."""

    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Anything else: a file with what it is to an audit, and its bytes where they are a text for it."""

    file: File | None = None
    text: bytes | None = None
    layer: str = ""


FOLDER = Folder()
OTHER = Plain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer: its entries by path, the last of each path, and the paths and folders that it takes away."""

    digest: str
    entries: Mapping[str, Folder | Symlink | Hardlink | Plain]
    removed: frozenset[str]
    emptied: frozenset[str]


class _Archive(tarfile.TarFile):
    """An archive with the types of the extended headers that were read for the last member."""

    extended = b""
    whole = True  # all of them were read, and the member


class _Member(tarfile.TarInfo):
    """A member whose header is sound, and means the same to engines, which are written in Go.

    tarfile takes a header that is not sound for the end of the archive.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        return super().frombuf(buf, encoding, errors).without_prefix(buf)

    @classmethod
    def _frombuf(cls, buf: bytes, encoding: str, errors: str, *, dircheck: bool = True) -> _Member:
        # What tarfile of newer releases calls, and that of Debian 12.
        member: _Member = super()._frombuf(buf, encoding, errors, dircheck=dircheck)  # type: ignore[misc]
        return member.without_prefix(buf)

    def without_prefix(self, buf: bytes | bytearray) -> Self:
        """Take from the name what tarfile read as a prefix where engines read none."""
        prefix = bytes(buf[PREFIX]).partition(b"\0")[0]
        if prefix and not buf.startswith(USTAR, MAGIC) and self.type not in tarfile.GNU_TYPES:
            if not TIMES.fullmatch(prefix):
                raise tarfile.InvalidHeaderError("a prefix in a header without one")  # type: ignore[attr-defined]
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
        """Look at a header before what belongs to it is read; tarfile calls it to be overridden."""
        if self.size < 0 or (self.type in EXTENDED and self.size > LONGEST):
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        # tarfile changes sizes by global headers, which engines ignore. Of several others for a member, it
        # takes the first, and engines the last.
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
    """Return the archive that a stream is, to be read in order; raise tarfile.TarError, also later."""
    return _Archive.open(  # type: ignore[call-overload,no-any-return]  # it only reads
        fileobj=stream, mode="r|", bufsize=BUFFER, tarinfo=_Member
    )


def read(stream: Stream, digest: str) -> Layer:
    """Return the layer that `stream` has the archive of, a tar, perhaps compressed; raise AuditError."""
    entries: dict[str, Folder | Symlink | Hardlink | Plain] = {}
    removed: set[str] = set()
    emptied: set[str] = set()
    used: set[str] = set()  # paths that others depend on: their folders, and files with hard links
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
                        raise tarfile.ReadError(f"more than {ALL_TEXTS} bytes of texts")
            _ended(archive, expanded)
            for path, kept, file in later.decoded():
                if entries.get(path) == Plain(file=kept, layer=digest):  # and nothing later at its path
                    entries[path] = Plain(file=file, layer=digest)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise AuditError(f"the layer {digest} can't be read: {error}") from error
    return Layer(digest=digest, entries=entries, removed=frozenset(removed), emptied=frozenset(emptied))


def read_file(path: Path) -> Layer:
    """Return the layer in the file `path`; raise AuditError."""
    try:
        with path.open("rb") as file:
            return read(file, path.name)
    except OSError as error:
        raise AuditError(f"the layer {path.name} can't be read: {error}") from error


def renamed(layer: Layer, digest: str) -> Layer:
    """Return a layer under another digest."""
    entries = {
        path: replace(entry, layer=digest) if isinstance(entry, Plain) and entry.layer else entry
        for path, entry in layer.entries.items()
    }
    return replace(layer, digest=digest, entries=entries)


def _ended(archive: tarfile.TarFile, expanded: Expanded) -> None:
    """Read what is left, so that all of it is seen to be whole; tarfile takes any end for a good one."""
    if archive.offset > expanded.produced:
        raise EOFError("it ends within a file")
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
    """Put an entry behind the others; of several at a path the last counts.

    Raises tarfile.ReadError where one that counted for other entries would be lost.
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
        raise tarfile.ReadError(f"{path} is sparse, and has {member.size} bytes")
    with archives.copied(file, member.size, head) as window:
        if window.size < member.size:
            raise EOFError(f"{path} is cut short")
        examined = objects.examine(path, window)
        if examined:
            later.keep(path, examined, window)
    return Plain(file=examined, layer=digest) if examined else OTHER


def _absolute(name: str) -> str:
    if ".." in name.split("/"):
        raise tarfile.ReadError(f"the path {name[:200]!r} leads out of it")
    return posixpath.normpath("/" + _short(name).lstrip("/"))


def _short(name: str) -> str:
    if len(name) > LONGEST_PATH:  # no file system has it, and it costs time at each step of a path
        raise tarfile.ReadError(f"the path {name[:80]!r}… has {len(name)} characters")
    return name
