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
    version = ".".join(map(str, sys.version_info[:3]))
    sys.excepthook = _print_error
    raise TooOldError(
        f"Python {needed} or newer is needed, and {sys.executable} is {version}\n  {_suggest_remedy(needed)}"
    )


def _suggest_remedy(needed: str) -> str:
    # The words after the interpreter, without those of whose text Python keeps nothing.
    first, *rest = sys.argv or [""]
    if first == "-m":  # Python is looking for the module
        words = ["-m", "imagematrix", *rest]
    else:
        words = [first, *rest] if first not in ("", "-", "-c") else []

    major, minor = needed.split(".")
    for newer in range(int(minor) + NEWER, int(minor) - 1, -1):
        name = f"python{major}.{newer}"
        if shutil.which(name):
            return f"start it with {' '.join(map(shlex.quote, [name, *words]))}"
    return f"install Python {needed} or newer; conda, uv and pyenv do so without root"


def _print_error(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
    if not isinstance(error, TooOldError):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"imagematrix: {error}\n")
    sys.exit(USAGE)
