"""The hosts that the resolver selects for: this node, probed again after a change, and classes of nodes."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from imagematrix.files import stamp
from imagematrix.node.host import Host
from imagematrix.node.probe import probe
from imagematrix.node.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path

__all__ = ["Node", "Probed", "Saved"]

# NVIDIA's driver lists MIG devices here; a Host probed without NVML lacks them.
CAPABILITIES = "/proc/driver/nvidia/capabilities"
INTERVAL_S = 1.0  # the shortest time between two checks for a change


class Node(Protocol):
    """A node. `host` returns its current facts, or raises ProbeError or UsageError."""

    def host(self) -> Host:
        """Return the host. Thread-safe."""
        ...


class Saved:
    """The host in a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._reloaded = _Reloaded(lambda: stamp(path), lambda: Host.load(path))

    def host(self) -> Host:
        """Return the host; see Node."""
        return self._reloaded.value()


class Probed:
    """This machine. A probe with NVML is slow, so it is repeated only after /proc, /sys or /dev changed."""

    def __init__(self) -> None:
        self._reloaded = _Reloaded(_state_without_nvml, probe)

    def host(self) -> Host:
        """Return the host; see Node."""
        return self._reloaded.value()


class _Reloaded:
    """A host that is read again after `state` changed, which is checked at most once in `INTERVAL_S`."""

    def __init__(self, state: Callable[[], Hashable], read: Callable[[], Host]) -> None:
        self._state = state
        self._read = read
        self._lock = threading.Lock()
        self._seen: Hashable = None
        self._value: Host | None = None
        self._checked = -INTERVAL_S

    def value(self) -> Host:
        with self._lock:
            if self._value is None or time.monotonic() - self._checked >= INTERVAL_S:
                seen = self._state()
                if self._value is None or seen != self._seen:
                    self._value = self._read()
                    self._seen = seen
                self._checked = time.monotonic()
            return self._value


def _state_without_nvml() -> Hashable:
    tree = Tree("/")
    gpus = tree.names(CAPABILITIES)
    instances = tuple((gpu, tree.names(f"{CAPABILITIES}/{gpu}/mig")) for gpu in gpus)
    return probe(nvml=False), instances
