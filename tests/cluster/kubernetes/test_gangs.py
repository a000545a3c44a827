"""Gangs of the scheduler, by PodGroup and Workload: all ranks start, with one image, or none does."""

import json

import pytest
import yaml

pytestmark = [pytest.mark.since("1.37"), pytest.mark.usefixtures("offered")]

CLASS, GPU = "imagematrix.io/class", "imagematrix.io/gpu"
H200 = "sm_90 550.163.01"  # what the image for n1 reports
API = "scheduling.k8s.io/v1beta1"
TEMPLATE = "ranks"
N1 = {"kubernetes.io/hostname": "n1"}


@pytest.fixture
def gang(cluster, training, tmp_path):
    """Return a function that starts a Job of `render job` for n1 as a gang, removed after the test.

    Each of its pods gets a GPU. The Job and its gang are made as the page on manifests says.
    """
    made: list[str] = []

    def start(name, pods):
        nodes = tmp_path / "nodes.json"
        nodes.write_text(cluster.kubectl("get", "nodes", "-o", "json").stdout)
        chosen = ("--class", cluster.get("node", "n1")["metadata"]["labels"][CLASS], "--name", name)
        counted = ("--pods", str(pods), "--gpus", "1", "--resource", GPU)
        words = ("kubernetes", "render", "job", training.name, "--nodes", nodes, *chosen, *counted)
        (job,) = yaml.safe_load_all(cluster.imagematrix(*words, "--", "600").stdout)
        policy = {"gang": {"minCount": pods}}
        template = {"name": TEMPLATE, "schedulingPolicy": policy}
        reference = {"workloadName": name, "templateName": TEMPLATE}
        cluster.apply(
            {"apiVersion": API, "kind": "Workload", **named(name, podGroupTemplates=[template])},
            {
                "apiVersion": API,
                "kind": "PodGroup",
                **named(name, workloadRef=reference, schedulingPolicy=policy),
            },
        )
        made.extend(f"{kind}/{name}" for kind in ("job", "podgroup", "workload"))
        joined = {"schedulingGroup": {"podGroupName": name}, "terminationGracePeriodSeconds": 1}
        changed = json.dumps({"spec": {"template": {"spec": joined}}})
        patch = ("patch", "--local", "-f", "-", "--type=merge", "-p", changed, "-o", "json")
        written = cluster.kubectl(*patch, input=json.dumps(job)).stdout
        cluster.kubectl("apply", "-f", "-", input=written)
        cluster.wait(lambda: len(pods_of(cluster, name)) == pods)

    yield start
    if made:
        cluster.kubectl("delete", "--ignore-not-found", *made)
        cluster.wait(lambda: not cluster.get("pods")["items"])


def named(name, **spec):
    return {"metadata": {"name": name}, "spec": spec}


def pods_of(cluster, name):
    return cluster.get("pods", "-l", f"job-name={name}")["items"]


def scheduled(cluster, name):
    """Return the nodes of the pods of a Job that have one."""
    return [node for pod in pods_of(cluster, name) if (node := pod["spec"].get("nodeName"))]


def refused(cluster, name):
    """Whether the scheduler has tried a gang and found no place for it."""
    conditions = cluster.get("podgroup", name).get("status", {}).get("conditions", ())
    return any((one["status"], one.get("reason")) == ("False", "Unschedulable") for one in conditions)


def test_all_ranks_of_a_gang_start_with_one_image(cluster, gang, training):
    gang("pair", 2)
    cluster.wait(lambda: {pod["status"]["phase"] for pod in pods_of(cluster, "pair")} == {"Running"})
    for pod in pods_of(cluster, "pair"):
        (status,) = pod["status"]["containerStatuses"]
        assert status["imageID"].endswith(training.digests[H200])
        assert cluster.whole_report(pod["metadata"]["name"]).startswith(f"{H200}\n")
    assert scheduled(cluster, "pair") == ["n1", "n1"]


def test_no_rank_of_a_gang_starts_without_a_gpu_for_each(cluster, gang):
    gang("three", 3)
    cluster.wait(lambda: refused(cluster, "three"))
    assert scheduled(cluster, "three") == []


def test_a_gang_waits_until_there_is_room_for_all_of_it(cluster, gang, create, training):
    create("holder", training.name, {GPU: "1"}, nodeSelector=N1)
    cluster.wait(lambda: cluster.phases("holder") == ["Running"])
    gang("later", 2)
    cluster.wait(lambda: refused(cluster, "later"))
    assert scheduled(cluster, "later") == []
    cluster.kubectl("delete", "pod", "holder")
    cluster.wait(lambda: scheduled(cluster, "later") == ["n1", "n1"])
