"""A node of a real Slurm starts the variant of an image that fits it; more is in tests/cluster/slurm."""

from pathlib import Path

import pytest
import slurm_jobs
from machines import wait_until
from slurm_jobs import GPUS, IMAGE, PROFILES, squashfuses, srun

NODE = "n1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Slurm with one node, and an image with variants for that and for another one."""
    if not Path("/sys/fs/cgroup/devices").exists():
        pytest.skip("the kernel has no device cgroups of cgroup v1")
    program = slurm_jobs.program(tmp_path_factory.mktemp("program"))
    images = slurm_jobs.variants(slurm_jobs.small())
    written = slurm_jobs.written(images, tmp_path_factory.mktemp("layout"))
    with slurm_jobs.cluster({NODE: PROFILES[NODE]}, program, written) as made:
        yield made


def test_a_task_runs_the_variant_of_its_node_with_its_gpus_only(cluster):
    script = (
        f"cat /etc/variant; {GPUS}; for n in 0 1; do (: < /dev/nvidia$n) 2> /dev/null && echo $n; done; true"
    )
    assert srun(cluster, "--gpus=1", IMAGE, "sh", "-c", script) == "znver4\nnvidia0\n0\n"


def test_tasks_at_the_same_time_have_different_gpus(cluster):
    script = f"{GPUS}; sleep 1"
    out = srun(cluster, "-n2", "-l", "--gpus-per-task=1", IMAGE, "sh", "-c", script)
    assert sorted(out.splitlines()) == ["0: nvidia0", "1: nvidia1"]


def test_a_variant_of_another_node_is_refused_with_the_reasons(cluster):
    own = "--export=ALL,IMAGEMATRIX_WHERE=march=skylake"
    error = srun(cluster, "--gpus=1", own, IMAGE, "true", code=3)
    assert "driver" in error
    assert "535.261.03" in error


def test_a_job_without_gpus_is_refused(cluster):
    assert "Slurm gave it none of the GPUs of this node" in srun(cluster, IMAGE, "true", code=3)


def test_scancel_leaves_nothing(cluster):
    step = cluster.popen("srun", "--gpus=2", IMAGE, "sh", "-c", "echo ready; exec sleep 60")
    assert step.stdout.readline() == "ready\n"
    assert squashfuses(cluster)
    cluster.run("scancel", "--user=user")
    step.communicate(timeout=20)
    assert step.returncode == 143  # by SIGTERM
    wait_until(lambda: not squashfuses(cluster), "no mounted image", 20)
    assert srun(cluster, "--gpus=2", IMAGE, "true") == ""  # no claim is left either
