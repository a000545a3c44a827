"""Staged warm images: layers of caches in a registry, as a warm-up pushes them.

`python staging.py REPOSITORY VARIANT COMMAND` stages the caches of a container in a real registry.
"""

import io
import json
import os
import sys

import pytest
from cache_folders import read_folder
from distribution import CONFIG, LAYER, MANIFEST, digest
from publishing import labels_of, tag

from imagematrix.build.publish.publish import publish
from imagematrix.hardware.vendors.marches import list_code_flags
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.warm_up import WarmUp, write_warm_up
from imagematrix.images.oci.compression import DEFAULT
from imagematrix.images.oci.registry import Registry
from imagematrix.images.warm.layer import write_layer
from imagematrix.images.warm.warm_file import read_archive, select_files

TIME = 1_700_000_000
KEY = f"sha256:{'c' * 64}"
WARM_UP = WarmUp(
    command=("python", "warm.py"), gpus="none", inputs=(("model", "/models/m"),), max_size=1 << 20
)
FLAGS = ["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "sse4_2", "ssse3"]


def cpu_with(*flags):
    """Return a match's CPU that has these of all flags on which code may depend, and no others."""
    without = sorted(list_code_flags("x86_64").difference(flags))
    return {"vendor": "GenuineIntel", "flags": sorted(flags), "without": without, "name": "Xeon"}


CPU = cpu_with(*FLAGS)
MATCH = {"cpu": CPU, "cpus": 2}
NUMBA = f"numba/app_{'a' * 40}/m.f-3.py311"
NUMBA_FILES = {f"{NUMBA}.nbi": b"index", f"{NUMBA}.1.nbc": b"data"}


@pytest.fixture
def staging(server):
    return server.repository("ml/staging")


@pytest.fixture
def add_base(repository, registry):
    """Call it with changes of labels to publish a variant with a warm-up; returns its digest."""

    def call(cell="a", warm_up=WARM_UP, **changes):
        own = labels_of(cell, **changes) | ({labels.WARM_UP: write_warm_up(warm_up)} if warm_up else {})
        own_labels = own | {"owner": "ml"}
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["HOME=/work"], "Entrypoint": ["/app"], "Labels": own_labels},
            "rootfs": {"type": "layers", "diff_ids": [digest(b"the tar")]},
            "history": [{"created_by": "COPY app /"}],
        }
        own_labels[labels.CONTENT] = labels.hash_content(config)
        annotations = labels.select_annotations(own) | {"org.example.team": "ml"}
        raw = json.dumps(config).encode()
        base = repository.image(tag(own), own, config=raw, annotations=annotations, layer=b"base")
        publish(registry, "v1")
        return base

    return call


@pytest.fixture
def caches(tmp_path):
    """Call it with files and their contents to get a layer of them, as a warm-up writes it."""

    def call(**files):
        folder = tmp_path / f"caches{len([*tmp_path.iterdir()])}"
        for path, content in (files or NUMBA_FILES).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (TIME, TIME))  # a layer with other times is another one
        return packed(read_folder(folder))

    return call


@pytest.fixture
def stage(staging, server, caches):
    """Call it with the digest of a base and changes of the label to stage a layer; returns its name."""

    def call(variant, layer=None, /, *, name="w", more_layers=(), config=None, **changes):
        layers = [*more_layers, caches() if layer is None else layer]
        config, manifest = documents(layers, label(variant, **changes), config)
        staging.blobs |= {digest(blob): blob for blob in (config, *layers)}
        staging.put(name, manifest, MANIFEST)
        return f"{server.address}/ml/staging:{name}"

    return call


def label(variant, **changes):
    """Return the label of a warm image of the variant with this digest."""
    return {
        "schema": 1,
        "base": variant,
        "key": KEY,
        "match": MATCH,
        "command": list(WARM_UP.command),
        "inputs": {"model": {"path": "/models/m", "digest": KEY}},
        "date": "2026-11-29T12:00:00Z",
        "seconds": {"cold": 48.2, "warm": 11.0},
        "tools": {"numba": "0.68.1", "jax": None},
        "content": "opaque",
        "proofs": {"image-user": "proved", "root": "proved"},
        "reproducible": False,
        "why_not_reproducible": "it measures",
    } | changes


def documents(layers, stated, config=None):
    """Return configuration and manifest of a staged image, both with more than there should be."""
    settings = {"Labels": {labels.WARM: json.dumps(stated), "evil": "1"}, "Entrypoint": ["/evil"]}
    document = {"config": settings, "rootfs": {"diff_ids": ["x"]}} if config is None else config
    raw = json.dumps(document).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": digest(raw), "size": len(raw)},
        "layers": [{"mediaType": LAYER, "digest": digest(layer), "size": len(layer)} for layer in layers],
        "annotations": {labels.VARIANT: "{}", "evil": "1"},
    }
    return raw, json.dumps(manifest).encode()


def packed(files):
    """Return the layer of these files."""
    buffer = io.BytesIO()
    write_layer(select_files(files), buffer, DEFAULT)
    return buffer.getvalue()


def main(repository, variant, command):
    """Stage the caches in an engine's tar, which is read from stdin, under the tag w."""
    with read_archive(sys.stdin.buffer, WARM_UP.max_size) as files, Registry(repository) as registry:
        layer = packed(files)
        stated = label(variant, command=[command], inputs={})
        config, manifest = documents([layer], stated)
        for blob in (layer, config):
            registry.push_blob(digest(blob), io.BytesIO(blob))
        registry.push_manifest("w", manifest, MANIFEST)


if __name__ == "__main__":
    main(*sys.argv[1:])
