"""Variants in a registry in memory, and in layouts to push there."""

import io
import json
from functools import partial
from types import SimpleNamespace

import pytest
from distribution import CONFIG, LAYER, MANIFEST, digest
from images import tar

from imagematrix.audit.images.layers import Layers
from imagematrix.build.plan.protocols import BuildRequest, BuildSources, BuiltImage
from imagematrix.build.stores.registry import RegistryStore
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.image_index import IndexEntry, make_platform
from imagematrix.images.catalog.warm_image import make_warm_tag
from imagematrix.images.oci.registry import Registry

KEY = digest(b"key")  # of a warm image
VARIANT = {"platform": "linux/amd64", "march": "znver4", "cpu_flags": ["avx2"]}


def labels_of(cell, made_of="1", version="v1", **changes):
    """Return the labels of an image of `cell`; those that are None in `changes` are omitted."""
    own = {
        labels.IMAGE: "training",
        labels.VERSION: version,
        labels.CELL: cell,
        labels.INPUT: digest(made_of.encode()),
        labels.INPUTS: json.dumps({"dockerfile": made_of}),
        labels.VARIANT: json.dumps(VARIANT),
    } | {getattr(labels, name): value for name, value in changes.items()}
    return {name: value for name, value in own.items() if value is not None}


def tag(own):
    return labels.make_tag(own[labels.VERSION], own[labels.CELL], own[labels.INPUT])


class Docker:
    """An engine that has images by reference, and can push them; with `has_manifests` it knows digests."""

    has_manifests = True

    def __init__(self, repository):
        self.repository = repository
        self.images = {}
        self.pushed = []
        self.saved = {}  # special images by reference: a configuration and layers

    def store(self, order, made):
        self.images[order.reference] = order.labels, made.digest

    tag_image = store

    def push(self, reference):
        self.pushed.append(reference)
        own, _ = self.images[reference]
        self.repository.image(reference.rpartition(":")[2], own)

    def find_source(self, reference, *, local):
        return f"docker-image://held:{reference}" if local and reference in self.images else None

    def get_image_id(self, reference):
        return self.images[reference][1]

    def save(self, image):
        (reference,) = (
            name for name, image_and_digest in self.images.items() if image_and_digest[1] == image
        )
        plain = {"config": {"Labels": self.images[reference][0]}}, [tar()]
        config, layers = self.saved.get(reference, plain)
        config = {"rootfs": {"diff_ids": list(map(digest, layers))}} | config
        names = [f"blobs/sha256/{digest(layer)[7:]}" for layer in layers]
        listed = json.dumps([{"Config": "config.json", "RepoTags": [reference], "Layers": names}])
        files = [("config.json", json.dumps(config).encode()), *zip(names, layers, strict=True)]
        return io.BytesIO(tar(*files, ("manifest.json", listed.encode())))

    def get_digest(self, reference):
        return self.images[reference][1]


@pytest.fixture
def image(server):
    return f"{server.address}/ml/training"


@pytest.fixture
def registry(image):
    with Registry(image) as client:
        yield client


@pytest.fixture
def repository(server):
    return server.repository("ml/training")


@pytest.fixture
def docker(repository):
    return Docker(repository)


@pytest.fixture
def remote(docker):
    with RegistryStore(docker, Layers()) as result:
        yield result


@pytest.fixture
def add_variant(repository):
    """Call it with a cell, and perhaps arguments of `labels_of`, to put its image into the registry."""

    def call(cell, made_of="1", *, layer=b"layer", packed=LAYER, **changes):
        own = labels_of(cell, made_of, **changes)
        return repository.image(tag(own), own, layer=layer, packed=packed)

    return call


def warm_label(base, key=KEY, **changes):
    """Return what a warm image of a variant says of itself, by its keys in JSON."""
    return {
        "schema": 1,
        "base": base,
        "key": key,
        "match": {"cpu": {"flags": ["avx2"]}},
        "command": ["warm"],
        "inputs": {},
        "date": "2026-11-29T12:00:00Z",
        "seconds": {"cold": 48.2, "warm": 11.0},
        "tools": {"numba": "0.62.1"},
        "content": "opaque",
        "proofs": {"image-user": "proved"},
        "reproducible": False,
        "why_not_reproducible": "compilers write what they measured",
    } | changes


def put_warm(repository, base, key=KEY, *, version="v1", layer=b"caches", **changes):
    """Put the warm image of a variant with a digest into a registry; `changes` are of its label.

    It returns the image's entry in the index of a version.
    """
    text = json.dumps(warm_label(base, key, **changes))
    pushed = repository.image(make_warm_tag(version, base, key), {labels.WARM: text}, layer=layer)
    return IndexEntry(
        digest=pushed,
        size=len(repository.manifests[pushed][1]),
        media_type=MANIFEST,
        annotations={labels.WARM: text, labels.SIZE: str(len(layer))},
        platform=make_platform(None),
    )


@pytest.fixture
def add_warm(repository):
    """Call it with what `put_warm` takes after the registry."""
    return partial(put_warm, repository)


@pytest.fixture
def make_image(image, tmp_path):
    """Call it with a cell to get an order for its image, and the image in a layout."""

    def call(cell, made_of="1", *, layers=(b"one", b"two"), kind=LAYER, **changes):
        blobs = tmp_path / "layout" / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)

        def blob(raw, media_type):
            (blobs / digest(raw)[7:]).write_bytes(raw)
            return {"mediaType": media_type, "digest": digest(raw), "size": len(raw)}

        own = labels_of(cell, made_of, **changes)
        config = {"architecture": "amd64", "os": "linux", "config": {"Labels": own}}
        config["rootfs"] = {"diff_ids": [f"sha256:{number}" for number in range(1, len(layers) + 1)]}
        manifest = {
            "mediaType": MANIFEST,
            "config": blob(json.dumps(config).encode(), CONFIG),
            "layers": [blob(layer, kind) for layer in layers],
        }
        pushed = blob(json.dumps(manifest).encode(), MANIFEST)["digest"]
        sources = BuildSources(context=tmp_path, platform="linux/amd64")
        order = BuildRequest(reference=f"{image}:{tag(own)}", dockerfile="", sources=sources, labels=own)
        return SimpleNamespace(
            order=order, made=BuiltImage(digest=pushed, layout=tmp_path / "layout"), tag=tag(own)
        )

    return call


@pytest.fixture(name="labels_of")
def _labels_of():
    return labels_of


@pytest.fixture
def variant():
    """Call it with a march, and optionally a CUDA release, to get the label of such a variant."""

    def call(march, cuda=None, platform="linux/amd64", **more):
        flags = sorted(marches.get_required_flags(march, "gcc-14"))
        gpu = {"cuda": cuda, "cubins": ["89"], "driver": {"mode": "host"}} if cuda else {}
        return json.dumps({"platform": platform, "march": march, "cpu_flags": flags} | gpu | more)

    return call
