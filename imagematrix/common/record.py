"""Records: frozen, slotted, keyword-only dataclasses that load fast.

The rule: a class is a Record only if its module may be loaded by `imagematrix select` when it chooses from a
file or the engine (in common, hardware, images.catalog and selection), by `imagematrix run` (in launcher), or
by the runtime that gives GPUs to tasks of Swarm (in launcher.gpu_claims). Every other value class is a
dataclass. The reason is time: `dataclasses` loads `inspect` and compiles several functions for every class,
which for the types on the select path takes twice as long as starting Python does. A choice from a registry
loads it, and waits for the network anyway.

Records are written, type-checked and used like dataclasses, and the functions of `dataclasses` accept them.
Change a record with `record.replace`: `dataclasses.replace` compiles the fields anew on each call.
"""

from __future__ import annotations

from operator import attrgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import Field
    from inspect import Signature
    from typing import Any, ClassVar, Never, Self, TypeVar, dataclass_transform

    R = TypeVar("R", bound="Record")
else:

    def dataclass_transform(**_: bool) -> object:
        """Stand in for typing's, which is slow to load and matters to type checkers only."""
        return lambda cls: cls


def replace(record: R, /, **changes: object) -> R:
    """Return `record` with some fields changed."""
    setters = record._setters  # noqa: SLF001 - it is also the records' own `__replace__`
    if not changes.keys() <= setters.keys():
        return type(record)(**changes)  # which raises the precise error
    copy = object.__new__(type(record))
    for name, set_field in setters.items():
        set_field(copy, changes[name] if name in changes else getattr(record, name))
    return copy


def describe_fields(record: Any) -> dict[str, object]:
    """Return a record, or a dataclass with slots, as JSON: its fields by name.

    Tuples are lists, and sets are sorted ones. Records in it are described by their `to_json`.
    """
    return {name: _describe_value(getattr(record, name)) for name in record.__slots__}


def _describe_value(value: Any) -> object:
    if isinstance(value, tuple):
        return [_describe_value(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value.to_json() if hasattr(value, "to_json") else value


class _DataclassFields:
    """The fields of a record in the form that `dataclasses` expects."""

    def __init__(self, kinds: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._kinds = kinds
        self._defaults = defaults

    def __get__(self, _: object, owner: type) -> dict[str, Field[Any]]:
        from dataclasses import MISSING, field, fields, make_dataclass

        declared = [
            (name, kind, field(default=self._defaults.get(name, MISSING)))
            for name, kind in self._kinds.items()
        ]
        equivalent = make_dataclass(owner.__name__, declared, kw_only=True)
        return {declaration.name: declaration for declaration in fields(equivalent)}


class _Signature:
    """How a record is called, as `help` and `inspect.signature` show it."""

    def __init__(self, kinds: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._kinds = kinds
        self._defaults = defaults

    def __get__(self, _: object, owner: type) -> Signature:
        from inspect import Parameter, Signature

        keyword, required = Parameter.KEYWORD_ONLY, Parameter.empty
        return Signature(
            [
                Parameter(name, keyword, default=self._defaults.get(name, required), annotation=kind)
                for name, kind in self._kinds.items()
            ]
        )


def _make_getter(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    """Return a function that returns the values of fields."""
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda record: (get(record),)


def _compile_init(
    name: str, setters: Mapping[str, Callable[[object, object], None]], defaults: Mapping[str, Any]
) -> Callable[..., None]:
    """Return the `__init__` of the class with this name, with a parameter for each field."""
    parameters = [f"{field}=defaults[{field!r}]" if field in defaults else field for field in setters]
    header = f"def __init__(self, *, {', '.join(parameters)}):"
    names: dict[str, Any] = {f"set_{field}": set_field for field, set_field in setters.items()}
    names["defaults"] = defaults
    code = "\n ".join([header, *[f"set_{field}(self, {field})" for field in setters]])
    exec(code, names)  # noqa: S102 - of our own names
    init: Callable[..., None] = names["__init__"]
    init.__qualname__ = f"{name}.__init__"
    return init


class _Slots(type):
    """Makes slots of the annotations in a class body; values assigned there are defaults.

    A class of which there are `many` records has an `__init__` of its own, which takes half the time of the
    one that all share. Compiling it takes as long as making 300 records saves.
    """

    _setters: dict[str, Callable[[object, object], None]]

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], *, many: bool = False
    ) -> _Slots:
        kinds = body.get("__annotations__", {})
        defaults = {field: body.pop(field) for field in kinds if field in body}
        body["__slots__"] = kinds  # a mapping, of which `help` shows the values: the types
        if kinds:
            body["__signature__"] = _Signature(kinds, defaults)
            body["__dataclass_fields__"] = _DataclassFields(kinds, defaults)
            body["_defaults"] = defaults
            body["_values"] = property(_make_getter(tuple(kinds)))
        record_class = super().__new__(mcs, name, bases, body)
        if kinds:
            # `object.__setattr__` would look up the slot of each field again, for every record.
            record_class._setters = {field: getattr(record_class, field).__set__ for field in kinds}
        if many:
            record_class.__init__ = _compile_init(name, record_class._setters, defaults)  # type: ignore[misc]
        return record_class


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record(metaclass=_Slots):
    """Base of records. A subclass annotates its fields; further subclassing is not supported."""

    if TYPE_CHECKING:
        __slots__: Mapping[str, Any]
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
        _defaults: ClassVar[dict[str, Any]]
        _setters: ClassVar[dict[str, Callable[[object, object], None]]]
        _values: ClassVar[Any]

    def __init__(self, **arguments: object) -> None:
        values = arguments if len(arguments) == len(self._setters) else self._defaults | arguments
        if values.keys() != self._setters.keys():
            name, fields = type(self).__name__, ", ".join(self.__slots__)
            raise TypeError(f"{name} has the fields {fields}, got {', '.join(arguments) or 'none'}")
        for name, set_field in self._setters.items():
            set_field(self, values[name])

    def __setattr__(self, name: str, value: object) -> Never:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> Never:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__qualname__}({fields})"

    __replace__ = replace

    def __reduce__(self) -> tuple[Callable[[], Self], tuple[()]]:
        # Pickle passes no keywords to a class, and its fields are keywords.
        from functools import partial

        return partial(type(self), **{name: getattr(self, name) for name in self.__slots__}), ()
