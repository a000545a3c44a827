"""The releases of Kubernetes that `ci/kubernetes` builds, and what differs between them."""

import os
import subprocess
from dataclasses import dataclass, field
from typing import Any

from engines import require
from machines import ROOT

SOCKET = "unix:///run/containerd/containerd.sock"
CONTAINERD = """\
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = "/run/containerd/containerd.sock"
"""
# Without CAP_SYS_RESOURCE, nobody may lower the score by which the kernel chooses whom to kill.
CONTAINERD_1 = f"""\
version = 2
{CONTAINERD}
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{{pause}}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{{programs}}/cni"
conf_dir = "{{folder}}/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{{folder}}/registries"
"""
CONTAINERD_2 = f"""\
version = 3
{CONTAINERD}
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{{pause}}"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{{folder}}/registries"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{{programs}}/cni"]
conf_dir = "{{folder}}/cni"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release of Kubernetes with its containerd."""

    name: str
    containerd: str  # its configuration, with the places `folder`, `pause` and `programs`
    needed: tuple[str, ...] = ()  # programs of the machine besides runc
    settings: dict[str, Any] = field(default_factory=dict)  # of the kubelet's configuration
    flags: tuple[str, ...] = ()  # of the kubelet
    control: tuple[str, ...] = ()  # of the API server, the scheduler and the controller manager
    api: tuple[str, ...] = ()  # of the API server

    @property
    def programs(self):
        """The folder in which `ci/kubernetes` puts the release."""
        return ROOT / ".cache/kubernetes" / self.name

    def has(self, oldest):
        """Whether this is the release `oldest`, such as "1.36", or a newer one."""
        return _numbers(self.name) >= _numbers(oldest)

    def require(self):
        """Build the programs if they are missing; skip the tests if a program of the machine is missing."""
        require("openssl", "runc", "tini", "ip", *self.needed)
        subprocess.run([ROOT / "ci/kubernetes", self.name], check=True)


RELEASES = (
    Release(
        name="1.37.2",
        containerd=CONTAINERD_2,
        settings={"containerRuntimeEndpoint": SOCKET, "failCgroupV1": False},
        # Gangs are a beta, which is off by default.
        control=("--feature-gates=GenericWorkload=true",),
        api=("--runtime-config=scheduling.k8s.io/v1beta1=true",),
    ),
    Release(
        name="1.20.2",
        containerd=CONTAINERD_1,
        needed=("containerd", "containerd-shim-runc-v2", "ctr"),
        flags=("--container-runtime=remote", f"--container-runtime-endpoint={SOCKET}"),
    ),
)


def chosen():
    """Return the release that the variable IMAGEMATRIX_KUBERNETES names; by default the newest one."""
    name = os.environ.get("IMAGEMATRIX_KUBERNETES") or RELEASES[0].name
    (found,) = (release for release in RELEASES if release.name == name)
    return found


def _numbers(name):
    return tuple(map(int, name.split(".")))
