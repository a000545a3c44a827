"""The root of a container: the image's files, mounted where only its processes see them.

Squashfs images are mounted with squashfuse, because only root may have the kernel mount them. Changes in the
container go to memory, over the image's files, and end with the container.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH116, PTH118, PTH119, PTH211

from __future__ import annotations

import contextlib
import os
import signal

from imagematrix.common.programs import SYSTEM_PATH
from imagematrix.errors import EngineError
from imagematrix.images.local_store.folder import FOLDER
from imagematrix.launcher.daemonless import namespace
from imagematrix.launcher.daemonless.namespace import mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.images.local_store.folder import StoredImage

PROGRAMS = ("squashfuse_ll", "squashfuse")  # the first is faster
OWNER = 0  # of this user's files, as this namespace sees them
# The image's files, a layer over them, the container's and its changes, below the mount point.
LOWER, LAYER, ROOT, UPPER = "lower", "layer", "root", "upper"
RESET = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # it ends itself by one of them
NO_FUSE = "as root, run `modprobe fuse` and `chmod 666 /dev/fuse`, or pull the image with --unpacked"
NO_PROGRAM = "install squashfuse (`apt install squashfuse`), or pull the image with --unpacked"
NO_OVERLAY = "use a kernel of 5.12 or newer"


def mount_image(
    image: StoredImage, at: str, squashfuse: str | None, *, read_only: bool, layer: str | None = None
) -> str:
    """Mount the files of an image below the folder `at`, and return the container's root.

    This process is in a namespace of its own. `squashfuse` is the program for images that are squashfs. The
    files in the folder `layer` are over those of the image. Raises EngineError.
    """
    with _convert_mount_errors(image.root):
        mount("tmpfs", at, "tmpfs", options="mode=0700")
        lower = str(image.root) if image.kind == FOLDER else _mount_squashfs(str(image.root), at, squashfuse)
        if read_only:
            return _mount_overlay(lower, at, layer) if layer else lower
        if os.stat(lower).st_uid != OWNER:
            raise EngineError(
                f"{image.root} belongs to another user, so nothing in it can be changed",
                remedy="run with --read-only, or pull the image into a store of your own",
            )
        return _mount_writable(lower, at, layer)


def mount_trial_root(at: str) -> None:
    """Mount an empty root below the folder `at`, as a trial; raise EngineError if that fails."""
    with _convert_mount_errors("an empty image"):
        mount("tmpfs", at, "tmpfs", options="mode=0700")
        lower = os.path.join(at, LOWER)
        os.mkdir(lower, 0o755)
        _mount_writable(lower, at)


@contextlib.contextmanager
def _convert_mount_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"cannot mount {what}: {error.filename}: {error.strerror}", remedy=NO_OVERLAY
        ) from error


def _mount_writable(lower: str, at: str, layer: str | None = None) -> str:
    """Mount a folder with changes in memory over it, and over a layer; return where."""
    upper, work = folders = tuple(os.path.join(at, name) for name in (UPPER, "work"))
    for folder in folders:
        os.mkdir(folder, 0o755)
    return _mount_overlay(lower, at, layer, f"upperdir={upper},workdir={work},")


def _mount_overlay(lower: str, at: str, layer: str | None, changes: str = "") -> str:
    """Mount a layer over a folder; return where. `changes` are the options for changes."""
    root = os.path.join(at, ROOT)
    os.mkdir(root, 0o755)
    links = []
    for name, folder in ((LAYER, layer), (LOWER, lower)):
        # A comma or a colon in the path of a store would end the option.
        link = os.path.join(at, name)
        if folder and not os.path.lexists(link):
            os.symlink(folder, link)
        links += [link] if folder else []
    mount("overlay", root, "overlay", options=f"lowerdir={':'.join(links)},{changes}userxattr")
    return root


def has_fuse() -> bool:
    """Whether this user may mount squashfs images."""
    return os.access("/dev/fuse", os.R_OK | os.W_OK)


def make_no_fuse_error() -> EngineError:
    """Return the error for a node on which this user may not."""
    return EngineError("/dev/fuse cannot be opened, so no squashfs image can be mounted", remedy=NO_FUSE)


def make_no_program_error() -> EngineError:
    """Return the error for a node without squashfuse."""
    return EngineError("squashfuse not found, so no squashfs image can be mounted", remedy=NO_PROGRAM)


def _mount_squashfs(path: str, at: str, program: str | None) -> str:
    """Mount a squashfs for this process and its descendants; return where."""
    folder = os.path.join(at, LOWER)
    os.mkdir(folder, 0o755)
    if not has_fuse():
        raise make_no_fuse_error()
    if program is None:
        raise make_no_program_error()

    # Signals that the caller ignores, as nohup and shells do, must not be ignored there.
    child = os.posix_spawn(program, [program, path, folder], {"PATH": SYSTEM_PATH}, setsigdef=RESET)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status):
        raise EngineError(f"{os.path.basename(program)} cannot mount {path}", remedy="pull the image again")

    # The program goes on in the background, and ends when nothing has its file system mounted any longer. So
    # it must not itself: it stays in the namespace in which it mounted, from which the mount is taken away
    # when this process has left for another. No process has to keep anything open for it.
    without_mount = namespace.leave_mounts()
    with namespace.enter_mount_namespace(without_mount):
        namespace.unmount(folder)
    return folder
