"""An engine on a node of a Slurm, whose users may all use it."""

import contextlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

from engines import Engine
from gpu_node import MOUNT

SOCKET = "docker.sock"
BIND = 'mount --bind "$1" /run/lock; shift; exec "$@"'


def engine_on(cluster, node):
    """Return a Docker engine, not started, that sees a node's devices and locks, in a network of its own."""
    folder = cluster.folder / node
    (folder / "dev").mkdir(exist_ok=True)
    inside = ["sh", "-ec", BIND, "locks", str(folder / "lock"), "sh", "-c", MOUNT, "gpu-node", str(folder)]
    return Engine("containerd", SimpleNamespace(inside=inside, environment={**os.environ}))


@contextlib.contextmanager
def in_use(cluster, node, path):
    """Let the users of a node use the engine with the socket at a path, by docker's command."""
    own = cluster.shared / "srv" / SOCKET
    os.link(path, own)
    own.chmod(0o666)
    root = Path(f"/proc/{cluster.processes[node].pid}/root")
    shutil.copy(shutil.which("docker"), root / "usr/local/bin/docker")
    (root / "run" / SOCKET).symlink_to(f"/srv/{SOCKET}")
    yield
    # A socket at which no engine answers would drain the node.
    (root / "run" / SOCKET).unlink()
    own.unlink()
