"""The hosts that the resolver selects for: this node, probed again after a change, and classes of nodes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from imagematrix.common.files import read_stamp
from imagematrix.errors import EngineError, ImagematrixError, UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.probe import probe_hardware
from imagematrix.hardware.host.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from pathlib import Path

# NVIDIA's driver lists MIG devices here; a Host probed without NVML lacks them.
CAPABILITIES = "/proc/driver/nvidia/capabilities"
INTERVAL_S = 1.0  # the shortest time between two checks for a change
RETRY_S, LONGEST_RETRY_S = 30.0, 600.0  # until an incomplete host is read again, first and at most


class HostSource(Protocol):
    """A node whose facts can be read."""

    def read_host(self) -> Host:
        """Return the current facts of the node, or raise ProbeError or UsageError. Thread-safe."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSources:
    """This node, and by name the nodes that represent classes. Their facts are read when they are needed."""

    this_node: HostSource
    classes: Mapping[str, HostSource]

    def get_host(self, node_class: str | None) -> Host:
        """Return the host of a class, or of this node; raise UsageError if there is no such class.

        Raises EngineError if the host cannot be read: a temporary error, not a verdict about an image.
        """
        node = self.this_node if node_class is None else self.classes.get(node_class)
        if node is not None:
            try:
                return node.read_host()
            except ImagematrixError as error:
                raise EngineError(f"the node cannot be read: {error}", remedy=error.remedy) from error
        names = ", ".join(sorted(self.classes)) or "none"
        remedy = f"classes of this resolver: {names}; `--class NAME=FILE` adds one"
        raise UsageError(f"class {node_class!r} not found", remedy=remedy)

    def read_all(self) -> HostSources:
        """Return the hosts as they are now, which other processes can use."""
        classes = {name: _read_host(node) for name, node in self.classes.items()}
        return HostSources(this_node=_read_host(self.this_node), classes=classes)


@dataclass(frozen=True, slots=True)
class _HostResult:
    """A host that was read, or why it could not be."""

    result: Host | ImagematrixError

    def read_host(self) -> Host:
        """Return the host; see HostSource."""
        if isinstance(self.result, ImagematrixError):
            raise self.result
        return self.result


def _read_host(node: HostSource) -> _HostResult:
    try:
        return _HostResult(node.read_host())
    except ImagematrixError as error:
        return _HostResult(error)


class ReloadedHost:
    """A host that is read again when its state changed, which is checked at most once in `INTERVAL_S`.

    `read_state` is cheap, and returns the same as long as `load_host` would return the same, unless the host
    `is_incomplete`: then it is also read again after a time, which doubles with each attempt.
    """

    def __init__(
        self,
        read_state: Callable[[], Hashable],
        load_host: Callable[[], Host],
        is_incomplete: Callable[[Host], bool] = lambda _: False,
    ) -> None:
        self._read_state = read_state
        self._load_host = load_host
        self._is_incomplete = is_incomplete
        self._lock = threading.Lock()
        self._state: Hashable = None
        self._host: Host | None = None
        self._checked = -INTERVAL_S
        self._loaded, self._retry_s = 0.0, RETRY_S

    @classmethod
    def from_file(cls, path: Path) -> ReloadedHost:
        """Return the host in a file."""
        return cls(lambda: read_stamp(path), lambda: Host.load(path))

    @classmethod
    def from_probe(cls) -> ReloadedHost:
        """Return this machine. A probe with NVML is slow: it follows a change in /proc, /sys or /dev."""
        return cls(_read_state_without_nvml, probe_hardware, _lacks_readings)

    def read_host(self) -> Host:
        """Return the host; see HostSource."""
        with self._lock:
            if self._host is None or time.monotonic() - self._checked >= INTERVAL_S:
                # Before the host: what changes between the two is found at the next check.
                state = self._read_state()
                is_changed = self._host is None or state != self._state
                if self._host is None or is_changed or self._is_due(self._host):
                    self._host = self._load_host()
                    self._retry_s = RETRY_S if is_changed else min(2 * self._retry_s, LONGEST_RETRY_S)
                    self._state, self._loaded = state, time.monotonic()
                self._checked = time.monotonic()
            return self._host

    def _is_due(self, host: Host) -> bool:
        return self._is_incomplete(host) and time.monotonic() - self._loaded >= self._retry_s


def _lacks_readings(host: Host) -> bool:
    """Whether NVML did not answer, or did not reach a GPU: nothing else shows when it does."""
    return any(gpu.memory_mib is None for gpu in host.gpus)


def _read_state_without_nvml() -> Hashable:
    tree = Tree("/")
    gpus = tree.list_names(CAPABILITIES)
    instances = tuple((gpu, tree.list_names(f"{CAPABILITIES}/{gpu}/mig")) for gpu in gpus)
    return probe_hardware(nvml=False), instances
