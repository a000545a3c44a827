"""The files of compiled caches in a container, and which of them a layer keeps.

They come as the tar in which an engine sends a folder; what starts without an engine writes such a tar.
"""

from __future__ import annotations

import contextlib
import posixpath
import tarfile
import tempfile
from dataclasses import dataclass, replace

from imagematrix.common.temp_folder import get_disk_folder
from imagematrix.errors import AuditError
from imagematrix.images.oci.layer_entries import list_members, make_absolute, require_dense
from imagematrix.images.oci.tar import open_tar
from imagematrix.images.warm.tools import DROPPED, KEPT, ROOT, classify_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from typing import IO

    from imagematrix.images.oci.byte_stream import ByteStream

PIECE = 1 << 20
MOST = 200_000  # entries of a layer
# Folders have no sticky bit: with it, only root could replace a file of root, and tools such as Numba replace
# their index when they compile one more function.
FOLDER_MODE, LINK_MODE, PLAIN_MODE, PROGRAM_MODE = 0o777, 0o777, 0o644, 0o755
ANY_EXECUTE = 0o111
LINKS = (tarfile.SYMTYPE, tarfile.LNKTYPE)
KINDS = {
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmFile:
    """An entry at the absolute `path`; `kind` is a type of tarfile.

    `mtime` is in seconds since 1970. `target` is that of a symbolic link as it stands, or the absolute path
    of the file of which a hard link is another name. `open` opens the content of a regular file of `size`
    bytes.
    """

    path: str
    kind: bytes
    mode: int = 0
    mtime: int = 0
    size: int = 0
    target: str = ""
    open: Callable[[], AbstractContextManager[ByteStream]] | None = None


@contextlib.contextmanager
def read_archive(stream: ByteStream, max_size: int) -> Iterator[tuple[WarmFile, ...]]:
    """Yield everything in a tar of the folder ROOT as engines write it, with its last name before all paths.

    Contents are kept in a temporary file within the context. Raises AuditError if the tar is damaged, or has
    more than `max_size` bytes of files.
    """
    files: list[WarmFile] = []
    with tempfile.TemporaryFile(dir=get_disk_folder()) as contents:
        try:
            with open_tar(stream) as archive:
                for member in list_members(archive):
                    file = _describe_member(member)
                    if file.kind == tarfile.REGTYPE:
                        require_dense(member, file.path)
                        if contents.tell() + member.size > max_size:
                            raise AuditError(f"{ROOT} has more than {max_size} bytes")
                        file = replace(file, open=_copy_content(archive, member, contents))
                    files.append(file)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise AuditError(f"the caches cannot be read: {error}") from error
        yield tuple(files)


def select_files(files: Iterable[WarmFile], changed: Collection[str] | None = None) -> tuple[WarmFile, ...]:
    """Return what a layer keeps of these files, as `write_layer` takes them: sorted, with their folders.

    Only files whose paths are in `changed` are kept, by default all. Locks, temporary files and what the
    table of tools drops are left out, and folders without a file. Raises AuditError for anything that no tool
    of the table writes, and for a link that leaves ROOT.
    """
    by_path = {file.path: file for file in files}
    names: dict[str, list[str]] = {}  # by the path of each file that has a content, the names that are kept
    kept: dict[str, WarmFile] = {}
    for path in sorted(by_path, key=make_sort_key):
        file = by_path[path]
        is_new = file.kind != tarfile.DIRTYPE and (changed is None or path in changed)
        if not is_new or not _is_kept(file):
            continue
        if file.kind == tarfile.SYMTYPE:
            require_inside(file)
            kept[path] = replace(file, mode=LINK_MODE)
        else:
            names.setdefault(_find_content(file, by_path), []).append(path)
    for source, (first, *others) in names.items():
        content = by_path[source]
        mode = PROGRAM_MODE if content.mode & ANY_EXECUTE else PLAIN_MODE
        kept[first] = replace(content, path=first, mode=mode)
        for path in others:
            kept[path] = replace(content, path=path, kind=tarfile.LNKTYPE, mode=mode, size=0, target=first)
    for folder in {folder for path in kept for folder in _list_parents(path)}:
        listed = by_path.get(folder) or WarmFile(path=folder, kind=tarfile.DIRTYPE)
        kept[folder] = replace(listed, mode=FOLDER_MODE)
    if len(kept) > MOST:
        raise AuditError(f"the caches have more than {MOST} files")
    return tuple(kept[path] for path in sorted(kept, key=make_sort_key))


def require_inside(link: WarmFile) -> None:
    """Raise AuditError if a symbolic link may lead out of ROOT.

    Its own folder is reached through no link, so `..` at the beginning of a target is what it seems; after a
    name, which may be a link, it is not.
    """
    names = link.target.split("/")
    upwards = next((place for place, name in enumerate(names) if name != ".."), len(names))
    path = posixpath.normpath(posixpath.join(posixpath.dirname(link.path), link.target))
    inside = path == ROOT or path.startswith(f"{ROOT}/")
    if not inside or ".." in names[upwards:] or not link.target.isprintable():
        raise AuditError(f"{link.path[:200]!r} is a link to {link.target[:200]!r}, which leads out of {ROOT}")


def make_sort_key(path: str) -> tuple[str, ...]:
    """Return a key by which a folder comes directly before what is in it."""
    return tuple(path.split("/"))


def read_content(file: WarmFile) -> Iterator[bytes]:
    """Yield the content of a regular file; raise AuditError if it is shorter."""
    if file.open is None:
        raise AuditError(f"{file.path[:200]!r} has no content")
    remaining = file.size
    with file.open() as stream:
        while remaining:
            piece = stream.read(min(remaining, PIECE))
            if not piece:
                raise AuditError(f"{file.path[:200]!r} is shorter than {file.size} bytes")
            remaining -= len(piece)
            yield piece


@contextlib.contextmanager
def extract_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[ByteStream]:
    """Yield the content of a regular file in a tar; raise tarfile.ReadError if it has none."""
    stream = archive.extractfile(member)
    if stream is None:
        raise tarfile.ReadError("it has a file without content")
    with stream:
        yield stream


def _is_kept(file: WarmFile) -> bool:
    """Whether the layer has a file; raise AuditError if no tool writes it, or if it is no file."""
    found = classify_path(file.path)
    if found is None or not file.path.isprintable():
        remedy = (
            "let the warm-up write only its tools' caches there; a tool that imagematrix does not know "
            "needs a folder elsewhere"
        )
        raise AuditError(f"no tool of the table writes {file.path[:200]!r}", remedy=remedy)
    if file.kind not in (tarfile.REGTYPE, *LINKS) and found[1] != DROPPED:
        raise AuditError(f"{file.path[:200]!r} is {KINDS.get(file.kind, 'of an unknown kind')}")
    return found[1] == KEPT


def _find_content(file: WarmFile, by_path: Mapping[str, WarmFile]) -> str:
    """Return the path of the regular file of which this is a name."""
    content = by_path.get(file.target) if file.kind == tarfile.LNKTYPE else file
    if content is None or content.kind != tarfile.REGTYPE:
        raise AuditError(
            f"{file.path[:200]!r} is a hard link to {file.target[:200]!r}, which is no file here"
        )
    return content.path


def _describe_member(member: tarfile.TarInfo) -> WarmFile:
    """Return an entry of an engine's tar."""
    kind = tarfile.REGTYPE if member.isreg() else member.type
    target = _move_to_root(member.linkname) if kind == tarfile.LNKTYPE else member.linkname
    return WarmFile(
        path=_move_to_root(member.name),
        kind=kind,
        mode=member.mode,
        mtime=int(member.mtime),
        size=member.size if kind == tarfile.REGTYPE else 0,
        target=target,
    )


def _move_to_root(name: str) -> str:
    """Return the path in ROOT of a name in an engine's tar, whose first folder is ROOT's own."""
    folder, _, inner = make_absolute(name).lstrip("/").partition("/")
    if folder != posixpath.basename(ROOT):
        raise tarfile.ReadError(f"the path {name[:200]!r} is not in {ROOT}")
    return f"{ROOT}/{inner}" if inner else ROOT


def _copy_content(
    archive: tarfile.TarFile, member: tarfile.TarInfo, contents: IO[bytes]
) -> Callable[[], AbstractContextManager[ByteStream]]:
    """Append the content of a member to `contents`; return a function that opens it there."""
    start = contents.tell()
    with extract_member(archive, member) as stream:
        while piece := stream.read(PIECE):
            contents.write(piece)

    @contextlib.contextmanager
    def open_copy() -> Iterator[ByteStream]:
        contents.seek(start)
        yield contents

    return open_copy


def _list_parents(path: str) -> Iterator[str]:
    """Yield the folders of a path, from ROOT on."""
    while path != ROOT:
        path = posixpath.dirname(path)
        yield path
