"""The user's cache of audited layers, shared by all commands.

Losing it costs only time. An entry is valid for one layer digest and for the version of the code that wrote
it. Entries that are damaged, or that another user could have written, are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import zlib
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from imagematrix.audit import findings
from imagematrix.audit.layer import Layer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.resources.abc import Traversable

__all__ = ["Cache", "place"]

LIMIT = 256 << 20  # bytes of all entries; one of a large layer has some 100 kB
LARGEST = 64 << 20  # bytes of an entry before compression
# Packages and libraries whose code and tables determine the result of an audit.
ROOMS = ("audit", "facts", "oci")
LIBRARIES = ("iced-x86",)


def place() -> Path | None:
    """Return the cache folder (XDG Base Directory Specification), or None if there is no home folder."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "imagematrix" / "layers"


class Cache:
    """The layers in a folder, by digest.

    Threads and processes may share it. A cache that cannot be read or written raises nothing: it stays empty.
    """

    def __init__(self, folder: Path | None, limit: int = LIMIT) -> None:
        self._folder = folder
        self._limit = limit

    def get(self, digest: str) -> Layer | None:
        """Return the layer with a digest, or None if it is not cached."""
        with contextlib.suppress(OSError, ValueError, RecursionError, zlib.error):
            layer = findings.load(Layer, json.loads(self._read(self._name(digest))))
            return layer if layer.digest == digest else None
        return None

    def put(self, layer: Layer) -> None:
        """Cache a layer. The caller has checked that its bytes match its digest."""
        raw = json.dumps(findings.dump(layer), separators=(",", ":")).encode()
        if len(raw) > LARGEST:
            return
        with contextlib.suppress(OSError):
            self._write(self._name(layer.digest), zlib.compress(raw, 1))
            self._evict()

    def _own(self) -> Path:
        """Return the folder; raise OSError if it does not exist, or if others can access it."""
        if self._folder is None:
            raise FileNotFoundError
        state = self._folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise PermissionError
        return self._folder

    def _created(self) -> Path:
        """Return the folder, creating it if needed; raise OSError."""
        if self._folder and not self._folder.exists():
            parent = next(one for one in self._folder.parents if one.exists())
            if parent.stat().st_uid != os.geteuid():  # under sudo, HOME may belong to another user
                raise PermissionError
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._own()

    def _name(self, digest: str) -> str:
        return f"{digest.removeprefix('sha256:')}.{self._rules}"

    @cached_property
    def _rules(self) -> str:
        """A digest of the code that reads layers, and of the versions of the libraries that it uses."""
        package = files("imagematrix")
        checksum = hashlib.sha256()
        for room in ROOMS:
            for path, raw in _sources(package / room, room):
                checksum.update(f"{path} {len(raw)} ".encode() + raw)
        for library in LIBRARIES:
            with contextlib.suppress(PackageNotFoundError):  # the zipapp for nodes does not contain it
                checksum.update(f"{library} {version(library)} ".encode())
        return checksum.hexdigest()[:16]

    def _read(self, name: str) -> bytes:
        descriptor = os.open(self._own() / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_size > LARGEST:
                raise PermissionError
            unpacked = zlib.decompressobj()
            raw = unpacked.decompress(file.read(), LARGEST)
            if not unpacked.eof:
                raise ValueError("truncated, or too large")
            os.utime(descriptor)  # mark it as recently used, for `_evict`
        return raw

    def _write(self, name: str, raw: bytes) -> None:
        folder = self._created()
        descriptor, written = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
            Path(written).rename(folder / name)
        except BaseException:
            Path(written).unlink(missing_ok=True)
            raise

    def _evict(self) -> None:
        """Remove the least recently used entries until the rest is within the limit."""
        with os.scandir(self._own()) as entries:
            kept = sorted(_states(entries), key=_age)
        total = sum(state.st_size for state, _ in kept)
        for state, path in kept:
            if total <= self._limit:
                break
            Path(path).unlink(missing_ok=True)
            total -= state.st_size


def _states(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[os.stat_result, str]]:
    """Yield the state and the path of each entry, except those that another process has just removed."""
    for one in entries:
        with contextlib.suppress(FileNotFoundError):
            yield one.stat(follow_symlinks=False), one.path


def _age(one: tuple[os.stat_result, str]) -> int:
    return one[0].st_mtime_ns


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for one in sorted(folder.iterdir(), key=lambda one: one.name):
        if one.is_file() and one.name.endswith((".py", ".json")):
            yield f"{path}/{one.name}", one.read_bytes()
        elif one.is_dir():
            yield from _sources(one, f"{path}/{one.name}")
