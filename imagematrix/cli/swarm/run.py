"""`imagematrix swarm run`: starts a service, or a one-shot job, whose tasks get GPUs or shares of them."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from imagematrix.cli.shared.options import Json
from imagematrix.cli.shared.output import print_document, print_info, print_info_block, print_json, warn
from imagematrix.common.text import format_count, quote_word
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.engine.releases import OVERLAYS_WITH_GPUS
from imagematrix.integrations.swarm.logs import ServiceLogs
from imagematrix.integrations.swarm.resources import GPU, VRAM
from imagematrix.integrations.swarm.tasks import COMPLETE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from docker import DockerClient

    from imagematrix.integrations.swarm.manager import Manager
    from imagematrix.integrations.swarm.nodes import SwarmNode
    from imagematrix.integrations.swarm.reservation import Reservation
    from imagematrix.integrations.swarm.service import SwarmService

# All words after the image are the container's command, including options.
SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": False, "allow_interspersed_args": False}
}
RESOLVER = "127.0.0.1:5050"


def command(
    image: Annotated[str, typer.Argument(metavar="IMAGE[:VERSION]")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="The command, if not the image's.")
    ] = None,
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
    from imagematrix.images.engine import transport
    from imagematrix.integrations.swarm.manager import Manager
    from imagematrix.integrations.swarm.service import SwarmService, make_image_name, make_service_name

    _require_compatible_options(gpus, vram, job=job, wait=wait, remove=remove, json=json)
    with closing(transport.open_client()) as client:
        manager = Manager(client)
        nodes = manager.list_nodes()
        service = SwarmService(
            name=name or make_service_name(image, os.urandom(4).hex()),
            image=make_image_name(image, resolver),
            command=tuple(words or ()),
            job=job,
            replicas=replicas,
            reservation=_make_reservation(nodes, gpus, vram),
            environment=tuple(env or ()),
            networks=tuple(network or ()),
            volumes=tuple(volume or ()),
            constraints=tuple(constraint or ()),
        )
        for doubt, remedy in _find_doubts(nodes, service, manager.select_overlays(service.networks)):
            warn(doubt, remedy)
        identifier = None if dry_run else manager.create_service(service)
        if identifier and wait:
            print_info(f"created service {service.name}")
            sys.exit(
                JobWait(manager=manager, service=service, identifier=identifier, remove=remove).run(client)
            )
    if json:
        print_json(service.to_json(identifier))
    else:
        print_document(f"{identifier or shlex.join(service.to_command())}\n", "see it with --json")


def _require_compatible_options(
    gpus: int | None, vram: str | None, *, job: bool, wait: bool, remove: bool, json: bool
) -> None:
    """Raise UsageError for options that cannot be combined."""
    if (gpus is None) == (vram is None):
        raise UsageError("expected either --gpus or --vram", remedy="--gpus 0 requests no GPU")
    if wait and not job:
        raise UsageError("--wait requires --job", remedy="pass --job too: only jobs end")
    if remove and not wait:
        raise UsageError("--rm requires --job and --wait", remedy="pass --job --wait too")
    if wait and json:
        raise UsageError("--wait and --json are mutually exclusive: stdout has the output of the job")


def _make_reservation(nodes: Sequence[SwarmNode], gpus: int | None, vram: str | None) -> Reservation:
    from imagematrix.integrations.swarm import reservation
    from imagematrix.launcher.docker.options import parse_mib
    from imagematrix.launcher.docker.share import require_minimum

    if vram is None:
        return reservation.reserve_gpus(nodes, gpus or 0)
    vram_mib = parse_mib(vram)
    require_minimum(vram_mib)
    return reservation.reserve_memory(nodes, vram_mib)


def _find_doubts(
    nodes: Sequence[SwarmNode], service: SwarmService, overlays: Sequence[str]
) -> Iterator[tuple[str, str | None]]:
    """Yield warnings about a service, each with its remedy."""
    reserved = service.reservation
    if reserved.vram_mib and reserved.kind != VRAM:
        yield f"each task reserves a share of {reserved.vram_mib} MiB ({reserved.kind})", None
    unsuited = [
        node.name
        for node in nodes
        if reserved.vram_mib and reserved.kind not in node.offers and node.offers.keys() - {GPU}
    ]
    if unsuited:
        yield f"no task runs on {', '.join(unsuited)}: these nodes offer shares of other sizes", None
    broken = [f"{node.name} ({node.engine})" for node in nodes if node.rejects_overlay]
    if broken and overlays and reserved.kind and not all(node.manager for node in nodes):
        saw = (
            f"the manager {', '.join(broken)} rejects tasks on other nodes with a GPU and an overlay network"
        )
        yield (
            f"{saw}, such as {overlays[0]}",
            f"upgrade managers to {OVERLAYS_WITH_GPUS} or newer (moby/moby#44378), or use --network host",
        )


@dataclass(kw_only=True)
class JobWait:
    """The wait for a created job; with `remove`, the job is removed at the end or when interrupted."""

    manager: Manager
    service: SwarmService
    identifier: str
    remove: bool
    _slots: dict[str, int] = field(default_factory=dict)

    def run(self, client: DockerClient) -> int:
        """Wait, and return the exit code: 0, or that of the first task that failed.

        Raises EngineError if a task could not be started. An interrupted wait leaves the job running, unless
        `remove` is set.
        """
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        name = self.service.name
        logs = ServiceLogs(client, self.identifier, self._print_line)
        logs.follow()
        try:
            tasks = self.manager.wait(self.identifier, self.service.replicas, print_info)
            try:
                logs.finish()
            except (DockerException, RequestException, OSError) as error:
                warn(f"output of {name} may be incomplete: {error}")
        except (KeyboardInterrupt, SystemExit):
            if self.remove:
                self.manager.remove_service(self.identifier)
                print_info(f"removed service {name}")
            else:
                print_info(
                    f"service {name} continues without this command; "
                    f"`docker service rm {quote_word(name)}` ends it"
                )
            raise
        if self.remove:
            self.manager.remove_service(self.identifier)

        failed = [task for task in tasks if task.state != COMPLETE]
        for task in failed:
            warn(f"task {name}.{task.slot} {task.state}: {task.reason}")
        if not failed:
            return 0
        for task in failed:
            if task.exit_code:
                return task.exit_code
        raise EngineError(f"{format_count(len(failed), 'task')} of {name} could not be run")

    def _print_line(self, stream: str, task: str | None, line: bytes) -> None:
        """Print a line, prefixed with the name of its task if there are several, or with the task's id.

        The last line of a task, and pieces of a very long line, may have no line break.
        """
        if task is None:
            print_info_block(line.decode(errors="replace").rstrip("\n"))
            return
        if self.service.replicas > 1:
            if task not in self._slots:  # the number of each task in the job
                with suppress(EngineError):  # the manager restarts
                    listed = self.manager.list_tasks(self.identifier)
                    self._slots |= {one.id: one.slot for one in listed}
            prefix = f"{self.service.name}.{self._slots.get(task, task)} | ".encode()
            line = prefix + line.removesuffix(b"\n") + b"\n"
        output = sys.stdout if stream == "stdout" else sys.stderr
        with suppress(BrokenPipeError):
            output.buffer.write(line)
            output.buffer.flush()
