"""Modules of imagematrix that run in a process of their own."""

from __future__ import annotations

import os
import sys


def make_child_command(module: str) -> list[str]:
    """Return the command that runs `main` of a module, by its full name, in a separate process.

    It imports modules from where this process does: from folders or from an archive. What multiprocessing
    starts would import the main module of this process, which may be a script without a guard.
    """
    # "" is the working directory, which may contain a foreign pynvml.py.
    path = [os.path.abspath(entry) for entry in sys.path if entry]  # noqa: PTH100 - strings, not paths
    program = f"import sys; sys.path[:] = {path!r}; import {module} as child; child.main()"
    return [sys.executable, "-P", "-c", program]
