"""`imagematrix kubernetes dra-driver`: publishes this node's GPUs, and prepares the claims on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import DevicePlugins, KubeletRoot
from imagematrix.cli.shared.inputs import require_one_host
from imagematrix.cli.shared.options import HostFile, Root
from imagematrix.cli.shared.output import print_document, print_info
from imagematrix.launcher.kubelet.sockets import DEVICE_PLUGINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.launcher.gpu_claims.usage import Usage


def command(
    node: Annotated[
        str | None,
        typer.Option("--node-name", metavar="NAME", envvar="NODE_NAME", help="The name of this node's Node."),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            "--kubeconfig",
            metavar="FILE",
            help="How to reach the API server; default: as this pod's service account.",
        ),
    ] = None,
    cdi_root: Annotated[
        Path | None,
        typer.Option(
            "--cdi-root", metavar="FOLDER", help="Where engines read CDI specs; default: /var/run/cdi."
        ),
    ] = None,
    kubelet: KubeletRoot = None,
    device_plugins: DevicePlugins = Path(DEVICE_PLUGINS),
    host: HostFile = None,
    root: Root = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the ResourceSlices that would be published.")
    ] = False,
) -> None:
    """Publish this node's GPUs for dynamic resource allocation, and give claims their device nodes.

    A GPU is given to one claim, and pods that name the same claim share it. Runs until SIGTERM.
    """
    from imagematrix.errors import UsageError
    from imagematrix.hardware.host.host import Host
    from imagematrix.hardware.host.probe import probe
    from imagematrix.integrations.kubernetes.client.yaml import dump_yaml
    from imagematrix.integrations.kubernetes.dra import cdi, slices

    require_one_host(host, root)
    if node is None or not slices.NODE_NAME.fullmatch(node):
        raise UsageError(
            "no valid name of this node given", remedy="give --node-name, as `kubectl get nodes` shows it"
        )

    def probed() -> Host:
        return Host.load(host) if host else probe(root or "/")

    if dry_run:
        groups = slices.split_devices(slices.make_devices(probed(), {}))
        made = [
            slices.make_slice(node, None, index, count=len(groups), generation=1, devices=group)
            for index, group in enumerate(groups)
        ]
        print_document(f"{dump_yaml(*made)}\n")
        return
    from imagematrix.integrations.kubernetes.client import kubeconfig as kubeconfigs
    from imagematrix.integrations.kubernetes.client.api import find_cluster_api
    from imagematrix.integrations.kubernetes.dra.server import DriverSettings, serve
    from imagematrix.launcher.kubelet import sockets

    if other := sockets.find_answering_socket(map(str, sorted(device_plugins.glob(sockets.OURS)))):
        raise UsageError(
            f"the device plugin offers this node's GPUs, at {other}",
            remedy="run `imagematrix kubernetes device-plugin` or `imagematrix kubernetes dra-driver` on a "
            "node, not both",
        )
    seen = _InFile() if host else _InContainer(root) if root else _OnNode()
    settings = DriverSettings(
        node=node,
        api=kubeconfigs.load_kubeconfig(kubeconfig)
        if kubeconfig
        else find_cluster_api("give --kubeconfig FILE"),
        probe=probed,
        survey_usage=seen.usage,
        survey_plugins=seen.plugins,
        require_devices=seen.require,
        kubelet=kubelet,
        cdi_root=cdi_root or cdi.FOLDER,
    )
    serve(settings, on_line=print_info)


class _OnNode:
    """What a process on the node sees of its GPUs."""

    def usage(self, gpus: tuple[Gpu, ...]) -> Usage:
        from imagematrix.launcher.gpu_claims.survey import survey_outside_pods

        return survey_outside_pods(gpus)

    def plugins(self, gpus: tuple[Gpu, ...]) -> Usage:
        from imagematrix.launcher.gpu_claims import pods

        return pods.compute_pod_usage(gpus)

    def require(self, paths: tuple[str, ...]) -> None:
        from imagematrix.launcher.docker import devices

        devices.require_device_nodes(paths)


class _InContainer:
    """What a container sees that has the node's /proc and /dev under a root, and its lock folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def usage(self, gpus: tuple[Gpu, ...]) -> Usage:
        from imagematrix.launcher.gpu_claims.survey import survey_node_leases, survey_open_outside_pods
        from imagematrix.launcher.gpu_claims.usage import merge_usages

        return merge_usages(survey_node_leases(), survey_open_outside_pods(gpus, str(self._root)))

    def plugins(self, _: tuple[Gpu, ...]) -> Usage:
        return {}

    def require(self, paths: tuple[str, ...]) -> None:
        from imagematrix.launcher.docker.devices import DevicesError, find_absent_nodes

        # It may not open the nodes.
        missing = find_absent_nodes(
            path for path in paths if not (self._root / path.removeprefix("/")).exists()
        )
        if missing:
            raise DevicesError(missing)


class _InFile:
    """What is seen of a saved host, which may be another node."""

    def usage(self, _: tuple[Gpu, ...]) -> Usage:
        return {}

    def plugins(self, _: tuple[Gpu, ...]) -> Usage:
        return {}

    def require(self, _: tuple[str, ...]) -> None:
        pass
