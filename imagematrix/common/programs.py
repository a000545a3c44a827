"""The programs of the node that are started: runtimes, docker, and what reads and writes images.

They are looked up before anything of an image is mounted or read, and started by an absolute path, so that no
variable and no file of an image decides what runs on the node.
"""
# pathlib and shutil are slow to load.
# ruff: noqa: PTH116, PTH118

from __future__ import annotations

import os
import stat

from imagematrix.common.settings import read_site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from subprocess import CompletedProcess

# Where root's programs are, and those of a batch system: who may start something as root does not choose it.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_program(*names: str) -> str | None:
    """Return the absolute path of the first of these programs that the node has, None if it has none.

    It is in an absolute folder of PATH, for root in one of SYSTEM_PATH, or in one of `program_folders` of the
    site's file. Raises UsageError if that file is invalid.
    """
    path = _find_in_folders(names, get_search_path().split(":"))
    return path or _find_in_folders(names, read_site().program_folders)


def get_search_path() -> str:
    """Return the PATH with which programs of the node are started: without folders of the site's file."""
    # A relative folder, or an empty one, is the working folder, in which anybody's files can be.
    return ":".join(folder for folder in _get_path().split(":") if folder.startswith("/"))


def read_output(words: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
    """Run a program without input; return its exit code and its output, of which bytes may be damaged.

    Raises OSError if it cannot be started, and TimeoutExpired if it takes longer.
    """
    import subprocess

    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def _get_path() -> str:
    return SYSTEM_PATH if os.geteuid() == 0 else os.environ.get("PATH", SYSTEM_PATH)


def _find_in_folders(names: Sequence[str], folders: Sequence[str]) -> str | None:
    for path in (os.path.join(folder, name) for name in names for folder in folders if folder):
        try:
            if stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK):
                return path
        except (OSError, ValueError):
            continue
    return None
