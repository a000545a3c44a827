"""Simulated machines, and the network between them.

Each machine has namespaces of its own: processes, mounts, network, IPC and host name. Its processes end with
it, containers included. A bridge in another network namespace connects the machines with each other and with
nothing else.
"""

import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPACES = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt", "pid": "pid_for_children"}
SUBNET = "10.77.0"
# The last line becomes process 1 of the machine, which has to reap orphaned processes.
BOOT = """\
set -eu
mount -t tmpfs -o mode=755 run /run
mkdir /run/lock
hostname "$1"
ip link set lo up
touch "$2"
exec tini sleep infinity
"""


class Switch:
    """The network of a cluster: a bridge in a namespace of its own."""

    def __init__(self):
        self._process = _start("unshare", "--net", "sleep", "infinity")
        self._inside = ["nsenter", f"--net=/proc/{self._process.pid}/ns/net"]
        wait_until(lambda: _space(self._process.pid, "net") != _space("self", "net"), "network namespace")
        self._ip("link", "add", "bridge", "type", "bridge")
        self._ip("link", "set", "bridge", "up")

    def connect(self, pid, number):
        """Give the network namespace of a process an interface, and return its address."""
        port = f"port{number}"
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._ip("link", "set", port, "master", "bridge", "up")
        address = f"{SUBNET}.{10 + number}"
        inside = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]
        subprocess.run([*inside, "addr", "add", f"{address}/24", "dev", "eth0"], check=True)
        subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)
        return address

    def _ip(self, *words):
        subprocess.run([*self._inside, "ip", *words], check=True)

    def remove(self):
        self._process.kill()
        self._process.wait()


class Machine:
    """A machine with a name, a folder for its files, and a number on a switch.

    `hardware` is the GpuNode that simulates its GPUs, or None.
    """

    def __init__(self, name, folder, switch, number, hardware=None):
        self.name = name
        self.folder = folder
        self.group = f"{folder.name}-{name}"  # of all its containers
        ready = folder / "ready"
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        boot = ["sh", "-c", BOOT, name, name, ready]
        self._machine = _start("unshare", *spaces, *(hardware.inside if hardware else ()), *boot)
        wait_until(ready.exists, f"machine {name}")
        self.address = switch.connect(self._machine.pid, number)

    @property
    def inside(self):
        """The words that start a command on this machine."""
        spaces = (f"--{name}=/proc/{self._machine.pid}/ns/{file}" for name, file in SPACES.items())
        return ["nsenter", *spaces, f"--wdns={ROOT}"]

    @property
    def network(self):
        """The file of its network namespace."""
        return Path(f"/proc/{self._machine.pid}/ns/net")

    def turn_off(self):
        """End everything on the machine at once."""
        self._machine.kill()
        self._machine.wait()

    def remove_groups(self):
        """Remove the cgroups of its containers, once it is off."""
        root = Path("/sys/fs/cgroup")  # with a folder for each controller, in cgroup v1
        for folder in [root / self.group, *root.glob(f"*/{self.group}")]:
            for path in [*sorted(folder.glob("**/*/"), reverse=True), folder]:
                wait_until(lambda path=path: _removed(path), path)


def wait_until(ready, what, seconds=60):
    """Wait until `ready()` is true; after the timeout, fail the test with the message `what`."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            pytest.fail(f"not ready within {seconds} s: {what}")
        time.sleep(0.1)


def _start(*command):
    # Killed, because `unshare --fork` ignores SIGTERM.
    words = ["setpriv", "--pdeathsig", "KILL", *map(str, command)]
    return subprocess.Popen(words, start_new_session=True)


def _removed(group):
    """Remove a cgroup if it is empty; return whether it is gone. A killed process may remain for a moment."""
    try:
        group.rmdir()
    except OSError:
        return not group.exists()
    return True


def _space(pid, name):
    return Path(f"/proc/{pid}/ns/{name}").stat().st_ino
