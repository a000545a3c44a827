"""The files of a host: under `/`, or a captured copy of some of them in another folder."""
# pathlib costs more to import than a whole probe takes.
# ruff: noqa: PTH112, PTH115, PTH116, PTH208

from __future__ import annotations

import errno
import os
import stat

from imagematrix.errors import ProbeError

LIMIT = 1024 * 1024  # bytes; the files read here have a few kB, except /proc/cpuinfo
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
CHUNK = 64 * 1024
LINKS = 40  # in one path, as in Linux (MAXSYMLINKS)


class Tree:
    """Reads files below one root: with a size limit, without blocking, and without errors for single files.

    Paths are those of the host ("/proc/cpuinfo"), whatever the root. A missing file is None, false or empty.
    So is an unreadable file, which adds a sentence to `warnings`. `live` is true for `/`. Links in a captured
    tree are followed as on the host, with the tree's root as `/`, so that none leads to another host's files.
    """

    __slots__ = ("_root", "live", "warnings")

    def __init__(self, root: str) -> None:
        try:
            real = os.path.realpath(root)
            is_folder = os.path.isdir(real)
        except ValueError:  # a NUL in the name
            real, is_folder = root, False
        if not is_folder:
            raise ProbeError(
                f"not a folder: {root!r}",
                remedy="pass the folder with the captured folders proc, sys and dev",
            )
        self.live = real == "/"
        self._root = "" if self.live else real
        self.warnings: list[str] = []

    def read_text(self, path: str, *, limit: int = LIMIT) -> str | None:
        """Return the text of a file, at most its first `limit` bytes; invalid UTF-8 is replaced."""
        raw = self.read_bytes(path, limit=limit)
        return None if raw is None else raw.decode("utf-8", "replace")

    def read_bytes(self, path: str, *, limit: int = LIMIT) -> bytes | None:
        """Return the bytes of a file, at most its first `limit`."""
        try:
            raw = self._read_file(path, limit)
        except OSError as error:
            self._warn(path, error)
            return None
        if len(raw) > limit:
            self.warnings.append(f"{path} is larger than {limit // 1024} KiB; the rest was ignored")
        return raw[:limit]

    def list_names(self, path: str) -> list[str]:
        """Return the names in a folder, sorted."""
        try:
            return sorted(os.listdir(self._locate(path)))
        except OSError as error:
            self._warn(path, error)
            return []

    def open_folder(self, path: str) -> Tree | None:
        """Return a folder as a tree of its own, None if it does not exist."""
        try:
            return Tree(self._locate(path))
        except (OSError, ProbeError):
            return None

    def resolve_file(self, path: str) -> str | None:
        """Return where the regular file `path` is after all links, as a path of this machine, or None."""
        try:
            real = os.path.realpath(path) if self.live else self._locate(path)
            return real if stat.S_ISREG(os.stat(real).st_mode) else None
        except (OSError, ValueError):
            return None

    def read_link(self, path: str) -> str | None:
        """Return the last component of a symbolic link's target, None if it is not a link."""
        folder, _, name = path.rpartition("/")
        try:
            target = os.readlink(f"{self._locate(folder)}/{name}")
        except OSError:  # missing, or not a link: not worth a warning
            return None
        # A name that is no UTF-8 could not be printed.
        return os.fsencode(target.rpartition("/")[2]).decode("utf-8", "replace") or None

    def has_folder(self, path: str) -> bool:
        """Whether the folder exists."""
        mode = self._get_mode(path)
        return mode is not None and stat.S_ISDIR(mode)

    def has_node(self, path: str) -> bool:
        """Whether a character device exists; a captured tree may have a regular file in its place."""
        mode = self._get_mode(path)
        return mode is not None and (stat.S_ISCHR(mode) or (not self.live and stat.S_ISREG(mode)))

    def get_refusal(self, path: str) -> int:
        """Return the error number with which access to a device of the running host fails, or 0."""
        if not self.live:
            return 0
        from imagematrix.hardware.host import device

        try:
            device.require_device(path)
        except OSError as error:
            return error.errno or 0
        return 0

    def _get_mode(self, path: str) -> int | None:
        try:
            return os.stat(self._locate(path)).st_mode
        except OSError:
            return None

    def _read_file(self, path: str, limit: int) -> bytes:
        """Return the bytes of a file, of more than `limit` at least one more; raise OSError."""
        real = self._locate(path)
        # Opening a device or a pipe can have effects or block forever, so check first.
        if not stat.S_ISREG(os.stat(real).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            chunks = []
            remaining = limit + 1
            # Files in /proc have no size, and one read may return a part of them.
            while remaining > 0 and (chunk := os.read(descriptor, min(remaining, CHUNK))):
                chunks.append(chunk)
                remaining -= len(chunk)
        finally:
            os.close(descriptor)
        return b"".join(chunks)

    def _locate(self, path: str) -> str:
        if self.live:
            return path
        real, links = self._root, 0
        pending = path.split("/")[::-1]
        while pending:
            name = pending.pop()
            if name == "..":
                real = real.rpartition("/")[0] if real != self._root else real
            if name in {"", ".", ".."}:
                continue
            try:
                target = os.readlink(f"{real}/{name}")
            except OSError:  # no link
                real = f"{real}/{name}"
                continue
            links += 1
            if links > LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            real = self._root if target.startswith("/") else real
            pending += target.split("/")[::-1]
        return real

    def _warn(self, path: str, error: OSError) -> None:
        if error.errno not in ABSENT:
            self.warnings.append(f"could not read {path}: {error.strerror}")
