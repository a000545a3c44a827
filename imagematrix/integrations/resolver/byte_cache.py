"""A cache whose contents have a limit in bytes; what was used longest ago is dropped first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENTRY = 1_024  # bytes that an entry takes besides its content


class ByteCache(Generic[K, V]):
    """Values by key, at most `limit` bytes as `measure` returns them. A larger value is not kept."""

    def __init__(self, limit: int, measure: Callable[[V], int]) -> None:
        self._limit, self._measure = limit, measure
        self._values: OrderedDict[K, V] = OrderedDict()
        self._total = 0

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return iter([*self._values.items()])

    def get(self, key: K) -> V | None:
        """Return the value of a key, which thereby is used, or None."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep a value in place of an earlier one."""
        self.drop(key)
        self._values[key] = value
        self._total += self._measure(value) + ENTRY
        while self._total > self._limit:
            self.drop(next(iter(self._values)))

    def drop(self, key: K) -> None:
        """Drop the value of a key, if there is one."""
        value = self._values.pop(key, None)
        if value is not None:
            self._total -= self._measure(value) + ENTRY
