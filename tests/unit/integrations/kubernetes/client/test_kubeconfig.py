"""Kubeconfigs, with credentials in files."""

import base64
import json
import re
import ssl
from pathlib import Path

import pytest

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.client.api import ApiServer
from imagematrix.integrations.kubernetes.client.kubeconfig import load_kubeconfig
from imagematrix.integrations.kubernetes.install import certificates


def config(path, user, cluster=None, **more):
    """Write a kubeconfig with one context."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "other"}, {"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://10.0.0.1:6443", **(cluster or {})}}],
        "users": [{"name": "u", "user": user}],
        **more,
    }
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config"


def test_files_are_found_beside_the_kubeconfig(path):
    files = {"tokenFile": "token", "client-certificate": "/pki/c.pem", "client-key": "/pki/c.pem"}
    assert load_kubeconfig(config(path, files, {"certificate-authority": "ca.crt"})) == ApiServer(
        url="https://10.0.0.1:6443",
        token=path.parent / "token",
        authorities=path.parent / "ca.crt",
        certificate=(Path("/pki/c.pem"), Path("/pki/c.pem")),
    )


@pytest.mark.parametrize("url", ["https://10.0.0.1:bad", "nonsense", "https://", "ftp://x", "https://[::1"])
def test_an_invalid_url_is_refused(path, url):
    """Otherwise it would be tried again for ever."""
    with pytest.raises(UsageError, match="invalid URL of an API server"):
        load_kubeconfig(config(path, {"tokenFile": "token"}, {"server": url}))


@pytest.mark.parametrize("url", ["https://rancher/k8s/clusters/c-1", "https://rancher/k8s/clusters/c-1/"])
def test_an_api_server_may_be_behind_a_path(path, url):
    """Another service at that host must not get the token."""
    api = load_kubeconfig(config(path, {"tokenFile": "token"}, {"server": url}))
    assert api.make_url("/api/v1/nodes") == "https://rancher/k8s/clusters/c-1/api/v1/nodes"


def test_kubelet_s_own_kubeconfig_can_be_used(path, tmp_path):
    """It has the authority in it, and the certificate in files."""
    tls = certificates.make_certificate(("node",))
    (tmp_path / "client.pem").write_bytes(tls.chain + tls.key)
    data = {"certificate-authority-data": base64.b64encode(tls.authorities).decode()}
    api = load_kubeconfig(
        config(path, {"client-certificate": "client.pem", "client-key": "client.pem"}, data)
    )
    assert api.make_headers() == {}
    context = api.make_tls_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    (known,) = context.get_ca_certs()
    assert known["subject"]
    (tmp_path / "client.pem").write_bytes(b"no certificate")
    with pytest.raises(UsageError, match=r"client\.pem cannot be read"):
        api.make_tls_context()


@pytest.mark.parametrize(
    ("user", "more", "why"),
    [
        ({"token": "secret"}, {}, "no credentials in files"),
        ({"exec": {"command": "aws"}}, {}, "no credentials in files"),
        ({"client-certificate": "c"}, {}, "no credentials in files"),
        ({"tokenFile": 7}, {}, "tokenFile"),
        ({"tokenFile": "t"}, {"current-context": "none"}, "'none' not found"),
        ({"tokenFile": "t"}, {"clusters": []}, "'k' not found"),
        ({"tokenFile": "t"}, {"users": [{"name": "u"}]}, "'u' not found"),
        ({"tokenFile": "t"}, {"clusters": [{"name": "k", "cluster": {}}]}, "server"),
        (
            {"tokenFile": "t"},
            {"clusters": [{"name": "k", "cluster": {"server": "s", "certificate-authority-data": "?"}}]},
            "is not a certificate in base64",
        ),
    ],
)
def test_an_invalid_kubeconfig_says_why(path, user, more, why):
    with pytest.raises(UsageError, match=re.escape(why)) as raised:
        load_kubeconfig(config(path, user, **more))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", ": expected one document, found 0"),
        (b"a: 1\n---\nb: 1", ": expected one document, found 2"),
        (b"\xff", ": not YAML: "),
        (b"token: secret\nb: [", ":2:5: not YAML: "),
        (b"token: secret: x", ":1:14: not YAML: mapping values are not allowed here"),
        (b"a: &a [*a]", ":1:8: not YAML: aliases are not supported"),
        (b"- 1", ": expected an object, found a list"),
        (b"a: " + b"x" * 2**20, ": exceeds 1 MiB"),
    ],
)
def test_what_is_no_kubeconfig_is_an_error(path, text, why):
    path.write_bytes(text)
    with pytest.raises(UsageError, match=re.escape(f"{path}{why}")) as raised:
        load_kubeconfig(path)
    assert "secret" not in str(raised.value)


def test_a_kubeconfig_that_does_not_exist_is_an_error(path):
    with pytest.raises(UsageError, match="No such file"):
        load_kubeconfig(path)


def test_authorities_that_cannot_be_read_are_an_error(tmp_path):
    for api in (
        ApiServer(url="https://x", authorities=tmp_path / "none"),
        ApiServer(url="https://x", authority_text="no certificate"),
    ):
        with pytest.raises(UsageError, match="cannot be read"):
            api.make_tls_context()
