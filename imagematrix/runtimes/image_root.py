"""The root of a container: the image's files, mounted where only its processes see them.

Squashfs images are mounted with squashfuse, because only root may have the kernel mount them. Changes in the
container go to memory, over the image's files, and end with the container.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH116, PTH118, PTH211

from __future__ import annotations

import contextlib
import os
import signal

from imagematrix.errors import EngineError
from imagematrix.runtimes.namespace import mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.image_store.folder import StoredImage

__all__ = ["PROGRAMS", "ROOT", "fuse_works", "mount_point", "mounted", "no_fuse", "no_program", "prepare"]

PROGRAMS = ("squashfuse_ll", "squashfuse")  # the first is faster
# It ends when no file of the image has been open for this long. A running program is an open file.
IDLE_S = 1
OWNER = 0  # of this user's files, as this namespace sees them
LOWER, ROOT = "lower", "root"  # the image's files and the container's, below the mount point
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
    with _told(image.root):
        mount("tmpfs", at, "tmpfs", options="mode=0700")
        lower, held = (str(image.root), None) if image.kind == "folder" else _squashed(str(image.root), at)
        if read_only:
            return lower, held
        if os.stat(lower).st_uid != OWNER:
            raise EngineError(
                f"{image.root} belongs to another user, so nothing in it can be changed",
                remedy="run with --read-only, or pull the image into a store of your own",
            )
        return _writable(lower, at), held


def prepare(at: str) -> None:
    """Mount an empty root below the folder `at`, as a trial; raise EngineError if that fails."""
    with _told("an empty image"):
        mount("tmpfs", at, "tmpfs", options="mode=0700")
        lower = os.path.join(at, LOWER)
        os.mkdir(lower, 0o755)
        _writable(lower, at)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"cannot mount {what}: {error.filename}: {error.strerror}", remedy=NO_OVERLAY
        ) from error


def _writable(lower: str, at: str) -> str:
    """Mount a folder with changes in memory over it; return where."""
    upper, work, root = folders = tuple(os.path.join(at, name) for name in ("upper", "work", ROOT))
    for folder in folders:
        os.mkdir(folder, 0o755)
    # A comma or a colon in the path of a store would end the option.
    link = os.path.join(at, LOWER)
    if not os.path.lexists(link):
        os.symlink(lower, link)
    mount("overlay", root, "overlay", options=f"lowerdir={link},upperdir={upper},workdir={work},userxattr")
    return root


def fuse_works() -> bool:
    """Whether this user may mount squashfs images."""
    return os.access("/dev/fuse", os.R_OK | os.W_OK)


def no_fuse() -> EngineError:
    """Return the error for a node on which this user may not."""
    return EngineError("/dev/fuse cannot be opened, so no squashfs image can be mounted", remedy=NO_FUSE)


def no_program() -> EngineError:
    """Return the error for a node without squashfuse."""
    return EngineError("squashfuse not found, so no squashfs image can be mounted", remedy=NO_PROGRAM)


def _squashed(path: str, at: str) -> tuple[str, int]:
    folder = os.path.join(at, LOWER)
    os.mkdir(folder, 0o755)
    if not fuse_works():
        raise no_fuse()
    environment: Mapping[str, str] = {"PATH": os.pathsep.join(os.get_exec_path())}
    for program in PROGRAMS:
        words = [program, "-o", f"timeout={IDLE_S}", path, folder]
        try:
            # Signals that the caller ignores, as nohup and shells do, must not be ignored there.
            child = os.posix_spawnp(program, words, environment, setsigdef=RESET)
        except FileNotFoundError:
            continue
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status):
            raise EngineError(f"{program} cannot mount {path}", remedy="pull the image again")
        return folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    raise no_program()
