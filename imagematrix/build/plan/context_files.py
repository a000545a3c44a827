"""What Dockerfiles copy from a context, compared with the files that are there."""

from __future__ import annotations

import os.path
import posixpath
import re
from functools import cached_property

from imagematrix.build.plan import context
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

MOST = 1_000  # files that are compared for a suggestion
# Patterns, which may match nothing, and what only the build replaces.
OPEN = re.compile(r"[*?\[\\$\"']")


class ContextFiles:
    """The files that a build can copy from `folder`; without a folder there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._complaints: dict[str, tuple[str, str] | None] = {}  # cells copy the same files

    @cached_property
    def names(self) -> frozenset[str]:
        """Their paths; raises UsageError if the folder cannot be read."""
        try:
            return context.list_context_paths(self._folder) if self._folder else frozenset()
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self._folder}: cannot be read: {error}") from error

    def find_complaint(self, source: str) -> tuple[str, str] | None:
        """Return what is wrong with a path that an instruction copies, and a remedy; None if it is there."""
        if source not in self._complaints:
            self._complaints[source] = self._find_fault(source)
        return self._complaints[source]

    def _find_fault(self, source: str) -> tuple[str, str] | None:
        if self._folder is None:
            remedy = "name the folder with its files in matrix.yaml, such as context: src"
            return f"the image has no context, from which it takes {source}", remedy
        path = posixpath.normpath(f"/{source}").lstrip("/")
        if not path or OPEN.search(source) or path in self.names:
            return None
        # A build follows a link to find a path, perhaps to where it is.
        parts = path.split("/")
        folders = (f"{self._folder}/{'/'.join(parts[:end])}" for end in range(1, len(parts)))
        if any(map(os.path.islink, folders)):
            return None
        if os.path.lexists(self._folder / path):
            message = f"{source} is there, but .dockerignore of the context excludes it"
            return message, f"write !{path} at the end of {self._folder / '.dockerignore'}"

        # Perhaps the file is in another folder, or has a similar name in this folder.
        folder, name = posixpath.split(path)
        namesakes = (file for file in self.names if posixpath.basename(file) == name)
        siblings = (file for file in self.names if posixpath.dirname(file) == folder)
        remedy = (
            suggest_nearest(path, sorted(namesakes)[:MOST], likeness=0)
            or suggest_nearest(path, sorted(siblings)[:MOST])
            or f"paths begin in the context, {self._folder}"
        )
        return f"{source} is not in the context", remedy
