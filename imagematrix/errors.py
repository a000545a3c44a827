"""The errors of imagematrix: one tree, each class with the exit code of the command line."""

from __future__ import annotations

from imagematrix.text import line

__all__ = [
    "AuditError",
    "BuildError",
    "EngineError",
    "EngineUnreachableError",
    "GpusBusyError",
    "ImagematrixError",
    "OutdatedError",
    "ProbeError",
    "SignatureError",
    "TagMovedError",
    "UnknownImageError",
    "UnservedError",
    "UsageError",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class ImagematrixError(Exception):
    """Base of every error raised on purpose.

    The message has one line for each of `lines`, whatever is in the values that they show. `remedy` is one
    sentence that states what to do about it, or None. `shown` is the same with options of the command, where
    the remedy has arguments of a function.
    """

    exit_code = 1

    def __init__(self, *lines: str, remedy: str | None = None, shown: str | None = None) -> None:
        super().__init__("\n".join(map(line, lines)))
        self.remedy = None if remedy is None else line(remedy)
        self._shown = None if shown is None else line(shown)

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
