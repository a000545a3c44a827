"""Files of variables for `--env-file`, read as docker does (docker/cli, pkg/kvfile)."""

from __future__ import annotations

from imagematrix.common.text import SPACE
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def read_env_file(path: str, environment: Mapping[str, str]) -> list[str]:
    """Return the variables in a file, each as NAME=VALUE: no quotes, comments on lines of their own.

    A line with only a name stands for the variable in `environment`, or for nothing if there is none. Raises
    UsageError if the file cannot be read or has something else.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:  # noqa: PTH123 - pathlib is slow to load
            lines = [line.removesuffix("\n").removesuffix("\r").lstrip(SPACE) for line in file]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--env-file {path} cannot be read: {reason}") from error
    variables = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        name, equals, _ = line.partition("=")
        if not name or not set(name).isdisjoint(SPACE) or "\0" in line:
            remedy = "write NAME=VALUE, or NAME for a variable of the caller, without blanks before the ="
            raise UsageError(f"--env-file {path}: invalid variable {line!r:.80}", remedy=remedy)
        if equals or name in environment:
            variables.append(line if equals else f"{name}={environment[name]}")
    return variables
