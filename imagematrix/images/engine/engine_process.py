"""Processes of engines on this machine: which of them this user may trust, and what they say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

DOCKERD, CONTAINERD = "dockerd", "containerd"
TIMEOUT_S = 10
LIMIT = 1 << 20  # bytes
MOUNTS = "ns/mnt"


class EngineProcess:
    """A process that stays the same one while it is asked, even if it ends and another gets its number.

    Its methods raise OSError if it has ended, or is another user's.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._folder = os.open(f"/proc/{pid}", os.O_PATH | os.O_DIRECTORY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def read_name(self) -> str:
        """Return its name: that of the file that it was started from, unless it gave itself another."""
        return os.fsdecode(self._read_file("comm")).strip()

    def read_words(self) -> list[str]:
        """Return its command line."""
        return [os.fsdecode(word) for word in self._read_file("cmdline").rstrip(b"\0").split(b"\0")]

    def read_users(self) -> frozenset[int]:
        """Return the ids of the users that it acts for: one, unless it changes them."""
        lines = self._read_file("status").splitlines()
        ids = next((line.split()[1:] for line in lines if line.startswith(b"Uid:")), [])
        return frozenset(map(int, ids))

    def is_trusted(self) -> bool:
        """Whether this user may trust its program and its words: root only those of root, and only here.

        Anybody can give a process the name of an engine, and that of a container has other files.
        """
        here = str(Path("/proc/self", MOUNTS).readlink())
        is_here = os.readlink(MOUNTS, dir_fd=self._folder) == here
        return is_here and self.read_users() == {os.geteuid()}

    def run_program(self, *words: str) -> str:
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


def find_trusted_processes(name: str) -> Iterator[EngineProcess]:
    """Yield the processes with this name that this user may trust, each until the next one is asked for."""
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        try:
            process = EngineProcess(pid)
        except OSError:  # it has ended
            continue
        with process:
            if _is_trusted(process, name):
                yield process


def _is_trusted(process: EngineProcess, name: str) -> bool:
    try:
        return process.read_name() == name and process.is_trusted()
    except OSError:
        return False


def read_command_lines(name: str) -> dict[int, list[str]]:
    """Return the command lines of the processes with this name that this user may trust, by their numbers."""
    commands = {}
    for process in find_trusted_processes(name):
        try:
            commands[process.pid] = process.read_words()
        except OSError:  # it has ended
            continue
    return commands
