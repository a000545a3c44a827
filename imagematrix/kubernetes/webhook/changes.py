"""Whether a file has changed."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["stamp"]


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written again or replaced; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
