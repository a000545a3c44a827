"""The help of `imagematrix oci-task`; imagematrix.cli.dispatch handles all other calls of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

# The task's command is words after --, whatever they look like.
SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False},
    "options_metavar": "",
}


def command(
    image: Annotated[str, typer.Argument(metavar="IMAGE")],
    envfile: Annotated[str, typer.Argument(metavar="ENVFILE")],
    spool: Annotated[str, typer.Argument(metavar="SPOOL")],
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND...")],
) -> None:
    """Start a task of Slurm in the image that fits its node. RunTimeRun in oci.conf calls this.

    IMAGE is the name that --container was given, ENVFILE has the job's variables, and SPOOL is the folder of
    the step's files. `imagematrix slurm node-config` writes oci.conf.
    """
    from imagematrix.cli.shared.slurm_task import run_slurm_task

    raise SystemExit(run_slurm_task([image, envfile, spool, *words]))
