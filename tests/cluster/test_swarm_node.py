"""A node of a swarm whose engine gives GPUs to tasks: only as assigned, and no GPU twice."""

import json
import signal
from pathlib import Path

import pytest

GPU = "DOCKER_RESOURCE_NVIDIA-GPU"
# The report of a task: the device nodes that it can open, the numbers of devices that it can open under
# another name, and its variables. A shell drops variables with a dash in their names.
REPORT = """
for node in /dev/nvidia*; do head -c0 $node && echo "node $node"; done
for number in {numbers}; do
    mknod /tmp/$number c $(echo $number | tr : ' ')
    head -c0 /tmp/$number 2> /dev/null && echo "number $number"
done
env | grep ^IMAGEMATRIX_ | sort
echo end
sleep 600
"""


@pytest.fixture(scope="module")
def node(start_cluster):
    """The only node of a swarm, with two GPUs."""
    cluster = start_cluster()
    node = cluster.add("n1", "milan-a10", 2)
    node.offer("--vram", "4G")
    cluster.form()
    node.cluster = cluster
    return node


@pytest.fixture(autouse=True)
def _no_service_outlives_its_test(node):
    yield
    if services := node.docker("service", "ls", "-q").stdout.split():
        node.docker("service", "rm", *services)
    node.cluster.wait(lambda: not node.docker("ps", "-q").stdout)
    assert node.has_no_containers()
    assert not any(gpu["used_by"] for gpu in node.gpus())


@pytest.fixture
def create(node, base):
    """Return a function that creates a service from docker's options and a shell command."""

    def start(name, *options, command="sleep 600", image=base):
        words = ("-d", "--no-resolve-image", "--name", name, *options, image, "sh", "-c", command)
        node.docker("service", "create", *words)

    return start


def users(node):
    return [
        [(one["name"].split(" ")[0].split(".")[0], one["vram_mib"]) for one in gpu["used_by"]]
        for gpu in node.gpus()
    ]


def number(node, path):
    """Return the numbers of a device, as MAJOR:MINOR."""
    return ":".join(str(int(word, 16)) for word in node.run("stat", "-c", "%t %T", path).stdout.split())


def reports(node, name, count):
    """Return the lines of each task of a service, once `count` have reported."""
    reported: list[list[str]] = []

    def ready():
        logs = [node.docker("logs", one).stdout for one in containers(node, name)]
        reported[:] = sorted(log.split("\n")[:-2] for log in logs if log.endswith("end\n"))
        return len(reported) == count

    node.cluster.wait(ready)
    return reported


def containers(node, name):
    return node.docker("ps", "-q", "--filter", f"name={name}.").stdout.split()


def errors(node, name):
    """Return the errors of a service's failed tasks, as `docker service ps` shows them."""
    words = ("service", "ps", "--no-trunc", "--format", "{{.Error}}", name)
    return node.docker(*words).stdout


def test_the_engine_offers_the_gpus_of_the_node(node):
    described = node.inspect("n1")["Description"]
    offered = described["Resources"]["GenericResources"]
    named = [one["NamedResourceSpec"] for one in offered if "NamedResourceSpec" in one]
    assert {(one["Kind"], one["Value"]) for one in named} == {
        ("NVIDIA-GPU", gpu["uuid"]) for gpu in node.gpus()
    }
    assert {"DiscreteResourceSpec": {"Kind": "VRAM-4G", "Value": 12}} in offered
    assert described["Engine"]["Labels"]["io.imagematrix.compute"] == "8.6"


def test_each_replica_has_its_own_gpu(node, create):
    numbers = [number(node, f"/dev/nvidia{minor}") for minor in (0, 1)]
    report = REPORT.format(numbers=" ".join(numbers))
    create("three", "--replicas", "3", "--generic-resource", "NVIDIA-GPU=1", command=report)
    node.cluster.wait(lambda: node.cluster.states("three") == ["pending", "running", "running"])
    assert users(node) == [[("three", None)], [("three", None)]]
    control = ["node /dev/nvidia-uvm", "node /dev/nvidia-uvm-tools", "node /dev/nvidiactl"]
    for gpu, lines in zip(node.gpus(), reports(node, "three", 2), strict=True):
        minor = gpu["minor"]
        assert {f"node /dev/nvidia{minor}", *control} <= set(lines)
        assert f"node /dev/nvidia{1 - minor}" not in lines
        assert [line for line in lines if line.startswith("number")] == [f"number {numbers[minor]}"]
        assert lines[-1] == f"IMAGEMATRIX_GPUS={gpu['uuid']}"
    # The waiting task gets the GPU of the task that ends.
    node.docker("service", "scale", "-d", "three=2")
    (first, *_) = containers(node, "three")
    node.docker("kill", first)
    node.cluster.wait(lambda: len(containers(node, "three")) == 2 and first not in containers(node, "three"))
    assert users(node) == [[("three", None)], [("three", None)]]


def test_shares_have_their_fraction_and_never_exceed_a_gpu(node, create):
    create("jobs", "--replicas", "14", "--generic-resource", "VRAM-4G=1", command=REPORT.format(numbers=""))
    expected = ["pending"] * 2 + ["running"] * 12
    node.cluster.wait(lambda: node.cluster.states("jobs") == expected)
    assert users(node) == [[("jobs", 3814)] * 6] * 2
    for lines in reports(node, "jobs", 12):
        assert lines[-2:] == [
            "IMAGEMATRIX_VRAM_FRACTION=0.1308",  # 3814 MiB less 800 for CUDA, of 23028, rounded down
            "IMAGEMATRIX_VRAM_MIB=3814",
        ]


def test_other_containers_get_nothing(node, create, base):
    """The variable and the labels of a task, in a container of another user and in an image."""
    (gpu, _) = node.gpus()
    labels = ("--label", "com.docker.swarm.task.id=x7", "--label", "com.docker.swarm.service.name=web")
    words = ("--rm", "--network", "none", "-e", f"{GPU}={gpu['uuid']}", *labels)
    ls = "ls /dev | grep -c nvidia"
    assert node.docker("run", *words, base, "sh", "-c", ls, check=False).stdout == "0\n"
    node.docker("create", "--name", "made", "--network", "none", base, "true")
    node.docker("commit", "--change", f"ENV {GPU}={gpu['uuid']}", "made", "greedy:v1")
    node.docker("rm", "made")
    create("greedy", image="greedy:v1", command=f"{ls}; echo end; sleep 600")
    assert reports(node, "greedy", 1) == [["0"]]
    assert not any(one["used_by"] for one in node.gpus())


def test_a_gpu_that_is_in_use_is_refused(node, create, base):
    held = ("--network", "none", "--device", "/dev/nvidia0", "--name", "held")
    node.docker("run", "-d", "--rm", *held, base, "sleep", "600")
    create("two", "--replicas", "2", "--generic-resource", "NVIDIA-GPU=1", "--restart-delay", "1s")
    node.cluster.wait(lambda: "in use by container held" in errors(node, "two"))
    assert "OCI runtime create failed: imagematrix: requested 1 GPU, 0 free" in errors(node, "two")
    assert users(node) == [[("held", None)], [("two", None)]]
    node.docker("kill", "held")
    node.cluster.wait(lambda: len(containers(node, "two")) == 2)
    assert users(node) == [[("two", None)], [("two", None)]]


def test_an_engine_that_is_killed_and_a_node_that_is_drained(node, create):
    create("two", "--replicas", "2", "--generic-resource", "NVIDIA-GPU=1")
    node.cluster.wait(lambda: len(containers(node, "two")) == 2)
    node.stop(signal.SIGKILL)
    node.start()
    node.cluster.wait(lambda: len(containers(node, "two")) == 2)
    assert users(node) == [[("two", None)], [("two", None)]]
    node.docker("node", "update", "--availability", "drain", "n1")
    node.cluster.wait(lambda: not containers(node, "two"))
    assert users(node) == [[], []]
    node.docker("node", "update", "--availability", "active", "n1")
    node.cluster.wait(lambda: len(containers(node, "two")) == 2)
    assert users(node) == [[("two", None)], [("two", None)]]


def test_a_gpu_that_is_lost_while_tasks_wait(node, create):
    create("three", "--replicas", "3", "--generic-resource", "NVIDIA-GPU=1", "--restart-delay", "1s")
    node.cluster.wait(lambda: node.cluster.states("three") == ["pending", "running", "running"])
    before = set(containers(node, "three"))
    first = node.gpus()[0]
    bus_id = json.loads(node.imagematrix("probe", "--json").stdout)["gpus"][0]["pci_bus_id"]
    shown = Path(node.node.inside[-1], "proc/driver/nvidia/gpus", bus_id)
    shown.rename(shown.parents[4] / "lost")
    (ended,) = [one for one in before if environment(node, one)["IMAGEMATRIX_GPUS"] == first["uuid"]]
    node.docker("kill", ended)
    missing = f"imagematrix: Swarm assigned {first['uuid']}, which this node does not have"
    node.cluster.wait(lambda: errors(node, "three").count(missing) > 1)
    assert set(containers(node, "three")) == before - {ended}
    (shown.parents[4] / "lost").rename(shown)
    node.cluster.wait(lambda: len(containers(node, "three")) == 2)
    assert users(node) == [[("three", None)], [("three", None)]]


def environment(node, container):
    """Return the variables of the first process in a container."""
    pid = node.docker("inspect", "-f", "{{.State.Pid}}", container).stdout.strip()
    text = node.run("cat", f"/proc/{pid}/environ").stdout
    return dict(entry.split("=", 1) for entry in text.split("\0") if entry)
