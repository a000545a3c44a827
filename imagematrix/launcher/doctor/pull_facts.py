"""What the engines of this node say about how they pull: running containerds, Docker and Podman."""

from __future__ import annotations

import os
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

from imagematrix.common.json_documents import parse_json, parse_natural
from imagematrix.common.programs import find_program, read_output
from imagematrix.errors import UsageError
from imagematrix.hardware.host.tree import Tree
from imagematrix.images.engine import endpoint, engine_process
from imagematrix.images.engine.engine_process import CONTAINERD, DOCKERD, EngineProcess
from imagematrix.launcher.doctor.pulls import (
    COPIES,
    DOCKER_DOWNLOADS,
    SOCI_FILE,
    ContainerdFacts,
    DockerFacts,
    PodmanFacts,
    PullFacts,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

TIMEOUT_S = 10
DAEMON_FILE = "/etc/docker/daemon.json"
# The file that dockerd writes for the containerd that it starts: what that one pulls, dockerd pulls. It is in
# the folder of dockerd's sockets, and that of an administrator in /etc.
DOCKERS_OWN, ADMINISTRATORS = "/containerd/containerd.toml", "/etc/"
LIMIT = 1 << 20  # bytes


def gather_pull_facts(docker: DockerFacts | None) -> PullFacts:
    """Return the facts about this machine, given what Docker says of itself, None if it does not answer."""
    return PullFacts(
        processors=len(os.sched_getaffinity(0)),
        containerds=tuple(_read_containerds(Tree("/"))),
        docker=_read_downloads(docker) if docker else None,
        podman=_read_podman(),
    )


def _read_containerds(tree: Tree) -> Iterator[ContainerdFacts]:
    """Yield what each containerd of this machine says, without Docker's own.

    Each is asked by its own program with its own file, which k3s and others keep in other places.
    """
    for process in engine_process.find_trusted_processes(CONTAINERD):
        try:
            facts = _ask_containerd(process, tree)
        except (OSError, ValueError, RecursionError, subprocess.SubprocessError):
            continue  # it has ended, or is none
        if facts:
            yield facts


def _ask_containerd(process: EngineProcess, tree: Tree) -> ContainerdFacts | None:
    file = _find_option(process.read_words(), "--config", "-config", "-c")
    if file and file.endswith(DOCKERS_OWN) and not file.startswith(ADMINISTRATORS):
        return None
    _, _, version, *_ = process.run_program("--version").split()  # after the name and the module
    config = tomllib.loads(process.run_program(*(("--config", file) if file else ()), "config", "dump"))
    mkfs = find_program("mkfs.erofs")
    said = read_output([mkfs, "-V"], TIMEOUT_S).stdout.split() if mkfs else []
    return ContainerdFacts(
        version=version,
        config=config,
        file=file,
        kernel_erofs="erofs" in (tree.read_text("/proc/filesystems") or "").split(),
        mkfs_erofs=next((word for word in said if word[:1].isdigit()), None),
        soci_parallel=_reads_in_parallel(tree),
    )


def _find_option(words: Sequence[str], *names: str) -> str | None:
    """Return the value of an option in a command line, given as one word or two."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        name, separator, value = word.partition("=")
        if name in names:
            return value if separator else following
    return None


def _reads_in_parallel(tree: Tree) -> bool:
    try:
        modes = tomllib.loads(tree.read_text(SOCI_FILE) or "").get("pull_modes") or {}
        return bool(modes["parallel_pull_unpack"]["enable"])
    except (ValueError, RecursionError, LookupError, TypeError):
        return False


def _read_downloads(docker: DockerFacts) -> DockerFacts | None:
    """Return the facts with the limit of downloads, which Docker's API does not tell.

    It is in the command line of the daemon or in its file, so None is returned for one on another machine.
    """
    listener = endpoint.get_listener_pid(endpoint.find_address())
    if not listener:
        return None
    try:
        daemon = _read_daemon(listener)
    except OSError:
        return None
    unknown = replace(docker, is_configured_here=False)
    if daemon is None:
        return unknown
    words, user = daemon
    flag = _find_option(words, f"--{DOCKER_DOWNLOADS}")
    if flag is not None:
        return replace(docker, downloads=parse_natural(flag))
    file = _find_option(words, "--config-file") or _find_daemon_file(user)
    document = _read_daemon_file(file) if file else None
    if document is None:
        return unknown
    # In the file, dockerd does not tell 0 from a value that is absent (MergeDaemonConfigurations).
    return replace(docker, downloads=parse_natural(str(document.get(DOCKER_DOWNLOADS))) or None)


def _read_daemon(listener: int) -> tuple[list[str], int] | None:
    """Return the command line and the user of the daemon at a socket, None if it is not certain which it is.

    Anybody can call a process dockerd, so those of other users but root do not count.
    systemd listens for the daemon, which then gets the socket (`dockerd -H fd://`).
    """
    with EngineProcess(listener) as process:
        if process.read_name() == DOCKERD:
            user, *others = process.read_users()
            is_trusted = user in {0, os.geteuid()} and not others
            return (process.read_words(), user) if is_trusted else None
    commands = engine_process.read_command_lines(DOCKERD)
    return (next(iter(commands.values())), os.geteuid()) if len(commands) == 1 else None


def _find_daemon_file(user: int) -> str | None:
    """Return the file that a daemon of root or of this user reads by default, None if it is not known."""
    if user == 0:
        return DAEMON_FILE
    folder = _find_config_folder()
    return str(folder / "docker/daemon.json") if folder else None


def _read_daemon_file(file: str) -> Mapping[str, object] | None:
    """Return a daemon's settings, None if they are unknown; a file that does not exist has none."""
    tree = Tree("/")
    text = tree.read_text(file, limit=LIMIT) or ""
    if tree.warnings or not Path(file).is_absolute():  # closed, or in a folder that is not known
        return None
    try:
        document = parse_json(text, file) if text.strip() else {}
    except UsageError:
        return None
    return document if isinstance(document, dict) else None


def _find_config_folder() -> Path | None:
    """Return the folder of this user's settings, None for a user without a home."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))  # noqa: PTH111
    return folder if folder.is_absolute() else None


def _read_podman() -> PodmanFacts | None:
    program = find_program("podman")
    if program is None:
        return None
    try:
        version = read_output((program, "--version"), TIMEOUT_S).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    copies: object = None
    tree = Tree("/")
    for path in _list_podman_files():
        try:
            engine = tomllib.loads(tree.read_text(str(path), limit=LIMIT) or "").get("engine") or {}
            copies = engine.get(COPIES, copies)
        except (ValueError, RecursionError, AttributeError):
            continue
    return PodmanFacts(
        version=version[-1] if version else "", copies=copies if isinstance(copies, int) else None
    )


def _list_podman_files() -> Iterator[Path]:
    """Yield the files of settings, of which a later one wins (containers.conf(5))."""
    only, over = os.environ.get("CONTAINERS_CONF"), os.environ.get("CONTAINERS_CONF_OVERRIDE")
    folders = [Path("/usr/share/containers"), Path("/etc/containers")]
    if os.geteuid() != 0 and (own := _find_config_folder()):
        folders.append(own / "containers")
    if only:
        yield Path(only)
    for folder in () if only else folders:
        yield folder / "containers.conf"
        yield from sorted(folder.glob("containers.conf.d/*.conf"))
    if over:
        yield Path(over)
