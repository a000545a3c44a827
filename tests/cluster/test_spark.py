"""Spark workers as services with GPUs: the starter's stack on two nodes, and a job on the GPUs of both.

Spark, its images, the resolvers and the swarm are real. The GPUs are simulated: the driver in the images
loads, but finds no GPU.
"""

import json
import os
import signal
import subprocess

import pytest
from engines import ROOT
from processes import END_WITH_US

IMAGE = "127.0.0.1:5000/spark"
JOB = """
import ctypes, json, os, time
from pyspark import TaskContext
from pyspark.sql import SparkSession

def look(_):
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    return {
        "gpus": list(TaskContext.get().resources()["gpu"].addresses),
        "given": os.environ["IMAGEMATRIX_GPUS"],
        "driver": version.value,
        "nodes": sorted(name for name in os.listdir("/dev") if name.startswith("nvidia")),
    }

spark = SparkSession.builder.getOrCreate()
# One executor could run both tasks before the other one is registered.
registered = spark.sparkContext._jsc.sc().getExecutorMemoryStatus
while registered().size() < 1 + 2:  # the driver and the executors
    time.sleep(0.1)
found = spark.sparkContext.parallelize(range(2), 2).map(look).collect()
total = spark.range(1000000).selectExpr("sum(id)").first()[0]
print(json.dumps({"found": found, "total": total}))
"""
RESOURCES = ("executor.resource.gpu.amount=1", "task.resource.gpu.amount=1", "executor.memory=600m")


@pytest.fixture(scope="module")
def published(builder, tmp_path_factory):
    """Build the starter's images for the two nodes and for CPUs, and publish them."""
    folder = tmp_path_factory.mktemp("spark") / "project"
    assert builder.imagematrix("init", folder, "--template", "spark").returncode == 0
    matrix = folder / "matrix.yaml"
    text = matrix.read_text().replace("  spark:\n    version", f"  {IMAGE}:\n    version")
    secrets = []
    if certificates := os.environ.get("PIP_CERT"):
        text = text.replace("    context:", "    secrets: [ca]\n    context:")
        secrets = ["--secret", f"id=ca,src={certificates}"]
    matrix.write_text(text)
    for cells in ("cuda=none", "compute=8.9", "compute=9.0"):
        built = builder.imagematrix("build", "--push", *secrets, "--only", cells, "-f", matrix)
        assert built.returncode == 0, built.stderr
    done = builder.imagematrix("publish", f"{IMAGE}:v1")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def cluster(start_cluster, published):  # noqa: ARG001 - the registry has to have the images
    cluster = start_cluster()
    resolvers = []
    for name, profile in (("n1", "icelake-l40s"), ("n2", "genoa-h200")):
        node = cluster.add(name, profile, 1)
        node.offer()
        command = [*END_WITH_US, *node.inside, ROOT / ".venv/bin/imagematrix", "resolver"]
        words = ("--upstream", "127.0.0.1:5000")
        options = {"env": node.environment, "stderr": subprocess.PIPE, "start_new_session": True}
        resolvers.append(subprocess.Popen([*map(str, command), *words], **options))
        assert b"serving " in resolvers[-1].stderr.readline()
    cluster.form()
    yield cluster
    for resolver in resolvers:
        os.killpg(resolver.pid, signal.SIGKILL)  # nsenter has forked, and the other process has the pipe too
        resolver.communicate()


@pytest.fixture(scope="module")
def stack(cluster, published):
    """The services of the starter's stack file, once all workers that can run are running."""
    file = published / "templates/spark/stack.yaml"
    cluster.manager.docker("stack", "deploy", "--resolve-image", "never", "-c", str(file), "spark")
    cluster.wait(lambda: "running" in cluster.states("spark_master"), 300)
    cluster.wait(lambda: cluster.states("spark_worker") == ["pending", "running", "running"], 300)
    return cluster


def workers(cluster):
    """Return the container of the worker on each node, as docker describes it."""
    containers = []
    for node in cluster.nodes:
        (identifier,) = node.docker("ps", "-q", "--filter", "name=spark_worker").stdout.split()
        containers.append(node.inspect(identifier))
    return containers


def test_each_node_has_one_worker_with_its_image_and_the_third_waits(stack):
    cells = [one["Config"]["Labels"]["io.imagematrix.cell"] for one in workers(stack)]
    assert [cell.rpartition("-")[2] for cell in cells] == ["sm89", "sm90"]
    (waiting,) = [task for task in stack.tasks("spark_worker") if task["Status"]["State"] == "pending"]
    assert "insufficient resources" in waiting["Status"]["Err"]


def test_a_job_runs_on_the_gpus_of_both(stack, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    configuration = [word for one in RESOURCES for word in ("--conf", f"spark.{one}")]
    words = ["--gpus", "0", "--job", "--wait", "--rm", "--network", "spark_cluster"]
    words += ["-v", f"{tmp_path}:/job:ro", "--constraint", "node.hostname==n1", "spark:v1-cpu"]
    done = stack.manager.imagematrix(
        "swarm", "run", *words, "spark-node", "submit", *configuration, "/job/job.py"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert answer["total"] == 499999500000
    uuids = [gpu["uuid"] for node in stack.nodes for gpu in node.gpus()]
    assert sorted(one["given"] for one in answer["found"]) == sorted(uuids)
    for one in answer["found"]:
        assert one["gpus"] == [one["given"]]
        assert one["driver"] == 12040
        assert "nvidia0" in one["nodes"]
