"""`swarm run` and `swarm gc` on a real swarm: services, jobs, the queue, and clean-up.

The nodes offer invented GPUs, so that no runtime is needed.
"""

import json
import os
import signal
import subprocess
import time

import pytest

RESOLVER = "127.0.0.1:5000"  # the registry of each node: one image for all of them
LABEL = "io.imagematrix.swarm"


@pytest.fixture(scope="module")
def cluster(start_cluster):
    cluster = start_cluster()
    gpus = ["NVIDIA-GPU=GPU-a"]
    cluster.add("n1", "milan-a10", 1, {"node-generic-resources": [*gpus, "VRAM=23028"]})
    cluster.add("n2", "genoa-h200", 1, {"node-generic-resources": ["NVIDIA-GPU=GPU-b"]})
    cluster.form()
    return cluster


@pytest.fixture(autouse=True)
def _no_service_outlives_its_test(cluster):
    yield
    if services := cluster.manager.docker("service", "ls", "-q").stdout.split():
        cluster.manager.docker("service", "rm", *services)


@pytest.fixture
def run(cluster, base):
    """Return a function that runs `swarm run` with options and a shell command, and returns the result."""

    def call(*options, command="true", **given):
        words = ("swarm", "run", "--resolver", RESOLVER, *options, base, "sh", "-c", command)
        return cluster.manager.imagematrix(*words, **given)

    return call


def spec(cluster, name):
    return cluster.manager.inspect(name)["Spec"]


def test_the_service_equals_the_one_of_the_docker_command(cluster, run):
    words = ["--vram", "4G", "--job", "--replicas", "2", "-e", "A=1", "-v", "data:/data:ro"]
    words += ["--constraint", "node.hostname==n1"]
    assert run("--name", "ours", *words).returncode == 0
    printed = run("--name", "theirs", "--dry-run", "--json", *words)
    cluster.manager.docker(*json.loads(printed.stdout)["docker"][1:])
    ours, theirs = spec(cluster, "ours"), spec(cluster, "theirs")
    for one in (ours, theirs):  # without the defaults that only one of the two writes
        one.pop("Name")
        one.pop("EndpointSpec", None)
        task = one["TaskTemplate"]
        for part, names in (
            (task["ContainerSpec"], ("Isolation", "DNSConfig", "Init", "StopGracePeriod")),
            (task, ("Runtime", "ForceUpdate")),
            (task["Placement"], ("Platforms",)),
            (task["Resources"], ("Limits",)),
            (task["RestartPolicy"], ("Delay", "MaxAttempts", "Window")),
        ):
            for name in names:
                part.pop(name, None)
    assert ours == theirs


def test_surplus_replicas_wait_and_a_request_above_every_node_is_refused(cluster, run):
    assert run("--gpus", "1", "--replicas", "3", "--name", "three", command="sleep 600").returncode == 0
    cluster.wait(lambda: cluster.states("three") == ["pending", "running", "running"])
    for words in (("--gpus", "2"), ("--vram", "24Gi")):
        refused = run(*words, "--name", "never")
        assert refused.returncode == 2
        assert "but no node offers more than" in refused.stderr
    assert cluster.manager.docker("service", "inspect", "never", check=False).returncode != 0


def test_a_job_is_waited_for_with_its_output_and_exit_code(cluster, run):
    command = 'for n in 1 2 3; do echo "line $n"; sleep 0.3; done; echo sorry >&2; exit 7'
    done = run("--vram", "4G", "--job", "--wait", "--name", "seven", command=command)
    assert (done.returncode, done.stdout) == (7, "line 1\nline 2\nline 3\n")
    assert "sorry\n" in done.stderr
    assert "task seven.0 failed: task: non-zero exit (7)" in done.stderr
    # A job is not started again.
    time.sleep(7)
    assert cluster.states("seven") == ["failed"]
    assert cluster.manager.imagematrix("swarm", "gc").stdout == "service seven\n"


def test_the_output_of_a_short_job_is_complete(run):
    done = run("--vram", "4G", "--job", "--wait", "--rm", command="seq 20000")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(number) for number in range(1, 20001)]


def test_an_image_that_no_node_gets(cluster):
    words = ("--gpus", "0", "--job", "--wait", "--name", "none", "--resolver", RESOLVER)
    done = cluster.manager.imagematrix("swarm", "run", *words, "nowhere:v1")
    assert done.returncode == 8
    assert "task none.0 rejected: " in done.stderr
    assert "1 task of none could not be run" in done.stderr


@pytest.mark.parametrize("remove", [False, True])
def test_an_interrupted_wait(cluster, base, remove):
    words = ["swarm", "run", "--resolver", RESOLVER, "--vram", "4G", "--job", "--wait", "--name", "long"]
    words += ["--rm"] if remove else []
    command = [*cluster.manager.inside, ".venv/bin/imagematrix", *words, base, "sleep", "600"]
    with subprocess.Popen(
        command, env=cluster.manager.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert "1 running\n" in iter(process.stderr.readline, "")
        os.killpg(process.pid, signal.SIGINT)
        messages = process.stderr.read()
    if remove:
        assert "removed service long" in messages
        assert cluster.manager.docker("service", "inspect", "long", check=False).returncode != 0
    else:
        assert "service long continues without this command" in messages
        assert cluster.states("long") == ["running"]


def test_a_manager_that_restarts_is_waited_for(cluster, base):
    words = ["swarm", "run", "--resolver", RESOLVER, "--gpus", "0", "--job", "--wait", "--name", "patient"]
    words += ["--constraint", "node.hostname==n2"]
    script = "echo before; sleep 20; echo after; exit 5"
    command = [*cluster.manager.inside, ".venv/bin/imagematrix", *words, base, "sh", "-c", script]
    with subprocess.Popen(
        command, env=cluster.manager.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "before\n"
        cluster.manager.stop()
        cluster.manager.start()
        rest, messages = process.communicate(timeout=90)
    assert process.returncode == 5, messages
    assert rest == "after\n"


def test_gc_keeps_queued_and_running_jobs_on_every_node(cluster, run):
    gc = ("swarm", "gc")
    run("--gpus", "1", "--job", "--replicas", "3", "--name", "queued", command="sleep 600")
    run("--gpus", "0", "--job", "--replicas", "2", "--name", "over")
    run("--gpus", "0", "--name", "serving", command="sleep 600")
    cluster.manager.docker(
        "service",
        "create",
        "-d",
        "--mode",
        "replicated-job",
        "--name",
        "strangers",
        "--no-resolve-image",
        "127.0.0.1:5000/debian:trixie",
        "true",
    )
    cluster.wait(lambda: cluster.states("queued") == ["pending", "running", "running"])
    cluster.wait(lambda: cluster.states("over") == ["complete", "complete"])
    cluster.wait(lambda: cluster.states("strangers") == ["complete"])
    worker = cluster.nodes[1]
    worker.stop(signal.SIGKILL)
    cluster.wait(lambda: len(cluster.ready()) == 1)
    assert cluster.manager.imagematrix(*gc, "--dry-run").stdout == "service over\n"
    assert cluster.manager.imagematrix(*gc).stdout == "service over\n"
    left = cluster.manager.docker("service", "ls", "--format", "{{.Name}}").stdout.split()
    assert sorted(left) == ["queued", "serving", "strangers"]
    worker.start()
    cluster.wait(lambda: len(cluster.ready()) == 2)
    # Swarm, or gc there, removes what the job left on the worker while the worker was unreachable.
    worker.imagematrix(*gc)
    cluster.wait(lambda: not worker.docker("ps", "-aq", "--filter", "name=over").stdout)
