"""`imagematrix kubernetes device-plugin`: offers this node's GPUs to kubelet."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import DevicePlugins, KubeletRoot, parse_resource_kinds, require_alone
from imagematrix.cli.shared.inputs import require_one_host
from imagematrix.cli.shared.options import HostFile, Root
from imagematrix.cli.shared.output import print_info, print_text
from imagematrix.launcher.kubelet.sockets import DEVICE_PLUGINS


def command(
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="{product|class}",
            help="Also offer each GPU by its product, or by the node's class; repeatable.",
        ),
    ] = None,
    vram: Annotated[bool, typer.Option("--vram", help="Also offer the memory of each GPU, in GiB.")] = False,
    kubelet: KubeletRoot = None,
    device_plugins: DevicePlugins = Path(DEVICE_PLUGINS),
    host: HostFile = None,
    root: Root = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be offered.")] = False,
) -> None:
    """Offer this node's GPUs to kubelet, and give containers their device nodes and nothing else.

    Each GPU is an imagematrix.io/gpu, each MIG device an imagematrix.io/mig-PROFILE. Runs until SIGTERM.
    """
    from imagematrix.integrations.kubernetes.nodes.node_view import open_node_view
    from imagematrix.integrations.kubernetes.plugin.offer import make_offer

    require_one_host(host, root)
    offer = partial(make_offer, by=parse_resource_kinds(by), vram=vram)
    view = open_node_view(host, root, kubelet)
    if dry_run:
        print_text(*(f"{name} {len(devices)}" for name, devices in offer(view.probe()).resources.items()))
        return
    from imagematrix.integrations.kubernetes.dra.slices import DRIVER
    from imagematrix.integrations.kubernetes.plugin.server import PluginSettings, serve
    from imagematrix.launcher.kubelet import sockets

    dra_socket = sockets.locate_dra_socket(str(kubelet or sockets.find_root_dir()), DRIVER)
    require_alone("the DRA driver", [dra_socket])
    settings = PluginSettings(view=view, offer=offer, folder=device_plugins, kubelet=kubelet)
    serve(settings, on_line=print_info)
