"""Tasks with a GPU and an overlay network, in swarms with and without the bug that rejects them.

The worker offers an invented GPU, so that no runtime is needed.
"""

import subprocess

import pytest
from engines import ROOT

OLD = "docker-bookworm"


@pytest.fixture(scope="module", params=[OLD, None], ids=["old", "new"])
def cluster(request, start_cluster):
    """A swarm with an old manager and a new worker, and the other way round."""
    subprocess.run([ROOT / "ci/engines", OLD], check=True)
    cluster = start_cluster()
    cluster.add("manager", "milan-a10", 1, release=request.param)
    gpus = {"node-generic-resources": ["NVIDIA-GPU=GPU-a"]}
    cluster.add("worker", "milan-a10", 1, gpus, release=None if request.param else OLD)
    cluster.form()
    cluster.manager.docker("network", "create", "--driver", "overlay", "net")
    return cluster


def test_only_an_old_manager_rejects_tasks_with_a_gpu_and_an_overlay_network(request, cluster, base):
    old = request.node.callspec.params["cluster"] == OLD
    words = ["--detach", "--restart-condition", "none", "--network", "net", "--endpoint-mode", "dnsrr"]
    words += ["--generic-resource", "NVIDIA-GPU=1", "--name", "job"]
    cluster.manager.docker("service", "create", *words, base, "sleep", "infinity")
    cluster.wait(lambda: cluster.states("job") == ["rejected" if old else "running"])
    words = ["--dry-run", "--resolver", "127.0.0.1:5000", "--network", "net", "--gpus", "1", base, "true"]
    printed = cluster.manager.imagematrix("swarm", "run", *words)
    assert printed.returncode == 0, printed.stderr
    said = " ".join(printed.stderr.split())
    assert ("the manager manager (20.10.24+dfsg1) rejects tasks on other nodes" in said) is old
