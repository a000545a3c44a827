"""Reading untrusted JSON documents: bounded, typed, and with precise errors."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from functools import lru_cache

from imagematrix.errors import COMMAND, CONTROL, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any, Never, TypeVar

    T = TypeVar("T")

LARGEST = 1e300  # sums and means of numbers up to this stay finite
DIGITS = 9  # enough for every number that people write; Python refuses to convert thousands of digits
LIMIT = 64 * 1024 * 1024  # bytes; a catalog of 10,000 variants is about 10 MB


def read_json(path: str | Path, *, limit: int = LIMIT) -> object:
    """Return the JSON value in `path`; raise UsageError if it cannot be read or is not JSON."""
    try:
        with open(os.fspath(path), "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            raw = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (TypeError, ValueError) as error:  # not a path, or one with a null character
        raise UsageError(f"{path!r:.80} is not the path of a file") from error
    if len(raw) > limit:
        raise UsageError(f"{path}: exceeds {limit // 2**20} MiB, too large for a document of this kind")
    return parse_json(raw, str(path))


def parse_json(raw: bytes | str, where: str) -> object:
    """Return the JSON value in `raw`; `where` names the source in messages.

    An object with a key twice is refused: programs differ in which of the two values they take.
    """
    try:
        return json.loads(raw, object_pairs_hook=_make_object)
    except RecursionError as error:
        raise UsageError(f"{where}: nested too deeply") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except ValueError as error:  # a duplicate key, or an integer with more digits than Python converts
        raise UsageError(f"{where}: {error}") from error


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"duplicate key {next(key for key in counts if counts[key] > 1)!r:.80}")
    return result


def parse_natural(text: str) -> int | None:
    """Return the value of decimal digits, None if `text` is anything else or very long."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else None


def dump_json(value: object) -> str:
    """Return `value` as the JSON text that commands print: indented, stable, one final newline."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # JSON escapes the first 32 characters; terminals act on others too, and CI systems on words.
    is_harmless = text.isascii() and "\x7f" not in text and "##" not in text
    if not is_harmless:
        text = re.sub(f"{CONTROL}|{COMMAND}", lambda match: f"\\u{ord(match[0]):04x}", text)
    return text + "\n"


class Fields:
    """One JSON object, read field by field; errors name the path, the expected and the actual type."""

    __slots__ = ("_data", "_where")

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise UsageError(f"{where}: expected an object, found {_describe_kind(data)}")
        self._data = data
        self._where = where

    @property
    def data(self) -> dict[str, Any]:
        """The object itself."""
        return self._data

    def require_schema(self, expected: str) -> None:
        """Check the document's `schema`; the error distinguishes another version from another kind."""
        schema = self.get_text("schema")
        if schema == expected:
            return
        kind = expected.rpartition("/")[0]
        if schema.startswith(f"{kind}/v"):
            raise UsageError(
                f"{self._where}: unsupported schema {schema!r} (this release reads {expected!r})",
                remedy="use the imagematrix release that wrote it, or a newer one",
            )
        raise UsageError(f"{self._where}: schema is {schema!r}, expected {expected!r}")

    def has(self, key: str) -> bool:
        """Whether the field exists and is not null."""
        return self._data.get(key) is not None

    def get_text_map(self, key: str) -> dict[str, str]:
        """Return the strings in an object by name; none if the object is absent."""
        inner = self.get_object_or_empty(key)
        return {name: text for name, text in inner.data.items() if type(text) is str}

    def get_text(self, key: str) -> str:
        """Return a required string."""
        value = self._data.get(key)
        return value if isinstance(value, str) else self._refuse(key, "a string")

    def get_text_or_none(self, key: str) -> str | None:
        """Return a string, or None if it is null or absent."""
        value = self._data.get(key)
        return value if value is None or isinstance(value, str) else self._refuse(key, "a string")

    def get_matching(self, key: str, pattern: re.Pattern[str], what: str) -> str:
        """Return a required string that matches `pattern` whole; the error says that it is not `what`."""
        value = self.get_text(key)
        if not pattern.fullmatch(value):
            raise self.fail(key, f"{value[:80]!r} is not {what}")
        return value

    def get_matching_or_none(self, key: str, pattern: re.Pattern[str], what: str) -> str | None:
        """Return such a string, or None if it is null or absent."""
        return self.get_matching(key, pattern, what) if self.has(key) else None

    def get_integer(self, key: str) -> int:
        """Return a required integer."""
        value = self._data.get(key)
        # By its type, because a bool is an int to isinstance.
        return value if type(value) is int else self._refuse(key, "an integer")

    def get_integer_or_none(self, key: str) -> int | None:
        """Return an integer, or None if it is null or absent."""
        return self.get_integer(key) if self.has(key) else None

    def get_number_or_none(self, key: str) -> float | None:
        """Return a finite, non-negative number, or None if it is null or absent."""
        if not self.has(key):
            return None
        value = self._data[key]
        if type(value) not in (int, float) or not 0 <= value <= LARGEST:  # false for NaN too
            return self._refuse(key, "a finite, non-negative number")
        return float(value)

    def get_boolean(self, key: str) -> bool:
        """Return a boolean; false if it is absent."""
        value = self._data.get(key, False)
        return value if isinstance(value, bool) else self._refuse(key, "true or false")

    def get_texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if it is absent."""
        return tuple(self._list_elements(key, str, "a string"))

    def get_words(self, key: str) -> frozenset[str]:
        """Return the words in a list of strings; empty if it is absent. Equal lists share one set."""
        try:
            return _split_words(" ".join(self._get_list(key)))
        except TypeError:
            return frozenset(self.get_texts(key))  # which raises the precise error

    def get_integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers; empty if it is absent."""
        return tuple(self._list_elements(key, int, "an integer"))

    def list_objects(self, key: str) -> Iterator[Fields]:
        """Yield each object of a list; none if it is absent."""
        for position, item in enumerate(self._list_elements(key, dict, "an object")):
            yield Fields(item, f"{self._where}: {key}[{position}]")

    def get_object_or_none(self, key: str) -> Fields | None:
        """Return the object under `key`, or None if it is null or absent."""
        return Fields(self._data[key], f"{self._where}: {key}") if self.has(key) else None

    def get_object_or_empty(self, key: str) -> Fields:
        """Return the object under `key`, one without fields if it is null or absent."""
        return self.get_object_or_none(key) or Fields({}, f"{self._where}: {key}")

    def read_cached(self, key: str, read: Callable[[Fields, str], T], cache: dict[str, Any]) -> T:
        """Return the result of `read` for a field; `cache` shares it among objects with an equal field."""
        try:
            token = f"{key} {self._data.get(key, ...)!r}"
        except RecursionError as error:
            raise self.fail(key, "is nested too deeply") from error
        if token not in cache:
            cache[token] = read(self, key)
        result: T = cache[token]
        return result

    def fail(self, key: str, message: str) -> UsageError:
        """Return the error for a field's value."""
        return UsageError(f"{self._where}: {key}: {message}")

    def _get_list(self, key: str) -> list[Any]:
        value = self._data.get(key, [])
        return value if isinstance(value, list) else self._refuse(key, "a list")

    def _list_elements(self, key: str, kind: type, name: str) -> list[Any]:
        items = self._get_list(key)
        if {*map(type, items)} <= {kind}:
            return items
        for position, item in enumerate(items):
            if type(item) is not kind:
                raise UsageError(
                    f"{self._where}: {key}[{position}]: expected {name}, found {_describe_kind(item)}"
                )
        return items

    def _refuse(self, key: str, name: str) -> Never:
        if key not in self._data:
            raise UsageError(f"{self._where}: {key} is missing (expected {name})")
        raise UsageError(f"{self._where}: {key}: expected {name}, found {_describe_kind(self._data[key])}")


@lru_cache(maxsize=1024)
def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _describe_kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
