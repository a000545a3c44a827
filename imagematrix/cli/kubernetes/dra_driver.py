"""`imagematrix kubernetes dra-driver`: publishes this node's GPUs, and prepares the claims on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import DevicePlugins, KubeletRoot, require_alone
from imagematrix.cli.shared.inputs import require_one_host
from imagematrix.cli.shared.options import HostFile, Root
from imagematrix.cli.shared.output import print_document, print_info
from imagematrix.launcher.kubelet.sockets import DEVICE_PLUGINS, OURS


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
    from imagematrix.integrations.kubernetes.client.yaml import dump_yaml
    from imagematrix.integrations.kubernetes.dra import cdi, slices
    from imagematrix.integrations.kubernetes.nodes.node_view import open_node_view

    require_one_host(host, root)
    if node is None or not slices.NODE_NAME.fullmatch(node):
        raise UsageError(
            "no valid name of this node given", remedy="give --node-name, as `kubectl get nodes` shows it"
        )
    view = open_node_view(host, root, kubelet)
    if dry_run:
        groups = slices.split_devices(slices.make_devices(view.probe(), {}))
        documents = [
            slices.make_slice(node, None, index, count=len(groups), generation=1, devices=group)
            for index, group in enumerate(groups)
        ]
        print_document(dump_yaml(*documents))
        return
    from imagematrix.integrations.kubernetes.client import kubeconfig as kubeconfigs
    from imagematrix.integrations.kubernetes.client.api import find_cluster_api
    from imagematrix.integrations.kubernetes.dra.server import DriverSettings, serve

    require_alone("the device plugin", map(str, sorted(device_plugins.glob(OURS))))
    settings = DriverSettings(
        node=node,
        api=kubeconfigs.load_kubeconfig(kubeconfig)
        if kubeconfig
        else find_cluster_api("give --kubeconfig FILE"),
        view=view,
        kubelet=kubelet,
        cdi_root=cdi_root or cdi.FOLDER,
    )
    serve(settings, on_line=print_info)
