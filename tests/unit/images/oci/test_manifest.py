"""Parsing manifests and indexes."""

import json

import pytest

from imagematrix.errors import UsageError
from imagematrix.images.oci.manifest import (
    IMAGE,
    INDEX,
    Descriptor,
    ImageIndex,
    ImageManifest,
    compute_digest,
    parse_manifest,
)

CONFIG = {"digest": compute_digest(b"config"), "size": 6}
LAYER = {"digest": compute_digest(b"layer"), "size": 5, "annotations": {"a": "b", "c": 1}}


def parsed(**document):
    return parse_manifest(json.dumps(document).encode(), "x:v1", Descriptor)


def test_manifest_has_a_configuration_and_layers():
    manifest = parsed(config=CONFIG, layers=[LAYER])
    assert isinstance(manifest, ImageManifest)
    assert (manifest.media_type, manifest.config and manifest.config.digest) == (IMAGE, CONFIG["digest"])
    (layer,) = manifest.layers or ()
    assert (layer.digest, layer.size, layer.annotations) == (LAYER["digest"], 5, {"a": "b"})
    assert parsed(config=CONFIG).layers is None


def test_index_has_entries():
    index = parsed(manifests=[LAYER], annotations={"d": "e"})
    assert isinstance(index, ImageIndex)
    assert (index.media_type, index.annotations) == (INDEX, {"d": "e"})
    assert [entry.digest for entry in index.entries] == [LAYER["digest"]]


@pytest.mark.parametrize("size", [-1, 2**63, 10**400])
def test_size_that_no_blob_has_is_rejected(size):
    with pytest.raises(UsageError, match="size: is not a number of bytes"):
        parsed(config=CONFIG, layers=[LAYER | {"size": size}])
    assert parsed(config=CONFIG, layers=[LAYER | {"size": 2**63 - 1}]).layers


@pytest.mark.parametrize("more", [{"config": CONFIG}, {"layers": []}, {"mediaType": IMAGE}])
def test_document_that_is_a_manifest_and_an_index_is_rejected(more):
    with pytest.raises(UsageError, match="manifests: is not allowed in the manifest of an image"):
        parsed(manifests=[LAYER], **more)


@pytest.mark.parametrize("digest", ["sha256:../../etc/passwd", "sha512:" + 128 * "0", "", 1])
@pytest.mark.parametrize("key", ["config", "layers", "manifests"])
def test_invalid_digest_is_rejected(digest, key):
    descriptor = {"digest": digest, "size": 1}
    with pytest.raises(UsageError, match="digest"):
        parsed(**{key: descriptor if key == "config" else [descriptor]})
