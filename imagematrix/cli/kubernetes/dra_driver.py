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

    def probe_node() -> Host:
        return Host.load(host) if host else probe(root or "/")

    if dry_run:
        groups = slices.split_devices(slices.make_devices(probe_node(), {}))
        documents = [
            slices.make_slice(node, None, index, count=len(groups), generation=1, devices=group)
            for index, group in enumerate(groups)
        ]
        print_document(f"{dump_yaml(*documents)}\n")
        return
    from imagematrix.integrations.kubernetes.client import kubeconfig as kubeconfigs
    from imagematrix.integrations.kubernetes.client.api import find_cluster_api
    from imagematrix.integrations.kubernetes.dra.server import DriverSettings, serve
    from imagematrix.launcher.kubelet import sockets

    if plugin := sockets.find_answering_socket(map(str, sorted(device_plugins.glob(sockets.OURS)))):
        raise UsageError(
            f"the device plugin offers this node's GPUs, at {plugin}",
            remedy="run `imagematrix kubernetes device-plugin` or `imagematrix kubernetes dra-driver` on a "
            "node, not both",
        )
    view = _SavedHostView() if host else _ContainerView(root) if root else _NodeView()
    settings = DriverSettings(
        node=node,
        api=kubeconfigs.load_kubeconfig(kubeconfig)
        if kubeconfig
        else find_cluster_api("give --kubeconfig FILE"),
        probe=probe_node,
        survey_usage=view.survey_usage,
        survey_plugins=view.survey_plugin_usage,
        require_devices=view.require_nodes,
        kubelet=kubelet,
        cdi_root=cdi_root or cdi.FOLDER,
    )
    serve(settings, on_line=print_info)


class _NodeView:
    """The view of a node's GPUs that a process on the node has."""

    def survey_usage(self, gpus: tuple[Gpu, ...]) -> Usage:
        from imagematrix.launcher.gpu_claims.survey import survey_outside_pods

        return survey_outside_pods(gpus)

    def survey_plugin_usage(self, gpus: tuple[Gpu, ...]) -> Usage:
        from imagematrix.launcher.gpu_claims import pods

        return pods.compute_pod_usage(gpus)

    def require_nodes(self, paths: tuple[str, ...]) -> None:
        from imagematrix.launcher.docker import devices

        devices.require_device_nodes(paths)


class _ContainerView:
    """The view of a container that has the node's /proc and /dev under a root, and its lock folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def survey_usage(self, gpus: tuple[Gpu, ...]) -> Usage:
        from imagematrix.launcher.gpu_claims.survey import survey_node_leases, survey_open_outside_pods
        from imagematrix.launcher.gpu_claims.usage import merge_usages

        return merge_usages(survey_node_leases(), survey_open_outside_pods(gpus, str(self._root)))

    def survey_plugin_usage(self, _: tuple[Gpu, ...]) -> Usage:
        return {}

    def require_nodes(self, paths: tuple[str, ...]) -> None:
        from imagematrix.launcher.docker.devices import DevicesError, find_absent_nodes

        # It may not open the nodes.
        missing = find_absent_nodes(
            path for path in paths if not (self._root / path.removeprefix("/")).exists()
        )
        if missing:
            raise DevicesError(missing)


class _SavedHostView:
    """The view of a saved host, which may be another node: nothing uses its GPUs."""

    def survey_usage(self, _: tuple[Gpu, ...]) -> Usage:
        return {}

    def survey_plugin_usage(self, _: tuple[Gpu, ...]) -> Usage:
        return {}

    def require_nodes(self, _: tuple[str, ...]) -> None:
        pass
