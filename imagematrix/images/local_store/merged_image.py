"""The layers of an image as one stream of its files, each at its final path and once.

Layers are read twice: first their headers, side by side while they arrive, which give the tree that a
container sees, then the content of the files that are left in it. So no unpacked copy is needed. Or else the
content of all files is written at the first reading, under numbers, and they get their names later. Folders
come first, then links, then files in the order in which the layers have them, then further names of files.
"""

from __future__ import annotations

import contextlib
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Protocol

from imagematrix.errors import AuditError
from imagematrix.images.oci import layer_entries
from imagematrix.images.oci.decompression import DecompressedStream, HashedStream
from imagematrix.images.oci.layer_entries import (
    DEEPEST,
    LONGEST_PATH,
    LayerListing,
    list_members,
    read_to_the_end,
    require_dense,
)
from imagematrix.images.oci.read_ahead import read_ahead
from imagematrix.images.oci.tar import open_tar
from imagematrix.images.oci.tree import Folder, Hardlink, ImageTree, Symlink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from imagematrix.images.oci.byte_stream import ByteStream

AT_ONCE = 4  # layers that arrive and are unpacked side by side, each by three threads with some 10 MiB
PIECE = 1 << 20  # bytes of content to read at once
LATEST = (1 << 32) - 1  # the last time that squashfs can have, in seconds since 1970
PERMISSIONS = 0o7777
IMPLIED = 0o755  # the mode of a folder that no layer lists


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFile:
    """A layer: `open` opens its bytes, as they are compressed or not, any number of times.

    `digest` is that of these bytes, None if they have been compared with it. `tar` is the digest of its tar
    in the image's configuration, None if that is unknown. `name` is for messages.
    """

    open: Callable[[], AbstractContextManager[ByteStream]]
    name: str
    digest: str | None = None
    tar: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedFile:
    """A file of the merged image at `path`, absolute, and its `content` if it is a regular file of `size`.

    `kind` is a type of tarfile: a regular file, a folder, a symbolic link to `target`, or another name of the
    regular file at the path `target`, which came before. If its content was written already, it is in the
    file `written`, with its mode and time.
    """

    path: str
    kind: bytes
    mode: int = 0o777
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    size: int = 0
    target: str = ""
    content: ByteStream | None = None
    written: str | None = None

    def read_pieces(self, on_bytes: Callable[[int], object]) -> Iterator[bytes]:
        """Yield the content; `on_bytes` is told the bytes of each piece when the next one is wanted.

        Raises AuditError if it is truncated.
        """
        remaining = self.size
        while remaining:
            piece = self.content.read(min(remaining, PIECE)) if self.content else b""
            if not piece:
                raise AuditError(f"{self.path[:200]!r} is truncated")
            yield piece
            remaining -= len(piece)
            on_bytes(len(piece))


class ContentWriter(Protocol):
    """Keeps the content of files whose final names are not known yet."""

    def write(self, layer: int, place: int, file: MergedFile) -> None:
        """Write the content of a file, which has its `place` in a layer, by any thread; raise OSError."""

    def get_path(self, layer: int, place: int) -> str:
        """Return the path of what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attributes:
    """What a layer says of an entry besides its name."""

    mode: int
    uid: int
    gid: int
    mtime: int


@dataclass(frozen=True, slots=True)
class _OwnFolder(Folder):
    attributes: _Attributes


@dataclass(frozen=True, slots=True)
class _OwnLink(Symlink):
    attributes: _Attributes


@dataclass(frozen=True, slots=True, eq=False)  # two files are never the same one
class _Content:
    """A file: its place in its layer. `special` are devices, pipes and sockets."""

    place: int
    size: int
    special: bool
    attributes: _Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListedLayer:
    digest: str
    entries: Mapping[str, Folder | Symlink | Hardlink | _Content]
    removed: frozenset[str]
    emptied: frozenset[str]
    names_size: int


class GivenUpError(Exception):
    """The image was given up, such as because another layer cannot be read."""


class MergedImage:
    """The merged files of `layers`, the lowest first. Reads their headers; raises AuditError.

    With `contents`, it also has the content of their files written, and raises what that does. `on_bytes` is
    told the bytes of the tars as they are read, by any thread. `given_up` is set if a layer cannot be read,
    or after Ctrl-C: whoever still reads one should end with GivenUpError.

    `left_out` is the number of device nodes, pipes and sockets, which no user can make. `size` are the bytes
    of all files, `latest` is the latest of all times.
    """

    def __init__(
        self,
        layers: Sequence[LayerFile],
        on_bytes: Callable[[int], object] = lambda _: None,
        contents: ContentWriter | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        self._layers = layers
        self._report = on_bytes
        self._contents = contents
        self._given_up = given_up or threading.Event()
        listed = self._list_layers()
        self._tree: ImageTree[_Content] = ImageTree(listed)
        self._names: dict[_Content, list[str]] = {}
        self.left_out = 0
        for path, file in self._tree.list_files():
            _require_bounded(path)
            if file.special:
                self.left_out += 1
            else:
                self._names.setdefault(file, []).append(path)
        alive = self._names.keys()
        # By layer, the files to read by their places.
        self._wanted = [
            {
                entry.place: entry
                for entry in layer.entries.values()
                if isinstance(entry, _Content) and entry in alive
            }
            for layer in listed
        ]
        self.size = sum(file.size for file in self._names)
        self.latest = max(
            *(member.mtime for member in self._list_folders_and_links()),
            *(file.attributes.mtime for file in self._names),
            0,
        )

    def list_members(self) -> Iterator[MergedFile]:
        """Yield all members; the content of each has to be read before the next. Raises AuditError."""
        yield from self._list_folders_and_links()
        for number, wanted in enumerate(self._wanted):
            if wanted:
                if self._contents:
                    yield from self._list_written_files(self._contents, number, wanted)
                else:
                    yield from self._list_files(self._layers[number], wanted)
        for file, (first, *more_paths) in self._names.items():
            for path in more_paths:
                yield _make_member(path, tarfile.LNKTYPE, file.attributes, target=first)

    def _list_folders_and_links(self) -> Iterator[MergedFile]:
        for path, folder in self._tree.list_folders():
            _require_bounded(path)
            attributes = (
                folder.attributes
                if isinstance(folder, _OwnFolder)
                else _Attributes(mode=IMPLIED, uid=0, gid=0, mtime=0)
            )
            yield _make_member(path or "/", tarfile.DIRTYPE, attributes)
        for path, link in self._tree.list_links():
            _require_bounded(path)
            attributes = (
                link.attributes
                if isinstance(link, _OwnLink)
                else _Attributes(mode=0o777, uid=0, gid=0, mtime=0)
            )
            yield _make_member(path, tarfile.SYMTYPE, attributes, target=link.target)

    def _list_written_files(
        self, contents: ContentWriter, number: int, wanted: Mapping[int, _Content]
    ) -> Iterator[MergedFile]:
        for place, file in wanted.items():
            written = contents.get_path(number, place)
            path = self._names[file][0]
            yield _make_member(path, tarfile.REGTYPE, file.attributes, size=file.size, written=written)

    def _list_files(self, layer: LayerFile, wanted: Mapping[int, _Content]) -> Iterator[MergedFile]:
        with self._open_layer(layer) as archive:
            for place, member in enumerate(list_members(archive)):
                file = wanted.get(place)
                if file is None:
                    continue
                content = archive.extractfile(member) if member.isfile() else None
                if content is None or member.size != file.size:
                    raise tarfile.ReadError("it changed while it was read")
                checked = _FileContent(content, layer)
                path = self._names[file][0]
                yield _make_member(path, tarfile.REGTYPE, file.attributes, size=file.size, content=checked)

    def _list_layers(self) -> list[_ListedLayer]:
        """List all layers side by side; if one cannot be read, the others are given up."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            listing = [pool.submit(self._list_layer, number) for number in range(len(self._layers))]
            try:
                files = names_size = 0
                for listed in as_completed(listing):
                    files += len(listed.result().entries)
                    names_size += listed.result().names_size
                    _require_few(files, names_size)
            except BaseException:
                self._given_up.set()
                pool.shutdown(cancel_futures=True)
                raise
        return [listed.result() for listed in listing]

    def _list_layer(self, number: int) -> _ListedLayer:
        layer = self._layers[number]
        listing: LayerListing[_Content] = LayerListing()
        with self._open_layer(layer, tar=layer.tar) as archive:
            for place, member in enumerate(list_members(archive)):
                path = listing.read_path(member)
                if path is None:
                    continue
                entry = _make_entry(member, listing.read_link(member), place, path)
                if path != "/" or isinstance(entry, Folder):
                    listing.add(path, entry)
                if self._contents and isinstance(entry, _Content) and not entry.special:
                    content = archive.extractfile(member)
                    file = _make_member(
                        path, tarfile.REGTYPE, entry.attributes, size=entry.size, content=content
                    )
                    self._contents.write(number, place, file)
        return _ListedLayer(
            digest=layer.name,
            entries=listing.entries,
            removed=frozenset(listing.removed),
            emptied=frozenset(listing.emptied),
            names_size=listing.names_size,
        )

    @contextlib.contextmanager
    def _open_layer(self, layer: LayerFile, tar: str | None = None) -> Iterator[tarfile.TarFile]:
        """Open the tar of a layer; at the end, compare its digests and raise AuditError."""
        with _convert_errors(layer), contextlib.ExitStack() as stack:
            stream = stack.enter_context(layer.open())
            raw = HashedStream(stream, layer.digest) if layer.digest else None
            arriving = stack.enter_context(read_ahead(raw or stream))
            expanded = DecompressedStream(arriving)
            content = HashedStream(expanded, tar) if tar else None
            unpacked = stack.enter_context(read_ahead(content or expanded))
            with open_tar(_ObservedStream(unpacked, self._note_bytes)) as archive:
                yield archive
                read_to_the_end(archive, unpacked, expanded)
            while arriving.read(PIECE):  # what the decompressor left
                pass
            for hashed in (raw, content):
                if hashed:
                    hashed.finish()

    def _note_bytes(self, size: int) -> None:
        if self._given_up.is_set():
            raise GivenUpError
        self._report(size)


@contextlib.contextmanager
def _convert_errors(layer: LayerFile) -> Iterator[None]:
    """Raise AuditError if a layer cannot be read."""
    try:
        yield
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise AuditError(f"the layer {layer.name} cannot be read: {error}") from error


class _FileContent:
    """The content of a file in a layer, with errors of the layer."""

    def __init__(self, stream: ByteStream, layer: LayerFile) -> None:
        self._stream = stream
        self._layer = layer

    def read(self, size: int = -1, /) -> bytes:
        with _convert_errors(self._layer):
            return self._stream.read(size)


class _ObservedStream:
    """A stream that tells how many bytes are read from it."""

    def __init__(self, stream: ByteStream, on_bytes: Callable[[int], object]) -> None:
        self._stream = stream
        self._report = on_bytes

    def read(self, size: int = -1, /) -> bytes:
        piece = self._stream.read(size)
        self._report(len(piece))
        return piece


def _make_entry(
    member: tarfile.TarInfo, link: Symlink | Hardlink | None, place: int, path: str
) -> Folder | Symlink | Hardlink | _Content:
    if isinstance(link, Hardlink):
        return link
    attributes = _Attributes(
        mode=member.mode & PERMISSIONS,
        uid=member.uid & LATEST,
        gid=member.gid & LATEST,
        mtime=min(max(int(member.mtime), 0), LATEST),
    )
    if isinstance(link, Symlink):
        return _OwnLink(link.target, attributes)
    if member.isdir():
        return _OwnFolder(attributes)
    require_dense(member, path)
    return _Content(place, member.size, not member.isfile(), attributes)


def _make_member(
    path: str,
    kind: bytes,
    attributes: _Attributes,
    *,
    size: int = 0,
    target: str = "",
    content: ByteStream | None = None,
    written: str | None = None,
) -> MergedFile:
    return MergedFile(
        path=path,
        kind=kind,
        mode=attributes.mode,
        uid=attributes.uid,
        gid=attributes.gid,
        mtime=attributes.mtime,
        size=size,
        target=target,
        content=content,
        written=written,
    )


def _require_few(files: int, names_size: int) -> None:
    """Raise AuditError if layers have too many files, or too long names of all."""
    if files > layer_entries.MOST:
        raise AuditError(f"the layers have more than {layer_entries.MOST} files")
    if names_size > layer_entries.LONGEST_NAMES:
        raise AuditError(f"the layers have paths of more than {layer_entries.LONGEST_NAMES} characters")


def _require_bounded(path: str) -> None:
    """Raise AuditError if a path is too long, as links to folders can make it, or too deep."""
    if len(path) > LONGEST_PATH or path.count("/") > DEEPEST:
        raise AuditError(f"the path {path[:80]!r}… has {len(path)} characters, {path.count('/')} levels")
