"""The Python that runs us. One that is too old gets a sentence, where our syntax would be an error to it.

This module and `imagematrix/__init__.py` have only what Python 3.6 knows.
"""

import shlex
import shutil
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

USAGE = 2
NEWER = 20  # minor releases after the oldest that is needed, of which one may be installed


class TooOldError(ImportError):
    """This Python is too old for imagematrix. Where nobody catches it, its text is all that is printed."""


def refuse_interpreter(needed: str) -> None:
    """Raise TooOldError, which says that a Python of the release `needed`, such as "3.11", has to run us."""
    found = ".".join(map(str, sys.version_info[:3]))
    sys.excepthook = _told
    raise TooOldError(
        f"Python {needed} or newer is needed, and {sys.executable} is {found}\n  {_remedy(needed)}"
    )


def _remedy(needed: str) -> str:
    major, minor = needed.split(".")
    for newer in range(int(minor) + NEWER, int(minor) - 1, -1):
        name = f"python{major}.{newer}"
        if shutil.which(name):
            return f"start it with {' '.join(map(shlex.quote, [name, *_words()]))}"
    return f"install Python {needed} or newer; conda, uv and pyenv do so without root"


def _words() -> "list[str]":
    """Return the words after the interpreter, without those of whose text Python keeps nothing."""
    first, *rest = sys.argv or [""]
    if first == "-m":  # Python is looking for the module
        return ["-m", "imagematrix", *rest]
    return [first, *rest] if first not in ("", "-", "-c") else []


def _told(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
    if not isinstance(error, TooOldError):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"imagematrix: {error}\n")
    sys.exit(USAGE)
