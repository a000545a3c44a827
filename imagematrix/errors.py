"""The errors of imagematrix: one tree, each class with the exit code of the command line.

Messages are harmless wherever they are printed, whatever is in the values that they show. What makes them so
is here, too: all other modules may raise errors, so this one uses none of them.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Characters that control a terminal: C0 and C1 controls except line breaks and tabs, and those that change
# the direction of text, which can disguise a line. Patterns are compiled when they are first used, because
# most text of `select` has none of these.
CONTROL = "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
BREAKS = "[\t\n\u2028\u2029]"
# What CI systems take as a command in the log of a job. GitHub's runner: "::name" at the start of a line,
# also after blanks, and "##[" anywhere (actions/runner, ActionCommand.cs); Azure Pipelines: "##vso["
# anywhere; TeamCity: "##teamcity[". A line may be folded at any blank later, so "::" counts after all.
COMMAND = r"(?<!\S):(?=:\S)|#(?=#\w*\[)"
REPLACED = "\N{REPLACEMENT CHARACTER}"


def sanitize_text(text: str) -> str:
    """Return text of any number of lines without control characters and commands to CI systems."""
    if not text.isprintable():
        text = re.sub(CONTROL, REPLACED, text)
    return re.sub(COMMAND, REPLACED, text) if "::" in text or "##" in text else text


def sanitize_line(text: str) -> str:
    """Return `text` as one line: as `visible` does, with line breaks and tabs replaced, too."""
    return sanitize_text(text if text.isprintable() else re.sub(BREAKS, REPLACED, text))


class ImagematrixError(Exception):
    """Base of every error raised on purpose.

    The message has one line for each of `lines`, whatever is in the values that they show. `remedy` is one
    sentence that states what to do about it, or None. `shown` is the same with options of the command, where
    the remedy has arguments of a function.
    """

    exit_code = 1

    def __init__(self, *lines: str, remedy: str | None = None, shown: str | None = None) -> None:
        super().__init__("\n".join(map(sanitize_line, lines)))
        self.remedy = None if remedy is None else sanitize_line(remedy)
        self._shown = None if shown is None else sanitize_line(shown)

    @property
    def details(self) -> str:
        """The message in its long form, for a terminal."""
        return str(self)

    @property
    def shown(self) -> str | None:
        """The remedy, with options of the command in place of arguments."""
        return self._shown or self.remedy

    def __reduce__(self) -> tuple[Callable[..., ImagematrixError], tuple[Any, ...], dict[str, Any]]:
        # Exceptions are unpickled from their `args`, which differ from the parameters of these classes.
        return _made, (type(self), *self.args), self.__dict__


class UsageError(ImagematrixError):
    """A command, a document or a matrix is invalid."""

    exit_code = 2


class UnservedError(ImagematrixError):
    """Hosts that images were made for get none of them, or not those that are there."""

    exit_code = 3


class UnknownImageError(ImagematrixError):
    """The image or version is not in the catalog."""

    exit_code = 4


class ProbeError(ImagematrixError):
    """The host could not be probed."""

    exit_code = 5


class BuildError(ImagematrixError):
    """One or more builds failed."""

    exit_code = 6


class TagMovedError(ImagematrixError):
    """An immutable tag would have moved."""

    exit_code = 7


class EngineError(ImagematrixError):
    """The engine or the registry cannot be reached, or is too old for the request."""

    exit_code = 8


class EngineUnreachableError(EngineError):
    """No container engine answers, or it does not let this user in."""


class AuditError(ImagematrixError):
    """The bytes of an image contradict its labels."""

    exit_code = 9


class GpusBusyError(ImagematrixError):
    """The requested GPUs are not free."""

    exit_code = 10


class OutdatedError(ImagematrixError):
    """Something is outdated; only `imagematrix outdated` raises it."""

    exit_code = 11


class SignatureError(ImagematrixError):
    """A signature that a policy requires is missing or wrong."""

    exit_code = 12


def _made(kind: type[ImagematrixError], *args: object) -> ImagematrixError:
    return kind.__new__(kind, *args)
