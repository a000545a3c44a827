"""What an administrator has to find: every object of a cluster, and pods that an upgrade must not disturb."""

import json

VARIANTS = {"n1": "sm_90 550.163.01", "n2": "sm_86 535.261.03"}  # what the images for the nodes report
CLASS, HOST = "imagematrix.io/class", "kubernetes.io/hostname"
# Objects that come and go by themselves: the record of what happened, and heartbeats.
FLEETING = ("events", "events.events.k8s.io", "componentstatuses", "leases.coordination.k8s.io")
LINE = '{range .items[*]}{.kind} {.metadata.namespace} {.metadata.name}{"\\n"}{end}'
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def inventory(cluster):
    """Return every object of a cluster, and the Leases outside of the nodes' own namespace."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split()
    asked = ",".join(kind for kind in kinds if kind not in FLEETING)
    leases = cluster.kubectl("get", "leases", "-A", "-o", f"jsonpath={LINE}").stdout.splitlines()
    found = cluster.kubectl("get", asked, "-A", "-o", f"jsonpath={LINE}").stdout.splitlines()
    return {*found, *(line for line in leases if " kube-node-lease " not in line)}


def deciding(cluster, image):
    """Return specs of pods that use an image and say where they run, by names that begin with the node."""
    label = cluster.get("node", "n1")["metadata"]["labels"][CLASS]
    containers = [{"name": "main", "image": image}]
    term = {"matchExpressions": [{"key": HOST, "operator": "In", "values": ["n1"]}]}
    required = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}
    return {
        "n1-by-class": {"containers": containers, "nodeSelector": {CLASS: label}},
        "n1-by-affinity": {"containers": containers, "affinity": required},
        "n2-by-name": {"containers": containers, "nodeSelector": {HOST: "n2"}},
    }


def assert_undisturbed(stream, digests, kinds, least):
    """Check the pods of a stream, and delete them: none was refused, and each has its node's image."""
    images, count = stream.images()
    stream.delete()
    assert stream.refusals == []
    assert count == stream.created >= least
    assert {kind: {one.partition("@")[2] for one in found} for kind, found in images.items()} == {
        kind: {digests[kind[:2]]} for kind in kinds
    }


def tried(cluster, image, node):
    """Return the image of a pod for a node that the API server would create; empty if it is refused."""
    selecting = json.dumps({"spec": {"nodeSelector": {HOST: node}}})
    words = ("run", "tried", f"--image={image}", f"--overrides={selecting}", "--dry-run=server")
    return cluster.kubectl(*words, "-o", "jsonpath={.spec.containers[0].image}", check=False).stdout
