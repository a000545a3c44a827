"""Our policy and our webhook at an API server of Node objects, without kubelets and pods."""

import base64
import json
from contextlib import contextmanager

import yaml
from kube import Kubernetes
from machines import ROOT
from many_classes import NAME, catalog, nodes

from imagematrix.common import json_documents

PORT = 8443
POLICIES = [f"{kind}admissionpolicy{part}" for part in ("binding", "") for kind in ("mutating", "validating")]


@contextmanager
def bare_cluster(data, release):
    """Start a cluster of Node objects that no kubelet serves."""
    started = Kubernetes(data, {}, release)
    started.begin()
    started.apply(*nodes())
    yield started
    started.remove()


def save(cluster, folder):
    """Write catalog.json and the cluster's nodes.json to a folder; return it."""
    (folder / "catalog.json").write_text(json_documents.dump_json(catalog().to_json()))
    (folder / "nodes.json").write_text(cluster.kubectl("get", "nodes", "-o", "json").stdout)
    return folder


def rendered_policy(cluster, folder, unknown):
    """Return the objects that `render policy` writes."""
    files = ("--nodes", folder / "nodes.json", "--catalog", folder / "catalog.json")
    words = ("kubernetes", "render", "policy", NAME, *files, "--on-unknown", unknown)
    return list(yaml.safe_load_all(cluster.imagematrix(*words).stdout))


@contextmanager
def webhook(cluster, folder, unknown, *, runs=True):
    """Configure our webhook within the context; `runs` says whether it also runs."""
    words = ("kubernetes", "render", "install", NAME, "--program", "any", "--on-unknown", unknown)
    written = yaml.safe_load_all(cluster.imagematrix(*words).stdout)
    (made,) = (one for one in written if one["kind"] == "MutatingWebhookConfiguration")
    made["webhooks"][0]["clientConfig"] = client(cluster, PORT, "/mutate")
    if runs:
        files = ("--nodes", folder / "nodes.json", "--catalog", folder / "catalog.json")
        tls = ("--tls-cert", cluster.control.authority, "--tls-key", cluster.control.key)
        listen = ("--listen", f"127.0.0.1:{PORT}", "--on-unknown", unknown)
        program = ROOT / ".venv/bin/imagematrix"
        cluster.control.start("webhook", program, "kubernetes", "webhook", *files, *tls, *listen)
    try:
        with configuration(cluster, made):
            yield
    finally:
        if runs:
            cluster.control.stop("webhook")


@contextmanager
def configuration(cluster, made):
    """Configure a webhook within the context."""
    cluster.apply(made)
    try:
        yield
    finally:
        cluster.kubectl("delete", "mutatingwebhookconfiguration", made["metadata"]["name"])


def client(cluster, port, path):
    """Return how the API server reaches a webhook beside it."""
    authority = base64.b64encode(cluster.control.authority.read_bytes()).decode()
    return {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}


def why(cluster, given):
    """Return all that kubectl says about a pod that is not created."""
    words = ("create", "-f", "-", "--dry-run=server")
    return cluster.kubectl(*words, input=json.dumps(given), check=False).stderr
