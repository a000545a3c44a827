"""`imagematrix kubernetes device-plugin`: offers this node's GPUs to kubelet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.choosing import require_one_host
from imagematrix.cli.kubernetes.options import DevicePlugins, KubeletRoot, kinds
from imagematrix.cli.options import HostFile, Root
from imagematrix.cli.output import info, print_text
from imagematrix.kubelet.sockets import DEVICE_PLUGINS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.allocation.usage import Usage
    from imagematrix.node.host import Gpu

__all__ = ["command"]


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
    from imagematrix.kubernetes.plugin.offer import DeviceOffer, offer
    from imagematrix.node.host import Host
    from imagematrix.node.probe import probe

    require_one_host(host, root)
    named = kinds(by)

    def offered() -> DeviceOffer:
        return offer(Host.load(host) if host else probe(root or "/"), by=named, vram=vram)

    if dry_run:
        print_text(*(f"{name} {len(devices)}" for name, devices in offered().resources.items()))
        return
    from imagematrix.allocation.survey import opened_outside_pods, survey_outside_pods
    from imagematrix.errors import UsageError
    from imagematrix.kubelet import sockets
    from imagematrix.kubernetes.dra.slices import DRIVER
    from imagematrix.kubernetes.plugin.server import PluginSettings, serve

    if other := sockets.answering([sockets.dra(str(kubelet or sockets.root_dir()), DRIVER)]):
        raise UsageError(
            f"the DRA driver offers this node's GPUs, at {other}",
            remedy="run `imagematrix kubernetes device-plugin` or `imagematrix kubernetes dra-driver` on a "
            "node, not both",
        )

    def usage(gpus: tuple[Gpu, ...]) -> Usage:
        if host:  # it may be that of another node
            return {}
        return opened_outside_pods(gpus, str(root)) if root else survey_outside_pods(gpus)

    serve(PluginSettings(offer=offered, usage=usage, folder=device_plugins, kubelet=kubelet), note=info)
