"""Paths in a container, found among the image's files with links followed as in the container.

A link of an image can lead anywhere, and the kernel would follow it to files of the node. So each name of a
path is opened in the folder before it, and links are followed here: an absolute one begins at the image's
root again, and nothing leads above that.
"""
# pathlib is slow to load.
# ruff: noqa: PTH116

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import TracebackType
    from typing import Self

    from imagematrix.launcher.daemonless.options import Bind

HOPS = 40  # links that the kernel follows before it gives up (path_resolution(7))


class InMountError(Exception):
    """A path leads to `where` something else is mounted, or to what is `beyond` in there ("" if nothing)."""

    def __init__(self, where: str, beyond: str) -> None:
        super().__init__(where, beyond)
        self.where = where
        self.beyond = beyond


class LinkLoopError(OSError):
    """Links go in circles, or a file stands where a folder should."""


class ImageFiles:
    """The files of an image in the folder `root` of the node; close it after use.

    `mounted` are paths without links at which something else is mounted in the container. Of these, `binds`
    are files and folders of the node in which paths go on, with their links followed as in the container.
    """

    def __init__(self, root: str, mounted: Collection[str] = (), binds: Sequence[Bind] = ()) -> None:
        self.root = root
        self._mounted = {*mounted}
        self._binds = binds
        self._open = [os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
        self._names: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        for descriptor in self._open:
            os.close(descriptor)

    def add_mount(self, path: str) -> None:
        """Add a path without links at which something is mounted."""
        self._mounted.add(path)

    def locate(self, path: str) -> str:
        """Return where a path without links, of the container, is on the node."""
        bind = self._find_bind(path)
        return f"{self.root}{path}" if bind is None else f"{bind.source}{path[len(bind.target) :]}"

    def find(self, path: str) -> str | None:
        """Return where a path of the container leads, without links; None if there is nothing.

        Raises InMountError, and LinkLoopError.
        """
        return self._walk(path, make=None)

    def make_folder(self, path: str) -> str:
        """Return where a path leads, with the folders that were missing made; raise as `find`, or OSError."""
        return self._walk(path, make=stat.S_IFDIR) or "/"

    def make_place(self, path: str, *, folder: bool) -> str:
        """Return where a path leads, made a folder or an empty file if it is missing; raise as `find`."""
        return self._walk(path, make=stat.S_IFDIR if folder else stat.S_IFREG) or "/"

    def find_kind(self, path: str) -> int | None:
        """Return what a path is itself, a link too, as S_IFMT of its mode; None if there is nothing."""
        parent, _, name = path.rpartition("/")
        try:
            if self._walk(parent, make=None) is None:
                return None
            return self._stat_kind(name)
        except (InMountError, LinkLoopError):
            return None

    def replace(self, path: str, kind: int) -> None:
        """Make an empty folder or file (`kind`: S_IFDIR, S_IFREG) at a path itself, unless there is one.

        Anything else there is replaced. Raises OSError.
        """
        parent, _, name = path.rpartition("/")
        self._walk(parent, make=stat.S_IFDIR)
        present = self._stat_kind(name)
        if present == kind:
            return
        if present == stat.S_IFDIR:
            raise LinkLoopError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if present is not None:
            os.unlink(name, dir_fd=self._open[-1])
        self._create(name, kind)

    def _walk(self, path: str, make: int | None) -> str | None:  # noqa: C901 - as path_resolution(7)
        """Go where a path leads, and return that; the last folder on the way is the last that is open.

        Missing folders are made, and in the end what `make` says, S_IFDIR or S_IFREG; None makes nothing.
        """
        self._reset()
        ahead = path.split("/")[::-1]
        hops = 0
        while ahead:
            name = ahead.pop()
            if name == "..":
                self._leave()
            if name in ("", ".", ".."):
                continue

            inner = "/" + "/".join([*self._names, name])
            beyond = [part for part in reversed(ahead) if part not in ("", ".")]
            if inner in self._mounted:
                raise InMountError(inner, "/".join(beyond))

            bind = self._find_bind(inner)
            source = bind.source if bind is not None and bind.target == inner else None
            kind = self._stat_kind(name) if source is None else stat.S_IFMT(os.stat(source).st_mode)
            if kind is None:
                if make is None:
                    return None
                kind = stat.S_IFDIR if beyond else make
                self._create(name, kind)

            if kind == stat.S_IFLNK:
                hops += 1
                if hops > HOPS:
                    raise LinkLoopError(errno.ELOOP, os.strerror(errno.ELOOP), inner)
                target = os.readlink(name, dir_fd=self._open[-1])
                if target.startswith("/"):
                    self._reset()
                ahead += target.split("/")[::-1]
            elif kind == stat.S_IFDIR:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if source is None else 0)
                self._open.append(os.open(source or name, flags, dir_fd=self._open[-1]))
                self._names.append(name)
            elif beyond:
                raise LinkLoopError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), inner)
            else:
                return inner
        return "/" + "/".join(self._names)

    def _stat_kind(self, name: str) -> int | None:
        try:
            state = os.stat(name, dir_fd=self._open[-1], follow_symlinks=False)
        except FileNotFoundError:
            return None
        return stat.S_IFMT(state.st_mode)

    def _find_bind(self, path: str) -> Bind | None:
        """Return the bind in which a path without links is: a later one hides those that are below it."""
        return next(
            (bind for bind in reversed(self._binds) if f"{path}/".startswith(f"{bind.target}/")), None
        )

    def _create(self, name: str, kind: int) -> None:
        bind = self._find_bind("/" + "/".join(self._names))
        if bind is not None and bind.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        if kind == stat.S_IFDIR:
            os.mkdir(name, 0o755, dir_fd=self._open[-1])
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(name, flags, 0o644, dir_fd=self._open[-1]))

    def _leave(self) -> None:
        if self._names:
            self._names.pop()
            os.close(self._open.pop())

    def _reset(self) -> None:
        while self._names:
            self._leave()
