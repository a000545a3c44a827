"""The catalog of a registry: one request for the index, docker's credentials, validated answers."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from imagematrix.common.image_reference import Reference
from imagematrix.errors import EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.oci.manifest import ATTESTED

DIGEST = f"sha256:{'a' * 64}"
INPUT = f"sha256:{'0123456789ab' + 'c' * 52}"
ENTRY = {"platform": "linux/amd64", "march": "znver4", "cpu_flags": ["avx2"]}


def manifest(**changes):
    annotations = {
        "io.imagematrix.version": "v1",
        "io.imagematrix.cell": "cpu-znver4",
        "io.imagematrix.input": INPUT,
        "io.imagematrix.variant": json.dumps(ENTRY),
    }
    return {
        "digest": DIGEST,
        "size": 1,
        "annotations": annotations | changes.pop("annotations", {}),
    } | changes


def index(*manifests):
    """Return an index that states its entries, as `publish` writes it."""
    empty = {"mediaType": "", "annotations": {}, "platform": {}}
    entries = [empty | one for one in manifests]
    entries.sort(key=lambda one: (one["annotations"].get("io.imagematrix.cell", ""), one["digest"]))
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "annotations": {"io.imagematrix.content": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"},
        "manifests": manifests,
    }


class Registry:
    """A registry on loopback: `answers` by path, each a status with a body; `requests` are recorded."""

    def __init__(self):
        self.answers: dict[str, tuple[Any, ...]] = {}
        self.requests: list[object] = []
        self.protected_by = None
        self.lacking = 0  # announced bytes of each answer that are never sent
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                registry.requests.append((self.path, self.headers.get("Authorization")))
                if (
                    registry.protected_by
                    and path.startswith("/v2/")
                    and not self.headers.get("Authorization")
                ):
                    self._send(401, b"{}", {"WWW-Authenticate": registry.protected_by})
                else:
                    self._send(*registry.answers.get(path, (404, b"{}")))

            def _send(self, status, body, headers=()):
                self.send_response(status)
                for name, value in dict(headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body) + registry.lacking))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.name = f"{self.address}/ml/training:v1"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def has(self, document, status=200, path="/v2/ml/training/manifests/v1"):
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.answers[path] = (status, body)
        return body

    def close(self):
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def registry(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr("imagematrix.images.oci.retry.PAUSE", 0)
    client = Registry()
    yield client
    client.close()


def log_in(registry, tmp_path):
    secret = base64.b64encode(b"me:secret").decode()
    config = {"auths": {registry.address: {"auth": secret}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return f"Basic {secret}"


def test_catalog_takes_one_request(registry):
    attestation = {
        "digest": DIGEST,
        "size": 1,
        "annotations": {"vnd.docker.reference.type": "attestation-manifest", ATTESTED: DIGEST},
    }
    hidden = {"digest": DIGEST, "size": 1, "platform": {"architecture": "unknown", "os": "unknown"}}
    registry.has(index(manifest(), attestation, hidden))
    catalog = open_catalog(registry.name)
    assert (catalog.image, catalog.version) == (f"{registry.address}/ml/training", "v1")
    (variant,) = catalog.variants
    assert variant.reference == f"{registry.name}-cpu-znver4-0123456789ab"
    assert variant.digest == DIGEST
    assert variant.march == "znver4"
    assert len(registry.requests) == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_image_built_on_a_variant_is_not_the_variant(server, sealed):
    """It inherits the labels, including the variant's content digest, if there is one."""
    repository = server.repository("ml/training")
    own = {"io.imagematrix.image": f"{server.address}/ml/training", **manifest()["annotations"]}
    config: dict[str, Any] = {"architecture": "amd64", "os": "linux", "config": {"Labels": own}}
    if sealed:
        own[labels.CONTENT] = labels.hash_content(config)
    tag = "v1-cpu-znver4-0123456789ab"
    digest = repository.image(tag, {}, config=json.dumps(config).encode())
    config["config"]["Env"] = ["A=B"]
    derived = repository.image("mine", {}, config=json.dumps(config).encode())
    name = f"{server.address}/ml/training"
    for named in (f"{name}:{tag}", f"{name}@{digest}"):
        (variant,) = open_catalog(named).variants
        assert (variant.reference, variant.digest) == (f"{name}:{tag}", digest)
    for named in (f"{name}:mine", *([f"{name}@{derived}"] if sealed else [])):
        with pytest.raises(UnknownImageError, match="has no labels of its own"):
            open_catalog(named)


def test_a_version_may_be_the_one_variant_with_which_a_resolver_answers(server):
    repository = server.repository("ml/training")
    own = {"io.imagematrix.image": f"{server.address}/ml/training", **manifest()["annotations"]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Labels": own}}).encode()
    repository.image("v1", {}, config=config)
    name = f"{server.address}/ml/training"
    with pytest.raises(UnknownImageError, match="has no labels of its own"):
        open_catalog(f"{name}:v1")
    digest = repository.image("v1-cpu-znver4-0123456789ab", {}, config=config)
    (variant,) = open_catalog(f"{name}:v1").variants
    assert (variant.reference, variant.digest) == (f"{name}:v1-cpu-znver4-0123456789ab", digest)


def test_index_by_digest_is_verified(registry):
    body = json.dumps(index(manifest())).encode()
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    registry.has(body, path=f"/v2/ml/training/manifests/{digest}")
    name = f"{registry.address}/ml/training@{digest}"
    assert len(open_catalog(name).variants) == 1
    registry.has(body + b" ", path=f"/v2/ml/training/manifests/{digest}")
    with pytest.raises(EngineError, match="answered with content that does not match sha256:"):
        open_catalog(name)


def test_basic_authentication_uses_docker_credentials(registry, tmp_path):
    registry.has(index(manifest()))
    registry.protected_by = 'Basic realm="here"'
    with pytest.raises(EngineError, match="denies access") as caught:
        open_catalog(registry.name)
    assert caught.value.remedy.startswith(f"`docker login {registry.address}`")
    basic = log_in(registry, tmp_path)
    assert open_catalog(registry.name).variants
    assert registry.requests[-1] == ("/v2/ml/training/manifests/v1", basic)


def test_token_is_fetched_from_the_challenge_s_realm(registry, tmp_path):
    registry.has(index(manifest()))
    registry.has({"token": "t0ken"}, path="/token")
    realm = f"http://{registry.address}/token"
    registry.protected_by = f'Bearer realm="{realm}",service="s",scope="repository:ml/training:pull"'
    assert open_catalog(registry.name).variants
    assert registry.requests[-1][1] == "Bearer t0ken"
    basic = log_in(registry, tmp_path)
    assert open_catalog(registry.name).variants
    path, login = registry.requests[-2]
    assert path == "/token?service=s&scope=repository%3Aml%2Ftraining%3Apull"
    assert login == basic
    registry.has({}, status=403, path="/token")
    with pytest.raises(EngineError, match="denies access"):
        open_catalog(registry.name)
    registry.protected_by = 'Bearer service="s"'
    with pytest.raises(EngineError, match="a token without a realm"):
        open_catalog(registry.name)


def test_unreadable_credentials_are_reported(registry, tmp_path):
    registry.protected_by = 'Basic realm="here"'
    helper = {"credHelpers": {registry.address: "that-is-not-installed"}}
    (tmp_path / "config.json").write_text(json.dumps(helper))
    with pytest.raises(EngineError, match="credentials"):
        open_catalog(registry.name)


@pytest.mark.parametrize(
    ("document", "status", "error", "message"),
    [
        ({}, 404, UnknownImageError, "has no 127.0.0.1"),
        ({}, 500, EngineError, "answered 500 for"),
        (b"<html>", 200, UsageError, "not JSON"),
        (b"[" * 100_000, 200, UsageError, "nested too deeply"),
        ([], 200, UsageError, "expected an object"),
        (
            {"mediaType": "application/vnd.oci.image.manifest.v1+json"},
            200,
            UsageError,
            "not an index of variants",
        ),
        (index(), 200, UnknownImageError, "without variants"),
        (index(manifest()) | {"annotations": {}}, 200, TagMovedError, "does not state its entries"),
        (index() | {"manifests": [manifest()]}, 200, TagMovedError, "has other entries than it states"),
        (index(manifest(digest="sha256:123")), 200, UsageError, "'sha256:123' is not a sha256 digest"),
        (index(manifest(), manifest()), 200, UsageError, "occurs twice"),
        (index(manifest(annotations={"io.imagematrix.variant": "{"})), 200, UsageError, "not JSON"),
        (
            index(manifest(annotations={"io.imagematrix.variant": "{}"})),
            200,
            UsageError,
            "platform is missing",
        ),
        (
            index(manifest(annotations={"io.imagematrix.cell": "--privileged x"})),
            200,
            UsageError,
            "reference",
        ),
        ({"manifests": {}}, 200, UsageError, "expected a list"),
    ],
)
def test_unexpected_answers_are_errors(registry, document, status, error, message):
    registry.has(document, status)
    with pytest.raises(error, match=message):
        open_catalog(registry.name)


def test_unreachable_registry_is_an_engine_error():
    with pytest.raises(EngineError, match=r"the registry 127\.0\.0\.1:1 cannot be reached"):
        open_catalog("127.0.0.1:1/training:v1")


def test_truncated_answer_is_an_engine_error(registry):
    registry.has(index(manifest()))
    registry.lacking = 10
    with pytest.raises(EngineError, match="truncates its answers: IncompleteRead"):
        open_catalog(registry.name)


def test_oversized_answer_is_not_read(registry, monkeypatch):
    monkeypatch.setattr("imagematrix.images.oci.transfer.LIMIT", 1000)
    registry.has(b" " * 2000)
    with pytest.raises(EngineError, match="the limit for documents of a registry"):
        open_catalog(registry.name)


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "scheme"),
    [
        ("training", "registry-1.docker.io", "library/training", "latest", "https"),
        ("ml/training:v1", "registry-1.docker.io", "ml/training", "v1", "https"),
        ("docker.io/ml/training:v1", "registry-1.docker.io", "ml/training", "v1", "https"),
        ("index.docker.io/debian", "registry-1.docker.io", "library/debian", "latest", "https"),
        ("reg.example:5000/ml/training:v1", "reg.example:5000", "ml/training", "v1", "https"),
        ("localhost/training", "localhost", "training", "latest", "http"),
        ("localhost:5000/t:v1", "localhost:5000", "t", "v1", "http"),
        (f"reg.example/t@{DIGEST}", "reg.example", "t", DIGEST, "https"),
        ("[::1]:5000/t:v1", "[::1]:5000", "t", "v1", "http"),
        ("[::1]/t:v1", "[::1]", "t", "v1", "http"),
    ],
)
def test_references_are_parsed_as_docker_does(text, registry, repository, tag, scheme):
    result = Reference.parse(text)
    assert (result.registry, result.repository, result.tag) == (registry, repository, tag)
    assert result.url == f"{scheme}://{registry}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "reg.example/", "a b", "a:b\n"),
        *("./t:v1", "../t:v1", "a..b/t:v1", f"{'a' * 64}.example/t", "[::1/t", "a_b:5000/t", "reg:x/t"),
    ],
)
def test_invalid_reference_is_rejected(text):
    with pytest.raises(UsageError, match="invalid image reference"):
        Reference.parse(text)
