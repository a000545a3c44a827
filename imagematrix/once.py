"""What several threads want and one works out."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Generic, TypeVar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["Once"]

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")


class Once(Generic[K, V]):
    """What is worked out once for each key; who asks meanwhile waits.

    An error is raised to all who wait for it, and the next who asks has it tried again.
    """

    def __init__(self) -> None:
        self._known: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    def __call__(self, key: K, work: Callable[[], V]) -> V:
        """Return what the `work` of whoever came first with this key returns, or raise what it raises."""
        own: Future[V] = Future()
        with self._lock:
            known = self._known.setdefault(key, own)
        if known is own:
            try:
                own.set_result(work())
            except BaseException as error:
                with self._lock:
                    del self._known[key]
                own.set_exception(error)
                raise
        return known.result()
