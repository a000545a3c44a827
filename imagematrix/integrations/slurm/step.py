"""A step of Slurm on several nodes, as the variables of its tasks describe it."""

from __future__ import annotations

import re

from imagematrix.common.record import Record
from imagematrix.errors import UsageError
from imagematrix.integrations.slurm.node_list import NODES, expand_node_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", re.ASCII)
NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)


class SlurmStep(Record):
    """A step on several nodes: one image in one run of a job, the nodes, and the node of this task.

    When Slurm requeues a job, it counts the steps from 0 again, and the jobs when it has lost its state. The
    number of restarts, and the second in which this run of the job began, tell such steps apart.
    """

    image: str
    job: str
    restart: str
    start: str
    number: str
    nodes: tuple[str, ...]
    node: str


def find_step(image: str, environment: Mapping[str, str]) -> SlurmStep | None:
    """Return the step of a task with these variables, None if it has one node only; raise UsageError.

    slurmstepd passes to every task when this run of its job began. Where it does not, `start` is empty in all
    tasks of the step, so that they agree all the same. In a first run there is no number of restarts.
    """
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if environment.get("SLURM_STEP_NUM_NODES", "1") in ("", "1") and not re.search(r"[\[,]", nodes):
        return None
    node = environment.get("SLURMD_NODENAME", "")
    job, number = _get_number("SLURM_JOB_ID", environment), _get_number("SLURM_STEP_ID", environment)
    restart = _get_number("SLURM_RESTART_COUNT", {"SLURM_RESTART_COUNT": "0", **environment})
    start = _get_number("SLURM_JOB_START_TIME", environment) if "SLURM_JOB_START_TIME" in environment else ""
    names = _expand_nodes(nodes)
    if node not in names:
        raise UsageError(f"SLURMD_NODENAME {node!r:.80} is not in SLURM_STEP_NODELIST {nodes!r:.80}")
    if len(names) == 1:
        return None
    return SlurmStep(
        image=image, job=job, restart=restart, start=start, number=number, nodes=names, node=node
    )


def _get_number(name: str, environment: Mapping[str, str]) -> str:
    """Return a variable that Slurm sets to a number; raise UsageError if it is none."""
    value = environment.get(name, "")
    if not NUMBER.fullmatch(value):
        raise UsageError(f"{name} {value!r:.40}: not that of a step")
    return value


def _expand_nodes(nodes: str) -> tuple[str, ...]:
    """Return the names in the list of a step's nodes, each once; raise UsageError."""
    names = [*expand_node_list(nodes)]
    if len(names) > NODES or not all(map(NODE.fullmatch, names)):
        raise UsageError(f"SLURM_STEP_NODELIST {nodes!r:.80} is not a list of nodes")
    return tuple(dict.fromkeys(names))
