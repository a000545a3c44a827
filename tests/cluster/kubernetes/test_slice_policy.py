"""The DRA driver's account at an API server: it may only change the ResourceSlices of its own node."""

import json

import pytest
import yaml
from admitting import bare_cluster
from many_classes import NAME, pod

pytestmark = pytest.mark.since("1.34")

SPACE, ACCOUNT = "imagematrix", "imagematrix-dra-driver"
OURS, OTHER = "gpu.imagematrix.io", "gpu.example.com"
NEEDED = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding")
REFUSED = f"may only change ResourceSlices of {OURS} on the node of its pod"


@pytest.fixture(scope="module")
def cluster(data, release):
    """A cluster of Node objects with the driver's account, its role and its policy."""
    with bare_cluster(data, release) as started:
        words = ("kubernetes", "render", "install", NAME, "--program", "any", "--dra-driver")
        made = list(yaml.safe_load_all(started.imagematrix(*words).stdout))
        kinds = (*NEEDED, "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
        started.apply(*(one for one in made if one["kind"] in kinds))
        driver = pod("driver", "any", nodeName="n1", serviceAccountName=ACCOUNT)
        driver["metadata"]["namespace"] = SPACE
        started.apply(driver)
        started.apply(resource_slice("strange", OTHER, "n1"), resource_slice("far", OURS, "n2"))
        yield started


def resource_slice(name, driver, node, generation=1):
    """Return a ResourceSlice with one device."""
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": [{"name": "gpu-0"}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": spec,
    }


@pytest.fixture
def act(cluster):
    """Return a function that calls kubectl as the driver, with the token of its pod or of no pod."""

    def call(*words, bound=True, given=None):
        of = ("--bound-object-kind=Pod", "--bound-object-name=driver") if bound else ()
        token = cluster.kubectl("create", "token", "-n", SPACE, ACCOUNT, *of).stdout.strip()
        written = json.dumps(given) if given else ""
        return cluster.kubectl(f"--token={token}", *words, input=written, check=False)

    return call


def test_the_driver_changes_its_own_slices(cluster, act):
    own = resource_slice("own", OURS, "n1")
    cluster.wait(lambda: act("create", "-f", "-", given=own).returncode == 0)
    newer = act("replace", "-f", "-", given=resource_slice("own", OURS, "n1", generation=2))
    assert newer.returncode == 0, newer.stderr
    gone = act("delete", "resourceslice", "own")
    assert gone.returncode == 0, gone.stderr


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("create", "-f", "-"), resource_slice("new", OURS, "n2")),
        (("create", "-f", "-"), resource_slice("new", OTHER, "n1")),
        (("replace", "-f", "-"), resource_slice("far", OURS, "n2", generation=2)),
        (("replace", "-f", "-"), resource_slice("strange", OTHER, "n1", generation=2)),
        (("delete", "resourceslice", "far"), None),
        (("delete", "resourceslice", "strange"), None),
    ],
)
def test_the_driver_changes_no_slices_of_others(cluster, act, words, given):
    cluster.wait(lambda: REFUSED in act("delete", "resourceslice", "far").stderr)
    refused = act(*words, given=given)
    assert refused.returncode != 0
    assert REFUSED in refused.stderr
    names = [one["metadata"]["name"] for one in cluster.get("resourceslices")["items"]]
    assert sorted(names) == ["far", "strange"]


def test_without_the_node_of_a_pod_it_changes_none(act):
    given = resource_slice("own", OURS, "n1")
    assert REFUSED in act("create", "-f", "-", bound=False, given=given).stderr


def test_others_are_not_asked(cluster):
    cluster.apply(resource_slice("mine", OTHER, "n3"))
    cluster.kubectl("delete", "resourceslice", "mine")
