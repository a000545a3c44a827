"""`imagematrix run`: select, and start the container with docker's own command."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from imagematrix.cli.choosing import catalog_of, node_of
from imagematrix.cli.output import say
from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.probe.host import Host
    from imagematrix.select.selection import Selection
    from imagematrix.use.claim import Claim
    from imagematrix.use.uses import Uses

__all__ = ["SETTINGS", "command"]

# Every word goes to our own reading: most options are docker's, and -h is one of them.
SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False},
    "add_help_option": False,
    "options_metavar": "[OPTIONS]",
}


def command(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="IMAGE[:VERSION] [COMMAND...]")] = None,
) -> None:
    """Run the variant that fits this node best, with the device nodes of its GPUs and nothing else.

    Every option of `docker run` works before the image. Besides them: --gpus SPEC (all, none, a number,
    indices, UUIDs or conditions), --wait 10m (for GPUs that are in use), --allow-cpu, --dry-run (print the
    command, run nothing), --host FILE and --catalog FILE (decide for a saved host, choose from a saved
    catalog), --nvidia-smi XML.
    """
    from imagematrix.launch.devices import migs, require
    from imagematrix.launch.options import split
    from imagematrix.launch.plan import docker_run, plan
    from imagematrix.select.gpus import exactly
    from imagematrix.select.select import select

    asked = split(words or [])
    if asked.help or asked.image is None:
        print(context.get_help())
        return
    host, wanted = node_of(_path(asked.host), None, _path(asked.nvidia_smi), asked.gpus)
    catalog = catalog_of(asked.image, asked.catalog)
    chosen = select(host, catalog, gpus=wanted, allow_cpu=asked.allow_cpu)
    launch = plan(chosen, asked.command, mig_minors=migs(), held=_held(chosen, dry_run=asked.dry_run))
    if asked.dry_run:
        print(shlex.join(docker_run(launch, asked.docker)))
        return
    require(launch.devices)  # before anybody waits for GPUs
    with ExitStack() as stack:
        if launch.gpus:
            taken = stack.enter_context(_claim(host, wanted, asked.wait_s))
            chosen = select(host, catalog, gpus=exactly(taken.gpus), allow_cpu=asked.allow_cpu)
            launch = plan(chosen, asked.command, mig_minors=migs(), held=_held(chosen, dry_run=False))
            require(launch.devices)
            taken.pass_on()
        _become(docker_run(launch, asked.docker))


def _claim(host: Host, wanted: str | None, wait_s: float) -> Claim:
    """Return a claim on GPUs that nobody uses; docker's command keeps it as long as it lives."""
    from imagematrix import engine
    from imagematrix.select.gpus import candidates
    from imagematrix.use.claim import claim
    from imagematrix.use.survey import ask_nvml, survey

    found, count = candidates(host.gpus, wanted)

    def look() -> Uses:
        return survey(host.gpus, engine.running, ask_nvml)

    return claim(found, count, look, wait_s=wait_s, tell=say)


def _held(chosen: Selection, *, dry_run: bool) -> frozenset[str] | None:
    """Return the digests of what the engine has under the selected name; what it lacks is pulled by digest.

    A dry run takes place where there need not be an engine: it names an image of a registry by its digest.
    """
    from imagematrix import engine

    reference = str(chosen.selected)
    if "/" not in reference:
        return None
    try:
        return engine.digests(reference)
    except EngineError:
        if dry_run:
            return frozenset()
        raise


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _become(line: list[str]) -> None:
    """Become docker's command: its exit code, its terminal and the signals to it are then the container's."""
    try:
        os.execvp(line[0], line)  # noqa: S606 - there is no shell, and none is wanted
    except OSError as error:
        raise EngineError(
            f"docker's command can't be started: {error.strerror}",
            remedy="install it: the package is docker-cli or docker-ce-cli",
        ) from error
