"""The hosts that the resolver decides for: this node, probed anew when it changes, and classes of nodes."""

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

# What NVIDIA's driver shows of MIG devices; a Host without NVML's readings lacks them.
CAPABILITIES = "/proc/driver/nvidia/capabilities"
RARELY_S = 1.0  # how often a change is looked for, at most


class Node(Protocol):
    """A node: `host` returns its facts now, and raises ProbeError or UsageError if they cannot be read."""

    def host(self) -> Host:
        """Return the host; threads may share this."""
        ...


class Saved:
    """The host in a file, read anew when the file changes."""

    def __init__(self, path: Path) -> None:
        self._read = _Changing(lambda: stamp(path), lambda: Host.load(path))

    def host(self) -> Host:
        """Return the host; see Node."""
        return self._read.value()


class Probed:
    """This machine. A probe with NVML takes long, so one is made only after /proc, /sys or /dev changed."""

    def __init__(self) -> None:
        self._read = _Changing(_signs, probe)

    def host(self) -> Host:
        """Return the host; see Node."""
        return self._read.value()


class _Changing:
    """A value that is read again after `state` changed, which is looked at from time to time."""

    def __init__(self, state: Callable[[], Hashable], read: Callable[[], Host]) -> None:
        self._state = state
        self._read = read
        self._lock = threading.Lock()
        self._seen: Hashable = None
        self._value: Host | None = None
        self._looked = -RARELY_S

    def value(self) -> Host:
        with self._lock:
            if self._value is None or time.monotonic() - self._looked >= RARELY_S:
                seen = self._state()
                if self._value is None or seen != self._seen:
                    self._value = self._read()
                    self._seen = seen
                self._looked = time.monotonic()
            return self._value


def _signs() -> Hashable:
    tree = Tree("/")
    gpus = tree.names(CAPABILITIES)
    instances = tuple((gpu, tree.names(f"{CAPABILITIES}/{gpu}/mig")) for gpu in gpus)
    return probe(nvml=False), instances
