"""Giving a batch job back to Slurm's queue, once, from a node on which it cannot run."""

from __future__ import annotations

import subprocess

from imagematrix.common.json_documents import parse_natural
from imagematrix.common.programs import find_program, read_output
from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE_S = 20.0
FIRST = "0"


def is_requeueable(environment: Mapping[str, str]) -> bool:
    """Whether this is the first task here of a batch job that was not requeued before.

    The user of an interactive job waits for it, and decides. sbatch sets ENVIRONMENT, which steps get from
    the batch script.
    """
    batch = environment.get("ENVIRONMENT") == "BATCH"
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return batch and parse_natural(restarts) == 0 and environment.get("SLURM_LOCALID", FIRST) == FIRST


def requeue_job(environment: Mapping[str, str]) -> str:
    """Requeue the job of these variables, and return its number; raise EngineError with why it is not."""
    job = environment.get("SLURM_JOB_ID", "")
    if parse_natural(job) is None:
        raise EngineError("its number is unknown")
    program = find_program("scontrol")
    if program is None:
        raise EngineError(
            "scontrol was not found", remedy="name its folder in program_folders of the site's file"
        )
    try:
        process = read_output([program, "requeue", job], PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer in {PATIENCE_S:g} seconds"
        raise EngineError(f"scontrol: {reason}") from error
    if process.returncode:
        raise EngineError(process.stderr.strip()[:200])
    return job
