"""Containers that a job of Slurm has an engine start: by a label with the job's number they are found again.

They are no processes of the job, so Slurm cannot end them: with scancel and at the time limit, it ends
docker's command, which passes the signal on unless it is killed.
"""

from __future__ import annotations

import re
from contextlib import closing

from imagematrix.errors import UsageError
from imagematrix.images.engine import transport
from imagematrix.images.engine.containers import list_labelled, list_launch_labels
from imagematrix.images.engine.removal import remove_container

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LABEL = "io.imagematrix.slurm-job"
VARIABLE = "SLURM_JOB_ID"
NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)


def make_labels(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a container that a process with these variables starts; none outside of a job."""
    job = environment.get(VARIABLE, "")
    return {LABEL: job} if NUMBER.fullmatch(job) else {}


def get_job(environment: Mapping[str, str]) -> str:
    """Return the number of the job that an Epilog is for; raise UsageError if its variable has none."""
    job = environment.get(VARIABLE, "")
    if not NUMBER.fullmatch(job):
        raise UsageError(
            f"{VARIABLE} {job!r:.40} is not the number of a job", remedy="let Slurm start it, as Epilog"
        )
    return job


def remove_containers(job: str) -> tuple[str, ...]:
    """Remove the containers of a job, also running ones; return their names. Raises EngineError."""
    names_by_id = list_labelled(f"{LABEL}={job}")
    if names_by_id:  # an image that was made of a container of the job has the label too
        launched = list_launch_labels(LABEL)
        names_by_id = {key: name for key, name in names_by_id.items() if launched.get(key) == job}
    if names_by_id:  # after most jobs there are none, so docker-py is not loaded
        with closing(transport.open_client()) as client:
            for identifier in names_by_id:
                remove_container(client, identifier, running=True)
    return tuple(sorted(name for name in names_by_id.values() if name))
