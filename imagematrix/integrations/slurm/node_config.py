"""The lines about a node in Slurm's configuration: its GPUs, its features, and how tasks in containers start.

See oci.conf(5), gres.conf(5) and slurm.conf(5).
"""

from __future__ import annotations

import re
from itertools import groupby

from imagematrix.common.record import Record
from imagematrix.errors import ProbeError, UsageError
from imagematrix.integrations.slurm.features import make_features, make_word
from imagematrix.integrations.slurm.task import LINE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Gpu, Host

SCHEMA = "imagematrix.slurm-node/v1"
PLAIN = re.compile(r"/[A-Za-z0-9_./+-]+", re.ASCII)  # what a shell takes as it is
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
OCI = """\
# srun --container=training:v1 starts the variant of the image that fits each node. The shell reads RunTimeRun
# up to the comment: what users write is no command, and keeps its quotes.
IgnoreFileConfigJson=true
CreateEnvFile=null
EnvExclude="^(SLURM_CONF|SLURM_CONF_SERVER)="
RunTimeRun="set -f; IFS=; exec {program} oci-task --line $(xargs -0 printf %%s < /proc/$$/cmdline) \\# {line}"
RunTimeKill="kill -s SIGTERM %p"
RunTimeDelete="kill -s SIGKILL %p"
"""


class NodeLines(Record):
    """The lines of a node in gres.conf and in slurm.conf."""

    gres: str
    slurm: str


def render_oci_conf(program: str) -> str:
    """Return oci.conf; `program` is the path of this program on the nodes. Raises UsageError."""
    if not PLAIN.fullmatch(program):
        raise UsageError(
            f"{program!r} cannot stand in oci.conf: a shell reads it",
            remedy="name an absolute path of letters, digits, _, ., + and - with --program",
        )
    return OCI.format(program=program, line=LINE)


def make_node_lines(host: Host, name: str, shards: int = 0) -> NodeLines:
    """Return the lines of a node; with `shards`, each GPU can be shared by that many jobs.

    GPUs that cannot be used and those in MIG mode are left out. Raises ProbeError if the number of a GPU's
    device file is unknown, and UsageError if Slurm could not read the node's name.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of a node", remedy="name it with --node")
    gpus = list_offered_gpus(host)
    for gpu in gpus:
        if gpu.minor is None:
            raise ProbeError(
                f"device minor of {gpu.label} unknown", remedy="load the driver, and run it again"
            )
    kinds = [(kind, [*group]) for kind, group in groupby(gpus, key=lambda gpu: make_word(gpu.name or ""))]
    gres = [
        f"NodeName={name} Name=gpu {f'Type={kind} ' if kind else ''}File={_format_device_files(group)}"
        for kind, group in kinds
    ]
    counts = [f"gpu:{f'{kind}:' if kind else ''}{len(group)}" for kind, group in kinds]
    if shards and gpus:
        gres.append(f"NodeName={name} Name=shard Count={shards * len(gpus)}")
        counts.append(f"shard:{shards * len(gpus)}")
    words = [f"NodeName={name}", *([f"Gres={','.join(counts)}"] if counts else [])]
    features = make_features(host)
    words += [f"Features={','.join(features)}"] if features else []
    return NodeLines(gres="".join(f"{line}\n" for line in gres), slurm=f"{' '.join(words)}\n")


def list_offered_gpus(host: Host) -> tuple[Gpu, ...]:
    """Return the GPUs that Slurm can give out whole, those of one kind beside each other."""
    whole = (gpu for gpu in host.gpus if gpu.usable and gpu.mig is None)
    return tuple(sorted(whole, key=lambda gpu: (make_word(gpu.name or ""), gpu.minor or 0)))


def _format_device_files(gpus: Iterable[Gpu]) -> str:
    """Return the device files of GPUs as Slurm writes lists: /dev/nvidia[0-3,6]."""
    minors = sorted(gpu.minor for gpu in gpus if gpu.minor is not None)
    if len(minors) == 1:
        return f"/dev/nvidia{minors[0]}"
    runs = [
        [minor for _, minor in run]
        for _, run in groupby(enumerate(minors), key=lambda pair: pair[1] - pair[0])
    ]
    return f"/dev/nvidia[{','.join(f'{run[0]}-{run[-1]}' if run[1:] else str(run[0]) for run in runs)}]"
