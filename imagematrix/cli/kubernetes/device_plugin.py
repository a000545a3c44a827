"""`imagematrix kubernetes device-plugin`: offers this node's GPUs to kubelet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import kinds
from imagematrix.cli.options import HostFile, Root
from imagematrix.cli.output import info, print_text
from imagematrix.kubelet.sockets import FOLDER

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
    kubelet: Annotated[Path, typer.Option("--kubelet", metavar="FOLDER", help="Kubelet's folder.")] = Path(
        FOLDER
    ),
    host: HostFile = None,
    root: Root = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be offered.")] = False,
) -> None:
    """Offer this node's GPUs to kubelet, and give containers their device nodes and nothing else.

    Each GPU is an imagematrix.io/gpu, each MIG device an imagematrix.io/mig-PROFILE. Runs until SIGTERM.
    """
    from imagematrix.kubernetes.plugin.offer import Offer, offer
    from imagematrix.node.host import Host
    from imagematrix.node.probe import probe

    named = kinds(by)

    def offered() -> Offer:
        return offer(Host.load(host) if host else probe(root or "/"), by=named, vram=vram)

    if dry_run:
        print_text("\n".join(f"{name} {len(devices)}" for name, devices in offered().resources.items()))
        return
    from imagematrix.kubernetes.plugin.server import Settings, serve

    serve(Settings(offer=offered, kubelet=kubelet), note=info)
