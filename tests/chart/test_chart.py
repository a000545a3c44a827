"""The chart as Helm lints and renders it: equal to what `render install` writes with the same options."""

import base64
import json

import kubernetes_validate
import pytest
import yaml
from charting import installation_of, values_of
from cryptography import x509

from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.install import make_manifests, make_service_names

SPACE = "space"
REQUIRED = {"images": ["reg.example.com/ml/t:v1"], "program": "reg.example.com/imagematrix:1"}
SETS = [
    {},
    {"onUnknown": "deny", "pullSecret": "logins", "timeoutSeconds": 30, "allowCpu": True},
    {"images": ["r.x/a:1", "r:5000/b:2"], "where": ["python=3.13", "cuda=12.*,march=<x&y>"], "events": False},
    {"matchConditions": False, "excludeNamespaces": ["one", "two"], "onUnknown": "deny"},
    {"devicePlugin": {"enabled": True, "by": ["product", "class"]}, "kubelet": "/data/kubelet"},
    {"devicePlugin": {"enabled": True, "by": []}, "pullSecret": "logins", "events": False},
    {"draDriver": {"enabled": True}, "kubelet": "/data/kubelet", "pullSecret": "logins"},
]


@pytest.fixture(scope="session")
def tls():
    return certificates.make_certificate(make_service_names(SPACE))


@pytest.fixture
def render(helm, chart, tmp_path):
    """Return a function that renders the chart with values, and returns the objects."""

    def call(values, *, check=True):
        path = tmp_path / "values.yaml"
        path.write_text(json.dumps(values))
        words = ("template", "release", chart, "--namespace", SPACE, "-f", path, "--kube-version", "1.37.2")
        done = helm(*words, check=check)
        return list(yaml.safe_load_all(done.stdout)) if check else done

    return call


def sorted_by_name(objects):
    return sorted(objects, key=lambda one: (one["kind"], one["metadata"]["name"]))


@pytest.mark.parametrize("more", SETS, ids=json.dumps)
def test_the_chart_equals_the_manifests(render, tls, more):
    given = {"cert": tls.chain.decode(), "key": tls.key.decode(), "ca": tls.authorities.decode()}
    values = values_of(**REQUIRED | more, tls=given)
    expected = [
        each for each in make_manifests(installation_of(values, SPACE), tls) if each["kind"] != "Namespace"
    ]
    found = render({**REQUIRED, **more, "tls": given})
    assert sorted_by_name(found) == sorted_by_name(expected)
    for each in found:
        kubernetes_validate.validate(each, "1.37", strict=True)


def test_the_chart_makes_a_certificate_that_is_trusted(render):
    found = {one["kind"]: one for one in render(REQUIRED)}
    data = {key: base64.b64decode(text) for key, text in found["Secret"]["data"].items()}
    (hook,) = found["MutatingWebhookConfiguration"]["webhooks"]
    bundle = base64.b64decode(hook["clientConfig"]["caBundle"])
    assert bundle == data["ca.crt"]
    made = certificates.Tls(chain=data["tls.crt"], key=data["tls.key"], authorities=bundle)
    certificates.require_valid_certificate(made, ("crt", "key", "ca"), make_service_names(SPACE)[0])
    ends = certificates.get_end_of_trust(made)
    assert ends is not None
    renew = int(found["Secret"]["metadata"]["annotations"]["imagematrix.io/renew-after"])
    assert 59.5 < (ends.timestamp() - renew) / 86400 < 60.5
    (first,) = x509.load_pem_x509_certificates(data["tls.crt"])
    names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert tuple(names.get_values_for_type(x509.DNSName)) == make_service_names(SPACE)


def test_the_chart_has_no_lint(helm, chart, tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps(REQUIRED))
    done = helm("lint", chart, "--strict", "-f", values)
    assert "0 chart(s) failed" in done.stdout
    assert "[WARNING]" not in done.stdout + done.stderr
    assert "[ERROR]" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"images": REQUIRED["images"]}, "program: give an image with imagematrix"),
        ({"program": "r/p:1"}, "images: name at least one version"),
        (REQUIRED | {"images": ["t:v1"]}, "images"),
        (REQUIRED | {"images": ["ml/t:v1"]}, "images"),
        (REQUIRED | {"where": ["python"]}, "where"),
        (REQUIRED | {"tls": {"cert": "x"}}, "tls"),
        (REQUIRED | {"onUnknown": "x"}, "onUnknown"),
        (REQUIRED | {"devicePlugin": {"enabled": True}, "draDriver": {"enabled": True}}, "not"),
        (REQUIRED | {"kubelets": "x"}, "kubelets"),
    ],
)
def test_invalid_values_are_refused_by_name(render, values, message):
    done = render(values, check=False)
    assert done.returncode != 0
    assert message in done.stderr
