"""`imagematrix slurm epilog`: removes the containers that a job has left in the engine of this node."""

from __future__ import annotations

import os

from imagematrix.cli.shared.output import print_text


def command() -> None:
    """Remove the containers that the job SLURM_JOB_ID has left in this node's engine, and print their names.

    For Epilog in slurm.conf. On a node without an engine, there are none.
    """
    from imagematrix.images.engine.endpoint import find_address
    from imagematrix.integrations.slurm.containers import get_job, remove_containers

    job = get_job(os.environ)
    socket = find_address().removeprefix("unix://")
    if socket.startswith("/") and not os.path.exists(socket):  # noqa: PTH110
        return
    for name in remove_containers(job):
        print_text(f"container {name}")
