"""A real Slurm on one machine: slurmctld, and a slurmd for each node, with simulated GPUs.

The programs run in a tree of a release of Debian (ci/slurm), each node in namespaces of its own: its root
is an overlay of the tree, in which /proc and /dev show the processor and the GPUs of a host profile. The
nodes have one network with real addresses. Their cgroups are the kernel's, in cgroup v1, below one group for
each cluster.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path

from gpu_node import CONTROL, GPUS, MISC, pci_line, profiles

ROOT = Path(__file__).parents[2]
RELEASE = os.environ.get("IMAGEMATRIX_SLURM", "trixie")  # of Debian
USER = 1500
NETWORK = "10.99.0"
START_S = 40
# Run in new mount and UTS namespaces: $1 the node's folder, $2 its name, then the command.
ENTER = """\
set -eu
own=$1 name=$2; shift 2
hostname "$name"
mount --make-rprivate /
mkdir -p "$own/upper" "$own/work" "$own/root"
mount -t overlay -o "lowerdir=$TREE,upperdir=$own/upper,workdir=$own/work" overlay "$own/root"
cd "$own/root"
mount -t proc proc proc
# Without one on which nothing is mounted, the kernel lets no ordinary user mount another.
mount -t proc proc mnt
mount --rbind /sys sys
for hierarchy in $HIERARCHIES; do mount --bind "$hierarchy/$GROUP" "${hierarchy#/}"; done
mount -t tmpfs -o mode=755 dev dev
mount -t tmpfs -o mode=755 run run
mount -t tmpfs -o mode=1777 tmp tmp
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/ptmx /dev/fd dev
mknod -m 666 dev/fuse c 10 229
mkdir dev/pts dev/shm
mkdir run/lock
mount --bind "$own/lock" run/lock
mount --rbind /dev/pts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
if [ -e "$own/nodes" ]; then
    while read -r node major minor; do mknod -m 666 "dev/$node" c "$major" "$minor"; done < "$own/nodes"
    mount --bind "$own/proc/driver" proc/driver
    mount --bind "$own/proc/cpuinfo" proc/cpuinfo
    mount --bind "$own/pci" proc/bus/pci/devices
    mount --bind "$own/sys/bus/pci/devices" sys/bus/pci/devices
fi
mkdir -p etc/slurm etc/imagematrix home/user srv
mount --bind "$SHARED/slurm" etc/slurm
mount --bind "$SHARED/home" home/user
mount --bind "$SHARED/srv" srv
cp "$SHARED/site.toml" etc/imagematrix/site.toml
cp "$SHARED/hosts" etc/hosts
cp "$PROGRAM" usr/local/bin/imagematrix
chmod 755 usr/local/bin/imagematrix
id -u user > /dev/null 2>&1 || true
grep -q ^user: etc/passwd || echo "user:x:1500:1500::/home/user:/bin/bash" >> etc/passwd
grep -q ^user: etc/group || echo "user:x:1500:" >> etc/group
mkdir -p old
pivot_root . old
umount -l old
exec "$@"
"""
CONFIG = """\
ClusterName=test
SlurmctldHost={first}({network}.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/slurm
AuthInfo=cred_expire=5
CredType=cred/slurm
StateSaveLocation=/var/spool/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=3
Epilog=/etc/slurm/epilog
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
MinJobAge=300
SlurmctldDebug=info
SlurmdDebug=debug
"""


class SlurmCluster:
    """Nodes by name, each with the name of a host profile, of which it has the first two GPUs.

    `files` are those of the guide for administrators: site.toml, the epilog, and lines of slurm.conf and
    cgroup.conf.
    """

    def __init__(self, folder, nodes, program, files):
        self.folder = folder
        self.nodes = nodes
        self.program = program
        self.processes = {}
        self.shared = folder / "shared"
        self.lines = {}
        self._files = files
        self._group = folder.name
        self._hierarchies = _make_groups(self._group)
        for name in ("slurm", "home", "srv"):
            (self.shared / name).mkdir(parents=True)
        os.chown(self.shared / "home", USER, USER)
        (self.shared / "site.toml").write_text(files["site.toml"])
        lines = [f"{NETWORK}.{number} {name}\n" for number, name in enumerate(nodes, 1)]
        (self.shared / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        key = self.shared / "slurm/slurm.key"
        key.write_bytes(secrets.token_bytes(256))
        key.chmod(0o600)
        (self.shared / "slurm/cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\n{files['cgroup.conf']}")
        self.write("epilog", files["epilog"])
        (self.shared / "slurm/epilog").chmod(0o755)
        hosts = profiles()
        for name, profile in nodes.items():
            (folder / name).mkdir()
            (folder / name / "lock").mkdir()
            (folder / name / "lock").chmod(0o1777)
            _capture(folder / name, hosts, name, profile)
        self.network = self._network()

    @property
    def in_network(self):
        """The words that start a command in the network of the nodes."""
        return ("nsenter", f"--net=/proc/{self.network.pid}/ns/net")

    def write(self, name, text):
        """Write a file of the folder /etc/slurm."""
        (self.shared / "slurm" / name).write_text(text)

    def enter(self):
        """Set the namespaces of the nodes up."""
        for name in self.nodes:
            self._spawn(name, name, "sleep", "infinity")
        self._wait(lambda: all(_runs_sleep(self.processes[name].pid) for name in self.nodes))

    def start(self):
        """Start the daemons with the lines of each node (`lines`), and wait for the nodes."""
        self.configure()
        first = next(iter(self.nodes))
        self._daemon(first, "slurmctld", "-D")
        for name in self.nodes:
            self.start_slurmd(name)
        self.wait_until_idle()

    def start_slurmd(self, name):
        """Start the daemon of a node."""
        self._daemon(name, "slurmd", "-D", "-N", name)

    def configure(self):
        """Write slurm.conf and gres.conf, with the lines of each node."""
        text = CONFIG.format(first=next(iter(self.nodes)), network=NETWORK) + self._files["slurm.conf"]
        for number, name in enumerate(self.nodes, 1):
            own = self.lines.get(name, f"NodeName={name}")
            text += f"{own} NodeAddr={NETWORK}.{number} Port=1700{number} CPUs=4 RealMemory=4000\n"
        self.write("slurm.conf", f"{text}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        included = [f"Include gres.{name}.conf\n" for name in self.nodes]
        self.write("gres.conf", "".join(included))

    def wait_until_idle(self):
        """Wait until Slurm says that the nodes are idle."""
        self._wait(lambda: {*self.run("sinfo", "-h", "-o", "%T").stdout.split()} == {"idle"})

    def imagematrix(self, *words, node=None):
        """Run the program as root on a node."""
        done = self.run("imagematrix", *words, user=False, node=node)
        assert done.returncode == 0, done.stderr
        return done

    def run(self, *words, user=True, node=None, **how):
        """Run a command on a node, by default on the first, as the ordinary user or as root."""
        return subprocess.run(
            self.words(*words, user=user, node=node),
            capture_output=True,
            text=True,
            check=False,
            env=self._environment(user=user),
            timeout=how.pop("timeout", 120),
            **how,
        )

    def popen(self, *words, **how):
        """Start a command on the first node as the ordinary user."""
        return subprocess.Popen(
            self.words(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment(user=True),
            **how,
        )

    def words(self, *words, user=True, node=None):
        """Return the command line of a command on a node."""
        pid = self.processes[node or next(iter(self.nodes))].pid
        enter = ["nsenter", f"--target={pid}", "--mount", "--uts", "--net"]
        to = (
            ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all"]
            if user
            else []
        )
        home = "/home/user" if user else "/root"
        return [*enter, *to, "env", "-C", home, *words]

    def log(self, name):
        """Return what a daemon has logged: slurmctld, or slurmd of a node."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self, key):
        """End a daemon."""
        process = self.processes.pop(key)
        process.send_signal(signal.SIGTERM)
        process.wait(20)

    def remove(self):
        """End everything, and remove the cgroups."""
        if self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--user=root,user", user=False, timeout=20)
            time.sleep(0.5)
        for key in reversed([*self.processes]):
            process = self.processes.pop(key)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid, _ in self.commands():  # such as slurmstepd of a job that is being ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.network.wait()
        for hierarchy in self._hierarchies:
            _remove_cgroup(Path(hierarchy, self._group))
        shutil.rmtree(self.folder)

    def commands(self):
        """Return the processes of all nodes, which are those in their network, each with its command line."""
        network = Path(f"/proc/{self.network.pid}/ns/net").readlink()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "ns/net").readlink() == network:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found.append((int(folder.name), words))
        return found

    def _daemon(self, node, *words):
        path = self.folder / f"{words[0]}-{node}.log"
        with path.open("a") as log:
            self.processes[f"{words[0]}-{node}"] = subprocess.Popen(
                self.words(*words, user=False, node=node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(user=False),
            )

    def _spawn(self, key, node, *words):
        with (self.folder / f"enter-{node}.log").open("w") as log:
            self.processes[key] = subprocess.Popen(
                [
                    *(*self.in_network, "unshare", "--mount", "--uts"),
                    *("sh", "-c", ENTER, "slurm-node", str(self.folder / node), node, *words),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **self._environment(user=False),
                    "TREE": str(ROOT / ".cache/slurm" / RELEASE),
                    "HIERARCHIES": " ".join(self._hierarchies),
                    "GROUP": self._group,
                    "SHARED": str(self.shared),
                    "PROGRAM": str(self.program),
                },
            )

    def _network(self):
        process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._wait(lambda: _runs_sleep(process.pid))
        lines = [
            "ip link set lo up",
            "ip link add v0 type veth peer name v1",
            "ip link set v0 up",
            "ip link set v1 up",
        ]
        lines += [f"ip addr add {NETWORK}.{number}/24 dev v0" for number in range(1, len(self.nodes) + 1)]
        subprocess.run(
            ["nsenter", f"--net=/proc/{process.pid}/ns/net", "sh", "-ec", "\n".join(lines)], check=True
        )
        return process

    def _environment(self, *, user):
        home = "/home/user" if user else "/root"
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin" + ("" if user else ":/usr/local/sbin:/usr/sbin:/sbin"),
            "HOME": home,
            "USER": "user" if user else "root",
        }

    def _wait(self, condition, seconds=START_S):
        deadline = time.monotonic() + seconds
        while not condition():
            for key, process in self.processes.items():
                assert process.poll() is None, key
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _runs_sleep(pid):
    """Whether a process has set its namespaces up, and became sleep."""
    return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def _make_groups(name):
    """Make a cgroup in each hierarchy of cgroup v1; return the folders of the hierarchies."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [path for _, path, kind, *_ in mounts if kind == "cgroup"]
    for hierarchy in map(Path, found):
        (hierarchy / name).mkdir()
        for setting in hierarchy.glob("cpuset.[cm][pe][um]s"):  # without them, it takes no process
            (hierarchy / name / setting.name).write_text(setting.read_text())
    return found


def _remove_cgroup(group):
    folders = sorted((folder for folder in [group, *group.rglob("*")] if folder.is_dir()), reverse=True)
    for folder in folders:
        for _ in range(50):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def _capture(folder, hosts, name, profile):
    node = hosts.NODES[profile]
    hosts.NODES[name] = node._replace(cards=node.cards[:2])
    hosts.capture(folder, name)
    shutil.rmtree(folder / "dev")
    listed = dict(line.split()[::-1] for line in Path("/proc/misc").read_text().splitlines())
    # Not /dev/fuse: Slurm would deny it to tasks, which need it.
    numbers = [f"{MISC} {listed[device]}" for device in GPUS if device in listed and device != "fuse"]
    nodes = {f"nvidia{card.minor}": number for card, number in zip(node.cards[:2], numbers, strict=False)}
    for control, device in CONTROL.items():
        number = (Path("/dev") / device).stat().st_rdev
        nodes[control] = f"{os.major(number)} {os.minor(number)}"
    (folder / "nodes").write_text("".join(f"{each} {number}\n" for each, number in nodes.items()))
    (folder / "pci").write_text("".join(map(pci_line, hosts.answer(name).gpus)))
