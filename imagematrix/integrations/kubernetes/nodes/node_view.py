"""How a process sees the node whose GPUs it gives out: as one on the node, from a container, or saved."""

from __future__ import annotations

from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.probe import probe
from imagematrix.launcher.docker import devices
from imagematrix.launcher.gpu_claims import pods
from imagematrix.launcher.gpu_claims.survey import (
    survey_node_leases,
    survey_open_outside_pods,
    survey_outside_pods,
)
from imagematrix.launcher.gpu_claims.usage import merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.launcher.gpu_claims.usage import Usage


class NodeView:
    """The view that a process on the node has. All methods raise ImagematrixError."""

    def probe(self) -> Host:
        """Read the node."""
        return probe("/")

    def survey_usage(self, gpus: tuple[Gpu, ...]) -> Usage:
        """Return the usage of GPUs outside of pods."""
        return survey_outside_pods(gpus)

    def survey_plugin_usage(self, gpus: tuple[Gpu, ...]) -> Usage:
        """Return the usage of GPUs by pods that got them from a device plugin."""
        return pods.compute_pod_usage(gpus)

    def require_nodes(self, paths: tuple[str, ...]) -> None:
        """Raise if one of some device nodes cannot be passed to a container."""
        devices.require_device_nodes(paths)


class ContainerView(NodeView):
    """The view of a container that has the node's /proc and /dev under a root.

    With `has_locks` it has the node's lock folder, too.
    """

    def __init__(self, root: Path, *, has_locks: bool = False) -> None:
        self._root = root
        self._has_locks = has_locks

    def probe(self) -> Host:
        """Read the node under the root."""
        return probe(self._root)

    def survey_usage(self, gpus: tuple[Gpu, ...]) -> Usage:
        """Return the usage by open device nodes, and by leases if the lock folder is there."""
        leased = survey_node_leases() if self._has_locks else {}
        return merge_usages(leased, survey_open_outside_pods(gpus, str(self._root)))

    def survey_plugin_usage(self, _: tuple[Gpu, ...]) -> Usage:
        """Return nothing: kubelet's list is not known here."""
        return {}

    def require_nodes(self, paths: tuple[str, ...]) -> None:
        """Raise DevicesError if a device node does not exist; a container may not open it."""
        missing = devices.find_absent_nodes(
            path for path in paths if not (self._root / path.removeprefix("/")).exists()
        )
        if missing:
            raise devices.DevicesError(missing)


class SavedHostView(NodeView):
    """The view of a saved host, which may be another node: nothing uses its GPUs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def probe(self) -> Host:
        """Read the saved host."""
        return Host.load(self._path)

    def survey_usage(self, _: tuple[Gpu, ...]) -> Usage:
        """Return nothing."""
        return {}

    def survey_plugin_usage(self, _: tuple[Gpu, ...]) -> Usage:
        """Return nothing."""
        return {}

    def require_nodes(self, _: tuple[str, ...]) -> None:
        """Accept all."""


def open_node_view(host: Path | None, root: Path | None, *, has_locks: bool = False) -> NodeView:
    """Return the view of a saved host, of a container with a root, or of a process on the node."""
    if host:
        return SavedHostView(host)
    return ContainerView(root, has_locks=has_locks) if root else NodeView()
