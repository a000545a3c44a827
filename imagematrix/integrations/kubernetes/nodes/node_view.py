"""How a process sees the node whose GPUs it gives out: as one on the node, from a container, or saved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.probe import probe
from imagematrix.launcher.docker import devices
from imagematrix.launcher.gpu_claims import pods, survey
from imagematrix.launcher.gpu_claims.gpu_claim import lock_gpus
from imagematrix.launcher.gpu_claims.usage import merge_usages
from imagematrix.launcher.kubelet import sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.launcher.gpu_claims.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Functions that read a node, and raise ImagematrixError.

    `survey_usage` returns the usage of GPUs outside of pods, and `survey_plugin_usage` that by pods that got
    them from a device plugin. `require_nodes` raises if one of some device nodes cannot be passed to a
    container. `lock_gpus` locks GPUs as that of `imagematrix.launcher.gpu_claims.gpu_claim` does.
    """

    probe: Callable[[], Host]
    survey_usage: Callable[[tuple[Gpu, ...]], Usage]
    survey_plugin_usage: Callable[[tuple[Gpu, ...]], Usage] = lambda _: {}
    require_nodes: Callable[[tuple[str, ...]], object] = lambda _: None
    lock_gpus: Callable[[tuple[Gpu, ...], float], tuple[int, ...]] = lambda *_: ()


def open_node_view(host: Path | None, root: Path | None, kubelet: Path | None = None) -> NodeView:
    """Return the view of a saved host, of a container with a root, or of a process on the node.

    The container has the node's /proc and /dev under the root. The node's lock folder, folder of CDI specs
    and kubelet's socket are at their own paths there; what it lacks of them does not count. `kubelet` is
    kubelet's root directory, by default that of the kubelet that runs on this node.
    """
    if host:  # it may be another node: nothing uses its GPUs
        return NodeView(probe=lambda: Host.load(host), survey_usage=lambda _: {})
    socket = sockets.locate_pods_socket(str(kubelet)) if kubelet else None
    survey_plugin_usage = partial(pods.compute_pod_usage, socket=socket)
    if root is None:
        return NodeView(
            probe=lambda: probe("/"),
            survey_usage=survey.survey_outside_pods,
            survey_plugin_usage=survey_plugin_usage,
            require_nodes=devices.require_device_nodes,
            lock_gpus=lock_gpus,
        )

    def survey_usage(gpus: tuple[Gpu, ...]) -> Usage:
        return merge_usages(survey.survey_node_leases(), survey.survey_open_outside_pods(gpus, str(root)))

    def require_nodes(paths: tuple[str, ...]) -> None:
        # A container may not open the nodes.
        missing = devices.find_absent_nodes(
            path for path in paths if not (root / path.removeprefix("/")).exists()
        )
        if missing:
            raise devices.DevicesError(missing)

    return NodeView(
        probe=lambda: probe(root),
        survey_usage=survey_usage,
        survey_plugin_usage=survey_plugin_usage,
        require_nodes=require_nodes,
        lock_gpus=lock_gpus,
    )
