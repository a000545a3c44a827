"""Simulated machines with GPUs (see `machines`), whose Docker engines form a swarm."""

import json
import signal
import subprocess

from engines import Engine, Registry
from gpu_node import GpuNode, profiles
from machines import Machine, Switch, wait_until
from processes import END_WITH_US, new_folder, remove_folder

POOL = "10.78.0.0/16"  # of the overlay networks: docker's own default has addresses that slirp4netns uses


class Node(Machine, Engine):
    """A machine of a cluster and its dockerd, of a `release` (see Engine); `start` adds its `config`."""

    def __init__(self, name, hardware, switch, number, store="classic", release=None):
        Engine.__init__(self, store, hardware, release)
        Machine.__init__(self, name, self.folder, switch, number, hardware)
        self.config_file = self.folder / "daemon.json"
        config = {"features": {"containerd-snapshotter": store == "containerd"}}
        self.config_file.write_text(json.dumps(config))

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
        """Offer the node's GPUs with `swarm node-config`, and restart dockerd, as an administrator would."""
        words = ("--file", self.config_file, "--runtime", self.folder / "runtime", *options)
        done = self.imagematrix("swarm", "node-config", *words)
        assert done.returncode == 0, done.stderr
        self.stop()
        self.start()

    def gpus(self):
        """Return the GPUs of this machine as `imagematrix gpus` lists them."""
        return json.loads(self.imagematrix("gpus", "--json").stdout)["gpus"]

    def run(self, *words, check=True):
        """Run a command on this machine."""
        return subprocess.run(
            [*self.inside, *words], check=check, capture_output=True, text=True, env=self.environment
        )

    def stop(self, how=signal.SIGTERM):
        """Stop dockerd; SIGKILL also kills its containerd, but containers keep running."""
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
        self.turn_off()
        for process in self._processes:
            process.wait(60)
        self._processes = []

    def remove(self):
        """Power off, and remove the files that the machine has written."""
        self.power_off()
        self.remove_groups()
        remove_folder(self.folder)


class Cluster:
    """Machines whose engines form a swarm. The first one is its manager.

    Every node has a registry on 127.0.0.1:5000; all of them share the data in the folder `data`.
    """

    def __init__(self, data):
        self.nodes = []
        self._data = data
        self.registries = []
        self._folders = []
        self._hosts = profiles()
        self._switch = Switch()

    def add(self, name, profile, gpus, config=None, store="classic", release=None):
        """Add a machine like that of a profile, with the first `gpus` of its GPUs, and return its node.

        `config` is added to its daemon.json, `release` names another engine than the installed one.
        """
        known = self._hosts.NODES
        known[name] = known[profile]._replace(cards=known[profile].cards[:gpus])
        folder = new_folder()
        self._folders.append(folder)
        machine = GpuNode(folder, name, self._hosts)
        node = Node(name, machine, self._switch, len(self.nodes) + 1, store, release)
        self.nodes.append(node)
        self.registries.append(Registry(node, 5000, data=self._data))
        node.start(config)
        return node

    @property
    def manager(self):
        """The node that manages the swarm."""
        return self.nodes[0]

    def form(self):
        """Join the engines to a swarm."""
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
        """Wait until `ready()` is true; after the timeout, the test fails and shows `ready`."""
        wait_until(ready, ready, seconds)

    def remove(self):
        """Remove registries, nodes, folders and the network."""
        for registry in self.registries:
            registry.remove()
        for node in self.nodes:
            node.remove()
        for folder in self._folders:
            remove_folder(folder)
        self._switch.remove()
