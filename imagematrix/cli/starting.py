"""Carrying out `imagematrix run`: show the launch, or start it. It loads no typer: jobs wait for it."""

from __future__ import annotations

import os
import shlex
import time
from contextlib import ExitStack
from pathlib import Path

from imagematrix.cli.choosing import catalog_of, node_of
from imagematrix.cli.output import answer, say, show, warn
from imagematrix.errors import EngineError, UsageError
from imagematrix.launcher.options import JSON

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.launcher.options import Words
    from imagematrix.launcher.plan import Launch
    from imagematrix.selection.selection import Selection

__all__ = ["start"]


def start(asked: Words, image: str) -> int:
    """Show the launch, or start it on GPUs that nobody uses; return the exit code."""
    from imagematrix.launcher.request import elsewhere, request

    if asked.measure and asked.detached:
        raise UsageError("--measure tells at the end of a run, and -d does not wait for it")
    remote = elsewhere(asked)
    host, wanted = node_of(_path(asked.host), None, _path(asked.nvidia_smi), asked.gpus)
    found = request(asked, host, catalog_of(image, asked.catalog), wanted, remote)
    chosen, launch = found.first()
    if asked.shown:
        _show(launch, asked)
        return 0
    for doubt, remedy in found.doubts(chosen, launch):
        warn(doubt, remedy)
    with ExitStack() as stack:
        if launch.gpus or found.passed:
            taken = stack.enter_context(found.claim(launch, say))
            chosen, launch = found.on(taken)
            taken.pass_on()
        if asked.detached:
            _become(launch, asked)
        return _attend(launch, asked, chosen)


def _show(launch: Launch, asked: Words) -> None:
    from imagematrix.launcher.plan import docker_run

    if asked.shown == JSON:
        answer(launch.to_json(asked.docker))
    else:
        show(shlex.join(docker_run(launch, asked.docker)))


def _become(launch: Launch, asked: Words) -> None:
    """Become docker's command, which ends once the container runs."""
    from imagematrix.launcher.plan import docker_run

    line = docker_run(launch, asked.docker)
    try:
        os.execvp(line[0], line)  # noqa: S606 - there is no shell, and none is wanted
    except OSError as error:
        raise _no_docker(error) from error


def _attend(launch: Launch, asked: Words, chosen: Selection) -> int:
    """Run docker's command to its end, and say what the container died of, if a rule speaks about that."""
    from imagematrix.launcher.death import death, died
    from imagematrix.launcher.foreground import attend
    from imagematrix.launcher.measure import Measure, told
    from imagematrix.launcher.plan import LAUNCH, docker_run
    from imagematrix.launcher.watch import Watch

    token = os.urandom(6).hex()
    watch = Watch(f"{LAUNCH}={token}", time.time(), removed=asked.removed)
    measure = Measure(lambda: watch.container) if asked.measure and launch.gpus else None

    def meanwhile() -> None:
        watch.start()
        if measure:
            measure.start()

    line = docker_run(launch.labelled({LAUNCH: token}), asked.docker)
    try:
        code = attend(line, meanwhile)
    except OSError as error:
        raise _no_docker(error) from error
    if measure:
        measure.stop()
        say(told(measure.peaks, launch.gpus))
    found = death(code, watch.last_lines(), chosen) if died(code) else None
    if found:
        warn(f"the container died of {found}", found.remedy)
    return code


def _no_docker(error: OSError) -> EngineError:
    return EngineError(
        f"docker's command can't be started: {error.strerror}",
        remedy="install it: the package is docker-cli or docker-ce-cli",
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
