"""The sockets of a node's kubelet: where plugins register, and where it lists the devices of its pods.

The folder of device plugins is a constant in kubelet (DevicePluginPath of k8s.io/kubelet). The folder
pod-resources is in its root directory, which --root-dir sets (getPodResourcesDir in pkg/kubelet), and so are
those of DRA drivers (getPluginsRegistrationDir). See
https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins.
"""
# os is imported faster than pathlib.
# ruff: noqa: PTH119, PTH120, PTH123

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT_DIR = "/var/lib/kubelet"  # the default of kubelet's --root-dir
DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"
POD_RESOURCES = "pod-resources"  # a folder in the root directory
PLUGINS, REGISTRY = "plugins", "plugins_registry"  # folders of DRA drivers in it
PODS = "pods"  # another, which tells a kubelet's root directory from other folders
OURS = "imagematrix*.sock"  # our device plugin's sockets beside kubelet's
SOCKET = "kubelet.sock"  # kubelet's own socket in both folders
TABLE = "/proc/net/unix"


def locate_pods_socket(root: str) -> str:
    """Return the socket at which a kubelet with this root directory lists the devices of its pods."""
    return f"{root}/{POD_RESOURCES}/{SOCKET}"


def locate_dra_socket(root: str, driver: str) -> str:
    """Return the socket at which a kubelet with this root directory calls a DRA driver."""
    return f"{root}/{PLUGINS}/{driver}/dra.sock"


def locate_registration_socket(root: str, driver: str) -> str:
    """Return the socket at which a kubelet with this root directory learns of a DRA driver."""
    return f"{root}/{REGISTRY}/{driver}-reg.sock"


def find_answering_socket(paths: Iterable[str]) -> str | None:
    """Return the first of these sockets at which a process listens; one that was killed leaves its socket."""
    import socket  # which a launch does without

    for path in paths:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            try:
                client.connect(path)
            except OSError:
                continue
            return path
    return None


def find_root_dir(table: str = TABLE) -> str:
    """Return the root directory of the kubelet that runs on this node, by default ROOT_DIR.

    The kernel's table of sockets shows where kubelet listens. Anybody can give a socket any name, so folders
    that other users can change do not count.
    """
    roots = sorted({*_list_listening_roots(table)}, key=lambda root: (root != ROOT_DIR, root))
    return next(filter(_is_trusted, roots), ROOT_DIR)


def _list_listening_roots(table: str) -> Iterator[str]:
    """Yield the folders whose pod-resources has a listening socket.

    Kubelet binds a socket of a temporary name, which stays in the table, and renames it.
    """
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return
    for line in lines:
        path = line[line.find("/") :] if "/" in line else ""
        folder = os.path.dirname(path)
        if os.path.basename(folder) == POD_RESOURCES:
            yield os.path.dirname(folder)


def _is_trusted(root: str) -> bool:
    """Whether a folder is the root directory of a kubelet of root, or of this user."""
    try:
        return all(_is_guarded(f"{root}/{name}") for name in (POD_RESOURCES, PODS))
    except (OSError, ValueError):
        return False


def _is_guarded(path: str) -> bool:
    """Whether only root and this user can change what a path leads to: all on the way to it is theirs.

    Others may write only where the sticky bit keeps them from what is not theirs, as in /tmp.
    """
    parent = os.path.dirname(path)
    if parent != path and not _is_guarded(parent):
        return False
    try:
        status = os.lstat(path)
    except PermissionError:
        # Kubelet's own folders are closed to other users. A mount in user space is closed even to root.
        return not os.access(parent, os.X_OK)
    if status.st_uid not in {0, os.geteuid()}:
        return False
    if stat.S_ISLNK(status.st_mode):
        return _is_guarded(os.path.realpath(path, strict=True))
    others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid else 0)
    return not status.st_mode & others or bool(status.st_mode & stat.S_ISVTX)
