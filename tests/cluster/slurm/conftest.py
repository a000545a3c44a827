"""A Slurm with two nodes that differ in processor, driver and GPUs, and an image with a variant for each."""

import subprocess
from types import SimpleNamespace

import pytest
import slurm_jobs
from engines import Registry
from slurm_cluster import RELEASE, ROOT
from slurm_jobs import PROFILES
from storing import push

PORT = 5031


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The commands for a node as one file."""
    return slurm_jobs.program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="session")
def image_layout(program, tmp_path_factory):  # noqa: ARG001 - with Slurm's tree
    """An OCI layout with both variants of training:v1, which can say which they are."""
    return slurm_jobs.written(slurm_jobs.variants(slurm_jobs.small()), tmp_path_factory.mktemp("layout"))


@pytest.fixture(scope="session")
def mpi_layout(program, tmp_path_factory):  # noqa: ARG001 - with Slurm's tree
    """An OCI layout with variants that have Open MPI."""
    if not [*(ROOT / ".cache/slurm" / RELEASE).glob("usr/lib/*/slurm-wlm/mpi_pmix.so")]:
        pytest.skip(f"the Slurm of Debian {RELEASE} has no plugin for PMIx")
    subprocess.run([ROOT / "ci/slurm", "mpi"], check=True)
    base = (ROOT / ".cache/slurm/mpi.tar").read_bytes()
    made = slurm_jobs.variants(base, {"mpi": "5.0.7", "pmix": "5.0.7"})
    return slurm_jobs.written(made, tmp_path_factory.mktemp("mpi"))


@pytest.fixture(scope="session")
def published(cluster, tmp_path_factory):
    """The name of training:v1 in a registry that both nodes reach, as large as a whole Debian."""
    data = tmp_path_factory.mktemp("registry")
    filling = Registry(SimpleNamespace(inside=()), PORT, data=data)
    name = push(filling, *slurm_jobs.variants((ROOT / ".cache/bases/trixie.tar").read_bytes()))
    filling.remove()
    serving = Registry(SimpleNamespace(inside=cluster.in_network), PORT, data=data)
    yield name
    serving.remove()


@pytest.fixture(scope="session")
def cluster(program, image_layout):
    """Slurm with both nodes."""
    with slurm_jobs.cluster(PROFILES, program, image_layout) as made:
        yield made


@pytest.fixture(autouse=True)
def _idle(cluster):
    yield
    cluster.run("scancel", "--user=user,root", user=False)
    cluster.wait_until_idle()
