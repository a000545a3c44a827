"""Each request by which the image of a pod or its node can change, with our policy and with our webhook.

`docs/how-to/choose-images-on-kubernetes.md` has a table of them.
"""

import json
from contextlib import contextmanager

import pytest
from admitting import POLICIES, bare_cluster, rendered_policy, save, webhook
from many_classes import HOST, NAME, POOL, pod

from imagematrix.integrations.kubernetes.admission.admission import UNPLACED
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.workloads.affinity import get_required_terms

pytestmark = pytest.mark.since("1.36")

OTHER = "reg.test/other:v1"
BIG, OLD = {POOL: "1-9.0"}, {POOL: "0-8.0"}  # pools whose nodes get one image each
EARLIER = ("earlier", "leaving")
FINALIZER = "example.com/kept"
KEEPING_NO_MORE = '{"metadata": {"finalizers": null}}'


@pytest.fixture(scope="module")
def cluster(data, release):
    """A cluster of Node objects that no kubelet serves."""
    with bare_cluster(data, release) as started:
        yield started


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    """A folder with catalog.json and the cluster's nodes.json."""
    return save(cluster, tmp_path_factory.mktemp("operations"))


@contextmanager
def policy(cluster, folder, unknown):
    """Have our policy in force within the context."""
    made = rendered_policy(cluster, folder, unknown)
    for one in made:
        if "failurePolicy" in one["spec"]:
            one["spec"]["failurePolicy"] = "Fail"  # so that no error is silent
    cluster.apply(*made)
    try:
        yield
    finally:
        cluster.kubectl("delete", ",".join(POLICIES), "--all")


@pytest.fixture(scope="module")
def judge(request, cluster, folder):
    """Have our policy or webhook decide, with two pods on a node that had the name before."""
    decides, unknown = request.param
    for name in EARLIER:
        given = pod(name, NAME, OTHER, nodeName="n5")
        given["metadata"]["finalizers"] = [FINALIZER]
        cluster.apply(given)
    with decides(cluster, folder, unknown):
        cluster.wait(lambda: image_of(cluster, BIG) not in {NAME, ""})
        yield
        for name in EARLIER:
            cluster.kubectl("delete", "pod", name, "--ignore-not-found", "--wait=false", "--force")
            cluster.kubectl("patch", "pod", name, "--type=merge", "-p", KEEPING_NO_MORE, check=False)
    cluster.wait(lambda: image_of(cluster, BIG) == NAME)


def judging(unknown):
    """Run a test with the policy, and with the webhook."""
    judges = [(policy, unknown), (webhook, unknown)]
    return pytest.mark.parametrize("judge", judges, indirect=True, ids=["policy", "webhook"])


@pytest.fixture
def create(cluster):
    """Return a function that creates a pod, deleted after the test."""
    names = []

    def call(name, *images, **spec):
        names.append(name)
        cluster.apply(pod(name, *images, **spec))
        return cluster.get("pod", name)

    yield call
    cluster.kubectl("delete", "pod", "--ignore-not-found", "--force", *names)


def image_of(cluster, pool):
    """Return the image that a pod for the nodes of a pool gets; empty if it is refused."""
    words = ("create", "-f", "-", "--dry-run=server", "-o", "jsonpath={.spec.containers[0].image}")
    given = json.dumps(pod("any", NAME, nodeSelector=pool))
    return cluster.kubectl(*words, input=given, check=False).stdout


def node_in(cluster, pool):
    """Return the name of a node of a pool."""
    (key, value), *_ = pool.items()
    return cluster.get("nodes", "-l", f"{key}={value}")["items"][0]["metadata"]["name"]


def images(cluster, name):
    """Return the images of a pod's containers, of any kind."""
    spec = cluster.get("pod", name)["spec"]
    lists = ("initContainers", "containers", "ephemeralContainers")
    return [one["image"] for some in lists for one in spec.get(some, [])]


def request(cluster, verb, path, document):
    """Send a request of any kind as the administrator; return the answer, or why it is refused."""
    words = ("--raw", f"/api/v1/namespaces/default/pods/{path}", "-f", "-")
    done = cluster.kubectl(verb, *words, input=json.dumps(document), check=False)
    return done.stdout or done.stderr


@judging("deny")
@pytest.mark.usefixtures("judge")
@pytest.mark.parametrize("pool", [BIG, OLD], ids=["big", "old"])
def test_a_changed_image_is_that_of_the_node(cluster, create, pool):
    wanted, node = image_of(cluster, pool), node_in(cluster, pool)
    init = [{"name": "init", "image": OTHER}]
    create("placed", OTHER, OTHER, nodeName=node, initContainers=init)
    cluster.kubectl("set", "image", "pod/placed", f"c0={NAME}")
    assert images(cluster, "placed") == [OTHER, wanted, OTHER]
    cluster.kubectl("set", "image", "pod/placed", f"init={NAME}")
    patch = json.dumps([{"op": "replace", "path": "/spec/containers/1/image", "value": NAME}])
    cluster.kubectl("patch", "pod", "placed", "--type=json", "-p", patch)
    assert images(cluster, "placed") == [wanted] * 3
    now = cluster.get("pod", "placed")
    now["spec"]["containers"][0]["image"] = NAME
    cluster.kubectl("replace", "-f", "-", input=json.dumps(now))
    whole = pod("placed", NAME, NAME, nodeName=node, initContainers=init)
    words = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    cluster.kubectl(*words, input=json.dumps(whole))
    assert images(cluster, "placed") == [OTHER, wanted, wanted]
    assert "affinity" not in cluster.get("pod", "placed")["spec"]


@judging("deny")
@pytest.mark.usefixtures("judge")
def test_a_changed_image_is_refused_without_a_node(cluster, create):
    create("waiting", OTHER, nodeSelector=BIG)
    done = cluster.kubectl("set", "image", "pod/waiting", f"c0={NAME}", check=False)
    assert done.returncode != 0
    assert UNPLACED in done.stderr
    create("foreign", OTHER, nodeName="unknown")
    assert UNPLACED in cluster.kubectl("set", "image", "pod/foreign", f"c0={NAME}", check=False).stderr
    for name in ("waiting", "foreign"):
        assert images(cluster, name) == [OTHER]


@judging("deny")
@pytest.mark.usefixtures("judge")
def test_what_had_the_name_before_can_change_in_all_else(cluster):
    cluster.kubectl("label", "--overwrite", "pod", "earlier", "a=b")
    cluster.kubectl("annotate", "--overwrite", "pod", "earlier", "a=b")
    tolerations = [*cluster.get("pod", "earlier")["spec"]["tolerations"], {"key": "a", "operator": "Exists"}]
    patch = json.dumps({"spec": {"tolerations": tolerations}})
    cluster.kubectl("patch", "pod", "earlier", "--type=merge", "-p", patch)
    cluster.kubectl("debug", "earlier", f"--image={OTHER}", "--container=debug")
    assert images(cluster, "earlier") == [NAME, OTHER, OTHER]
    cluster.kubectl("set", "image", "pod/earlier", f"c1={NAME}")
    assert images(cluster, "earlier") == [NAME, image_of(cluster, {HOST: "n5"}), OTHER]
    cluster.kubectl("delete", "pod", "leaving", "--wait=false", "--force")
    cluster.kubectl("patch", "pod", "leaving", "--type=merge", "-p", KEEPING_NO_MORE)
    assert "not found" in cluster.kubectl("get", "pod", "leaving", check=False).stderr


@judging("deny")
@pytest.mark.usefixtures("judge")
def test_an_ephemeral_container_gets_the_image_of_the_node(cluster, create):
    create("debugged", OTHER, nodeName=node_in(cluster, BIG))
    cluster.kubectl("debug", "debugged", f"--image={NAME}", "--container=debug")
    assert images(cluster, "debugged") == [OTHER, image_of(cluster, BIG)]
    create("waiting", OTHER)
    assert UNPLACED in cluster.kubectl("debug", "waiting", f"--image={NAME}", check=False).stderr


@judging("deny")
@pytest.mark.usefixtures("judge")
def test_a_gated_pod_keeps_image_and_classes(cluster, create):
    """Its node selector and affinity can change, but only so that fewer nodes are left."""
    made = create("gated", NAME, nodeSelector=BIG, schedulingGates=[{"name": "a.b/c"}])
    (term,) = get_required_terms(made["spec"])
    assert CLASS in [one["key"] for one in term["matchExpressions"]]
    wider = {"spec": {"affinity": {"nodeAffinity": None}}}
    words = ("patch", "pod", "gated", "--type=merge", "-p")
    assert cluster.kubectl(*words, json.dumps(wider), check=False).returncode != 0
    narrower = {"spec": {"nodeSelector": {**BIG, HOST: node_in(cluster, BIG)}, "schedulingGates": None}}
    cluster.kubectl(*words, json.dumps(narrower))
    now = cluster.get("pod", "gated")["spec"]
    assert "schedulingGates" not in now
    assert now["containers"] == made["spec"]["containers"]
    assert get_required_terms(now) == [term]


@judging("deny")
@pytest.mark.usefixtures("judge")
def test_other_subresources_change_no_image(cluster, create):
    create("fixed", OTHER, nodeName=node_in(cluster, BIG))
    changed = cluster.get("pod", "fixed")
    changed["spec"]["containers"][0]["image"] = NAME
    for subresource in ("status", "resize"):
        request(cluster, "replace", f"fixed/{subresource}", changed)
        assert images(cluster, "fixed") == [OTHER], subresource


@judging("deny")
@pytest.mark.usefixtures("judge")
def test_a_binding_changes_neither_image_nor_affinity(cluster, create):
    """So the kubelet of a node of another class refuses the pod: it checks the affinity again."""
    made = create("bound", NAME, nodeSelector=BIG)
    target = {"apiVersion": "v1", "kind": "Node", "name": node_in(cluster, OLD)}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "bound"}, "target": target}
    request(cluster, "create", "bound/binding", binding)
    now = cluster.get("pod", "bound")["spec"]
    assert now["nodeName"] == target["name"]
    assert (now["containers"], now["affinity"]) == (made["spec"]["containers"], made["spec"]["affinity"])


@judging("deny")
@pytest.mark.usefixtures("judge")
def test_an_image_that_is_a_volume_is_left_alone(create):
    volumes = [{"name": "files", "image": {"reference": NAME}}]
    assert create("mounting", OTHER, volumes=volumes)["spec"]["volumes"][0]["image"]["reference"] == NAME


@judging("deny")
@pytest.mark.usefixtures("judge")
def test_pods_of_a_changed_workload_are_new(cluster):
    labels = {"app": "deployed"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": OTHER}]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": spec})
    try:
        cluster.kubectl("set", "image", "deployment/d", f"main={NAME}")
        failed = ("get", "replicasets", "-l", "app=deployed", "-o", "jsonpath={..conditions[*].message}")
        cluster.wait(lambda: "need different images" in cluster.kubectl(*failed).stdout)
        selecting = {"spec": {"template": {"spec": {"nodeSelector": BIG}}}}
        cluster.kubectl("patch", "deployment", "d", "-p", json.dumps(selecting))
        pods = ("pods", "-l", "app=deployed")
        wanted = image_of(cluster, BIG)
        cluster.wait(
            lambda: wanted in [one["spec"]["containers"][0]["image"] for one in cluster.get(*pods)["items"]]
        )
    finally:
        cluster.kubectl("delete", "deployment/d")


@judging("default")
@pytest.mark.usefixtures("judge")
def test_without_deny_only_new_uses_of_the_name_are_decided(cluster, create):
    create("waiting", OTHER, nodeSelector=BIG)
    create("placed", OTHER, nodeName=node_in(cluster, BIG))
    for name in ("waiting", "placed"):
        cluster.kubectl("set", "image", f"pod/{name}", f"c0={NAME}")
    assert images(cluster, "waiting") == [NAME]
    assert images(cluster, "placed") == [image_of(cluster, BIG)]
    cluster.kubectl("label", "pod", "earlier", "a=b")
    assert images(cluster, "earlier") == [NAME, OTHER]
