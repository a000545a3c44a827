"""CDI specs where programs look for them that have no option for the folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# /etc with the folder cdi, for one command.
OVERLAY = 'mount -t overlay -o ro,lowerdir="$0":/etc overlay /etc && exec "$@"'
# In a container: all device nodes of NVIDIA's.
LIST = ("find", "/dev", "-name", "nvidia*", "-type", "c")


def etc_with(folder: Path) -> list[str]:
    """Return the words that start a command for which `folder`/cdi is /etc/cdi."""
    return ["unshare", "--mount", "sh", "-c", OVERLAY, str(folder)]
