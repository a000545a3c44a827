"""Variants with real layers in a registry in memory, in layouts and in archives; and stores for them."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
from images import MANIFEST, Parts, tar
from processes import new_folder, remove_folder
from publishing import VARIANT, labels_of, tag, warm_label

from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.registry import read_entry
from imagematrix.images.catalog.warm_image import make_warm_tag
from imagematrix.images.local_store.folder import ImageStore
from imagematrix.images.local_store.image_fetch import CatalogEntry
from imagematrix.images.local_store.merged_image import LayerFile
from imagematrix.images.local_store.origins import RegistryOrigin
from imagematrix.images.oci.manifest import INDEX
from imagematrix.images.oci.registry import Registry

NEEDS_SQUASHFS = pytest.mark.skipif(
    shutil.which("mksquashfs") is None, reason="squashfs-tools are not installed"
)
LAYERS = (
    tar(("etc/os-release", b"ID=test\n"), ("bin/tool", b"#!/bin/true\n", 0o755), "gone"),
    tar(".wh.gone", ("data/new", b"x" * 5000)),
)

CATALOG = {"schema": "imagematrix.catalog/v1", "image": "t", "version": "v1", "prefer": [], "variants": []}
PUBLISHED = CatalogEntry(references=("t:v1-x",), variant={"reference": "t:v1-x"}, catalog=CATALOG)


def layer_file(raw, name="layer"):
    """Return a layer with these bytes."""
    return LayerFile(open=lambda: contextlib.nullcontext(io.BytesIO(raw)), name=name)


def listed(store, part):
    """Return the names in a folder of a store, sorted."""
    return sorted(path.name for path in Path(store.path, part).iterdir())


def variant(cell="cpu", *layers, version="v1", **how):
    """Return an image with the labels of a variant, and its tag. The cell "two" needs more than others."""
    flags = {"cpu_flags": ["avx2", "fma"]} if cell == "two" else {}
    own = labels_of(cell, version=version, VARIANT=json.dumps(VARIANT | flags))
    return Parts(*(layers or LAYERS), labels=own, **how), tag(own)


def warm(base, *layers, version="v1", **changes):
    """Return a warm image of a variant, with its tag; it fits hosts that `changes` of its label say."""
    label = warm_label(base.digest, **changes)
    layers = layers or (*LAYERS, tar(("var/cache/warm/numba/x.nbi", b"compiled")))
    image = Parts(*layers, labels={labels.WARM: json.dumps(label)})
    return image, make_warm_tag(version, base.digest, label["key"])


def put(server, *pairs, version="v1", repository="ml/training"):
    """Put images with their tags, and the index of their version, into a registry; return its name."""
    kept = server.repository(repository)
    for image, name in pairs:
        kept.blobs |= image.blobs
        kept.put(name, image.raw, MANIFEST)
    image = f"{server.address}/{repository}"
    with Registry(image) as registry:
        entries = [read_entry(registry, name) for _, name in pairs]
    kept.put(version, image_index.write_index(entries, image, version), INDEX)
    return f"{image}:{version}"


def push(registry, *pairs, version="v1", repository="ml/training"):
    """Push images with their tags, and the index of their version, to a real registry; return its name."""
    name = f"{registry.address}/{repository}"
    with Registry(name) as client:
        for image, tag in pairs:
            for digest, raw in image.blobs.items():
                if digest != image.digest and not client.has_blob(digest):
                    client.push_blob(digest, io.BytesIO(raw))
            client.push_manifest(tag, image.raw, MANIFEST)
        entries = [read_entry(client, tag) for _, tag in pairs]
        client.push_manifest(version, image_index.write_index(entries, name, version), INDEX)
    return f"{name}:{version}"


def from_registry(server, repository="ml/training"):
    @contextlib.contextmanager
    def source():
        with Registry(f"{server.address}/{repository}") as registry:
            yield RegistryOrigin(registry)

    return source


@pytest.fixture
def image_store(tmp_path):
    return ImageStore(tmp_path / "store")


@pytest.fixture
def shared_folder():
    """A folder that other users can enter, unlike those of pytest."""
    folder = new_folder()
    yield folder
    remove_folder(folder)
