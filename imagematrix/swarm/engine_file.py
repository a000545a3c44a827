"""The engine's configuration file, and the engine that was started with it."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEFAULT", "Engine", "diff", "indent", "read", "started_with", "write"]

DEFAULT = Path("/etc/docker/daemon.json")
BACKUP = ".bak"
VALIDATE_S = 30.0
NO_SUCH_FLAG = "unknown flag"  # engines before 23.0 cannot validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A running engine, by the flags of its command line: (name without dashes, value), in order."""

    flags: tuple[tuple[str, str], ...]

    def values(self, *names: str) -> list[str]:
        """Return the values of a flag, in order, under any of its names."""
        return [value for name, value in self.flags if name in names]


def read(path: Path) -> str:
    """Return the text of the file, empty if there is none; raise UsageError if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def indent(text: str) -> int:
    """Return by how many blanks a JSON text is indented, 2 if that does not show."""
    match = re.search(r'^( +)"', text, re.MULTILINE)
    return len(match[1]) if match else 2


def diff(path: Path, before: str, after: str) -> str:
    """Return the change as a unified diff, empty if there is none."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), str(path), f"{path} (new)", lineterm=""
    )
    return "\n".join(lines)


def started_with(path: Path, proc: Path = Path("/proc")) -> Engine | None:
    """Return the running engine whose configuration is the file `path`, None if there is none."""
    for folder in sorted(proc.glob("[0-9]*")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            program, *words = (folder / "cmdline").read_text("utf-8").rstrip("\0").split("\0")
            if os.path.basename(program) != "dockerd":  # noqa: PTH119 - a word, not a path of ours
                continue
            engine = Engine(flags=tuple(_flags(words)))
            if Path([str(DEFAULT), *engine.values("config-file")][-1]) == path:
                return engine
    return None


def write(path: Path, text: str) -> str | None:
    """Replace the file at once, once dockerd has found it valid; its former text is kept beside it.

    Returns the reason if dockerd could not be asked, else None. Raises UsageError if dockerd refuses it, or
    if it cannot be written.
    """
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            undo.callback(Path(name).unlink, missing_ok=True)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unchecked = _validate(name, path)
            if target.exists():
                status = target.stat()
                os.chown(name, status.st_uid, status.st_gid)
                Path(name).chmod(status.st_mode & 0o7777)
                shutil.copy2(target, f"{target}{BACKUP}")
            else:
                Path(name).chmod(0o644)
            Path(name).replace(target)
            undo.pop_all()
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
    return unchecked


def _validate(name: str, path: Path) -> str | None:
    try:
        done = subprocess.run(
            ["dockerd", "--validate", "--config-file", name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VALIDATE_S,
            check=False,
        )
    except FileNotFoundError:
        return "dockerd not found"
    except subprocess.TimeoutExpired:
        return f"`dockerd --validate` took over {VALIDATE_S:g} seconds"
    if done.returncode == 0:
        return None
    said = done.stderr.strip()
    if NO_SUCH_FLAG in said:
        return "this dockerd cannot validate a file"
    raise UsageError(f"{path} would be invalid: {said.replace(name, str(path))}")


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command line of dockerd; a flag without a value has "true"."""
    rest = iter(words)
    following = next(rest, None)
    while following is not None:
        word, following = following, next(rest, None)
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and following is not None and not following.startswith("-"):
            value, following = following, next(rest, None)
        yield name, value if value or equals else "true"
