"""Start a bundle in a mount namespace with its own root, if runc cannot: contain.py FOLDER.

It uses the file system, devices, environment and command of the bundle. There are no cgroups and no other
namespaces, because sandboxes do not have them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
READ_ONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
# What every container has, in the runtime specification of the Open Container Initiative.
ALWAYS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Become the bundle's command."""
    config = json.loads(Path(sys.argv[1], "config.json").read_text())
    root = config["root"]["path"]
    _checked("unshare", libc.unshare(NEW_MOUNTS))
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", f"{root}/dev", "tmpfs", NOSUID)
    for path in (*ALWAYS, *(device["path"] for device in config["linux"]["devices"])):
        place = Path(f"{root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        _mount(path, str(place), None, BIND)
    # The driver creates missing device nodes itself if it can.
    _mount("none", f"{root}/dev", None, REMOUNT | BIND | READ_ONLY | NOSUID)
    _mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    os.chroot(root)
    os.chdir("/")
    process = config["process"]
    environment = dict(one.split("=", 1) for one in process["env"])
    os.execvpe(process["args"][0], process["args"], environment)  # noqa: S606 - there is no shell


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    words = (source.encode(), target.encode(), kind.encode() if kind else None)
    _checked(f"mount {target}", libc.mount(*words, ctypes.c_ulong(flags), None))


def _checked(what: str, answer: int) -> None:
    if answer:
        sys.exit(f"contain: {what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
