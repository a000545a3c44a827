"""Clean-up after long-lived processes of the tests, also if the tests are killed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# Prefix of a command that gets SIGTERM when the tests end, even if the tests are killed.
END_WITH_US = ("setpriv", "--pdeathsig", "TERM")
PREFIX = "imx-"


def new_folder():
    """Create a folder whose name has the id of the owning process."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


def remove_folder(folder, *, ignore_errors=False):
    """Remove a folder, with what an engine has mounted in it."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed([path for path in mounts if path.startswith(f"{folder}/")]):
        subprocess.run(["umount", "--lazy", mount], check=False)
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def remove_leftovers():
    """Remove the folders of test runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            remove_folder(folder, ignore_errors=True)  # others may remove it at the same time
