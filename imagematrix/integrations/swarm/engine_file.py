"""The engine's configuration file, and the running engine that uses it."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from imagematrix.common import files
from imagematrix.common.programs import read_output
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

DEFAULT = Path("/etc/docker/daemon.json")
DATA_ROOT = "/var/lib/docker"
SOCKET = "unix:///var/run/docker.sock"
BACKUP = ".bak"
VALIDATE_S = 30.0
NO_SUCH_FLAG = "unknown flag"  # engines before 23.0 cannot validate


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDaemon:
    """An engine, described by the flags of its command line in order: (name without dashes, value)."""

    flags: tuple[tuple[str, str], ...] = ()

    def get_data_root(self, config: Mapping[str, Any]) -> str:
        """Return the folder of its data; `config` is the content of its file."""
        return [str(config.get("data-root") or DATA_ROOT), *self.get_values("data-root", "g")][-1]

    def get_address(self, config: Mapping[str, Any]) -> str:
        """Return the address of its local socket; raise UsageError if it has none."""
        hosts = [*self.get_values("host", "H"), *config.get("hosts", ())] or [SOCKET]
        # With fd:// systemd passes the socket, which is SOCKET unless the unit was changed.
        local = [SOCKET if host.startswith("fd://") else host for host in hosts]
        for host in local:
            if host.startswith("unix://"):
                return host
        raise UsageError("the engine has no local socket", remedy=f"add {SOCKET} to its hosts")

    def refuse_flags(self, flags: Iterable[str]) -> None:
        """Raise UsageError if the engine was started with one of these flags."""
        words = [f"--{name}" for name in flags if self.get_values(name)]
        if words:
            raise UsageError(
                f"the engine was started with {', '.join(words)}, and refuses the same settings in its file",
                remedy="move them from the command line (`systemctl cat docker`) to the file",
            )

    def get_values(self, *names: str) -> list[str]:
        """Return the values of a flag, in order, under any of its names."""
        return [value for name, value in self.flags if name in names]


def read_engine_file(path: Path) -> str:
    """Return the text of the file, empty if it does not exist; raise UsageError if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def read_bytes(path: Path) -> bytes | None:
    """Return the bytes of a file, None if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def get_indent(text: str) -> int:
    """Return the number of spaces by which a JSON text is indented, 2 if it shows none."""
    match = re.search(r'^( +)"', text, re.MULTILINE)
    return len(match[1]) if match else 2


def make_diff(path: Path, before: str, after: str) -> str:
    """Return the change as a unified diff, empty if nothing changes."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), str(path), f"{path} (new)", lineterm=""
    )
    return "\n".join(lines)


def find_daemon(path: Path, commands: Mapping[int, Sequence[str]]) -> EngineDaemon:
    """Return the running engine whose configuration is the file `path`; without flags if none runs.

    `commands` are the command lines of dockerd, by the numbers of their processes. Raises UsageError if
    several use the file.
    """
    found = {}
    for pid, words in commands.items():
        daemon = EngineDaemon(flags=tuple(_parse_flags(words[1:])))
        if Path([str(DEFAULT), *daemon.get_values("config-file")][-1]) == path:
            found[pid] = daemon
    if len(found) > 1:
        raise UsageError(
            f"several engines use {path}: processes {', '.join(map(str, found))}",
            remedy="start all but one of them with another --config-file",
        )
    return next(iter(found.values()), EngineDaemon())


def write_engine_file(path: Path, text: str, on_unchecked: Callable[[str], object]) -> None:
    """Replace the file atomically once dockerd has validated the text; keep a copy of the old file beside it.

    `on_unchecked` gets the reason if there is no dockerd that can validate it: it is written all the same.
    Raises UsageError if the text is invalid, or if the file cannot be written.
    """
    target = path.resolve()

    def check(draft: Path) -> None:
        try:
            _validate_draft(draft, path)
        except EngineError as error:
            on_unchecked(str(error))
        if target.exists():
            status = target.stat()
            os.chown(draft, status.st_uid, status.st_gid)
            draft.chmod(stat.S_IMODE(status.st_mode))
            # After the validation, so that an invalid text leaves the last copy as it is.
            shutil.copy2(target, f"{target}{BACKUP}")

    replace_file(target, text.encode(), 0o644, check)


def replace_file(
    path: Path, content: bytes, mode: int, check: Callable[[Path], None] = lambda _: None
) -> None:
    """Replace a file as `files.replace` does, and create its folder; raise UsageError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, content, mode, check)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error


def _validate_draft(draft: Path, path: Path) -> None:
    """Raise UsageError if dockerd refuses the draft of a file, EngineError if it cannot tell."""
    try:
        process = read_output(["dockerd", "--validate", "--config-file", str(draft)], VALIDATE_S)
    except FileNotFoundError as error:
        raise EngineError("dockerd not found") from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"`dockerd --validate` took over {VALIDATE_S:g} seconds") from error
    output = process.stderr.strip()
    if process.returncode and NO_SUCH_FLAG in output:
        raise EngineError("this dockerd cannot validate a file")
    if process.returncode:
        raise UsageError(f"{path} would be invalid: {output.replace(str(draft), str(path))}")


def _parse_flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command line of dockerd; the value of a flag without one is "true"."""
    rest = iter(words)
    following = next(rest, None)
    while following is not None:
        word, following = following, next(rest, None)
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        # dockerd takes no plain arguments, so that a word after a flag is its value.
        if not equals and following is not None and not following.startswith("-"):
            value, following = following, next(rest, None)
        yield name, value if value or equals else "true"
