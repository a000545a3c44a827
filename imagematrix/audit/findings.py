"""Converting a Layer to JSON and back, driven by the types of its fields, so new fields need no code here."""

from __future__ import annotations

import base64
import binascii
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from imagematrix.audit.device_code import DeviceCode
from imagematrix.audit.driver_file import Driver
from imagematrix.audit.host_code import Carriers, HostCode
from imagematrix.audit.layer import Folder, Hardlink, Layer, Plain, Symlink
from imagematrix.audit.notes import Compat
from imagematrix.audit.objects import File

__all__ = ["dump", "load"]

# Every class in a Layer, for resolving annotations.
CLASSES = (Carriers, Compat, DeviceCode, Driver, File, Folder, Hardlink, HostCode, Layer, Plain, Symlink)
NAMES = {one.__name__: one for one in CLASSES} | {"Mapping": Mapping}
SCALARS = (str, int, bool, float)

T = TypeVar("T")
Read = Callable[[Any], Any]


def dump(value: object) -> object:
    """Return a value that `json` can write: an object becomes {class: {field: value}}, without defaults.

    An object with only defaults, like most files of a layer, becomes the name of its class.
    """
    if is_dataclass(value):
        own = ((field, getattr(value, field.name)) for field in fields(value))
        # Equality is enough to recognize a default: equal values of these classes are interchangeable.
        values = {
            field.name: dump(one) for field, one in own if field.default is MISSING or one != field.default
        }
        return {type(value).__name__: values} if values else type(value).__name__
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: dump(one) for key, one in value.items()}
    if isinstance(value, frozenset):
        return [dump(one) for one in sorted(value)]
    if isinstance(value, tuple):
        return [dump(one) for one in value]
    return value


def load(kind: type[T], data: object) -> T:
    """Return the object that `dump` converted to `data`; raise ValueError if it is no `kind`."""
    value: T = _reader(kind)(data)  # type: ignore[arg-type]  # classes can be hashed
    return value


@cache
def _reader(kind: Any) -> Read:
    """Return a function that reads a value of a type, or raises ValueError."""
    if kind in CLASSES:
        return _tagged((kind,))
    if kind is bytes:
        return _bytes
    if kind in SCALARS:
        return _scalar(kind)
    return READERS[get_origin(kind)](*get_args(kind))


def _union(*kinds: Any) -> Read:
    classes = tuple(one for one in kinds if one in CLASSES)
    others = [_reader(one) for one in kinds if one not in (*CLASSES, type(None))]
    (read,) = [_tagged(classes), *others] if classes else others  # JSON cannot distinguish more than one
    if type(None) not in kinds:
        return read
    return lambda data: None if data is None else read(data)


def _tagged(classes: tuple[type, ...]) -> Read:
    """Return a function that reads an object of one of several classes."""
    readers: dict[str, Read] = {}

    def read(data: Any) -> Any:
        if type(data) is str:
            data = {data: {}}
        if type(data) is not dict or len(data) != 1:
            raise ValueError("not an object of a class")
        ((name, value),) = data.items()
        if name not in readers:  # created on first use, because a class may contain itself
            readers.update({one.__name__: _object(one) for one in classes})
        if name not in readers:
            raise ValueError(f"no class {name}")
        return readers[name](value)

    return read


def _object(kind: Any) -> Read:
    hints = get_type_hints(kind, localns=NAMES)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}
    required = {field.name for field in fields(kind) if field.default is MISSING}
    shared = None if required else kind()

    def read(data: Any) -> Any:
        if not data and shared is not None:
            return shared
        if type(data) is not dict or not required <= data.keys() <= readers.keys():
            raise ValueError(f"not the fields of {kind.__name__}")
        return kind(**{name: readers[name](one) for name, one in data.items()})

    return read


def _mapping(_: Any, kind: Any) -> Read:
    read = _reader(kind)

    def each(data: Any) -> Any:
        if type(data) is not dict:
            raise ValueError("not a mapping")
        return {name: read(one) for name, one in data.items()}

    return each


def _set(kind: Any) -> Read:
    read = _tuple(kind, ...)
    return lambda data: frozenset(read(data))


def _tuple(*kinds: Any) -> Read:
    if kinds[1:] != (...,):
        return _row(tuple(map(_reader, kinds)))
    read = _reader(kinds[0])

    def each(data: Any) -> Any:
        if type(data) is not list:
            raise ValueError("not a list")
        return tuple(map(read, data))

    return each


def _row(readers: tuple[Read, ...]) -> Read:
    def each(data: Any) -> Any:
        if type(data) is not list or len(data) != len(readers):
            raise ValueError(f"not a list of {len(readers)}")
        return tuple(read(one) for read, one in zip(readers, data, strict=True))

    return each


def _scalar(kind: type) -> Read:
    def same(data: Any) -> Any:
        if type(data) is not kind:
            raise ValueError(f"not a {kind.__name__}")
        return data

    return same


def _bytes(data: Any) -> bytes:
    if type(data) is not str:
        raise ValueError("not bytes")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


# By the origin of a type, the function that makes its reader from the type's arguments.
READERS: Mapping[Any, Callable[..., Read]] = {
    Union: _union,
    types.UnionType: _union,
    Mapping: _mapping,
    frozenset: _set,
    tuple: _tuple,
}
