"""Limits of this process (setrlimit(2))."""

from __future__ import annotations

import contextlib
import os
import resource


def set_limit(kind: int, value: int) -> None:
    """Set a limit, to the highest value that is allowed if that is lower; raises OSError or ValueError."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def set_limit_if_allowed(kind: int, value: int) -> None:
    """Set a limit as `set_limit` does, unless this process is forbidden to change limits."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: how Python names EPERM here
        set_limit(kind, value)


def raise_niceness_if_allowed(niceness: int) -> None:
    """Let other processes go first, unless this one is forbidden to change its priority."""
    with contextlib.suppress(OSError):
        os.nice(niceness)
