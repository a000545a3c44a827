"""The catalog of a registry: one request for the index, validated answers."""

import hashlib
import json
from typing import Any

import pytest

from imagematrix.common.image_reference import Reference
from imagematrix.errors import EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.oci.manifest import ATTESTED, INDEX
from imagematrix.images.oci.retry import TRIES

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


@pytest.fixture
def has(server):
    """Call it with the document of the version v1, or its bytes, to get its name in a registry."""

    def put(document):
        raw = document if isinstance(document, bytes) else json.dumps(document).encode()
        server.repository("ml/training").put("v1", raw, INDEX)
        return f"{server.address}/ml/training:v1"

    return put


def test_catalog_takes_one_request(server, has):
    attestation = {
        "digest": DIGEST,
        "size": 1,
        "annotations": {"vnd.docker.reference.type": "attestation-manifest", ATTESTED: DIGEST},
    }
    hidden = {"digest": DIGEST, "size": 1, "platform": {"architecture": "unknown", "os": "unknown"}}
    name = has(index(manifest(), attestation, hidden))
    catalog = open_catalog(name)
    assert (catalog.image, catalog.version) == (f"{server.address}/ml/training", "v1")
    (variant,) = catalog.variants
    assert variant.reference == f"{name}-cpu-znver4-0123456789ab"
    assert variant.digest == DIGEST
    assert variant.march == "znver4"
    assert len(server.requests) == 1


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


def test_index_by_digest_is_verified(server, has):
    has(index(manifest()))
    repository = server.repository("ml/training")
    digest = repository.tags["v1"]
    name = f"{server.address}/ml/training@{digest}"
    assert len(open_catalog(name).variants) == 1
    repository.manifests[digest] = INDEX, repository.manifests[digest][1] + b" "
    with pytest.raises(EngineError, match="answered with content that does not match sha256:"):
        open_catalog(name)


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        (b"<html>", UsageError, "not JSON"),
        (b"[" * 100_000, UsageError, "nested too deeply"),
        ([], UsageError, "expected an object"),
        (
            {"mediaType": "application/vnd.oci.image.manifest.v1+json"},
            UsageError,
            "not an index of variants",
        ),
        (index(), UnknownImageError, "without variants"),
        (index(manifest()) | {"annotations": {}}, TagMovedError, "does not state its entries"),
        (index() | {"manifests": [manifest()]}, TagMovedError, "has other entries than it states"),
        (index(manifest(digest="sha256:123")), UsageError, "'sha256:123' is not a sha256 digest"),
        (index(manifest(), manifest()), UsageError, "occurs twice"),
        (index(manifest(annotations={"io.imagematrix.variant": "{"})), UsageError, "not JSON"),
        (
            index(manifest(annotations={"io.imagematrix.variant": "{}"})),
            UsageError,
            "platform is missing",
        ),
        (
            index(manifest(annotations={"io.imagematrix.cell": "--privileged x"})),
            UsageError,
            "reference",
        ),
        ({"manifests": {}}, UsageError, "expected a list"),
    ],
)
def test_unexpected_documents_are_errors(has, document, error, message):
    with pytest.raises(error, match=message):
        open_catalog(has(document))


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(404, UnknownImageError, "has no 127.0.0.1"), (500, EngineError, "answered 500 for")],
)
def test_unexpected_answers_are_errors(server, status, error, message):
    server.fails("GET", "manifests/v1", status=status, times=TRIES)
    with pytest.raises(error, match=message):
        open_catalog(f"{server.address}/ml/training:v1")


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
