"""Results that several threads need and one computes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Generic, TypeVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Computes a result once for each key; concurrent callers wait for it.

    An error is raised in all waiting callers, and the next call tries again.
    """

    def __init__(self) -> None:
        self._results: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    def __call__(self, key: K, work: Callable[[], V]) -> V:
        """Return the result of the first caller's `work` for this key, or raise its error."""
        new: Future[V] = Future()
        with self._lock:
            shared = self._results.setdefault(key, new)
        if shared is new:
            try:
                new.set_result(work())
            except BaseException as error:
                # Before the waiting callers wake, so that one that tries again does not get this error.
                with self._lock:
                    del self._results[key]
                new.set_exception(error)
                raise
        return shared.result()
