"""The root of a container: the image's files, mounted where only its processes see them.

Squashfs images are mounted with squashfuse, because only root may have the kernel mount them. Changes in the
container go to memory, over the image's files, and end with the container.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH116, PTH118, PTH211

from __future__ import annotations

import os
import signal

from imagematrix.errors import EngineError
from imagematrix.runtimes.namespace import mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.image_store.folder import StoredImage

__all__ = ["mount_point", "mounted"]

PROGRAMS = ("squashfuse_ll", "squashfuse")  # the first is faster
# It ends when no file of the image has been open for this long. A running program is an open file.
IDLE_S = 1
ROOT = 0
RESET = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # it ends itself by one of them
NO_FUSE = "as root, run `modprobe fuse` and `chmod 666 /dev/fuse`, or pull the image with --unpacked"
NO_PROGRAM = "install squashfuse (`apt install squashfuse`), or pull the image with --unpacked"
NO_OVERLAY = "use a kernel of 5.11 or newer, or run with --read-only"


def mount_point() -> str:
    """Return a folder of this user's in which containers mount their files, each in its own namespace.

    Raises EngineError if there is no place for it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if os.path.isabs(runtime) and os.access(runtime, os.W_OK) else "/tmp"  # noqa: S108, PTH117
    own = os.path.join(base, "imagematrix" if base == runtime else f"imagematrix-{os.geteuid()}")
    path = os.path.join(own, "containers")
    try:
        for folder in (own, path):
            try:
                os.mkdir(folder, 0o700)
            except FileExistsError:
                status = os.lstat(folder)
                if status.st_uid != os.geteuid() or not os.path.isdir(folder) or os.path.islink(folder):  # noqa: PTH112, PTH114
                    raise EngineError(
                        f"{folder} belongs to another user", remedy="remove it, or set XDG_RUNTIME_DIR"
                    ) from None
    except OSError as error:
        raise EngineError(f"{error.filename}: {error.strerror}", remedy="set XDG_RUNTIME_DIR") from error
    return path


def mounted(image: StoredImage, at: str, *, read_only: bool) -> tuple[str, int | None]:
    """Mount the files of an image below the folder `at`; return the root, and what keeps it mounted.

    That is a descriptor that a process has to keep open, or None. This process is in a namespace of its own.
    Raises EngineError.
    """
    try:
        mount("tmpfs", at, "tmpfs", options="mode=0700")
        lower, held = (str(image.root), None) if image.kind == "folder" else _squashed(str(image.root), at)
        if read_only:
            return lower, held
        if os.stat(lower).st_uid != ROOT:  # as this namespace sees this user's files
            raise EngineError(
                f"{image.root} belongs to another user, so nothing in it can be changed",
                remedy="run with --read-only, or pull the image into a store of your own",
            )
        folders = {name: os.path.join(at, name) for name in ("upper", "work", "root")}
        for folder in folders.values():
            os.mkdir(folder, 0o755)
        # A comma or a colon in the path of a store would end the option.
        link = os.path.join(at, "lower")
        if not os.path.lexists(link):
            os.symlink(lower, link)
        layers = f"lowerdir={link},upperdir={folders['upper']},workdir={folders['work']}"
        mount("overlay", folders["root"], "overlay", options=f"{layers},userxattr")
    except OSError as error:
        raise EngineError(
            f"cannot mount the files of {image.digest} at {error.filename}: {error.strerror}",
            remedy=NO_OVERLAY,
        ) from error
    return folders["root"], held


def _squashed(path: str, at: str) -> tuple[str, int]:
    folder = os.path.join(at, "lower")
    os.mkdir(folder, 0o755)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise EngineError("/dev/fuse cannot be opened, so a squashfs image cannot be mounted", remedy=NO_FUSE)
    environment: Mapping[str, str] = {"PATH": os.environ.get("PATH", os.defpath)}
    for program in PROGRAMS:
        try:
            # Signals that the caller ignores, as nohup and shells do, must not be ignored there.
            child = os.posix_spawnp(
                program,
                [program, "-o", f"timeout={IDLE_S}", path, folder],
                environment,
                setsigdef=RESET,
            )
        except FileNotFoundError:
            continue
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status):
            raise EngineError(f"{program} cannot mount {path}", remedy="pull the image again")
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        return folder, held
    raise EngineError("squashfuse not found, so a squashfs image cannot be mounted", remedy=NO_PROGRAM)
