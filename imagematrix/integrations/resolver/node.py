"""The hosts that the resolver selects for: this node, probed again after a change, and classes of nodes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from imagematrix.common.files import read_stamp
from imagematrix.errors import EngineError, ImagematrixError, UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.probe import probe
from imagematrix.hardware.host.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from pathlib import Path

# NVIDIA's driver lists MIG devices here; a Host probed without NVML lacks them.
CAPABILITIES = "/proc/driver/nvidia/capabilities"
INTERVAL_S = 1.0  # the shortest time between two checks for a change


class HostSource(Protocol):
    """A node. `host` returns its current facts, or raises ProbeError or UsageError."""

    def host(self) -> Host:
        """Return the host. Thread-safe."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSources:
    """This node, and by name the nodes that represent classes. Their facts are read when they are needed."""

    here: HostSource
    classes: Mapping[str, HostSource]

    def host(self, node_class: str | None) -> Host:
        """Return the host of a class, or of this node; raise UsageError if there is no such class.

        Raises EngineError if the host cannot be read: a temporary error, not a verdict about an image.
        """
        node = self.here if node_class is None else self.classes.get(node_class)
        if node is not None:
            try:
                return node.host()
            except ImagematrixError as error:
                raise EngineError(f"the node cannot be read: {error}", remedy=error.remedy) from error
        names = ", ".join(sorted(self.classes)) or "none"
        remedy = f"classes of this resolver: {names}; `--class NAME=FILE` adds one"
        raise UsageError(f"class {node_class!r} not found", remedy=remedy)

    def read(self) -> HostSources:
        """Return the hosts as they are now, which other processes can use."""
        classes = {name: _read_host(node) for name, node in self.classes.items()}
        return HostSources(here=_read_host(self.here), classes=classes)


@dataclass(frozen=True, slots=True)
class _HostResult:
    """A host that was read, or why it could not be."""

    found: Host | ImagematrixError

    def host(self) -> Host:
        """Return the host; see HostSource."""
        if isinstance(self.found, ImagematrixError):
            raise self.found
        return self.found


def _read_host(node: HostSource) -> _HostResult:
    try:
        return _HostResult(node.host())
    except ImagematrixError as error:
        return _HostResult(error)


class SavedHost:
    """The host in a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._reloaded = _ReloadedHost(lambda: read_stamp(path), lambda: Host.load(path))

    def host(self) -> Host:
        """Return the host; see HostSource."""
        return self._reloaded.value()


class ProbedHost:
    """This machine. A probe with NVML is slow, so it is repeated only after /proc, /sys or /dev changed."""

    def __init__(self) -> None:
        self._reloaded = _ReloadedHost(_read_state_without_nvml, probe)

    def host(self) -> Host:
        """Return the host; see HostSource."""
        return self._reloaded.value()


class _ReloadedHost:
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
                # Before the host: what changes between the two is found at the next check.
                seen = self._state()
                if self._value is None or seen != self._seen:
                    self._value = self._read()
                    self._seen = seen
                self._checked = time.monotonic()
            return self._value


def _read_state_without_nvml() -> Hashable:
    tree = Tree("/")
    gpus = tree.list_names(CAPABILITIES)
    instances = tuple((gpu, tree.list_names(f"{CAPABILITIES}/{gpu}/mig")) for gpu in gpus)
    return probe(nvml=False), instances
