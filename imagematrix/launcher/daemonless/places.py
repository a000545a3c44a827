"""The places in an image's files that a container needs: of its mounts, and of its working folder.

Runtimes differ in what they make, and in whether they follow links of an image out of it. So all places are
found and made here, before a runtime starts, and it gets paths without links.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH110, PTH112

from __future__ import annotations

import os
import stat

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless import namespace
from imagematrix.launcher.daemonless.container import NETWORK
from imagematrix.launcher.daemonless.options import Bind
from imagematrix.launcher.daemonless.path_resolution import ImageFiles, InMountError, LinkLoopError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from imagematrix.launcher.daemonless.container import ContainerSpec

SYSTEM = ("/dev", "/proc", "/sys")  # every runtime mounts something there
# Of the node, so that the ranks of an MPI job share memory, and loaders of data have enough of it. Where the
# node has none, as in a chroot, it is the container's own.
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a mount, no file
# Below SYSTEM only these are no links, which could lead to what a runtime has open: files of the node.
WORKING_FOLDERS = (*SYSTEM, SHARED_MEMORY)
# Docker's (oci/defaults.go of moby).
MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
# Settings and drivers of the node in /proc, for runtimes that leave them as they are.
KERNEL_FILES = (*READ_ONLY, *(path for path in MASKED if path.startswith("/proc/")))
WRITABLE = "leave out --read-only"


def fit_container(
    container: ContainerSpec, root: str, files: Collection[str] = (), folders: Collection[str] = ()
) -> ContainerSpec:
    """Return a container whose places are in the folder `root` of the image's files, as paths without links.

    `files` and `folders` are those on which a runtime mounts the node's by itself, and follows links out of
    the image. What is missing is made, unless the image is read-only: then it needs all of them but for
    the files of the network, which are left out. Raises UsageError for a place that cannot be.
    """
    try:
        with ImageFiles(root, SYSTEM) as image:
            for path in (*SYSTEM, *folders):
                _replace_link(image, path, stat.S_IFDIR, container)
            for path in files:
                if image.find_kind(path) is not None or path in (bind.target for bind in container.binds):
                    _replace_link(image, path, stat.S_IFREG, container)
            mounts = [Bind(source=path, target=path) for path in folders]
            for path in folders:
                image.add_mount(path)
            for bind in container.binds:
                target = _find_bind_target(image, bind, mounts, container)
                if target is not None:
                    mounts.append(replace(bind, target=target))
                    image.add_mount(target)
        with ImageFiles(root, SYSTEM, mounts) as image:
            folder = _make_working_folder(image, container)
        return replace(container, binds=tuple(mounts[len(folders) :]), folder=folder)
    except InMountError as error:
        raise UsageError(f"a link of the image leads to {error.where}, where it has no place") from error
    except OSError as error:
        raise UsageError(f"the image has no place for {error.filename}: {error.strerror}") from error


def mount_read_only_sources(container: ContainerSpec, at: str) -> ContainerSpec:
    """Return a container whose read-only folders are mounted so in the folder `at`; raise OSError.

    For runtimes that do not make all of a folder read-only, with what is mounted in it.
    """
    binds = [
        replace(bind, source=namespace.bind_read_only(bind.source, f"{at}/{number}"))
        if bind.read_only
        else bind
        for number, bind in enumerate(container.binds)
    ]
    return replace(container, binds=tuple(binds))


def make_node_read_only(files: Collection[str]) -> None:
    """Make what a runtime mounts of the node as it is read-only in this namespace; raise OSError.

    These are /sys, the settings in /proc, and the `files` that it mounts by itself: root may change them all,
    and so may its container.
    """
    for path in ("/sys", *KERNEL_FILES, *files):
        if os.path.exists(path):
            namespace.mount_read_only(path, path)


def create_mount_point(path: str) -> None:
    """Make an empty file to mount something on; raise OSError."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _replace_link(image: ImageFiles, path: str, kind: int, container: ContainerSpec) -> None:
    """Replace a link at a path by a file or folder of this kind; raise UsageError, OSError."""
    name = "folder" if kind == stat.S_IFDIR else "file"
    present = image.find_kind(path)
    if container.read_only:
        if present not in (kind, None) or (present is None and path not in NETWORK):
            raise UsageError(f"--read-only: the image has no {name} {path}", remedy=WRITABLE)
        return
    parent = path.rpartition("/")[0]
    if parent and image.make_folder(parent) != parent:
        raise UsageError(f"the image's {parent} is a link, so that nothing can be mounted on {path}")
    image.replace(path, kind)


def _find_bind_target(
    image: ImageFiles, bind: Bind, before: Sequence[Bind], container: ContainerSpec
) -> str | None:
    """Return the path without links where a file or folder is mounted, None if it is left out."""
    is_folder = os.path.isdir(bind.source)
    try:
        if container.read_only:
            target = image.find(bind.target)
            if target is None and not bind.of_network:
                raise UsageError(
                    f"--read-only: the image has no {bind.target} to mount {_format_kind(is_folder)} on",
                    remedy=f"{WRITABLE}, or mount it where the image has a folder",
                )
        else:
            target = image.make_place(bind.target, folder=is_folder)
    except LinkLoopError as error:
        raise UsageError(f"cannot mount {bind.target}: {error.filename}: {error.strerror}") from error
    except InMountError as error:
        return _find_target_in_mount(image, bind, error, before, container)
    if target is not None and os.path.isdir(f"{image.root}{target}") != is_folder:
        raise UsageError(
            f"cannot mount {_format_kind(is_folder)} on {bind.target}, which is {_format_kind(not is_folder)}"
        )
    return target


def _find_target_in_mount(
    image: ImageFiles, bind: Bind, error: InMountError, before: Sequence[Bind], container: ContainerSpec
) -> str | None:
    """Return the place of a mount in what is mounted already: a folder of the node, or the system's."""
    target = f"{error.where}/{error.beyond}".rstrip("/")
    if not error.beyond:
        return target
    outer = next((mount for mount in reversed(before) if mount.target == error.where), None)
    if outer is not None:
        _make_target_in_bind(outer, error.beyond, bind)
        return target
    if target == bind.target:
        return target  # the runtime makes it in its own /dev, or there is none
    if bind.of_network:  # such as a link to a file in /proc
        if container.read_only:
            return None
        image.replace(bind.target, stat.S_IFREG)
        return bind.target
    raise UsageError(f"cannot mount {bind.target}: a link of the image leads to {target}")


def _make_target_in_bind(outer: Bind, path: str, bind: Bind) -> None:
    """Make a place in a folder of the node that is mounted, in which no link is followed."""
    place = outer.source
    names = path.split("/")
    for number, name in enumerate(names, 1):
        place = f"{place}/{name}"
        is_last = number == len(names)
        try:
            mode = os.lstat(place).st_mode
        except FileNotFoundError:
            if outer.read_only:
                raise UsageError(
                    f"cannot mount {bind.target}: {place} not found", remedy="create it first"
                ) from None
            if is_last and not os.path.isdir(bind.source):
                create_mount_point(place)
            else:
                os.mkdir(place)
            continue
        if name == ".." or stat.S_ISLNK(mode) or not (is_last or stat.S_ISDIR(mode)):
            raise UsageError(
                f"cannot mount {bind.target}: {place} is no folder itself", remedy="mount it elsewhere"
            )


def _make_working_folder(image: ImageFiles, container: ContainerSpec) -> str:
    """Return the folder in which a container starts, which is made as docker does."""
    try:
        if not container.read_only:
            return image.make_folder(container.folder)
        folder = image.find(container.folder)
    except InMountError as error:
        place = f"{error.where}/{error.beyond}".rstrip("/")
        if place in WORKING_FOLDERS:
            return place
        raise UsageError(
            f"cannot start in {container.folder}, which is below {error.where}",
            remedy="name another folder, such as by --workdir",
        ) from error
    except OSError as error:
        raise UsageError(f"cannot start in {container.folder}: {error.filename}: {error.strerror}") from error
    if folder is None:
        raise UsageError(f"--read-only: the image has no {container.folder} to start in", remedy=WRITABLE)
    return folder


def _format_kind(is_folder: bool) -> str:  # noqa: FBT001
    return "a folder" if is_folder else "a file"
