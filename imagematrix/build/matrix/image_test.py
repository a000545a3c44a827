"""The test of an image: a command in it, and what it may use."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTest:
    """A command that runs in each built image of a version before it is tagged; no part of the identity.

    `command` is the whole command, whatever the image's own is. It has no `network` unless that is set, and
    no files but the `secrets`, by id, and the `mounts`: paths in the container, each with a file or folder of
    this machine.
    """

    command: tuple[str, ...]
    network: bool = False
    secrets: tuple[str, ...] = ()
    mounts: tuple[tuple[str, Path], ...] = ()

    @property
    def digest(self) -> str:
        """A digest of what the matrix says of the test."""
        return hashlib.sha256(repr(self).encode()).hexdigest()
