"""A task of a Slurm job, read from its files: slurmstepd starts this program for it without any variables.

See oci.conf(5), and srun(1) for the variables of a task.
"""
# pathlib is slow to load.
# ruff: noqa: PTH112, PTH120, PTH123

from __future__ import annotations

import os
import re

from imagematrix.common.image_reference import Reference
from imagematrix.common.record import Record, replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import NONE
from imagematrix.hardware.gpu_request.visible import NO_GPU, within
from imagematrix.hardware.host.host import Accelerator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.hardware.host.host import Host

LIMIT = 16 << 20  # bytes of the file of variables; the kernel passes 6 MiB to a program at most
# Variables that a batch system or its MPI sets for each task: the image's own of these names are stale.
OF_TASK = re.compile(r"(?:SLURM|SLURMD|PMI|PMI2|PMIX|PALS)(?:_|$)|OMPI_MCA_", re.ASCII)
# Variables that name programs, libraries and files of the node, which the image has not or has elsewhere, and
# GPUs by numbers of the node: in the container, only those of the task are there, and count from 0.
OF_NODE = re.compile(
    r"(?:CUDA_VISIBLE|NVIDIA_VISIBLE|ROCR_VISIBLE|HIP_VISIBLE)_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
    r"|PATH|HOME|SHELL|LD_\w+|PYTHONHOME|PYTHONPATH|VIRTUAL_ENV|CONDA_\w+|MODULE\w+|LMOD_\w+|LOADEDMODULES"
    r"|_LM\w+|MANPATH|INFOPATH|TMPDIR|TMP|TEMP|XDG_\w+|DBUS_\w+|SSH_\w+|XAUTHORITY|SLURM_CONF|SLURM_CONF_SERVER"
    r"|PWD|OLDPWD|BASH_FUNC_.*|BASH_ENV|ENV|LOCPATH|PERL5LIB|_",
    re.ASCII | re.DOTALL,
)
# What oci.conf has after a # of the shell, which so reads nothing that a user wrote: the file of variables,
# the folder of the step, the name of the image, and the program.
LINE = "task: %e %m %b -- %@"
MARK = "# task: "
# A quote in an argument between quotes. Releases of Slurm write one too many at its end (24.11.5 does).
QUOTES = ("'\"'\"''", "'\"'\"'")
REMEDY = "write oci.conf anew with `imagematrix slurm node-config`, on all nodes"
NAMESPACE = "PMIX_NAMESPACE"
BATCH_SCRIPT = "slurm_script"  # in a folder of slurmd for the job
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class SlurmTask(Record):
    """A task: its program, the variables of its job, and the folder of the step's files."""

    program: tuple[str, ...]
    environment: Mapping[str, str]
    spool: str

    @property
    def scheduler_variables(self) -> Mapping[str, str]:
        """The variables that the batch system and its MPI set, which win over those of an image."""
        return {name: value for name, value in self._portable_variables.items() if OF_TASK.match(name)}

    @property
    def job_variables(self) -> Mapping[str, str]:
        """The job's other variables, over which those of an image win, as far as they hold in a container."""
        return {name: value for name, value in self._portable_variables.items() if not OF_TASK.match(name)}

    @property
    def is_pmix_rank(self) -> bool:
        """Whether a server of PMIx waits for the task (`srun --mpi=pmix`)."""
        return NAMESPACE in self.environment

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that the task's program needs: of the step, and of the batch script.

        The server of PMIx has its folders in that of the step, in which the task's own is before Slurm 25.05.
        """
        script, name = os.path.split(self.program[0])
        spool, server = map(os.path.normpath, (self.spool, self.environment.get("PMIX_SERVER_TMPDIR", "")))
        parent = os.path.dirname(spool)
        paths = (
            parent if os.path.dirname(server) == parent else spool,
            script if name == BATCH_SCRIPT else "",
        )
        return tuple(dict.fromkeys(path for path in paths if path.startswith("/") and os.path.isdir(path)))

    @property
    def _portable_variables(self) -> Mapping[str, str]:
        """The variables that mean the same in a container as on the node."""
        return {
            name: value
            for name, value in self.environment.items()
            if NAME.fullmatch(name) and not OF_NODE.fullmatch(name)
        }


def parse_command_line(line: str) -> list[str]:
    """Return image, file of variables, folder and program of a command line of Slurm's shell.

    A user who writes such words into names and arguments of his own only has another program of his own
    started. Raises UsageError.
    """
    _, mark, rest = line.partition(MARK)
    path, _, rest = rest.partition(" ")
    spool, _, rest = rest.partition(" ")
    image, dashes, arguments = rest.partition(" -- ")
    for quote in QUOTES:
        program = _parse_arguments(arguments, quote)
        if mark and dashes and program:
            return [image, path, spool, *program]
    raise UsageError("the task's command line cannot be read", remedy=REMEDY)


def _parse_arguments(text: str, quote: str) -> list[str] | None:
    """Return the arguments between quotes in a text, None if it is not made of such."""
    arguments: list[str] = []
    place = 0
    while text.startswith("'", place):
        place += 1
        argument = ""
        while (end := text.find("'", place)) >= 0:
            argument += text[place:end]
            if not text.startswith(quote, end):
                break
            argument += "'"
            place = end + len(quote)
        if end < 0:
            return None
        arguments.append(argument)
        place = end + 1
        if place == len(text):
            return arguments
        if text[place] != " ":
            return None
        place += 1
    return None


def parse_image(bundle: str) -> str:
    """Return the name of an image that `srun --container` was given; raise UsageError if it is none."""
    try:
        Reference.parse(bundle)
    except UsageError as error:
        raise UsageError(
            f"--container={bundle}: not the name of an image",
            remedy="name one such as training:v1 or registry:5000/ml/training:v1; paths of bundles are none",
        ) from error
    return bundle


def read_environment(path: str) -> dict[str, str]:
    """Return the variables in a file that Slurm wrote with CreateEnvFile=null; raise UsageError."""
    remedy = "set CreateEnvFile=null in oci.conf"
    try:
        with open(path, "rb") as file:
            raw = file.read(LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the job's variables in {path} cannot be read: {reason}", remedy=remedy) from error
    if len(raw) > LIMIT:
        raise UsageError(f"{path} is too large: more than {LIMIT} bytes")
    if raw and not raw.endswith(b"\0"):
        raise UsageError(f"{path}: the variables do not end with a null byte", remedy=remedy)
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if name and equals}


def find_task_gpus(host: Host, environment: Mapping[str, str]) -> tuple[Host, str | None]:
    """Return the node with only the task's GPUs, and the `--gpus` value for them.

    The job's GPUs are those whose nodes this process may open, or else those that Slurm's variables name. A
    job without GPUs on a node that has some is refused a CPU-only image, unless it consents to one.
    """
    visible, spec = within(host, None, environment)
    if not visible.gpus or spec not in (None, NONE):
        return visible, spec
    hint = Accelerator(kind="environment", where="the job", why=NO_GPU)
    return replace(visible, gpus=(), accelerators=(*visible.accelerators, hint)), None
