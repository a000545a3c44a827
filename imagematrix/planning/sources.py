"""What Dockerfiles copy from a context, compared with the files that are there."""

from __future__ import annotations

import os.path
import posixpath
import re
from functools import cached_property

from imagematrix.planning import context
from imagematrix.spelling import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ContextFiles"]

# Patterns, which may match nothing, and what only the build replaces.
OPEN = re.compile(r"[*?\[\\$\"']")


class ContextFiles:
    """The files that a build can copy from `folder`; without a folder there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @cached_property
    def names(self) -> frozenset[str]:
        """Their paths; raises UsageError if the folder cannot be read."""
        return context.names(self._folder) if self._folder else frozenset()

    def complaint(self, source: str) -> tuple[str, str] | None:
        """Return what is wrong with a path that an instruction copies, and a remedy; None if it is there."""
        if self._folder is None:
            remedy = "name the folder with its files in matrix.yaml, such as context: src"
            return f"the image has no context, from which it takes {source}", remedy
        path = posixpath.normpath(f"/{source}").lstrip("/")
        if not path or OPEN.search(source) or path in self.names or self._is_below_a_link(path):
            return None
        if os.path.lexists(self._folder / path):
            message = f"{source} is there, but .dockerignore of the context excludes it"
            return message, f"write !{path} at the end of {self._folder / '.dockerignore'}"
        remedy = nearest(path, self.names) or f"paths begin in the context, {self._folder}"
        return f"{source} is not in the context", remedy

    def _is_below_a_link(self, path: str) -> bool:
        """Whether a build follows a link to find a path, perhaps to where it is."""
        parts = path.split("/")
        folders = (f"{self._folder}/{'/'.join(parts[:end])}" for end in range(1, len(parts)))
        return any(map(os.path.islink, folders))
