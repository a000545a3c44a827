"""Measure webhook and policy in a Kubernetes with 5,000 nodes in 60 classes, which kwok keeps ready."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import time
from statistics import median, quantiles
from typing import TYPE_CHECKING

import yaml
from measure import KIB, Row, duration, processes
from samples import IMAGEMATRIX, ROOT

sys.path.append(str(ROOT / "tests" / "doubles"))  # behind this folder
from kube import Kubernetes  # the cluster of the tests
from many_classes import COMPUTES, DRIVERS, NAME, POOL, catalog, node, nodes, pod
from modules import built
from processes import new_folder, remove_folder
from releases import RELEASES

from imagematrix.common.json_documents import dump_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from measure import Extent, Pace

    Object = dict[str, Any]

NODES, CLASSES = 5_000, 60
GPUS = 8  # of each node; a pod on each node requests half of them
LIST_BAR = 5.0  # seconds for a command that reads the list of nodes (see measure.REFERENCE)
LIST_ROUNDS = 5
WARM, CREATIONS = 50, 1_000
BATCH = 500  # nodes for one kubectl
PORT = 8443
ROUNDS = 5  # new classes
NEW_MARCH, NEW_POOL = "znver4", "new"
DECIDED = "0-8.0"  # a pool whose nodes get an image
NOTHING_FITS = '"$@"; code=$?; [ $code = 0 ] || [ $code = 3 ]'  # some classes get no image
STAGES = ("fast/node-initialize.yaml", "heartbeat-with-lease/node-heartbeat-with-lease.yaml")
CREATE = ROOT / "ci/bench/programs/create_pods.py"
OTHER = "reg.test/other:v1"
POLICIES = ",".join(
    f"{kind}admissionpolicy{part}" for part in ("binding", "") for kind in ("mutating", "validating")
)


def rows(folder: Path, pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the rows: creation of pods with webhook or policy, their memory, a new class, and commands."""
    count = max(extent.part(NODES), CLASSES)
    data = new_folder()
    release = RELEASES[0]
    release.require()
    stages = built("kwok")
    cluster = Kubernetes(data, {}, release)
    try:
        cluster.begin()
        yield _filled(cluster, stages, count)
        (folder / "catalog.json").write_text(dump_json(catalog().to_json()))
        listed = folder / "nodes.json"
        listed.write_text(cluster.kubectl("get", "nodes", "-o", "json").stdout)
        yield from _commands(folder, listed, pace, count, extent)
        yield _created(cluster, "neither", {"other": False}, extent)
        yield from _with_policy(cluster, folder, extent)
        yield from _with_webhook(cluster, folder, count, extent)
    finally:
        cluster.remove()
        remove_folder(data)


def _filled(cluster: Kubernetes, kwok: Path, count: int) -> Row:
    """Create the nodes, and wait until kwok has made all of them ready."""
    start = time.monotonic()
    config = [word for name in STAGES for word in ("--config", kwok / "stage/node" / name)]
    access = cluster.control.configuration("admin")
    lease = ("--node-lease-duration-seconds", "120")  # renewed every 30 s
    cluster.control.start(
        "kwok", kwok / "kwok", "--kubeconfig", access, "--manage-all-nodes", *lease, *config
    )
    made = [_offering(each) for each in nodes(count)]
    for number in range(0, count, BATCH):
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": made[number : number + BATCH]})
        cluster.kubectl("create", "-f", "-", "-o", "name", input=given)
    ready = '{range .items[*].status.conditions[?(@.type=="Ready")]}{.status} {end}'

    def all_ready() -> bool:
        time.sleep(5)  # a list of so many nodes takes the API server's time
        told = str(cluster.kubectl("get", "nodes", "-o", f"jsonpath={ready}").stdout)
        return told.split() == ["True"] * count

    cluster.wait(all_ready, 1200)
    return Row(
        what=f"{count:,} nodes in {CLASSES} classes are created and ready",
        ours=duration(time.monotonic() - start),
    )


def _offering(made: Object) -> Object:
    capacity = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(GPUS)}
    return {**made, "status": {"capacity": capacity, "allocatable": capacity}}


def _commands(folder: Path, listed: Path, pace: Pace, count: int, extent: Extent) -> Iterator[Row]:
    """Yield the rows of the commands that read a saved list of the nodes."""
    pods = folder / "pods.json"
    requests = {"resources": {"requests": {"nvidia.com/gpu": str(GPUS // 2)}}}
    running = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"p{number}", "namespace": "default"},
            "spec": {"nodeName": f"n{number}", "containers": [{"name": "main", "image": OTHER, **requests}]},
            "status": {"phase": "Running"},
        }
        for number in range(count)
    ]
    pods.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": running}))
    base = ("sh", "-c", NOTHING_FITS, "sh", IMAGEMATRIX, "kubernetes")
    commands = {
        "classes": (*base, "classes", "--nodes", listed, "--catalog", folder / "catalog.json"),
        "gpus": (*base, "gpus", "--nodes", listed, "--pods", pods),
    }
    for name, cost in processes(commands, extent.times(LIST_ROUNDS)).items():
        yield Row(
            what=f"`kubernetes {name}` of a saved list of {count:,} nodes",
            ours=duration(cost.seconds),
            ratio=f"{cost.seconds / pace.seconds:.0f} x pass",
            instead=f"memory: {cost.memory:.0f} MiB",
            bar=pace.told(LIST_BAR),
            met=cost.seconds <= pace.limit(LIST_BAR),
        )


def _with_policy(cluster: Kubernetes, folder: Path, extent: Extent) -> Iterator[Row]:
    """Yield the rows with the admission policy in force."""
    before = _memory(cluster, "kube-apiserver")
    taken, policies = _rendered(cluster, folder)
    start = time.monotonic()
    cluster.apply(*policies)
    _served(cluster, DECIDED)
    served = time.monotonic() - start
    yield _created(cluster, "the policy", {"ours": True, "other": False}, extent)
    after = _memory(cluster, "kube-apiserver")
    yield Row(
        what="memory of the API server with the policy",
        ours=f"{after:.0f} MiB",
        instead=f"before: {before:.0f} MiB",
    )
    yield Row(
        what="until the policy for new classes is served: written, applied, in force",
        ours=duration(taken + served),
        instead=f"`kubernetes render policy`: {duration(taken)}",
    )
    cluster.kubectl("delete", POLICIES, "--all")


def _rendered(cluster: Kubernetes, folder: Path) -> tuple[float, list[Object]]:
    """Return the policies for the nodes, and how long it takes to list the nodes and write them."""
    start = time.monotonic()
    listed = folder / "now.json"
    listed.write_text(cluster.kubectl("get", "nodes", "-o", "json").stdout)
    words = ("kubernetes", "render", "policy", NAME, "--nodes", listed, "--catalog", folder / "catalog.json")
    written = cluster.imagematrix(*words, "--on-unknown", "deny").stdout
    return time.monotonic() - start, list(yaml.safe_load_all(written))


def _with_webhook(cluster: Kubernetes, folder: Path, count: int, extent: Extent) -> Iterator[Row]:
    """Yield the rows with the webhook, which follows the nodes."""
    with _webhook(cluster, folder):
        yield _created(cluster, "the webhook", {"ours": True, "other": False}, extent)
        taken = []
        rounds = extent.times(ROUNDS)
        for number in range(rounds):
            pool = f"{NEW_POOL}-{number}"
            made = _offering(node(count + number, pool, DRIVERS[0], COMPUTES[number], NEW_MARCH))
            taken.append(_served(cluster, pool, made))
        yield Row(
            what="until the webhook serves the class of a new node, from its creation",
            ours=duration(median(taken)),
            instead=f"of {rounds}, at most {duration(max(taken))}",
        )
        peak = _memory(cluster, "imagematrix", "VmHWM")
        yield Row(
            what=f"memory of the webhook with {count:,} nodes",
            ours=f"{_memory(cluster, 'imagematrix'):.0f} MiB",
            instead=f"at most: {peak:.0f} MiB",
        )


@contextlib.contextmanager
def _webhook(cluster: Kubernetes, folder: Path) -> Iterator[None]:
    """Run the webhook on the machine of the control plane, as in a pod, and let the API server ask it."""
    words = ("kubernetes", "render", "install", NAME, "--program", "any", "--on-unknown", "deny")
    made = list(yaml.safe_load_all(cluster.imagematrix(*words).stdout))
    hook = next(one for one in made if one["kind"] == "MutatingWebhookConfiguration")
    bundle = base64.b64encode(cluster.control.authority.read_bytes()).decode()
    client = {"url": f"https://127.0.0.1:{PORT}/mutate", "caBundle": bundle}
    hook["webhooks"][0]["clientConfig"] = client
    ours = [
        one
        for one in made
        if one["kind"] in {"Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
    ]
    cluster.apply(*ours)
    control = cluster.control
    token = cluster.kubectl(
        "create", "token", "-n", "imagematrix", "imagematrix-webhook", "--duration", "2h"
    ).stdout
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    (folder / "token").write_text(token)
    control.run("mkdir", "-p", account)
    for name, path in (("token", folder / "token"), ("ca.crt", control.authority)):
        control.run("cp", path, f"{account}/{name}")
    control.run("sh", "-c", f"printf imagematrix > {account}/namespace")
    files = ("--tls-cert", control.authority, "--tls-key", control.key, "--catalog", folder / "catalog.json")
    inside = ("env", f"KUBERNETES_SERVICE_HOST={control.address}", "KUBERNETES_SERVICE_PORT=443")
    listen = ("--listen", f"127.0.0.1:{PORT}", "--on-unknown", "deny", "--nodes", "cluster")
    control.start("webhook", *inside, IMAGEMATRIX, "kubernetes", "webhook", *files, *listen)
    try:
        cluster.wait(lambda: "policies made" in control.log("webhook"), 300)
        cluster.apply(hook)
        _served(cluster, DECIDED)
        yield
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "mutatingwebhookconfiguration", "imagematrix-webhook")
        control.stop("webhook")
        cluster.uninstall()


def _created(cluster: Kubernetes, beside: str, changed: Mapping[str, bool], extent: Extent) -> Row:
    """Return the row of pods that are created beside the policy, the webhook or neither.

    `changed` says which pods they change.
    """
    images = {"ours": NAME, "other": OTHER}
    creations = extent.part(CREATIONS)
    pods = {name: pod(name, images[name], nodeSelector={POOL: DECIDED}) for name in changed}
    asked = {"pods": pods, "rounds": creations, "warm": WARM, "changed": changed}
    taken = json.loads(_asked(cluster, asked))
    first, *others = (_percentiles(taken[name]) for name in changed)
    instead = f"a pod that it does not touch: {others[0]}" if others else ""
    return Row(
        what=f"creation of a pod with {beside}, p50 and p99 of {creations:,}", ours=first, instead=instead
    )


def _percentiles(taken: list[float]) -> str:
    return f"{duration(median(taken))}, {duration(quantiles(taken, n=100)[98])}"


def _served(cluster: Kubernetes, pool: str, new: Object | None = None) -> float:
    """Create a node, if any, and return the seconds until a pod for a pool of nodes gets an image."""
    pods = {"ours": pod("ours", NAME, nodeSelector={POOL: pool})}
    return float(_asked(cluster, {"pods": pods, "node": new}))


def _asked(cluster: Kubernetes, asked: Object) -> str:
    """Run the client on the machine of the control plane; return its output."""
    control = cluster.control
    where = {
        "address": control.address,
        "authority": str(control.authority),
        "token": control.tokens["admin"],
    }
    done = control.run(sys.executable, CREATE, input=json.dumps({**where, **asked}), check=False)
    if done.returncode:
        raise SystemExit(f"pods were not created as expected: {done.stderr[-2000:]}")
    return str(done.stdout)


def _memory(cluster: Kubernetes, program: str, field: str = "VmRSS") -> float:
    """Return the memory of a program on the machine of the control plane, in MiB."""
    process = cluster.control.run("pgrep", "-o", "-x", program).stdout.strip()
    lines = cluster.control.run("cat", f"/proc/{process}/status").stdout.splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values[field].split()[0]) / KIB
