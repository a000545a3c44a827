"""`render install` on a cluster without labels: applied, upgraded while pods are created, and removed.

Node Feature Discovery sets the labels from the files of the installed DaemonSet, so nothing is done by hand.
"""

import base64
import datetime as dt
import re
from dataclasses import dataclass

import pytest
import yaml
from administering import VARIANTS, assert_undisturbed, deciding, inventory, tried
from pod_stream import PodStream

from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.install import NAME, make_service_names

pytestmark = [pytest.mark.since("1.36"), pytest.mark.timeout(1800), pytest.mark.usefixtures("discovery")]

CLASS, HOST = "imagematrix.io/class", "kubernetes.io/hostname"
SPACE = "imagematrix"
FILE = "/etc/kubernetes/node-feature-discovery/features.d/imagematrix"
PODS = 1_000
LEFT = dt.timedelta(days=30)  # of the first certificate, so that an upgrade replaces it
REPLACED, YEAR = dt.timedelta(days=60), dt.timedelta(days=365)
CERTIFICATES = re.compile(b"-----BEGIN CERTIFICATE-----")


@dataclass
class Installed:
    """What was there `before`, and the last manifests that were applied."""

    before: set[str]
    written: str = ""


@pytest.fixture(scope="module")
def installed(cluster, program, training, newer, tmp_path_factory):
    """The installation with a certificate that ends in 30 days, in a cluster whose nodes have no labels."""
    folder = tmp_path_factory.mktemp("installed")
    made = certificates.make_certificate(make_service_names(SPACE), dt.datetime.now(dt.UTC) - (YEAR - LEFT))
    files = [folder / name for name in ("tls.crt", "tls.key", "ca.crt")]
    for path, pem in zip(files, (made.chain, made.key, made.authorities), strict=True):
        path.write_bytes(pem)
    given = Installed(inventory(cluster))
    options = ("--program", program, "--on-unknown", "deny", "--tls", *files)
    apply(cluster, given, training.name, newer.name, *options)
    rolled_out(cluster)
    for node, variant in VARIANTS.items():
        digest = training.digests[variant]
        cluster.wait(
            lambda node=node, digest=digest: tried(cluster, training.name, node).endswith(digest), 300
        )
    yield given
    cluster.uninstall()


def apply(cluster, installed, *words):
    """Write the manifests, and apply them; return what the command says besides."""
    done = cluster.imagematrix("kubernetes", "render", "install", *words)
    installed.written = done.stdout
    cluster.kubectl("apply", "-f", "-", input=installed.written)
    return done.stderr


def rolled_out(cluster):
    """Wait until all replicas are those of the manifests."""
    for workload in (f"deployment/{NAME}", "daemonset/imagematrix-labels"):
        cluster.kubectl("rollout", "status", "-n", SPACE, workload, "--timeout=600s")


def replicas(cluster):
    """Return the names of the webhook's pods that are not ending, with their images."""
    pods = cluster.get("pods", "-n", SPACE, "-l", f"app.kubernetes.io/name={NAME}")["items"]
    return {
        pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    }


def tls(installed):
    """Return the certificate of the manifests, with the authorities that the API server trusts."""
    found = {one["kind"]: one for one in yaml.safe_load_all(installed.written)}
    (hook,) = found["MutatingWebhookConfiguration"]["webhooks"]
    keys = found["Secret"]["data"]
    texts = keys["tls.crt"], keys["tls.key"], hook["clientConfig"]["caBundle"]
    chain, key, authorities = map(base64.b64decode, texts)
    return certificates.Tls(chain=chain, key=key, authorities=authorities)


@pytest.mark.parametrize("unknown", ["deny", "default"])
def test_an_upgrade_has_no_gap(
    cluster, installed, training, newer, program, newer_program, unknown, tmp_path
):
    """With `deny`, a gap would refuse pods; with `default`, it would leave them unchanged.

    The first upgrade replaces the certificate, which ends soon, and the second one keeps it.
    """
    before, certificate = replicas(cluster), tls(installed)
    ends = certificates.get_end_of_trust(certificate)
    assert ends is not None
    soon = ends - dt.datetime.now(dt.UTC) < REPLACED
    image = newer_program if program in before.values() else program
    previous = tmp_path / "install.yaml"
    previous.write_text(installed.written)
    options = ("--program", image, "--on-unknown", unknown, "--previous", previous)
    with PodStream(cluster, f"during-{unknown}", deciding(cluster, training.name), PODS) as stream:
        begun = stream.created
        apply(cluster, installed, training.name, newer.name, *options)
        rolled_out(cluster)
        cluster.wait(lambda: len(replicas(cluster)) == 2)
        assert stream.created > begun
    digests = {node: training.digests[variant] for node, variant in VARIANTS.items()}
    assert_undisturbed(stream, digests, deciding(cluster, training.name), PODS)
    after = replicas(cluster)
    assert set(after.values()) == {image}
    assert not set(after) & set(before)
    assert (tls(installed).chain != certificate.chain) == soon
    assert len(CERTIFICATES.findall(tls(installed).authorities)) == 2


def events(cluster, pod):
    """Return our Events about a pod."""
    found = cluster.get("events", "--field-selector", f"involvedObject.name={pod}")["items"]
    return [one for one in found if one["source"].get("component") == NAME]


def leader(cluster):
    """Return the identity of the replica that holds the Lease."""
    return cluster.get("lease", "-n", SPACE, NAME)["spec"].get("holderIdentity", "")


def test_each_cause_gets_one_event_from_the_leader(
    cluster, create, installed, training, newer, program, tmp_path
):
    previous = tmp_path / "install.yaml"
    previous.write_text(installed.written)
    options = ("--program", program, "--on-unknown", "default", "--previous", previous)
    apply(cluster, installed, training.name, newer.name, *options)
    rolled_out(cluster)
    repository = training.name.rpartition(":")[0]
    outdated = f"{repository}@{training.digests['sm_86 550.163.01']}"
    nowhere = {"nowhere": "x"}  # no node has such a label, so the pods stay pending
    # What other pods have to run beside is no matter of images, so that this one stays pending and undecided.
    beside = {"labelSelector": {"matchLabels": nowhere}, "topologyKey": HOST}
    alone = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}}
    label = cluster.get("node", "n1")["metadata"]["labels"][CLASS]
    pods: dict[str, tuple[str, dict[str, object]]] = {
        "NoImageFits": (newer.name, {"nodeSelector": {HOST: "n1", **nowhere}}),
        "ImageUndecided": (training.name, {"affinity": alone}),
        "NoClassMatches": (training.name, {"nodeSelector": {CLASS: "none"}}),
        "ImageOutdated": (outdated, {"nodeSelector": nowhere}),
        "NoNodeFits": (training.name, {"nodeSelector": {CLASS: label, **nowhere}}),
    }
    for cause, (image, spec) in pods.items():
        assert create(cause.lower(), image, **spec).returncode == 0
    for cause in pods:
        cluster.wait(lambda cause=cause: [one["reason"] for one in events(cluster, cause.lower())] == [cause])
    told = {cause: events(cluster, cause.lower())[0] for cause in pods}
    first = leader(cluster)
    assert {one["reportingInstance"] for one in told.values()} == {first}
    assert "nowhere" in told["NoNodeFits"]["message"]
    # Another replica leads once the first is gone, and repeats nothing.
    cluster.kubectl("delete", "pod", "-n", SPACE, first.partition("_")[0], "--grace-period=0", "--force")
    cluster.wait(lambda: leader(cluster) not in {"", first})
    create("later", training.name, nodeSelector={CLASS: "none"})
    cluster.wait(lambda: events(cluster, "later"))
    assert events(cluster, "later")[0]["reportingInstance"] == leader(cluster)
    for cause in pods:
        assert [one["metadata"]["uid"] for one in events(cluster, cause.lower())] == [
            told[cause]["metadata"]["uid"]
        ]


def test_a_pod_from_before_the_webhook_gets_an_event(cluster, create, installed, training):
    cluster.kubectl("delete", "mutatingwebhookconfiguration", NAME)
    cluster.wait(lambda: tried(cluster, training.name, "n1") == training.name)
    create("early", training.name, nodeSelector={HOST: "n1", "nowhere": "x"})
    cluster.kubectl("apply", "-f", "-", input=installed.written)
    cluster.wait(lambda: [one["reason"] for one in events(cluster, "early")] == ["NotAdmitted"])
    assert training.digests[VARIANTS["n1"]] in events(cluster, "early")[0]["message"]


def test_it_is_removed_without_a_trace(cluster, installed):
    """By the commands of the page."""
    assert len(inventory(cluster) - installed.before) > 10
    cluster.kubectl("delete", "mutatingwebhookconfiguration", NAME)
    cluster.kubectl("delete", "--ignore-not-found", "-f", "-", input=installed.written)
    cluster.wait(lambda: inventory(cluster) == installed.before)
    for node in cluster.nodes:
        node.run("rm", FILE)
    cluster.wait(lambda: not any(CLASS in one["metadata"]["labels"] for one in cluster.get("nodes")["items"]))
