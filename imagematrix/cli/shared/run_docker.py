"""Execution of `imagematrix run`: print the launch, or start it. Without typer, because jobs wait for it."""

from __future__ import annotations

import os
import shlex
import time
from contextlib import ExitStack

from imagematrix.cli.shared.inputs import find_catalog, load_node, make_path
from imagematrix.cli.shared.output import print_document, print_info, print_json, warn
from imagematrix.cli.shared.pull_image import PullDisplay
from imagematrix.cli.shared.wait_for_gpus import GpuWait
from imagematrix.common.record import replace
from imagematrix.common.settings import DOCKER, read_site
from imagematrix.errors import EngineUnreachableError, UsageError
from imagematrix.images.catalog.sources import require_signed
from imagematrix.images.engine import system
from imagematrix.launcher.docker.options import JSON

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.selection.selection import Selection


def run_with_docker(args: RunArgs, image: str) -> int:
    """Print the launch, or start it on unused GPUs; return the exit code."""
    site = read_site()
    engine = site.choose_value("engine", args.engine, "IMAGEMATRIX_ENGINE") or DOCKER
    if engine != DOCKER:
        from imagematrix.cli.shared.daemonless import run_daemonless

        return run_daemonless(args, image, engine, site)
    for option, is_set in (("--store", args.store is not None), ("--unpacked", args.unpacked)):
        if is_set:
            raise UsageError(f"{option} has no effect with --engine docker", remedy="add --engine oci")
    try:
        return _launch_image(args, image)
    except EngineUnreachableError as error:
        error.remedy = f"{error.remedy}; or add --engine oci, which needs no daemon"
        raise


def _launch_image(args: RunArgs, image: str) -> int:
    from imagematrix.launcher.docker.request import find_remote_machine, make_request

    if args.measure and args.is_detached:
        raise UsageError(
            "--measure and --detach are mutually exclusive: the report follows the end of the run"
        )
    remote = find_remote_machine(args)
    policy = make_path(args.policy)
    host, gpus = load_node(make_path(args.host), None, make_path(args.nvidia_smi), args.gpus)
    request = make_request(args, host, find_catalog(image, args.catalog, policy), gpus, remote)
    selection, launch = request.plan_on_any()
    launch = _label_with_job(_pin_signed(selection, launch, policy))
    if args.print_form:
        from imagematrix.launcher.docker.plan import format_docker_run

        if args.print_form == JSON:
            print_json(launch.to_json(args.docker))
        else:
            command = shlex.join(format_docker_run(launch, args.docker))
            print_document(f"{command}\n", "see it with --dry-run=json")
        return 0
    for doubt, remedy in request.find_doubts(selection, launch):
        warn(doubt, remedy)
    if "@" in launch.reference and args.may_pull:
        from imagematrix.launcher.docker.zstd_check import require_unpackable

        require_unpackable(launch.reference)

    is_saved = args.host or args.nvidia_smi
    wait = GpuWait(None if is_saved else lambda: load_node(None, None, None, args.gpus)[0])
    with ExitStack() as stack:
        if launch.gpus or request.passed_gpus:
            claim = stack.enter_context(request.claim_gpus(launch, wait.print_reason, wait.probe_again))
            signed = launch
            selection, launch = request.plan_on_claimed(
                claim, selection, launch, wait.latest or wait.probe_again()
            )
            launch = _label_with_job(_pin_signed(selection, launch, policy, signed))
            claim.pass_on()
        # Docker's command pulls an image without a digest, and any image if an option says so.
        if "@" in launch.reference and args.is_pulled_first:
            from imagematrix.launcher.docker.pull import pull_unless_present

            with PullDisplay(launch.reference, quiet=args.is_quiet) as display:
                pull_unless_present(launch.reference, launch.digest, launch.platform, on_progress=display)
        if args.is_detached:
            _exec_docker(launch, args)
        return _run_docker(launch, args, selection)


def _pin_signed(
    selection: Selection, launch: Launch, policy: Path | None, before: Launch | None = None
) -> Launch:
    """Return the launch; if policies require signatures, check them and name the image by its digest.

    By its tag, docker's command could pull another image with `--pull always`. The image of the launch
    `before` was already checked.
    """
    if before is not None and before.reference == launch.reference:
        return launch
    digest = None
    if selection.variant:
        digest = require_signed(selection.variant, policy, version=selection.version)
    if digest is None or "@" in launch.reference:
        return launch
    return replace(launch, reference=f"{launch.reference}@{digest}")


def _label_with_job(launch: Launch) -> Launch:
    """Return the launch with a label of the job of Slurm that this process is in, if any."""
    if "SLURM_JOB_ID" not in os.environ:
        return launch
    from imagematrix.integrations.slurm.containers import make_labels

    return launch.with_labels(make_labels(os.environ))


def _exec_docker(launch: Launch, args: RunArgs) -> None:
    """Exec docker's command, which ends once the container runs."""
    from imagematrix.launcher.docker.plan import format_docker_run

    program = system.find_docker()
    try:
        os.execv(program, format_docker_run(launch, args.docker))  # noqa: S606 - without a shell, on purpose
    except OSError as error:
        raise system.make_start_error(error) from error


def _run_docker(launch: Launch, args: RunArgs, selection: Selection) -> int:
    """Run docker's command to its end, and print why the container failed if that is known."""
    from imagematrix.launcher.docker import foreground
    from imagematrix.launcher.docker.plan import LAUNCH, format_docker_run

    token = os.urandom(6).hex()
    observer = _Observer(f"{LAUNCH}={token}", launch, args)
    _, *words = format_docker_run(launch.with_labels({LAUNCH: token}), args.docker)
    command = [system.find_docker(), *words]
    try:
        code = foreground.run_in_foreground(command, observer.start)
    except OSError as error:
        raise system.make_start_error(error) from error
    observer.report(code, selection)
    return code


class _Observer:
    """Watches the container with `label`, and reports how it went.

    Its modules are loaded while docker's command starts, or once the container has failed.
    """

    def __init__(self, label: str, launch: Launch, args: RunArgs) -> None:
        self._label = label
        self._since = time.time()
        self._removed = args.is_removed
        self._gpus = launch.gpus if args.measure else ()

    def start(self) -> None:
        """Start watching, and measuring if that was requested."""
        from imagematrix.launcher.docker.output_watcher import OutputWatcher

        self._watch = OutputWatcher(self._label, self._since, removed=self._removed)
        self._watch.start()
        if self._gpus:
            from imagematrix.launcher.docker.memory_sampler import MemorySampler

            self._measure = MemorySampler(lambda: self._watch.container)
            self._measure.start()

    def report(self, code: int, selection: Selection) -> None:
        """Print what was measured, and why the container failed, if that is known."""
        if self._gpus:
            from imagematrix.launcher.docker.memory_sampler import format_summary

            self._measure.stop()
            print_info(format_summary(self._measure.peaks, self._gpus))
        if code:
            from imagematrix.launcher.docker.diagnosis import diagnose, is_program_failure

            lines = self._watch.get_last_lines()
            diagnosis = diagnose(code, lines, selection) if is_program_failure(code) else None
            if diagnosis:
                warn(f"the container failed: {diagnosis}", diagnosis.remedy)
