"""Tasks with a GPU and an overlay network, on engines with and without the bug that rejects them.

The nodes offer invented GPUs, so that no runtime is needed.
"""

import subprocess

import pytest
from engines import ROOT

RELEASES = {"old": "docker-bookworm", "new": None}  # None is the installed engine


@pytest.fixture(scope="module")
def cluster(start_cluster):
    subprocess.run([ROOT / "ci/engines", "docker-bookworm"], check=True)
    cluster = start_cluster()
    cluster.add("manager", "milan-a10", 1)
    for name, release in RELEASES.items():
        gpus = {"node-generic-resources": [f"NVIDIA-GPU=GPU-{name}"]}
        cluster.add(name, "milan-a10", 1, gpus, release=release)
    cluster.form()
    cluster.manager.docker("network", "create", "--driver", "overlay", "net")
    return cluster


@pytest.mark.parametrize(("name", "state"), [("old", "rejected"), ("new", "running")])
def test_old_engines_reject_tasks_with_a_gpu_and_an_overlay_network(cluster, base, name, state):
    words: tuple[str, ...] = (
        "--detach",
        "--restart-condition",
        "none",
        "--network",
        "net",
        "--endpoint-mode",
        "dnsrr",
    )
    words += ("--generic-resource", "NVIDIA-GPU=1", "--constraint", f"node.hostname=={name}")
    cluster.manager.docker("service", "create", "--name", name, *words, base, "sleep", "infinity")
    cluster.wait(lambda: cluster.states(name) == [state])


def test_a_service_is_created_with_a_warning_about_these_engines(cluster, base):
    words = ("--dry-run", "--resolver", "127.0.0.1:5000", "--network", "net", "--gpus", "1", base, "true")
    printed = cluster.manager.imagematrix("swarm", "run", *words)
    assert printed.returncode == 0, printed.stderr
    assert "old (20.10.24+dfsg1) may reject tasks that have a GPU" in printed.stderr
    assert "new (" not in printed.stderr
