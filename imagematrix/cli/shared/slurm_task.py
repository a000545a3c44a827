"""Execution of `imagematrix oci-task`: become the container of a task of Slurm.

Without typer, because jobs wait for it. See oci.conf(5).
"""

from __future__ import annotations

import os
import socket

from imagematrix.cli.shared.daemonless import DaemonlessLaunch
from imagematrix.cli.shared.output import print_info, warn
from imagematrix.common.programs import SYSTEM_PATH
from imagematrix.common.settings import DOCKER, read_site
from imagematrix.errors import EngineError, UsageError
from imagematrix.hardware.gpu_request.spec import NONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.common.settings import Site
    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.integrations.slurm.task import SlurmTask
    from imagematrix.launcher.daemonless.options import Bind
    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.selection.selection import Selection

USAGE = "imagematrix oci-task IMAGE ENVFILE SPOOL -- COMMAND..."
DEFAULT = "oci"  # of the engines without a daemon
WHERE, ALLOW_CPU = "IMAGEMATRIX_WHERE", "IMAGEMATRIX_ALLOW_CPU"
REMEDY = "install bubblewrap or charliecloud on the node, or start the step with --mpi=none"
MPI = frozenset(("mpi", "pmix"))  # libraries of an image that ask the server of PMIx


def run_slurm_task(words: Sequence[str]) -> int:
    """Select the image of a task on this node, and become the runtime of its container.

    Raises NodeChangedError if the node is not what Slurm says of it, and what `run` without a daemon and
    `slurm.agreement.select_for_task` raise.
    """
    from imagematrix.integrations.slurm.configuration import VARIABLE, find_slurm_conf
    from imagematrix.integrations.slurm.task import (
        SlurmTask,
        parse_command_line,
        parse_image,
        read_environment,
    )

    if words[:1] == ["--line"] and len(words) == len(("--line", "TEXT")):
        image, path, spool, *program = parse_command_line(words[1])
    elif len(words) < 5 or words[3] != "--":  # noqa: PLR2004 - as in USAGE
        raise UsageError("oci-task: expected an image, two paths and a command", remedy=f"usage: {USAGE}")
    else:
        image, path, spool, _, *program = words
    parse_image(image)  # before anything else is done with it
    environment = read_environment(path)
    configuration = find_slurm_conf(os.environ)  # as slurmd has it
    # Slurm starts this with slurmd's variables, or with none: it is a process of the job, and gets the job's.
    os.environ.clear()
    # But for its PATH, and the place of slurm.conf: what runs on the node is the node's.
    os.environ.update({**environment, "PATH": SYSTEM_PATH})
    if configuration is not None:
        os.environ[VARIABLE] = configuration
    return _start_container(
        image, SlurmTask(program=tuple(program), environment=environment, spool=spool), configuration
    )


def _start_container(image: str, task: SlurmTask, configuration: str | None) -> int:
    from imagematrix.hardware.host.probe import probe_hardware
    from imagematrix.integrations.slurm.task import find_task_gpus
    from imagematrix.launcher.daemonless.options import Bind, ContainerOptions, make_site_binds
    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.launch_session import AdoptedGpus, LaunchSession
    from imagematrix.selection.query import parse_where

    site = read_site()
    engine = site.choose_value("engine", None, "IMAGEMATRIX_ENGINE") or DEFAULT
    where = task.environment.get(WHERE)
    args = RunArgs(
        options=(),
        image=image,
        command=task.program,
        where=parse_where([where]) if where else None,
        allow_cpu=task.environment.get(ALLOW_CPU, "") not in ("", "0"),
    )
    folders = tuple(Bind(source=path, target=path) for path in task.folders)
    terminal = all(map(os.isatty, range(3)))
    options = ContainerOptions(
        environment=task.scheduler_variables,
        binds=(),
        labels={},
        folder=_find_working_folder((*make_site_binds(site.mounts), *folders)),
        entrypoint="",  # as the image's is for a command of its own, and a job has a program
        name=None,
        interactive=True,
        terminal=terminal,
        read_only=False,
    )
    launch = (RankLaunch if task.is_pmix_rank else DaemonlessLaunch)(
        args,
        image,
        DEFAULT if engine == DOCKER else engine,
        options,
        site,
        folders=folders,
        inherited=task.job_variables,
        own_processes=False,
    )
    node = probe_hardware()
    if configuration is not None:
        _require_configured_node(configuration, task.environment, node)
    host, gpus = find_task_gpus(node, task.environment)
    catalog = _agree_with_step(image, task, site, args, launch, (host, gpus))
    request = launch.make_request(host, gpus, catalog)
    return LaunchSession(request=request, gpus=AdoptedGpus("Slurm"), on_warning=warn).run(launch)


class RankLaunch(DaemonlessLaunch):
    """The launch of a rank with a server of PMIx, which knows it by the job's user.

    The server compares the user that a rank says it is, root in its container, with the job's. PMIx 5.0.7
    then leaves the rank waiting (connection_hdlr.c).
    """

    of_user = True

    def verify(self, selection: Selection, launch: Launch) -> Launch:
        """Return the launch, unless it uses MPI and its process would be root; see ContainerEngine."""
        launch = super().verify(selection, launch)
        libraries = selection.variant.libraries if selection.variant else None
        if self.require_runtime().as_root and libraries is not None and not MPI.isdisjoint(dict(libraries)):
            raise EngineError(self._describe_problem(), remedy=REMEDY)
        return launch

    def find_warnings(self, selection: Selection, launch: Launch) -> Iterator[tuple[str, str | None]]:
        """Yield a warning if it is unknown whether the image uses MPI, and then the others."""
        libraries = selection.variant.libraries if selection.variant else None
        if self.require_runtime().as_root and libraries is None:
            yield f"{self._describe_problem()}, if the program uses it; {REMEDY}", None
        yield from super().find_warnings(selection, launch)

    def _describe_problem(self) -> str:
        root = f"a task is root in a container of {self.require_runtime().name}"
        return f"{root}, so the server of PMIx leaves MPI_Init waiting"


def _agree_with_step(
    image: str,
    task: SlurmTask,
    site: Site,
    args: RunArgs,
    daemonless: DaemonlessLaunch,
    node: tuple[Host, str | None],
) -> Catalog | None:
    """Return the catalog for a task of a step on several nodes, without warm images; None for any other task.

    It has the variant on which the tasks agree for this node. It has all if the task chooses for itself, or
    if its job got none of the node's GPUs and does not consent to that: such a task is refused, whatever the
    other tasks do.
    """
    from imagematrix.integrations.slurm.agreement import make_agreement, select_for_task
    from imagematrix.integrations.slurm.step import find_step

    host, gpus = node
    step = find_step(image, task.environment)
    if step is None:
        return None
    agreement = make_agreement(step, task.environment, site, site.hosts)
    if agreement is None or (host.accelerators and not host.gpus and not args.allow_cpu):
        return daemonless.open_catalog().without_warm()
    return select_for_task(
        step,
        agreement,
        host,
        daemonless.open_catalog,
        gpus=gpus if host.gpus else NONE,
        where=args.where,
        allow_cpu=args.allow_cpu,
    ).decision.catalog


def _require_configured_node(path: str, environment: Mapping[str, str], host: Host) -> None:
    """Raise NodeChangedError if this node is not as slurm.conf says; a batch job is requeued once, then."""
    from imagematrix.integrations.slurm.configuration import get_features, read_lines
    from imagematrix.integrations.slurm.features import NodeChangedError, require_unchanged
    from imagematrix.integrations.slurm.requeue import is_requeueable, requeue_job

    node = environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    try:
        require_unchanged(node, get_features(read_lines(path), node), host)
    except NodeChangedError:
        if is_requeueable(environment):
            try:
                print_info(f"imagematrix: job {requeue_job(environment)} was requeued, once")
            except EngineError as error:
                warn(f"the job was not requeued: {error}", error.remedy)
        raise


def _find_working_folder(binds: Sequence[Bind]) -> str | None:
    """Return the job's working folder if the container has it, else None, for the image's."""
    try:
        here = os.getcwd()  # noqa: PTH109 - pathlib is slow to load
    except FileNotFoundError:  # it was removed
        return None
    is_mounted = any(f"{here}/".startswith(f"{bind.target.rstrip('/')}/") for bind in binds)
    return here if is_mounted else None
