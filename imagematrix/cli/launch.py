"""`imagematrix run`: select, and start the container with docker's own command."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from imagematrix import engine
from imagematrix.cli.choosing import catalog_of, node_of
from imagematrix.cli.output import answer, say, warn
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.launch.options import Words
    from imagematrix.launch.plan import Launch
    from imagematrix.launch.share import Share
    from imagematrix.probe.host import Gpu, Host
    from imagematrix.select.selection import Selection
    from imagematrix.use.claim import Claim
    from imagematrix.use.uses import Uses

__all__ = ["SETTINGS", "command"]

# Every word goes to our own reading: most options are docker's, and -h is one of them.
SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False},
    "add_help_option": False,
    "options_metavar": "[OPTIONS]",
}


def command(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="IMAGE[:VERSION] [COMMAND...]")] = None,
) -> None:
    """Run the variant that fits this node best, with the device nodes of its GPUs and nothing else.

    Every option of `docker run` works before the image. Besides them: --gpus SPEC (all, none, a number,
    indices, UUIDs, MIG profiles or conditions), --wait 10m (for GPUs that are in use), --vram 4G (a share of
    a GPU), --mps and --mps-threads 25 (join the node's MPS daemon), --measure (tell the peak of GPU memory),
    --allow-cpu, --dry-run (print the command, run nothing), --print json (the same as data), --host FILE and
    --catalog FILE (decide for a saved host, choose from a saved catalog), --nvidia-smi XML.
    """
    from imagematrix.launch.options import split
    from imagematrix.record import replace
    from imagematrix.select.gpus import choose

    asked = split(words or [])
    if asked.help or asked.image is None:
        print(context.get_help())
        return
    if asked.measure and asked.detached:
        raise UsageError("--measure tells at the end of a run, and -d does not wait for it")
    remote = _remote(asked)
    host, wanted = node_of(_path(asked.host), None, _path(asked.nvidia_smi), asked.gpus)
    if asked.vram_mib is not None and asked.gpus is None:  # of a GPU that is to be shared one will do
        host, wanted = replace(host, gpus=choose(host, wanted)), "1"
    task = _Task(asked, host, catalog_of(asked.image, asked.catalog), _share(asked), remote)
    raise typer.Exit(task.run(wanted))


class _Task:
    """What was asked for, on one host, from one catalog; `remote` is another machine whose engine it is."""

    def __init__(self, asked: Words, host: Host, catalog: Catalog, share: Share, remote: str | None) -> None:
        self._asked = asked
        self._host = host
        self._catalog = catalog
        self._share = share
        self._remote = remote

    def run(self, wanted: str | None) -> int:
        """Show the launch, or start it on GPUs that nobody uses; return the exit code."""
        from imagematrix.select.gpus import exactly
        from imagematrix.select.select import serving

        sets, count = serving(self._host, self._catalog, wanted)
        first = exactly(sets[0][:count]) if len(sets[0]) > count else wanted
        chosen, launch = self._planned(first)
        if self._asked.shown:
            self._show(launch)
            return 0
        self._warn(chosen)
        self._require(launch)  # before anybody waits for GPUs
        with ExitStack() as stack:
            if launch.gpus:
                taken = stack.enter_context(self._claim(sets, count))
                chosen, launch = self._planned(exactly(taken.gpus))
                self._require(launch)
                launch = launch.labelled(taken.labels)
                taken.pass_on()
            start = _detached if self._asked.detached else _attended
            return start(launch, self._asked, chosen)

    def _planned(self, gpus: str | None) -> tuple[Selection, Launch]:
        from imagematrix.launch.devices import migs
        from imagematrix.launch.injection import through_cdi
        from imagematrix.launch.plan import plan
        from imagematrix.select.select import select

        asked = self._asked
        chosen = select(self._host, self._catalog, gpus=gpus, allow_cpu=asked.allow_cpu)
        held = _held(chosen, dry_run=asked.shown is not None)
        launch = plan(chosen, asked.command, share=self._share, mig_minors=migs(), held=held)
        if launch.injected and asked.host is None:
            launch = through_cdi(launch, _told(asked).get("CDISpecDirs") or ())
        return chosen, launch

    def _show(self, launch: Launch) -> None:
        from imagematrix.launch.options import JSON
        from imagematrix.launch.plan import docker_run

        if self._asked.shown == JSON:
            answer(launch.to_json(self._asked.docker))
        else:
            print(shlex.join(docker_run(launch, self._asked.docker)))

    def _warn(self, chosen: Selection) -> None:
        from imagematrix.launch.injection import second_driver
        from imagematrix.select.needs import mode

        if chosen.variant and mode(chosen.variant) in ("exact", "compat"):
            by = second_driver(self._asked, engine.info)
            if by:
                warn(f"the image has its own driver, and {by} brings the node's into it, too")
        daemon = self._share.mps
        if daemon and daemon.user and not self._asked.values("--user", "u"):
            warn("the MPS daemon serves its own user only", f"--user {daemon.user}")

    def _require(self, launch: Launch) -> None:
        from imagematrix.launch.devices import require

        if self._remote is None:
            require(launch.devices)

    def _claim(self, sets: tuple[tuple[Gpu, ...], ...], count: int) -> Claim:
        """Return a claim on GPUs of one set that nobody uses; docker's command keeps it while it lives."""
        from imagematrix.use.claim import claim, claim_first
        from imagematrix.use.locks import folder
        from imagematrix.use.survey import ask_nvml, survey

        # Of another machine only the containers can be seen; its GPUs are not those of the locks here.
        ask = ask_nvml if self._remote is None else lambda: None
        path = folder() if self._remote is None else f"{folder()}-{self._remote}"

        def look() -> Uses:
            return survey(self._host.gpus, engine.running, ask)

        def take(gpus: tuple[Gpu, ...], wait_s: float) -> Claim:
            vram_mib, mps = self._share.vram_mib, self._share.mps is not None
            return claim(gpus, count, look, vram_mib=vram_mib, mps=mps, wait_s=wait_s, tell=say, path=path)

        return claim_first(sets, take, self._asked.wait_s)


def _remote(asked: Words) -> str | None:
    """Return the name of the other machine that the engine runs on, or None; nobody guesses what it has."""
    if asked.host and asked.shown:
        return None
    machine = engine.remote()
    if machine and not asked.host:
        raise UsageError(
            f"the engine runs on {machine}, and what is probed is this machine",
            remedy=f"`imagematrix probe --json > node.json` on {machine}, then --host node.json here",
        )
    return machine


def _share(asked: Words) -> Share:
    from imagematrix.launch.share import Mps, Share, mps

    if not asked.mps:
        return Share(vram_mib=asked.vram_mib)
    if asked.host and asked.shown:  # the daemon of another node can't be asked
        return Share(vram_mib=asked.vram_mib, mps=Mps(threads=asked.mps_threads))
    return Share(vram_mib=asked.vram_mib, mps=mps(os.environ, asked.mps_threads))


def _told(asked: Words) -> Mapping[str, Any]:
    """Return what the engine tells of itself; nothing where a launch is only shown and there is no engine."""
    try:
        return engine.info()
    except EngineError:
        if asked.shown:
            return {}
        raise


def _held(chosen: Selection, *, dry_run: bool) -> frozenset[str] | None:
    """Return the digests of what the engine has under the selected name; what it lacks is pulled by digest.

    A dry run takes place where there need not be an engine: it names an image of a registry by its digest.
    """
    reference = str(chosen.selected)
    if "/" not in reference:
        return None
    try:
        return engine.digests(reference)
    except EngineError:
        if dry_run:
            return frozenset()
        raise


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _detached(launch: Launch, asked: Words, _: Selection) -> int:
    """Become docker's command, which ends once the container runs."""
    from imagematrix.launch.plan import docker_run

    line = docker_run(launch, asked.docker)
    try:
        os.execvp(line[0], line)  # noqa: S606 - there is no shell, and none is wanted
    except OSError as error:
        raise _no_docker(error) from error


def _attended(launch: Launch, asked: Words, chosen: Selection) -> int:
    """Run docker's command to its end, and say what the container died of, if a rule speaks about that."""
    from imagematrix.launch.death import death
    from imagematrix.launch.foreground import attend
    from imagematrix.launch.measure import Measure, told
    from imagematrix.launch.plan import LAUNCH, docker_run
    from imagematrix.launch.watch import Watch

    token = secrets.token_hex(6)
    watch = Watch(f"{LAUNCH}={token}", time.time())
    measure = Measure(lambda: watch.container)

    def meanwhile() -> None:
        watch.start()
        if asked.measure and launch.gpus:
            measure.start()

    line = docker_run(launch.labelled({LAUNCH: token}), asked.docker)
    try:
        code = attend(line, meanwhile)
    except OSError as error:
        raise _no_docker(error) from error
    finally:
        measure.stop()
    if asked.measure and launch.gpus:
        say(told(measure.peaks, launch.gpus))
    found = death(code, watch.last_lines(), chosen) if code else None
    if found:
        warn(f"the container died of {found}", found.remedy)
    return code


def _no_docker(error: OSError) -> EngineError:
    return EngineError(
        f"docker's command can't be started: {error.strerror}",
        remedy="install it: the package is docker-cli or docker-ce-cli",
    )
