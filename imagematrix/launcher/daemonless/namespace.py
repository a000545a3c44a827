"""A user namespace and a mount namespace for this process, in which an ordinary user may mount files.

See user_namespaces(7) and mount_namespaces(7). Mounts in it end with its last process.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH112, PTH123

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SET_FLAGS, UP = 0x8914, 0x41  # SIOCSIFFLAGS of netdevice(7), and what it sets: up and running
# Flags of mount(2).
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
DETACH = 2  # of umount2(2)
OWN_MOUNTS = "/proc/self/ns/mnt"
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1  # of mount_setattr(2)
APPARMOR = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
LIMIT = "/proc/sys/user/max_user_namespaces"


def enter_namespaces() -> None:
    """Move this process, which must have one thread, into new namespaces, as their root.

    Its files still belong to the caller: root in the namespace is the caller outside of it. Raises
    EngineError if this user may not create namespaces.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise _make_refused_error(ctypes.get_errno())
    try:
        _write_own("setgroups", "deny")  # otherwise an ordinary user may not map a group
        _write_own("uid_map", f"0 {user} 1")
        _write_own("gid_map", f"0 {group} 1")
        mount(None, "/", None, PRIVATE | RECURSIVE)
    except OSError as error:
        raise _make_refused_error(error.errno or 0) from error


def leave_node(*, has_network: bool) -> None:
    """Give this process a host name and shared memory of its own, and without a network only loopback.

    It is in namespaces of its own already. Raises OSError.
    """
    import socket
    import struct
    from fcntl import ioctl

    flags = CLONE_NEWUTS | (0 if has_network else CLONE_NEWNET)
    _require_success(ctypes.CDLL(None, use_errno=True).unshare(flags), "/proc/self/ns")
    socket.sethostname(os.urandom(6).hex())
    mount("shm", "/dev/shm", "tmpfs", options="mode=1777")  # noqa: S108 - a mount, no file
    if not has_network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interfaces:
            ioctl(interfaces, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, options: str = "") -> None:
    """Mount a file system, as the system call of this name does; raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    encoded = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    _require_success(libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options)), target)


def leave_mounts() -> int:
    """Go to a new namespace with the same mounts; return a descriptor of the old one. Raises OSError."""
    before = os.open(OWN_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
    _require_success(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS), OWN_MOUNTS)
    return before


@contextlib.contextmanager
def enter_mount_namespace(mounts: int) -> Iterator[None]:
    """Be in another mount namespace within the context, and close its descriptor; raise OSError.

    The working folder is the root afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(OWN_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _require_success(libc.setns(mounts, CLONE_NEWNS), OWN_MOUNTS)
        yield
        _require_success(libc.setns(before, CLONE_NEWNS), OWN_MOUNTS)
    finally:
        os.close(before)
        os.close(mounts)


def unmount(path: str) -> None:
    """Take a mount away, though files of it may be open; raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _require_success(libc.umount2(os.fsencode(path), DETACH), path)


def bind_read_only(source: str, at: str) -> str:
    """Mount a file or folder at the new path `at` so that nothing in it can be changed; raise OSError."""
    if os.path.isdir(source):
        os.mkdir(at)
    else:
        os.close(os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    mount_read_only(source, at)
    return at


def mount_read_only(source: str, at: str) -> None:
    """Mount a file or folder over another so that nothing in it can be changed; raise OSError."""
    mount(source, at, None, BIND | RECURSIVE)
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd.
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.sizeof(attributes)
    words = (os.fsencode(at), AT_RECURSIVE, attributes, ctypes.c_size_t(size))
    _require_success(libc.syscall(MOUNT_SETATTR, AT_FDCWD, *words), at)


def make_memory_folder(at: str, name: str) -> str:
    """Return a new folder in the folder `at`, with files in memory of its own; raise OSError."""
    path = f"{at}/{name}"
    os.mkdir(path, 0o755)
    mount("tmpfs", path, "tmpfs", options="mode=0755")
    return path


def _require_success(result: int, path: str) -> None:
    """Raise OSError for a path if a system call returned that it failed."""
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)


def _write_own(name: str, text: str) -> None:
    """Write a file of this process in /proc."""
    descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _make_refused_error(code: int) -> EngineError:
    remedy = "as root, run `sysctl kernel.unprivileged_userns_clone=1`; in a container, allow unshare(2)"
    if _read_number(APPARMOR) == 1:
        remedy = "as root, run `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or add a profile"
    elif code == errno.ENOSPC or _read_number(LIMIT) == 0:
        remedy = "as root, raise the limit: `sysctl user.max_user_namespaces=65536`"
    return EngineError(f"this user may not create a user namespace: {os.strerror(code)}", remedy=remedy)


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
