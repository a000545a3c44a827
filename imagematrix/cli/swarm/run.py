"""`imagematrix swarm run`: starts a service, or a one-shot job, whose tasks get GPUs or shares of them."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import closing
from typing import Annotated, Any

import typer

from imagematrix.cli.options import Json
from imagematrix.cli.output import info, print_json, print_text, warn
from imagematrix.errors import UsageError
from imagematrix.swarm.resources import GPU, VRAM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.swarm.nodes import Node
    from imagematrix.swarm.reservation import Reservation
    from imagematrix.swarm.service import Service

__all__ = ["SETTINGS", "command"]

# All words after the image are the container's command, including options.
SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": False, "allow_interspersed_args": False}
}
RESOLVER = "127.0.0.1:5050"


def command(
    image: Annotated[str, typer.Argument(metavar="IMAGE[:VERSION]")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]...")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=0, help="Whole GPUs for each task; 0 for none.")
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option("--vram", metavar="AMOUNT", help="A share of one GPU's memory for each task: 4G, 4Gi."),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", metavar="N", min=1, help="The number of tasks.")] = 1,
    job: Annotated[bool, typer.Option("--job", help="Run each task once, to its end.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the job, print its output, and exit with its exit code.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--rm", help="Remove the job when it has ended or the wait is interrupted.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="The service's name.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="NAME=VALUE", help="Set a variable; repeatable."),
    ] = None,
    network: Annotated[
        list[str] | None, typer.Option("--network", metavar="NAME", help="Join a network; repeatable.")
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume", "-v", metavar="SOURCE:TARGET[:ro]", help="Mount a volume or a folder; repeatable."
        ),
    ] = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option(
            "--constraint",
            metavar="EXPR",
            help="Use only nodes that match, such as node.labels.rack==a7; repeatable.",
        ),
    ] = None,
    resolver: Annotated[
        str,
        typer.Option("--resolver", metavar="ADDRESS:PORT", help="The address of each node's resolver."),
    ] = RESOLVER,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print docker's command, start nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Start a service of Docker Swarm, with one image name for all nodes and GPUs for its tasks.

    The image's registry is replaced by the resolver that runs on each node. Prints the service's id.
    """
    from imagematrix import engine
    from imagematrix.cli.swarm.waiting import Waiting
    from imagematrix.swarm.manager import Manager
    from imagematrix.swarm.service import Service, image_name, name_for

    _check(gpus, vram, job=job, wait=wait, remove=remove, json=json)
    with closing(engine.client()) as client:
        manager = Manager(client)
        nodes = manager.nodes()
        service = Service(
            name=name or name_for(image, os.urandom(4).hex()),
            image=image_name(image, resolver),
            command=tuple(words or ()),
            job=job,
            replicas=replicas,
            reservation=_reservation(nodes, gpus, vram),
            environment=tuple(env or ()),
            networks=tuple(network or ()),
            volumes=tuple(volume or ()),
            constraints=tuple(constraint or ()),
        )
        for doubt, remedy in _doubts(nodes, service, manager.overlays(service.networks)):
            warn(doubt, remedy)
        identifier = None if dry_run else manager.create(service)
        if identifier and wait:
            info(f"created service {service.name}")
            sys.exit(
                Waiting(manager=manager, service=service, identifier=identifier, remove=remove).run(client)
            )
    if json:
        print_json(service.to_json(identifier))
    else:
        print_text(identifier or shlex.join(service.docker()))


def _check(gpus: int | None, vram: str | None, *, job: bool, wait: bool, remove: bool, json: bool) -> None:
    """Raise UsageError for options that cannot be combined."""
    if (gpus is None) == (vram is None):
        raise UsageError("expected either --gpus or --vram", remedy="--gpus 0 requests no GPU")
    if wait and not job:
        raise UsageError("--wait requires --job", remedy="pass --job too: only jobs end")
    if remove and not wait:
        raise UsageError("--rm requires --job and --wait", remedy="pass --job --wait too")
    if wait and json:
        raise UsageError("--wait and --json are mutually exclusive: stdout has the output of the job")


def _reservation(nodes: Sequence[Node], gpus: int | None, vram: str | None) -> Reservation:
    from imagematrix.launcher.options import mib
    from imagematrix.launcher.share import require_room
    from imagematrix.swarm import reservation

    if vram is None:
        return reservation.gpus(nodes, gpus or 0)
    wanted = mib(vram)
    require_room(wanted)
    return reservation.memory(nodes, wanted)


def _doubts(
    nodes: Sequence[Node], service: Service, overlays: Sequence[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield warnings about a service, each with its remedy."""
    reserved = service.reservation
    if reserved.vram_mib and reserved.kind != VRAM:
        yield f"each task reserves a share of {reserved.vram_mib} MiB ({reserved.kind})", None
    others = [
        node.name
        for node in nodes
        if reserved.vram_mib and reserved.kind not in node.offers and node.offers.keys() - {GPU}
    ]
    if others:
        yield f"no task runs on {', '.join(others)}: these nodes offer shares of other sizes", None
    broken = [f"{node.name} ({node.engine})" for node in nodes if node.rejects_overlay]
    if broken and overlays and reserved.kind:
        yield (
            f"{', '.join(broken)} may reject tasks that have a GPU and the overlay network {overlays[0]}",
            "upgrade these engines to Docker 26 or newer (moby/moby#44378), or use --network host",
        )
