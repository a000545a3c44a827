"""Execution of `imagematrix run`: print the launch, or start it. Without typer, because jobs wait for it."""

from __future__ import annotations

import os
import shlex
import time

from imagematrix.cli.shared.inputs import (
    apply_warm_settings,
    find_catalog,
    load_launch_node,
    make_path,
    start_launch,
)
from imagematrix.cli.shared.output import print_document, print_info, print_json, warn
from imagematrix.cli.shared.pull_image import PullDisplay
from imagematrix.common.record import replace
from imagematrix.common.settings import DOCKER, read_site
from imagematrix.errors import EngineUnreachableError, UsageError
from imagematrix.images.engine import images, system
from imagematrix.launcher.docker.options import JSON
from imagematrix.launcher.launch_session import SignatureCheck

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.docker.request import LaunchRequest
    from imagematrix.launcher.gpu_claims.gpu_claim import Claim
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
    host, gpus = load_launch_node(args)
    catalog = find_catalog(image, args.catalog, make_path(args.policy))
    catalog = apply_warm_settings(catalog, no_warm=args.no_warm)
    request = make_request(args, host, catalog, gpus, remote)
    command = (DetachedCommand if args.is_detached else DockerCommand)(request)
    return start_launch(request, command, command.print_launch)


class DockerCommand:
    """Docker's command in the foreground, which starts what is requested."""

    def __init__(self, request: LaunchRequest) -> None:
        self._request = request
        self._args = request.args
        self._signatures = SignatureCheck(make_path(request.args.policy))

    def verify(self, selection: Selection, launch: Launch) -> Launch:
        """Return the launch, labelled and by its digest if policies require signatures; see ContainerEngine.

        By its tag, docker's command could pull another image with `--pull always`.
        """
        digest = self._signatures.require_signed(selection)
        if digest is not None and "@" not in launch.reference:
            signed = launch.digest if selection.warm else digest
            launch = replace(launch, reference=f"{launch.reference}@{signed}")
        return _label_with_job(launch)

    def find_warnings(self, selection: Selection, launch: Launch) -> Iterable[tuple[str, str | None]]:
        """Return the doubts about the launch; see ContainerEngine."""
        return self._request.find_doubts(selection, launch)

    def prepare(self, launch: Launch) -> None:
        """Raise an error if the engine could not unpack an image that is pulled; see ContainerEngine."""
        if "@" in launch.reference and self._args.may_pull:
            from imagematrix.launcher.docker.zstd_check import require_unpackable

            require_unpackable(launch.reference)

    def pull(self, selection: Selection, launch: Launch) -> None:
        """Pull an image by its digest unless the engine has it; see ContainerEngine.

        It follows the claim, on which the image may depend. Docker's command pulls an image without a digest,
        and any image if an option says so.
        """
        if "@" in launch.reference and self._args.is_pulled_first:
            from imagematrix.launcher.docker.pull import pull_unless_present

            with PullDisplay(launch.reference, quiet=self._args.is_quiet) as display:
                pull_unless_present(launch.reference, launch.digest, launch.platform, on_progress=display)
        elif selection.warm and not self._args.may_pull:
            images.require_image(launch.reference)

    def start(self, selection: Selection, launch: Launch, _: None, claim: Claim | None) -> int:
        """Run docker's command, which holds the claim too, and return its exit code."""
        if claim is not None:
            claim.pass_on()
        return self._run_command(selection, launch)

    def _run_command(self, selection: Selection, launch: Launch) -> int:
        """Run docker's command to its end, and print why the container failed if that is known."""
        from imagematrix.launcher.docker import foreground
        from imagematrix.launcher.docker.plan import LAUNCH, format_docker_run

        token = os.urandom(6).hex()
        observer = _Observer(f"{LAUNCH}={token}", launch, self._args)
        _, *words = format_docker_run(launch.with_labels({LAUNCH: token}), self._args.docker)
        command = [system.find_docker(), *words]
        try:
            code = foreground.run_in_foreground(command, observer.start)
        except OSError as error:
            raise system.make_start_error(error) from error
        observer.report(code, selection)
        return code

    def print_launch(self, _: Selection, launch: Launch) -> None:
        """Print the command, or the launch as a document."""
        from imagematrix.launcher.docker.plan import format_docker_run

        if self._args.print_form == JSON:
            print_json(launch.to_json(self._args.docker))
        else:
            command = shlex.join(format_docker_run(launch, self._args.docker))
            print_document(f"{command}\n", "see it with --print json")


class DetachedCommand(DockerCommand):
    """Docker's command with `--detach`: it ends once the container runs, and nothing has to outlive it."""

    def _run_command(self, _: Selection, launch: Launch) -> int:
        from imagematrix.launcher.docker.plan import format_docker_run

        program = system.find_docker()
        words = format_docker_run(launch, self._args.docker)
        try:
            os.execv(program, words)  # noqa: S606 - without a shell, on purpose
        except OSError as error:
            raise system.make_start_error(error) from error


def _label_with_job(launch: Launch) -> Launch:
    """Return the launch with a label of the job of Slurm that this process is in, if any."""
    if "SLURM_JOB_ID" not in os.environ:
        return launch
    from imagematrix.integrations.slurm.containers import make_labels

    return launch.with_labels(make_labels(os.environ))


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
