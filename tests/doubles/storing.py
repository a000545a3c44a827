"""Variants with real layers in a registry in memory, in layouts and in archives; and stores for them."""

import contextlib
import io

import pytest
from images import MANIFEST, Parts, tar
from publishing import labels_of, tag

from imagematrix.catalog import index
from imagematrix.catalog.registry import entry_of
from imagematrix.image_store.folder import ImageStore
from imagematrix.image_store.merging import LayerFile
from imagematrix.oci.manifest import INDEX
from imagematrix.oci.registry import Registry

LAYERS = (
    tar(("etc/os-release", b"ID=test\n"), ("bin/tool", b"#!/bin/true\n", 0o755), "gone"),
    tar(".wh.gone", ("data/new", b"x" * 5000)),
)


def layer_file(raw, name="layer"):
    """Return a layer with these bytes."""
    return LayerFile(open=lambda: contextlib.nullcontext(io.BytesIO(raw)), name=name)


def variant(cell="cpu", *layers, version="v1", **how):
    """Return an image with the labels of a variant, and its tag."""
    own = labels_of(cell, version=version)
    return Parts(*(layers or LAYERS), labels=own, **how), tag(own)


def put(server, *pairs, version="v1", repository="ml/training"):
    """Put images with their tags, and the index of their version, into a registry; return the version's name."""
    kept = server.repository(repository)
    for image, name in pairs:
        kept.blobs |= image.blobs
        kept.put(name, image.raw, MANIFEST)
    image = f"{server.address}/{repository}"
    with Registry(image) as registry:
        entries = [entry_of(registry, name) for _, name in pairs]
    kept.put(version, index.write(entries, image, version), INDEX)
    return f"{image}:{version}"


@pytest.fixture
def image_store(tmp_path):
    return ImageStore(tmp_path / "store")
