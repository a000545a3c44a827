"""A Kubernetes cluster of simulated machines: one with the control plane, and nodes with GPUs.

The programs are those of a release (`releases`), and runc is the machine's. There is no kube-proxy: the API
server has the address of its service, and calls webhooks at the addresses of their pods.
"""

import contextlib
import json
import os
import signal
import subprocess

from engines import Registry
from gpu_node import GpuNode, profiles
from images import Parts, layout, tar
from machines import ROOT, Machine, Switch, wait_until
from processes import END_WITH_US, new_folder, remove_folder

SERVICES, API = "10.79.0.0/24", "10.79.0.1"
PAUSE = "docker.io/library/pause:local"
IMAGE = "io.containerd.image.name"
TOKENS = {  # by the user, with the group
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
}
# What is written to /etc and /var stays on the machine: kubelets have a folder of a fixed name in /var.
OWN_FILES = """\
set -eu
for folder in etc var; do
    own=/run/own/$folder
    mkdir -p "$own/upper" "$own/work"
    mount -t overlay -o "lowerdir=/$folder,upperdir=$own/upper,workdir=$own/work" own "/$folder"
done
mkdir -p /var/lib/kubelet "$1/kubelet"
mount --bind "$1/kubelet" /var/lib/kubelet
[ -z "$3" ] || mount --bind "$3" /proc/cpuinfo
for group in /sys/fs/cgroup/*/; do
    mkdir -p "$group$2"
    for file in cpuset.cpus cpuset.mems; do
        [ ! -e "$group$file" ] || cat "$group$file" > "$group$2/$file"
    done
done
"""


class Member(Machine):
    """A machine of the cluster, with its own files in /etc and /var, which runs programs of a release."""

    def __init__(self, name, folder, switch, number, release, hardware=None):
        super().__init__(name, folder, switch, number, hardware)
        self.release = release
        environment = hardware.environment if hardware else os.environ
        path = f"{release.programs}/bin:{environment['PATH']}"
        self.environment = {**environment, "NO_COLOR": "1", "PATH": path}
        self._running = {}
        processors = hardware.folder / "proc/cpuinfo" if hardware else ""
        self.run("sh", "-c", OWN_FILES, "own-files", folder, self.group, processors)

    def run(self, *words, check=True, **options):
        """Run a command on this machine."""
        given = {"capture_output": True, "text": True, "env": self.environment, **options}
        return subprocess.run([*self.inside, *map(str, words)], check=check, **given)

    def imagematrix(self, *words, **options):
        """Run the command line as its user does."""
        return self.run(ROOT / ".venv/bin/imagematrix", *words, check=False, **options)

    def start(self, name, *words):
        """Start a program that runs until it is stopped; its output is in `log`."""
        command = [*END_WITH_US, *self.inside, *map(str, words)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=self.environment
            )

    def stop(self, name):
        """Stop a program, and wait for its end: that of nsenter, which started it, is at once."""
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        wait_until(lambda: not _exists(process.pid), name)

    def log(self, name):
        """Return what a program has printed."""
        return (self.folder / f"{name}.log").read_text()

    def remove(self):
        """Power off, and remove the cgroups; its files stay."""
        self.turn_off()
        for process in self._running.values():
            process.wait(60)
        self.remove_groups()


class ControlPlane(Member):
    """The machine of the API server, with a registry on port 5000 for the whole cluster."""

    def __init__(self, folder, switch, release, nodes):
        super().__init__("control", folder, switch, 1, release)
        self.nodes = nodes  # their names; they do not run yet
        self.tokens = {name: f"token-of-{name.rpartition(':')[2]}" for name in TOKENS}
        self.tokens |= {f"system:node:{name}": f"token-of-{name}" for name in nodes}
        self.authority, self.key = folder / "tls.crt", folder / "tls.key"
        self._certify(f"IP:{self.address},IP:{API},IP:127.0.0.1,DNS:localhost")
        self.run("ip", "address", "add", f"{API}/32", "dev", "lo")
        admin = str(self.configuration("admin"))
        self.environment |= {"KUBECONFIG": admin, "REQUESTS_CA_BUNDLE": str(self.authority)}

    def _certify(self, names):
        """Make a certificate for all servers on this machine, which is its own authority."""
        words = (
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
        )
        uses = (
            "-addext",
            "keyUsage=critical,digitalSignature,keyCertSign",
            "-addext",
            f"subjectAltName={names}",
        )
        files = ("-subj", "/CN=cluster", "-keyout", self.key, "-out", self.authority)
        self.run("openssl", *words, *uses, *files)

    def configuration(self, user):
        """Write the kubeconfig with which a program reaches the API server as a user; return its path."""
        path = self.folder / f"{user.replace(':', '-')}.kubeconfig"
        cluster = {"server": f"https://{self.address}:443", "certificate-authority": str(self.authority)}
        told = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": self.tokens[user]}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(json.dumps(told))
        return path

    def begin(self):
        """Start the control plane, and wait until it answers."""
        groups = TOKENS | {f"system:node:{name}": "system:nodes" for name in self.nodes}
        lines = [f'{self.tokens[user]},{user},{user},"{group}"' for user, group in groups.items()]
        (self.folder / "tokens.csv").write_text("\n".join(lines) + "\n")
        key = self.key
        self.start(
            "etcd",
            "etcd",
            *("--data-dir", self.folder / "etcd", "--unsafe-no-fsync"),
            *("--listen-peer-urls", "http://127.0.0.1:2380"),
        )
        self.start(
            "apiserver",
            "kube-apiserver",
            *("--etcd-servers=http://127.0.0.1:2379", "--secure-port=443"),
            f"--advertise-address={self.address}",
            *(f"--tls-cert-file={self.authority}", f"--tls-private-key-file={key}"),
            *(f"--token-auth-file={self.folder}/tokens.csv", "--authorization-mode=Node,RBAC"),
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.authority}",
            *(f"--service-account-signing-key-file={key}", f"--service-cluster-ip-range={SERVICES}"),
            *("--enable-aggregator-routing=true", "--kubelet-preferred-address-types=InternalIP"),
            *(*self.release.control, *self.release.api),
        )
        wait_until(lambda: self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", "API server")
        for name, *more in (
            ("kube-scheduler",),
            (
                "kube-controller-manager",
                *("--use-service-account-credentials=true", f"--service-account-private-key-file={key}"),
                f"--root-ca-file={self.authority}",
            ),
        ):
            user = f"--kubeconfig={self.configuration(f'system:{name}')}"
            self.start(name, name, user, "--leader-elect=false", *self.release.control, *more)

    def kubectl(self, *words, check=True, **options):
        """Call kubectl as the administrator."""
        done = self.run("kubectl", *words, check=False, **options)
        assert done.returncode == 0 or not check, done.stderr
        return done


class Node(Member):
    """A machine with containerd and a kubelet."""

    def __init__(self, name, folder, switch, number, release, hardware):
        super().__init__(name, folder, switch, number, release, hardware)
        self._hardware = hardware
        self.pods = f"10.80.{number}.0/24"

    def connect(self, control, others):
        """Set up the network of pods, and how the node reaches the API server's service and registries."""
        address = {
            "type": "host-local",
            "dataDir": f"{self.folder}/addresses",
            "ranges": [[{"subnet": self.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "ipam": address}
        folder = self.folder / "cni"
        folder.mkdir()
        (folder / "pods.conflist").write_text(
            json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]})
        )
        for there in (control, *others):
            there.run("ip", "route", "add", self.pods, "via", self.address)
        self.run("ip", "route", "add", SERVICES, "via", control.address)

    def trust(self, registry, authority):
        """Let containerd pull from a registry whose certificate is signed by an authority."""
        folder = self.folder / "registries" / registry
        folder.mkdir(parents=True)
        (folder / "hosts.toml").write_text(f'[host."https://{registry}"]\nca = "{authority}"\n')

    def begin(self, kubeconfig):
        """Start containerd and the kubelet."""
        self.run("mknod", "/dev/kmsg", "c", "1", "11")  # the kubelet reads it
        file = self.folder / "containerd.toml"
        places = {"folder": self.folder, "pause": PAUSE, "programs": self.release.programs}
        file.write_text(self.release.containerd.format(**places))
        self.start("containerd", "containerd", "--config", file)
        wait_until(lambda: self.run("ctr", "version", check=False).returncode == 0, "containerd")
        self._import(PAUSE, "pause")
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.group}",
            "enforceNodeAllocatable": ["none"],
            "evictionHard": {"memory.available": "0%"},
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": False,
            "nodeStatusUpdateFrequency": "2s",  # so that GPUs show up in time
            "oomScoreAdj": 0,
            "resolvConf": "",
            "syncFrequency": "10s",
            **self.release.settings,
        }
        (self.folder / "kubelet.json").write_text(json.dumps(settings))
        self._kubelet = [
            "kubelet",
            f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={kubeconfig}",
            *self.release.flags,
            *(f"--hostname-override={self.name}", f"--node-ip={self.address}"),
        ]
        self.start("kubelet", *self._kubelet)

    def _import(self, name, program):
        """Give containerd an image with one of our programs."""
        data = (self.release.programs / "bin" / program).read_bytes()
        image = Parts(tar((program, data, 0o755)), entrypoint=[f"/{program}"])
        folder = layout(self.folder / program, image, entries=[image.entry(annotations={IMAGE: name})])
        self.run("tar", "-C", folder, "-cf", f"{folder}.tar", ".")
        self.run("ctr", "-n", "k8s.io", "images", "import", f"{folder}.tar")

    def start_plugin(self, *options):
        """Start the device plugin, as systemd would."""
        self.start("plugin", ROOT / ".venv/bin/imagematrix", "kubernetes", "device-plugin", *options)

    @contextlib.contextmanager
    def driver(self, version):
        """Change the machine's driver within the context."""
        file, before = self._hardware.folder / "proc/driver/nvidia/version", self.environment["STUB_DRIVER"]
        file.write_text(file.read_text().replace(before, version))
        self.environment["STUB_DRIVER"] = version
        yield
        file.write_text(file.read_text().replace(version, before))
        self.environment["STUB_DRIVER"] = before

    def probed(self):
        """Return the machine's Host document."""
        return json.loads(self.imagematrix("probe", "--json").stdout)

    def number(self, path):
        """Return the major and minor number of a device."""
        return " ".join(str(int(word, 16)) for word in self.run("stat", "-c", "%t %T", path).stdout.split())

    def restart_kubelet(self):
        """Stop the kubelet, and start it again."""
        self.stop("kubelet")
        self.start("kubelet", *self._kubelet)


class Kubernetes:
    """A cluster of a release: a control plane, nodes, and a registry with the folder `data`.

    `gpus` contains the profile of each node, and how many of the profile's GPUs the node has.
    """

    def __init__(self, data, gpus, release):
        self._folders = []
        self._switch = Switch()
        self.release = release
        self.control = ControlPlane(self._folder(), self._switch, release, tuple(gpus))
        self._data = data
        self.registries = []
        hosts = profiles()
        self.nodes = []
        for number, (name, (profile, count)) in enumerate(gpus.items(), 2):
            hosts.NODES[name] = hosts.NODES[profile]._replace(cards=hosts.NODES[profile].cards[:count])
            hardware = GpuNode(self._folder(), name, hosts)
            self.nodes.append(Node(name, self._folder(), self._switch, number, release, hardware))
        self.registry = self.add_registry(5000)

    def _folder(self):
        self._folders.append(new_folder())
        return self._folders[-1]

    def add_registry(self, port, login=None):
        """Start a registry that nodes trust, on the machine of the control plane; return its address."""
        tls = (self.control.authority, self.control.key)
        where = {"data": self._data, "host": self.control.address, "tls": tls}
        self.registries.append(Registry(self.control, port, login, **where))
        address = self.registries[-1].address
        for node in self.nodes:
            node.trust(address, self.control.authority)
        return address

    def begin(self):
        """Start everything, and wait until the nodes are ready."""
        self.control.begin()
        for node in self.nodes:
            node.connect(self.control, [other for other in self.nodes if other is not node])
            node.begin(self.control.configuration(f"system:node:{node.name}"))
        ready = '{range .items[*].status.conditions[?(@.type=="Ready")]}{.status} {end}'
        wait_until(
            lambda: (
                self.kubectl("get", "nodes", "-o", f"jsonpath={ready}").stdout.split()
                == ["True"] * len(self.nodes)
            ),
            "nodes",
            120,
        )
        # The controllers create the service account; before that no pod can be created.
        words = ("run", "any", "--image=any", "--dry-run=server")
        wait_until(lambda: self.kubectl(*words, check=False).returncode == 0, "service account")

    def kubectl(self, *words, **options):
        """Call kubectl as the administrator."""
        return self.control.kubectl(*words, **options)

    def get(self, *words):
        """Return objects that kubectl gets."""
        return json.loads(self.kubectl("get", *words, "-o", "json").stdout)

    def phases(self, *pods):
        """Return the phases of pods, one after the other."""
        return [self.get("pod", name)["status"]["phase"] for name in pods]

    def report(self, pod):
        """Return the output of a pod."""
        return self.kubectl("logs", pod, check=False).stdout

    def whole_report(self, pod):
        """Wait for the report that the image's program prints at its start, and return it."""
        self.wait(lambda: self.report(pod).endswith("end\n"))
        return self.report(pod)

    def apply(self, *manifests, check=True):
        """Apply manifests, or create them if they have no name."""
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
        return self.kubectl("apply", "-f", "-", input=given, check=check)

    def uninstall(self):
        """Remove what `render install` has installed."""
        hook = "mutatingwebhookconfiguration/imagematrix-webhook"
        self.kubectl("delete", "--ignore-not-found", hook)
        self.kubectl("delete", "--ignore-not-found", "namespace/imagematrix")
        kinds = ["clusterroles", "clusterrolebindings"]
        if self.release.has("1.30"):
            kinds += ["validatingadmissionpolicies", "validatingadmissionpolicybindings"]
        self.kubectl("delete", ",".join(kinds), "-l", "app.kubernetes.io/part-of=imagematrix")

    def label(self):
        """Label the nodes as users without NFD do."""
        for node in self.nodes:
            words = ("kubernetes", "labels", "--format", "kubectl", "--node", node.name)
            done = node.imagematrix(*words)
            assert done.returncode == 0, done.stderr
            self.control.run("sh", input=done.stdout)

    def unlabel(self):
        """Remove our labels, and those of NFD, from the nodes."""
        for node in self.get("nodes")["items"]:
            metadata = node["metadata"]
            ours = ("imagematrix.io/", "feature.node.kubernetes.io/")
            gone = {key: None for key in metadata["labels"] if key.startswith(ours)}
            patch = json.dumps({"metadata": {"labels": gone}})
            self.kubectl("patch", "node", metadata["name"], "--type=merge", "-p", patch)

    def imagematrix(self, *words, check=True, **options):
        """Run imagematrix on the machine of the control plane, where kubectl works."""
        done = self.control.imagematrix(*words, **options)
        assert done.returncode == 0 or not check, done.stderr
        return done

    def wait(self, ready, seconds=120):
        """Wait until `ready()` is true; after the timeout, the test fails and shows the cluster."""
        wait_until(ready, self, seconds)

    def __repr__(self):
        """Return the cluster's pods, nodes, events and logs, for tests that fail."""
        asked = (("pods,nodes", "-A", "-o", "wide"), ("events", "-A"))
        shown = [self.kubectl("get", *words, check=False) for words in asked]
        logs = [
            f"{member.name} {name}:\n{member.log(name)[-2000:]}"
            for member in self.nodes
            for name in ("kubelet", "plugin")
            if (member.folder / f"{name}.log").exists()
        ]
        return "\n".join([*(one.stdout[-5000:] for one in shown), *logs])

    def remove(self):
        """Remove registries, machines, folders and the network."""
        for registry in self.registries:
            registry.remove()
        for member in (*self.nodes, self.control):
            member.remove()
        for folder in self._folders:
            remove_folder(folder)
        self._switch.remove()


def _exists(group):
    """Whether a process group has any process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
