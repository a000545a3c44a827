"""Jobs that share the memory of one GPU, from the queue to the containers: ten of 4 GB on a card of 24 GB."""

import pytest

RESOLVER = "127.0.0.1:5000"  # the registry of each node: one image for all of them
FRACTION = "0.1308"  # 3814 MiB less 800 for CUDA, of 23028


@pytest.fixture(scope="module")
def cluster(start_cluster):
    cluster = start_cluster()
    cluster.add("n1", "milan-a10", 1).offer("--vram", "all")
    cluster.form()
    return cluster


@pytest.fixture
def run(cluster, base):
    """Return a function that runs `swarm run` with options and a shell command, and returns the result."""

    def call(*options, command):
        words = ("swarm", "run", "--resolver", RESOLVER, *options, base, "sh", "-c", command)
        return cluster.manager.imagematrix(*words)

    return call


def test_ten_jobs_of_4_gb_on_a_card_of_24(cluster, run, tmp_path):
    report = "echo $IMAGEMATRIX_VRAM_MIB $IMAGEMATRIX_VRAM_FRACTION $IMAGEMATRIX_GPUS"
    command = f": < /dev/nvidia0 && {report}; until [ -e /go/now ]; do sleep 0.2; done"
    words = ("--vram", "4G", "--job", "--replicas", "10", "--name", "ten", "-v", f"{tmp_path}:/go")
    started = run(*words, command=command)
    assert started.returncode == 0, started.stderr
    cluster.wait(lambda: cluster.states("ten") == ["pending"] * 4 + ["running"] * 6)
    (gpu,) = cluster.manager.gpus()
    assert [use["vram_mib"] for use in gpu["used_by"]] == [3814] * 6
    assert gpu["vram_free_mib"] == 23028 - 6 * 3814
    assert cluster.manager.imagematrix("swarm", "gc").stdout == ""
    (tmp_path / "now").touch()
    cluster.wait(lambda: cluster.states("ten") == ["complete"] * 10)
    lines = cluster.manager.docker("service", "logs", "--raw", "ten").stdout.splitlines()
    assert lines == [f"3814 {FRACTION} {gpu['uuid']}"] * 10
    assert cluster.manager.imagematrix("swarm", "gc").stdout == "service ten\n"
    assert cluster.manager.docker("service", "ls", "-q").stdout == ""
    cluster.wait(cluster.manager.has_no_containers)
    (gpu,) = cluster.manager.gpus()
    assert gpu["free"]


def test_a_request_above_every_gpu_is_refused_immediately(cluster, run):
    refused = run("--vram", "24Gi", "--job", "--wait", command="true")
    assert refused.returncode == 2
    assert "requested 24576 MiB for each task, but no node offers more than 23028 MiB" in refused.stderr
    assert cluster.manager.docker("service", "ls", "-q").stdout == ""


def test_a_job_that_is_waited_for_computes_on_its_share(run):
    done = run("--vram", "8G", "--job", "--wait", "--rm", command="echo $IMAGEMATRIX_VRAM_MIB; exit 3")
    assert (done.returncode, done.stdout) == (3, "7629\n")
