"""Several machines with GPUs, simulated, whose Docker engines form a swarm.

Each machine has namespaces of its own: processes, mounts, network, IPC and host name. What was started on it
ends with it, containers included. A bridge, in a network namespace too, connects the machines with one
another and with nothing else.
"""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from engines import ROOT, Engine, Registry
from gpu_node import GpuNode, profiles
from processes import END_WITH_US, new_folder, remove_folder

SPACES = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt", "pid": "pid_for_children"}
SUBNET = "10.77.0"
POOL = "10.78.0.0/16"  # of the overlay networks: docker's own default has addresses that slirp4netns uses
# The last line is process 1 there, which has to collect the processes that others have left behind.
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
        _wait(lambda: _space(self._process.pid, "net") != _space("self", "net"), "network namespace")
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


class Node(Engine):
    """A machine of a cluster and its dockerd; `start` adds its `config` to daemon.json."""

    def __init__(self, name, machine, switch, number, store="classic"):
        super().__init__(store, machine)
        self.name = name
        self.group = f"{self.folder.name}-{name}"  # of all its containers
        ready = self.folder / "ready"
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        boot = ["sh", "-c", BOOT, name, name, ready]
        self._machine = _start("unshare", *spaces, *machine.inside, *boot)
        _wait(ready.exists, f"machine {name}")
        self.address = switch.connect(self._machine.pid, number)
        self.config_file = self.folder / "daemon.json"
        config = {"features": {"containerd-snapshotter": store == "containerd"}}
        self.config_file.write_text(json.dumps(config))

    @property
    def inside(self):
        """The words that start a command on this machine."""
        spaces = (f"--{name}=/proc/{self._machine.pid}/ns/{file}" for name, file in SPACES.items())
        return ["nsenter", *spaces, f"--wdns={ROOT}"]

    def start(self, config=None):
        """Start dockerd, or start it again."""
        merged = {**json.loads(self.config_file.read_text()), **(config or {})}
        self.config_file.write_text(json.dumps(merged))
        command = [
            *END_WITH_US,
            *self.inside,
            *("dockerd", "--config-file", self.config_file, "--host", self.host),
            *("--bridge", "none", "--iptables=false", "--pidfile", self.folder / "pid"),
            *("--cgroup-parent", f"/{self.group}"),
            *("--data-root", self.folder / "data", "--exec-root", self.folder / "run"),
        ]
        environment = {name: value for name, value in self.environment.items() if name != "DOCKER_HOST"}
        with (self.folder / "log").open("ab") as log:
            self._processes = [
                subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
            ]
        self._wait(lambda: self.docker("version", check=False).returncode == 0)

    def offer(self, *options):
        """Let `swarm node-config` make the node offer its GPUs, and restart dockerd, as its user would."""
        words = ("--file", self.config_file, "--runtime", self.folder / "runtime", *options)
        done = self.imagematrix("swarm", "node-config", *words)
        assert done.returncode == 0, done.stderr
        self.stop()
        self.start()

    def gpus(self):
        """Return what `imagematrix gpus` says of each GPU of this machine."""
        return json.loads(self.imagematrix("gpus", "--json").stdout)["gpus"]

    def run(self, *words, check=True):
        """Run a command on this machine."""
        return subprocess.run(
            [*self.inside, *words], check=check, capture_output=True, text=True, env=self.environment
        )

    def stop(self, how=signal.SIGTERM):
        """End dockerd; killed, it takes its containerd along but leaves containers running."""
        files = ["pid", "run/containerd/containerd.pid"] if how == signal.SIGKILL else ["pid"]
        for file in files:
            self.run("kill", f"-{how:d}", (self.folder / file).read_text().strip(), check=False)
            if how == signal.SIGKILL:
                (self.folder / file).unlink()
        for process in self._processes:
            process.wait(60)
        self._processes = []

    def power_off(self):
        """End everything on the machine at once."""
        self._machine.kill()
        self._machine.wait()
        for process in self._processes:
            process.wait(60)
        self._processes = []

    def remove(self):
        """Power off, and remove what the machine has written."""
        self.power_off()
        root = Path("/sys/fs/cgroup")  # with a folder for each controller, in cgroup v1
        for folder in [root / self.group, *root.glob(f"*/{self.group}")]:
            for path in [*sorted(folder.glob("**/*/"), reverse=True), folder]:
                _wait(lambda path=path: _removed(path), path)
        remove_folder(self.folder)


class Cluster:
    """Machines whose engines form a swarm. The first one is its manager.

    `data` is a folder with the data of a registry: every node has one on 127.0.0.1:5000 with the same data.
    """

    def __init__(self, data):
        self.nodes = []
        self._data = data
        self.registries = []
        self._folders = []
        self._hosts = profiles()
        self._switch = Switch()

    def add(self, name, profile, gpus, config=None, store="classic"):
        """Add a machine like that of a profile, with the first `gpus` of its GPUs, and return its node."""
        known = self._hosts.NODES
        known[name] = known[profile]._replace(cards=known[profile].cards[:gpus])
        folder = new_folder()
        self._folders.append(folder)
        node = Node(name, GpuNode(folder, name, self._hosts), self._switch, len(self.nodes) + 1, store)
        self.nodes.append(node)
        self.registries.append(Registry(node, 5000, data=self._data))
        node.start(config)
        return node

    @property
    def manager(self):
        """The node whose engine takes orders."""
        return self.nodes[0]

    def form(self):
        """Make a swarm of the engines."""
        first = self.manager
        listen = f"{first.address}:2377"
        where = ("--advertise-addr", first.address, "--listen-addr", listen)
        first.docker("swarm", "init", *where, "--default-addr-pool", POOL, "--dispatcher-heartbeat", "2s")
        token = first.docker("swarm", "join-token", "-q", "worker").stdout.strip()
        for node in self.nodes[1:]:
            node.docker("swarm", "join", "--token", token, "--advertise-addr", node.address, listen)
        self.wait(lambda: len(self.ready()) == len(self.nodes))

    def ready(self):
        """Return the host names of the nodes that the manager can reach."""
        shown = self.manager.docker("node", "ls", "--format", "{{.Hostname}} {{.Status}}").stdout
        return [line.split()[0] for line in shown.splitlines() if line.split()[1] == "Ready"]

    def tasks(self, service):
        """Return the tasks of a service, as `docker inspect` describes them."""
        identifiers = self.manager.docker("service", "ps", "-q", "--no-trunc", service).stdout.split()
        return json.loads(self.manager.docker("inspect", *identifiers).stdout) if identifiers else []

    def states(self, service):
        """Return the states of a service's tasks, sorted."""
        return sorted(task["Status"]["State"] for task in self.tasks(service))

    @staticmethod
    def wait(ready, seconds=120):
        """Wait until `ready()` is true; it is the reason why a test fails that waits in vain."""
        _wait(ready, ready, seconds)

    def remove(self):
        """End it all."""
        for registry in self.registries:
            registry.remove()
        for node in self.nodes:
            node.remove()
        for folder in self._folders:
            remove_folder(folder)
        self._switch.remove()


def _start(*command):
    # Killed, because `unshare --fork` ignores SIGTERM.
    words = ["setpriv", "--pdeathsig", "KILL", *map(str, command)]
    return subprocess.Popen(words, start_new_session=True)


def _removed(group):
    """Remove a cgroup if it is empty; it is for a moment not when its last process has just been killed."""
    try:
        group.rmdir()
    except OSError:
        return not group.exists()
    return True


def _space(pid, name):
    return Path(f"/proc/{pid}/ns/{name}").stat().st_ino


def _wait(ready, what, seconds=60):
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            pytest.fail(f"not ready within {seconds} s: {what}")
        time.sleep(0.1)
