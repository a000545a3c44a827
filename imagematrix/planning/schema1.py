"""Identities of schema 1, so that versions published with it are still recognised.

Nothing is built with it any more. It differs in the context: all bits of a file's mode counted, so a
different umask was a different input.
"""

from __future__ import annotations

import hashlib
import os
import stat

from imagematrix.errors import UsageError
from imagematrix.planning import patterns
from imagematrix.planning.context import ignored

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["SCHEMA", "components", "context_digest"]

SCHEMA = "1"
SINCE = ("defaults", "driver", "secrets", "ssh", "proxy", "trim")  # components that schema 1 did not support
UNIDENTIFIED = ("axes",)  # supported by schema 1, but not part of its identity


def components(now: Mapping[str, str], context: str) -> dict[str, str] | None:
    """Return the components of schema 1 for the components `now`; None if schema 1 did not support them.

    `context` is the digest of its context by `context_digest`.
    """
    if any(name in SINCE or name.startswith("arg ") for name in now):
        return None
    stated = {name: value for name, value in now.items() if name not in UNIDENTIFIED}
    return {**stated, "schema": SCHEMA, "context": context}


def context_digest(folder: Path) -> str:
    """Return the digest of the files in `folder` that a build can copy: paths, modes, links, content."""
    digest = hashlib.sha256()
    try:
        for name in sorted(patterns.left(folder, ignored(folder))):
            _add(digest, name, folder / name)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    return f"sha256:{digest.hexdigest()}"


def _add(digest: hashlib._Hash, name: str, path: Path) -> None:
    status = path.lstat()
    digest.update(f"{name}\0{stat.S_IMODE(status.st_mode):o}\0".encode("utf-8", "surrogateescape"))
    if path.is_symlink():
        target = os.readlink(path)  # noqa: PTH115 - pathlib would normalise it
        digest.update(f"link {target}".encode("utf-8", "surrogateescape"))
    elif path.is_file():
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update(b"\0")
