"""Jobs of a real Slurm that start containers with an engine, Docker or Podman, on their node."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from images import saved
from machines import wait_until
from podman import Podman
from slurm_cluster import ROOT
from slurm_engine import engine_on, in_use
from slurm_jobs import GPUS, small, srun, variants

from imagematrix.hardware.gpu_request.visible import NO_GPU

NODE = "n1"
PODMAN = "podman-forky"  # Podman 4 does not tell docker's command enough for --device
RUN = ("imagematrix", "run", "--engine", "docker", "--rm")
IMAGE = "training:v1"
LABEL = "io.imagematrix.slurm-job"
# It says which signals it gets, and ends by SIGTERM.
PROGRAM = "trap 'echo usr1' USR1; trap 'echo term; exit 9' TERM; echo ready; while :; do sleep 0.1; done"
STUBBORN = "trap '' TERM USR1; echo ready; while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def docker(cluster):
    """Docker, which sees the GPUs of the node."""
    made = engine_on(cluster, NODE)
    made.start()
    yield made
    made.remove()


@pytest.fixture(scope="module", params=["docker", "podman"])
def engine(request, cluster, docker, tmp_path_factory):
    """The engine of the node, with both variants of training:v1."""
    if request.param == "docker":
        made = docker
    else:
        subprocess.run([ROOT / "ci/engines", PODMAN], check=True)
        made = Podman(docker, PODMAN)
    folder = tmp_path_factory.mktemp("images")
    for parts, tag in variants(small()):
        path = saved(folder / tag, parts, *map(parts.blobs.get, parts.layers), names=[f"training:{tag}"])
        with Path(path).open("rb") as file:
            subprocess.run(["docker", "load"], env=made.environment, stdin=file, check=True)
    with in_use(cluster, NODE, made.folder / f"{request.param}.sock"):
        yield made
    if made is not docker:
        made.remove()


def containers(engine):
    """Return the containers of an engine, as `docker inspect` shows them."""
    names = asked(engine, "ps", "-aq").split()
    return json.loads(asked(engine, "inspect", *names)) if names else []


def asked(engine, *words):
    done = subprocess.run(
        ["docker", *words], env=engine.environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def started(cluster, *options, program=PROGRAM):
    """Start a step whose container runs a program; return it once the program does."""
    step = cluster.popen("srun", "-w", NODE, *options, *RUN, IMAGE, "sh", "-c", program)
    if step.stdout.readline() != "ready\n":
        pytest.fail(step.communicate()[1])
    return step


def submitted(cluster, text, *options):
    """Submit a batch script for the node; return its job, and the path of its output."""
    (cluster.shared / "home/job.sh").write_text(f"#!/bin/bash\n{text}\n")
    words = ("sbatch", "--parsable", "-w", NODE, "-o", "engine-%A", *options, "job.sh")
    job = cluster.run(*words).stdout.strip()
    return job, cluster.shared / f"home/engine-{job}"


def says(path, text):
    """Whether a job has written a text."""
    return path.exists() and text in path.read_text()


def launching(cluster):
    """Return the processes on the nodes that launch a container: ours, and docker's command."""
    return [pid for pid, words in cluster.commands() if {b"run", b"--rm"} <= {*words}]


def test_a_container_has_the_gpus_of_the_job_and_its_label(cluster, engine):
    step = started(cluster, "--gpus=1")
    (container,) = containers(engine)
    (job,) = cluster.run("squeue", "-h", "-o", "%i").stdout.split()
    assert container["Config"]["Labels"][LABEL] == job
    assert srun(cluster, "-w", NODE, "--gpus=1", *RUN, IMAGE, "sh", "-c", GPUS) == "nvidia1\n"
    cluster.run("scancel", job)
    step.communicate(timeout=30)


def test_tasks_of_a_job_have_different_gpus(cluster, engine):  # noqa: ARG001 - which runs them
    words = ("-w", NODE, "-n2", "-l", "--gpus-per-task=1", *RUN, IMAGE, "sh", "-c", f"{GPUS}; sleep 1")
    assert sorted(srun(cluster, *words).splitlines()) == ["0: nvidia0", "1: nvidia1"]


def test_a_job_without_gpus_gets_none(cluster, engine):
    error = srun(cluster, "-w", NODE, *RUN, "--gpus", "1", IMAGE, "true", code=2)
    assert "0 GPUs are usable, restricted by SLURM_JOB_ID=" in error
    assert NO_GPU in srun(cluster, "-w", NODE, *RUN, IMAGE, "true", code=3)
    assert not containers(engine)


def test_signals_of_scancel_reach_the_program(cluster, engine):
    step = started(cluster, "--gpus=1")
    cluster.run("scancel", "-s", "USR1", "--user=user")
    assert step.stdout.readline() == "usr1\n"
    cluster.run("scancel", "--user=user")
    # Slurm signals both processes, imagematrix and docker's command.
    assert step.communicate(timeout=30)[0].replace("usr1\n", "") == "term\n"
    assert step.returncode == 9
    wait_until(lambda: not containers(engine), "no container", 20)


def test_a_signal_before_the_time_limit_and_the_limit_reach_the_program(cluster, engine):
    text = f'exec {" ".join(RUN)} {IMAGE} sh -c "{PROGRAM}"'
    # Slurm sends it up to a minute earlier than that.
    _, output = submitted(cluster, text, "--gpus=1", "-t", "1", "--signal=B:USR1@30")
    wait_until(lambda: says(output, "usr1"), "the signal", 60)
    assert containers(engine)
    wait_until(lambda: says(output, "term"), "the end by the time limit", 150)
    assert "DUE TO TIME LIMIT" in output.read_text()
    cluster.wait_until_idle()
    assert not containers(engine)


def test_what_ignores_the_signal_is_removed_after_the_job(cluster, engine):
    step = started(cluster, "--gpus=2", program=STUBBORN)
    cluster.run("scancel", "--user=user")
    step.communicate(timeout=30)
    cluster.wait_until_idle()
    assert not containers(engine)
    assert srun(cluster, "-w", NODE, "--gpus=2", *RUN, IMAGE, "true") == ""


def test_what_a_killed_command_leaves_keeps_its_gpu_until_the_end_of_the_job(cluster, engine):
    text = f'{" ".join(RUN)} --gpus 1 {IMAGE} sh -c "{STUBBORN}"; echo ended $?; sleep 100'
    job, output = submitted(cluster, text, "--gpus=2")
    wait_until(lambda: says(output, "ready"), "the container", 20)
    for pid in launching(cluster):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: says(output, "ended 137"), "the end of the command", 20)
    (left,) = containers(engine)
    assert left["State"]["Running"]
    words = ("srun", f"--jobid={job}", "--overlap", "--gpus=2", *RUN, "--gpus", "1", IMAGE, "sh", "-c", GPUS)
    assert cluster.run(*words).stdout == "nvidia1\n"
    cluster.run("scancel", job)
    cluster.wait_until_idle()
    assert not containers(engine)
