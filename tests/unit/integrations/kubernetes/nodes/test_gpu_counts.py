"""The GPUs of a cluster, counted from lists of nodes and pods."""

import io
import json

import pytest

from imagematrix.common.json_documents import Fields
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.gpu_counts import count_gpus, count_requested

GPU, NVIDIA = "imagematrix.io/gpu", "nvidia.com/gpu"


def node(name, capacity=None, *, allocatable=None, spec=None, **labels):
    capacity = capacity or {}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": spec or {},
        "status": {
            "capacity": {"cpu": "4", "memory": "16Gi", **capacity},
            "allocatable": allocatable or capacity,
            "conditions": [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": "True"}],
        },
    }


def container(number, resource=GPU, kind="limits", **fields):
    return {"name": "c", "resources": {kind: {resource: str(number), "cpu": "1"}}, **fields}


def pod(node_name, *containers, init=(), phase="Running"):
    spec = {"containers": list(containers), "initContainers": list(init)}
    spec |= {"nodeName": node_name} if node_name else {}
    return {"kind": "Pod", "metadata": {"name": "p"}, "spec": spec, "status": {"phase": phase}}


def count(*objects):
    return count_gpus([({"kind": "List", "items": list(objects)}, "all.json")])


def by_resource(cluster, position=0):
    return {
        one.resource: (one.capacity, one.allocatable, one.requested, one.free)
        for one in cluster.nodes[position].counts
    }


def test_what_is_healthy_and_not_requested_is_free():
    cluster = count(
        node("node1", {GPU: "8", NVIDIA: "0"}, allocatable={GPU: "7"}),
        pod("node1", container(2), container(1, kind="requests")),
        pod("node1", container(4), phase="Succeeded"),
        pod("node1", container(4), phase="Failed"),
        pod("node2", container(4)),
        pod("node1", {"name": "no resources"}),
    )

    assert by_resource(cluster) == {GPU: (8, 7, 3, 4)}
    assert cluster.pending == ()


def test_nothing_is_free_if_pods_hold_more_than_the_healthy_devices():
    cluster = count(node("node1", {GPU: "2"}, allocatable={GPU: "1"}), pod("node1", container(2)))

    assert by_resource(cluster) == {GPU: (2, 1, 2, 0)}


@pytest.mark.parametrize("change", ["cordoned", "not ready"])
def test_nothing_is_free_on_a_node_that_takes_no_pods(change):
    closed = node("node1", {GPU: "2"})
    if change == "cordoned":
        closed["spec"]["unschedulable"] = True
    else:
        closed["status"]["conditions"][1]["status"] = "Unknown"

    cluster = count(closed, node("node2", {GPU: "2"}), pod("node1", container(1)))

    assert [one.schedulable for one in cluster.nodes] == [False, True]
    assert (by_resource(cluster, 0), by_resource(cluster, 1)) == ({GPU: (2, 2, 1, 0)}, {GPU: (2, 2, 0, 2)})


def test_an_api_server_shortens_thousands():
    cluster = count(node("node1", {"imagematrix.io/vram-gib": "2k", GPU: "1e3"}), pod("node1"))

    assert by_resource(cluster) == {"imagematrix.io/vram-gib": (2000, 2000, 0, 2000)}


def test_a_node_without_gpus_is_counted_without_resources():
    cluster = count({"kind": "Node", "metadata": {"name": "bare"}}, pod(None))

    assert [(one.name, one.counts) for one in cluster.nodes] == [("bare", ())]


@pytest.mark.parametrize(
    ("init", "main", "expected"),
    [
        ([], [1, 2], 3),
        ([4], [1, 2], 4),
        ([2, 2], [3], 3),
        ([(1, "Always")], [3], 4),
        ([(1, "Always"), 5], [3], 6),
        ([5, (1, "Always")], [3], 5),
    ],
)
def test_init_containers_count_as_a_scheduler_counts_them(init, main, expected):
    """See the KEP on sidecars: those listed before an init container run while it runs."""
    first = [
        container(one[0], restartPolicy=one[1]) if isinstance(one, tuple) else container(one) for one in init
    ]

    spec = Fields(pod("x", *map(container, main), init=first)["spec"], "spec")

    assert count_requested(spec) == {GPU: expected}


def test_classes_are_sums_over_their_nodes(cluster, hosts):
    big, small = cluster.own(hosts["genoa-h200"]), cluster.own(hosts["icelake-l40s"])
    usage = count(
        node("a", {GPU: "8"}, **big),
        node("b", {GPU: "8"}, **big),
        node("c", {GPU: "4"}, **small),
        pod("b", container(3)),
    )

    sums = {name: (number, [one.free for one in each]) for name, (number, each) in usage.classes.items()}
    assert sums == {big["imagematrix.io/class"]: (2, [13]), small["imagematrix.io/class"]: (1, [4])}


def test_pods_without_a_node_are_pending():
    usage = count(node("a", {GPU: "8"}), pod(None, container(3), phase="Pending"), pod(None, container(1)))

    (waiting,) = usage.pending
    assert (waiting.resource, waiting.pods, waiting.requested) == (GPU, 2, 4)


def test_a_list_without_pods_is_refused():
    nodes = {"kind": "NodeList", "items": [node("a", {GPU: "1"})]}

    with pytest.raises(UsageError, match=r"all\.json: no pods found"):
        count(node("a", {GPU: "1"}))
    empty = count_gpus([(nodes, "nodes.json"), ({"kind": "PodList", "items": []}, "pods.json")])
    assert by_resource(empty) == {GPU: (1, 1, 0, 1)}


def test_lists_of_an_api_server_are_read():
    """The items in the output of `kubectl get --raw /api/v1/nodes` have no kinds."""

    def bare(each):
        return {key: value for key, value in each.items() if key != "kind"}

    nodes = {"kind": "NodeList", "items": [bare(node("a", {GPU: "2"}))]}
    pods = {"kind": "PodList", "items": [bare(pod("a", container(1)))]}
    assert by_resource(count_gpus([(nodes, "nodes.json"), (pods, "pods.json")])) == {GPU: (2, 2, 1, 1)}
    with pytest.raises(UsageError, match=r"all\.json: items\[1\]: kind is missing"):
        count(pod("a"), {"metadata": {}})


def test_other_objects_are_refused():
    with pytest.raises(UsageError, match=r"all\.json: items\[1\]: kind: expected Node, found 'Service'"):
        count(pod("a"), {"kind": "Service"})
    with pytest.raises(UsageError, match="no nodes found"):
        count(pod("a"))


def test_the_command_prints_tables_and_a_document(cli, tmp_path, conforms, monkeypatch):
    closed = node("[b]", {GPU: "2"}, spec={"unschedulable": True})
    pods = {"kind": "PodList", "items": [pod("a", container(3)), pod(None, container(2))]}
    nodes = {"kind": "NodeList", "items": [node("a", {GPU: "8"}), closed, node("bare")]}
    (tmp_path / "nodes.json").write_text(json.dumps(nodes))
    (tmp_path / "pods.json").write_text(json.dumps(pods))

    shown = cli("kubernetes", "gpus", "--nodes", tmp_path / "nodes.json", "--pods", tmp_path / "pods.json")

    assert (shown.code, shown.err) == (0, "")
    lines = [line.split() for line in shown.out.splitlines()]
    assert ["a", GPU, "8", "8", "3", "5"] in lines
    assert ["[b]", "takes", "no", "pods", GPU, "2", "2", "0", "0"] in lines
    assert [GPU, "1", "2"] in lines
    assert "bare" not in shown.out
    both = json.dumps({"kind": "List", "items": [*nodes["items"], *pods["items"]]}).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(both)))
    document = conforms(json.loads(cli("kubernetes", "gpus", "--nodes", "-", "--json").out))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(pods).encode())))
    words = ("--nodes", tmp_path / "nodes.json", "--pods", "-", "--json")
    assert json.loads(cli("kubernetes", "gpus", *words).out) == document
    assert [one["name"] for one in document["nodes"]] == ["[b]", "a", "bare"]
    assert document["pending"] == [{"resource": GPU, "pods": 1, "requested": 2}]
    classes = [(one["nodes"], [each["free"] for each in one["resources"]]) for one in document["classes"]]
    assert sorted(classes) == [(1, []), (2, [5])], "a node without GPUs is of another class"


def test_a_cluster_without_gpus_has_a_message(cli, tmp_path):
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": [node("a"), pod("a")]}))

    assert cli("kubernetes", "gpus", "--nodes", tmp_path / "nodes.json") == (0, "no node offers GPUs\n", "")


def test_the_command_wants_its_lists_as_options(cli, tmp_path):
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps({"kind": "List", "items": [node("a")]}))

    assert cli("kubernetes", "gpus", path).code == 2
    assert "Missing option '--nodes'" in cli("kubernetes", "gpus", "--pods", path).err
    alone = cli("kubernetes", "gpus", "--nodes", path)
    assert (alone.code, "no pods found" in alone.err, "give --pods" in alone.err) == (2, True, True)
    cli("kubernetes", "gpus", "--nodes", "-", "--pods", "-").fails(2, "--nodes and --pods are both -")
