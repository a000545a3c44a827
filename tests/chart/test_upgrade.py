"""What an upgrade of a release does with its certificate, which Helm looks up at an API server."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.install import make_service_names

SPACE = "space"
ANNOTATION = "imagematrix.io/renew-after"
VALUES = {"images": ["reg.example.com/ml/t:v1"], "program": "reg.example.com/imagematrix:1"}
KINDS = {  # by group and version, those of the chart
    "v1": ("Secret", "Service", "ServiceAccount"),
    "admissionregistration.k8s.io/v1": ("MutatingWebhookConfiguration",),
    "apps/v1": ("DaemonSet", "Deployment"),
    "coordination.k8s.io/v1": ("Lease",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
}
WHOLE = ("ClusterRole", "ClusterRoleBinding", "MutatingWebhookConfiguration")  # in no namespace


def resources(version):
    """Return the list of resources of a group's version."""
    listed = [
        {"name": f"{kind.lower()}s", "kind": kind, "namespaced": kind not in WHOLE, "verbs": ["get"]}
        for kind in KINDS[version]
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


def group(version):
    """Return a group with one version."""
    only = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [only], "preferredVersion": only}


class Api(ThreadingHTTPServer):
    """As much of an API server as Helm asks for before it renders a chart: one Secret, or none."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.secret = None

    def answer(self, path):
        return {
            "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.2"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [group(each) for each in KINDS if "/" in each],
            },
            "/api/v1": resources("v1"),
            **{f"/apis/{version}": resources(version) for version in KINDS if "/" in version},
            f"/api/v1/namespaces/{SPACE}/secrets/imagematrix-webhook": self.secret,
        }.get(path)


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self):
        found = self.server.answer(self.path.partition("?")[0])
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "NotFound",
            "code": 404,
        }
        body = json.dumps(found or status).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def api():
    with Api() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def render(helm, chart, api, tmp_path):
    """Return a function that renders the chart as an upgrade, and returns its Secret and the authorities."""
    values = tmp_path / "values.yaml"
    words = (
        "template",
        "release",
        chart,
        "--namespace",
        SPACE,
        "-f",
        values,
        "--is-upgrade",
    )
    where = (
        "--kube-version",
        "1.37.2",
        "--dry-run=server",
        "--disable-openapi-validation",
        "--kube-apiserver",
        f"http://127.0.0.1:{api.server_port}",
    )

    def call(**more):
        values.write_text(json.dumps(VALUES | more))
        found = {one["kind"]: one for one in yaml.safe_load_all(helm(*words, *where).stdout)}
        (hook,) = found["MutatingWebhookConfiguration"]["webhooks"]
        return found["Secret"], base64.b64decode(hook["clientConfig"]["caBundle"])

    return call


def test_an_upgrade_keeps_the_certificate(render, api):
    api.secret, bundle = render()
    assert render() == (api.secret, bundle)


def test_a_certificate_near_its_end_is_replaced_and_both_are_trusted(render, api):
    old, bundle = render()
    old["metadata"]["annotations"][ANNOTATION] = str(int(time.time()) - 1)
    api.secret = old
    new, both = render()
    assert new["data"]["tls.crt"] != old["data"]["tls.crt"]
    assert both.endswith(bundle)
    assert both != bundle
    for secret in (old, new):
        data = {key: base64.b64decode(text) for key, text in secret["data"].items()}
        made = certificates.Tls(chain=data["tls.crt"], key=data["tls.key"], authorities=both)
        certificates.require_valid_certificate(made, ("crt", "key", "ca"), make_service_names(SPACE)[0])
        assert certificates.get_end_of_trust(made) is not None
    api.secret = new
    assert render() == (new, both)
    new["metadata"]["annotations"][ANNOTATION] = str(int(time.time()) - 1)
    _, later = render()
    assert base64.b64decode(new["data"]["ca.crt"]) in later
    assert bundle not in later


def test_the_certificate_of_manifests_is_replaced_and_both_are_trusted(render, api):
    """Its end is not known to Helm."""
    given = certificates.make_certificate(make_service_names(SPACE))
    keys = {"tls.crt": given.chain, "tls.key": given.key, "ca.crt": given.authorities}
    data = {key: base64.b64encode(text).decode() for key, text in keys.items()}
    api.secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "imagematrix-webhook", "namespace": SPACE},
        "data": data,
    }
    new, both = render()
    assert new["data"]["tls.crt"] != data["tls.crt"]
    assert both.endswith(given.authorities)


def test_a_given_certificate_replaces_one_that_stays_trusted(render, api):
    api.secret, bundle = render()
    given = certificates.make_certificate(make_service_names(SPACE))
    parts = {"cert": given.chain, "key": given.key, "ca": given.authorities}
    tls = {key: text.decode() for key, text in parts.items()}
    new, both = render(tls=tls)
    assert base64.b64decode(new["data"]["tls.crt"]) == given.chain
    assert both == given.authorities + b"\n" + bundle
    api.secret = new
    assert render(tls=tls) == (new, both)
