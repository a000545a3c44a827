"""What the engines of this node say about how they pull: running containerds, Docker and Podman."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

from imagematrix.common.json_documents import parse_natural, read_json
from imagematrix.common.programs import find_program, read_output
from imagematrix.errors import UsageError
from imagematrix.hardware.host.tree import Tree
from imagematrix.images.engine import endpoint
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
    from collections.abc import Iterator, Sequence
    from typing import Self

TIMEOUT_S = 10
CONTAINERD = "containerd"
DAEMON_FILE = "/etc/docker/daemon.json"
# The containerd that dockerd starts for itself: what it pulls, dockerd pulls.
DOCKERS_OWN = "/containerd/containerd.toml"
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

    Each is asked by its own program with its own file, which k3s and others keep in other places. As root,
    only programs of root in this mount namespace are started: anybody can call a process containerd, and that
    of a container has other files.
    """
    for pid in filter(str.isdecimal, tree.list_names("/proc")):
        if (tree.read_text(f"/proc/{pid}/comm") or "").strip() != CONTAINERD:
            continue
        try:
            with _EngineProcess(int(pid)) as process:
                facts = _ask_containerd(process, tree)
        except (OSError, ValueError, RecursionError, subprocess.SubprocessError):
            continue  # it has ended, is another user's, or is none
        if facts:
            yield facts


def _ask_containerd(process: _EngineProcess, tree: Tree) -> ContainerdFacts | None:
    words = process.read_words()
    file = _find_option(words, "--config", "-config", "-c")
    if not process.may_be_started() or (file or "").endswith(DOCKERS_OWN):
        return None
    _, _, version, *_ = process.ask("--version").split()  # after the name and the module
    config = tomllib.loads(process.ask(*(("--config", file) if file else ()), "config", "dump"))
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


class _EngineProcess:
    """A process that stays the same one while it is asked, even if it ends and another gets its number."""

    def __init__(self, pid: int) -> None:
        self._folder = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def read_words(self) -> list[str]:
        return [os.fsdecode(word) for word in self._read_file("cmdline").split(b"\0")]

    def may_be_started(self) -> bool:
        """Whether this user may trust its program: root only that of another process of root here."""
        users = {*self._read_users()}
        here = str(Path("/proc/self/ns/mnt").readlink())
        return os.readlink("ns/mnt", dir_fd=self._folder) == here and users == {os.geteuid()}

    def ask(self, *words: str) -> str:
        """Return the output of another start of its program; raise OSError, ValueError or SubprocessError."""
        program = os.open("exe", os.O_PATH, dir_fd=self._folder)
        try:
            done = subprocess.run(
                (f"/proc/self/fd/{program}", *words),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                pass_fds=(program,),
                check=True,
            )
        finally:
            os.close(program)
        return done.stdout.decode()

    def _read_file(self, name: str) -> bytes:
        with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=self._folder), "rb") as file:
            return file.read(LIMIT)

    def _read_users(self) -> Iterator[int]:
        for line in self._read_file("status").splitlines():
            if line.startswith(b"Uid:"):
                yield from map(int, line.split()[1:])


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
    try:
        words = Path(f"/proc/{listener}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    downloads: object = _find_option(words, f"--{DOCKER_DOWNLOADS}")
    if downloads is None:
        with contextlib.suppress(UsageError):
            document = read_json(_find_option(words, "--config-file") or DAEMON_FILE, limit=LIMIT)
            downloads = document.get(DOCKER_DOWNLOADS) if isinstance(document, dict) else None
    return replace(docker, downloads=parse_natural(str(downloads)))


def _read_podman() -> PodmanFacts | None:
    program = find_program("podman")
    if program is None:
        return None
    try:
        version = read_output((program, "--version"), TIMEOUT_S).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    copies: object = None
    for path in _list_podman_files():
        try:
            engine = tomllib.loads(path.read_text(encoding="utf-8")).get("engine") or {}
            copies = engine.get(COPIES, copies)
        except (OSError, ValueError, RecursionError, AttributeError):
            continue
    return PodmanFacts(
        version=version[-1] if version else "", copies=copies if isinstance(copies, int) else None
    )


def _list_podman_files() -> Iterator[Path]:
    """Yield the files of settings, of which a later one wins (containers.conf(5))."""
    only, over = os.environ.get("CONTAINERS_CONF"), os.environ.get("CONTAINERS_CONF_OVERRIDE")
    folders = [Path("/usr/share/containers"), Path("/etc/containers")]
    if os.geteuid() != 0:
        folders.append(Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "containers")
    if only:
        yield Path(only)
    for folder in () if only else folders:
        yield folder / "containers.conf"
        yield from sorted(folder.glob("containers.conf.d/*.conf"))
    if over:
        yield Path(over)
