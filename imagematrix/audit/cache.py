"""What was found in layers by earlier commands of this user, in the user's cache folder.

Losing it costs only time. An entry counts for the code that wrote it and for the bytes that have its digest;
one that is damaged, or that another user could have written, is as good as none.
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
# Whose code and tables decide what is found.
ROOMS = ("audit", "facts", "oci")
LIBRARIES = ("iced-x86",)


def place() -> Path | None:
    """Return the folder for it (XDG Base Directory Specification); None where there is no home."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "imagematrix" / "layers"


class Cache:
    """The layers in a folder, by digest. Threads and processes may share it; it raises nothing."""

    def __init__(self, folder: Path | None, limit: int = LIMIT) -> None:
        self._folder = folder
        self._limit = limit

    def get(self, digest: str) -> Layer | None:
        """Return the layer with a digest; None where it is not there."""
        with contextlib.suppress(OSError, ValueError, RecursionError, zlib.error):
            layer = findings.load(Layer, json.loads(self._read(self._name(digest))))
            return layer if layer.digest == digest else None
        return None

    def put(self, layer: Layer) -> None:
        """Keep a layer whose bytes were seen to have its digest."""
        raw = json.dumps(findings.dump(layer), separators=(",", ":")).encode()
        if len(raw) > LARGEST:
            return
        with contextlib.suppress(OSError):
            self._write(self._name(layer.digest), zlib.compress(raw, 1))
            self._evict()

    def _own(self) -> Path:
        """Return the folder; raise OSError where there is none, or others could write to it."""
        if self._folder is None:
            raise FileNotFoundError
        state = self._folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise PermissionError
        return self._folder

    def _made(self) -> Path:
        """Return the folder, which is made where it is not there; raise OSError."""
        if self._folder and not self._folder.exists():
            parent = next(one for one in self._folder.parents if one.exists())
            if parent.stat().st_uid != os.geteuid():  # under sudo it may be someone else's home
                raise PermissionError
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._own()

    def _name(self, digest: str) -> str:
        return f"{digest.removeprefix('sha256:')}.{self._rules}"

    @cached_property
    def _rules(self) -> str:
        """A digest of the code that examines layers, and of the versions of the libraries it uses."""
        package = files("imagematrix")
        checksum = hashlib.sha256()
        for room in ROOMS:
            for path, raw in _sources(package / room, room):
                checksum.update(f"{path} {len(raw)} ".encode() + raw)
        for library in LIBRARIES:
            with contextlib.suppress(PackageNotFoundError):  # as in the one file for nodes
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
                raise ValueError("cut short, or too large")
            os.utime(descriptor)  # what is used stays
        return raw

    def _write(self, name: str, raw: bytes) -> None:
        folder = self._made()
        descriptor, written = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(raw)
            Path(written).rename(folder / name)
        except BaseException:
            Path(written).unlink(missing_ok=True)
            raise

    def _evict(self) -> None:
        """Remove what was not used for longest, until the rest is within the limit."""
        with os.scandir(self._own()) as entries:
            kept = sorted(_states(entries), key=_age)
        total = sum(state.st_size for state, _ in kept)
        for state, path in kept:
            if total <= self._limit:
                break
            Path(path).unlink(missing_ok=True)
            total -= state.st_size


def _states(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[os.stat_result, str]]:
    """Yield state and path of those that no other process has removed in the meantime."""
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
