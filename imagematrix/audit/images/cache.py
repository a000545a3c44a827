"""The user's cache of audited layers, shared by all commands.

Losing it costs only time. An entry is valid for one layer digest and for the version of the code that wrote
it. Entries that are damaged, or that another user could have written, are ignored. They are JSON, written and
read by the types of a Layer's fields, so that a new field needs no code here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import stat
import tempfile
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from imagematrix.audit.binaries.device_code import DeviceCode, Fatbins
from imagematrix.audit.binaries.driver_file import DriverLibrary
from imagematrix.audit.binaries.host_code import Carriers, HostCode
from imagematrix.audit.binaries.notes import Compat
from imagematrix.audit.binaries.objects import File
from imagematrix.audit.images.layer import Layer, PlainFile
from imagematrix.audit.packages.installed_package import Database, InstalledPackage
from imagematrix.common.files import make_private, require_private
from imagematrix.common.image_reference import DIGEST
from imagematrix.images.oci.tree import Folder, Hardlink, Symlink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

LIMIT = 256 << 20  # bytes of all entries; one of a large layer has some 100 kB
LARGEST = 64 << 20  # bytes of an entry before compression
# Code, tables and libraries that determine the result of an audit, and the bytes of layers that are noted.
ROOMS = ("audit", "hardware/vendors", "images/oci")
LIBRARIES = ("iced-x86",)
# Every class in a Layer, for resolving annotations.
CLASSES = (
    Carriers,
    Compat,
    Database,
    DeviceCode,
    DriverLibrary,
    Fatbins,
    File,
    Folder,
    Hardlink,
    HostCode,
    InstalledPackage,
    Layer,
    PlainFile,
    Symlink,
)
NAMES = {kind.__name__: kind for kind in CLASSES} | {"Mapping": Mapping}
SCALARS = (str, int, bool, float)

T = TypeVar("T")
Reader = Callable[[Any], Any]


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
            layer = load_value(Layer, json.loads(self._read_entry(self._name_entry(digest))))
            return layer if layer.digest == digest else None
        return None

    def put(self, layer: Layer) -> None:
        """Cache a layer. The caller has checked that its bytes match its digest."""
        raw = json.dumps(dump_value(layer), separators=(",", ":")).encode()
        if len(raw) > LARGEST:
            return
        with contextlib.suppress(OSError):
            self._write_entry(self._name_entry(layer.digest), zlib.compress(raw, 1))
            self._evict()

    def has_layer(self, digest: str) -> bool:
        """Whether the layer with a digest is cached."""
        with contextlib.suppress(OSError):
            return (
                bool(DIGEST.fullmatch(digest))
                and (self._require_folder() / self._name_entry(digest)).is_file()
            )
        return False

    def get_note(self, kind: type[T], name: str) -> T | None:
        """Return the value noted under a name; None if there is none, or one that is no `kind`.

        A note about a layer is valid only while the cache `has` the layer.
        """
        with contextlib.suppress(OSError, ValueError, RecursionError, zlib.error):
            return load_value(kind, json.loads(self._read_entry(_name_note(name))))
        return None

    def put_note(self, name: str, value: object) -> None:
        """Note a value, made of tuples and scalars, under any name."""
        with contextlib.suppress(OSError):
            self._write_entry(_name_note(name), zlib.compress(json.dumps(dump_value(value)).encode(), 1))

    def _require_folder(self) -> Path:
        """Return the folder; raise OSError if it does not exist, or if others can access it."""
        if self._folder is None:
            raise FileNotFoundError
        return require_private(self._folder)

    def _name_entry(self, digest: str) -> str:
        return f"{digest.removeprefix('sha256:')}.{self._code_version}"

    @cached_property
    def _code_version(self) -> str:
        """A digest of the code that reads layers, and of the versions of the libraries that it uses."""
        package = files("imagematrix")
        checksum = hashlib.sha256()
        for room in ROOMS:
            for path, raw in _list_code(package / room, room):
                checksum.update(f"{path} {len(raw)} ".encode() + raw)
        for library in LIBRARIES:
            with contextlib.suppress(PackageNotFoundError):  # the zipapp for nodes does not contain it
                checksum.update(f"{library} {version(library)} ".encode())
        return checksum.hexdigest()[:16]

    def _read_entry(self, name: str) -> bytes:
        descriptor = os.open(self._require_folder() / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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

    def _write_entry(self, name: str, raw: bytes) -> None:
        folder = self._require_folder() if self._folder is None else make_private(self._folder)
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
        files: list[tuple[os.stat_result, str]] = []
        with os.scandir(self._require_folder()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    files.append((entry.stat(follow_symlinks=False), entry.path))
        files.sort(key=lambda file: file[0].st_mtime_ns)

        total = sum(state.st_size for state, _ in files)
        for state, path in files:
            if total <= self._limit:
                break
            Path(path).unlink(missing_ok=True)
            total -= state.st_size


def _name_note(name: str) -> str:
    return f"{hashlib.sha256(name.encode()).hexdigest()}.note"


def _list_code(entry: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    if entry.is_dir():
        for inner in sorted(entry.iterdir(), key=lambda inner: inner.name):
            yield from _list_code(inner, f"{path}/{inner.name}")
    elif entry.is_file() and path.endswith((".py", ".json")):  # the zipapp for nodes has fewer files
        yield path, entry.read_bytes()


def dump_value(value: object) -> object:
    """Return a value that `json` can write: an object becomes {class: {field: value}}, without defaults.

    An object with only defaults, like most files of a layer, becomes the name of its class.
    """
    if is_dataclass(value):
        items = ((field, getattr(value, field.name)) for field in fields(value))
        # Equality is enough to recognize a default: equal values of these classes are interchangeable.
        values = {
            field.name: dump_value(item)
            for field, item in items
            if field.default is MISSING or item != field.default
        }
        return {type(value).__name__: values} if values else type(value).__name__
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: dump_value(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return [dump_value(item) for item in sorted(value)]
    if isinstance(value, tuple):
        return [dump_value(item) for item in value]
    return value


def load_value(kind: type[T], data: object) -> T:
    """Return the object that `dump_value` converted to `data`; raise ValueError if it is no `kind`."""
    value: T = _make_reader(kind)(data)  # type: ignore[arg-type]  # classes can be hashed
    return value


@cache
def _make_reader(kind: Any) -> Reader:
    """Return a function that reads a value of a type, or raises ValueError."""
    if kind in CLASSES:
        return _make_object_reader((kind,))
    if kind is bytes:
        return lambda data: base64.b64decode(_require_type(str, data), validate=True)
    if kind in SCALARS:
        return partial(_require_type, kind)
    return READERS[get_origin(kind)](*get_args(kind))


def _make_union_reader(*kinds: Any) -> Reader:
    classes = tuple(kind for kind in kinds if kind in CLASSES)
    readers = [_make_reader(kind) for kind in kinds if kind not in (*CLASSES, type(None))]
    if classes:
        readers.insert(0, _make_object_reader(classes))
    (read_value,) = readers  # JSON cannot distinguish more than one
    if type(None) not in kinds:
        return read_value
    return lambda data: None if data is None else read_value(data)


def _make_object_reader(classes: tuple[type, ...]) -> Reader:
    """Return a function that reads an object of one of several classes."""
    readers: dict[str, Reader] = {}

    def read_object(data: Any) -> Any:
        if type(data) is str:
            data = {data: {}}
        if type(data) is not dict or len(data) != 1:
            raise ValueError("not an object of a class")
        ((name, value),) = data.items()
        if name not in readers:  # created on first use, because a class may contain itself
            readers.update({kind.__name__: _make_fields_reader(kind) for kind in classes})
        if name not in readers:
            raise ValueError(f"no class {name}")
        return readers[name](value)

    return read_object


def _make_fields_reader(kind: Any) -> Reader:
    """Return a function that reads an object of a class from {field: value}."""
    hints = get_type_hints(kind, localns=NAMES)
    readers = {field.name: _make_reader(hints[field.name]) for field in fields(kind)}
    required = {field.name for field in fields(kind) if field.default is MISSING}
    # One object for all without any field, as most files of a layer are.
    shared = None if required else kind()

    def read_fields(data: Any) -> Any:
        if not data and shared is not None:
            return shared
        if type(data) is not dict or not required <= data.keys() <= readers.keys():
            raise ValueError(f"not the fields of {kind.__name__}")
        return kind(**{name: readers[name](item) for name, item in data.items()})

    return read_fields


def _make_mapping_reader(_: Any, kind: Any) -> Reader:
    read = _make_reader(kind)
    return lambda data: {name: read(item) for name, item in _require_type(dict, data).items()}


def _make_set_reader(kind: Any) -> Reader:
    read = _make_tuple_reader(kind, ...)
    return lambda data: frozenset(read(data))


def _make_tuple_reader(*kinds: Any) -> Reader:
    if kinds[1:] == (...,):
        read = _make_reader(kinds[0])
        return lambda data: tuple(map(read, _require_type(list, data)))
    readers = tuple(map(_make_reader, kinds))
    return lambda data: tuple(
        read(item) for read, item in zip(readers, _require_type(list, data), strict=True)
    )


def _require_type(kind: type, data: Any) -> Any:
    """Return `data` if it is of the class `kind`, and of no subclass; raise ValueError otherwise."""
    if type(data) is not kind:
        raise ValueError(f"not a {kind.__name__}")
    return data


# By the origin of a type, the function that makes its reader from the type's arguments.
READERS: Mapping[Any, Callable[..., Reader]] = {
    Union: _make_union_reader,
    types.UnionType: _make_union_reader,
    Mapping: _make_mapping_reader,
    frozenset: _make_set_reader,
    tuple: _make_tuple_reader,
}
