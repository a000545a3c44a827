"""A node starts the warm image that fits it, by its digest, and the variant where that cannot be had."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import Registry

ROOT = Path(__file__).parents[2]
DOCKERFILE = "FROM debian:trixie\nRUN echo {{ march }} > /variant\n"
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"march": ["any"]},
    "facts": {"march": {"any": {"flags": ["sse4_2"]}}},
}
# Puts one more layer on the variant of a version, and the result into the index of the version. It runs in
# the network of the registry.
ADD = """
import io, json, sys
sys.path.insert(0, sys.argv[1])
from images import tar
from publishing import warm_label
from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.images.catalog.image_index import IndexEntry, make_platform
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.catalog.warm_image import make_warm_tag
from imagematrix.images.oci.manifest import compute_digest
from imagematrix.images.oci.registry import Registry

name, match = sys.argv[2], json.loads(sys.argv[3])
(variant,) = open_catalog(name).variants
key = compute_digest(sys.argv[3].encode())
image, version = name.rsplit(":", 1)
label = json.dumps(warm_label(variant.digest, key, match=match))
layer = tar(("var/cache/warm/numba/x.nbi", sys.argv[3].encode()))
with Registry(image) as registry:
    manifest = json.loads(registry.find_manifest(variant.digest).raw)
    config = json.loads(registry.fetch_small_blob(manifest["config"]["digest"]))
    config["config"]["Labels"] = {"io.imagematrix.warm": label}
    config["rootfs"]["diff_ids"].append(compute_digest(layer))
    written = json.dumps(config).encode()
    for blob in (layer, written):
        registry.push_blob(compute_digest(blob), io.BytesIO(blob))
    manifest["config"] |= {"digest": compute_digest(written), "size": len(written)}
    kind = "application/vnd.oci.image.layer.v1.tar"
    manifest["layers"].append({"mediaType": kind, "digest": compute_digest(layer), "size": len(layer)})
    manifest.pop("annotations", None)
    raw = json.dumps(manifest).encode()
    tag = make_warm_tag(version, variant.digest, key)
    registry.push_manifest(tag, raw, manifest["mediaType"])
    annotations = {"io.imagematrix.warm": label, "io.imagematrix.size": "5"}
    entry = IndexEntry(
        digest=compute_digest(raw),
        size=len(raw),
        media_type=manifest["mediaType"],
        annotations=annotations,
        platform=make_platform(None),
    )
    publish(registry, version, selection=IndexSelection(warm=[entry]))
print(f"{image}:{tag}@{entry.digest}")
"""
CACHE = ("cat", "/var/cache/warm/numba/x.nbi")


@pytest.fixture(scope="module", params=["containerd", "classic"])
def node(request):
    """An engine with this store."""
    return request.getfixturevalue("engine" if request.param == "containerd" else "classic")


@pytest.fixture(scope="module")
def registry(node):
    started = Registry(node, 5000)
    yield started
    started.remove()


@pytest.fixture
def version(node, registry, tmp_path, request):
    """The name of a version of its own, published with one variant."""
    image = f"{registry.address}/ml/{request.node.originalname.replace('_', '-')[:40].rstrip('-')}"
    for name in ("templates", "context"):
        (tmp_path / name).mkdir()
    (tmp_path / "templates" / "image.j2").write_text(DOCKERFILE)
    described = {image: {"version": "v1", "template": "image.j2", "context": "context"}}
    (tmp_path / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))
    for words in (("build", "--push"), ("publish", f"{image}:v1")):
        done = node.imagematrix(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    built = node.docker("images", "--format", "{{.Repository}}:{{.Tag}}", image).stdout.split()
    if built:  # engines with the classic image store keep what they push
        node.docker("rmi", "--force", *built)
    return f"{image}:v1"


def add_warm(node, version, match):
    """Publish a warm image of the version's only variant; return REFERENCE@DIGEST."""
    command = [*node.inside, sys.executable, "-c", ADD, ROOT / "tests/doubles", version, json.dumps(match)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=node.environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run(node, version, *words, options=()):
    return node.imagematrix("run", "--rm", "--gpus", "none", *options, version, *words)


def test_the_warm_image_that_fits_is_pulled_and_started(node, version):
    add_warm(node, version, {"cpu": {"vendor": "of no CPU"}})
    fitting = add_warm(node, version, {"cpu": {"flags": ["sse4_2"]}})
    started = run(node, version, *CACHE)
    assert (started.returncode, started.stdout) == (0, '{"cpu": {"flags": ["sse4_2"]}}'), started.stderr
    pulled = node.imagematrix("pull", version, "--gpus", "none")
    assert (pulled.returncode, pulled.stdout, pulled.stderr) == (0, f"{fitting}\n", ""), pulled.stderr
    cold = run(node, version, *CACHE, options=["--no-warm"])
    assert (cold.returncode, cold.stdout) == (1, "")
    labelled = node.docker("inspect", "--format", "{{json .Config.Labels}}", fitting).stdout
    assert "io.imagematrix.variant" not in labelled


def test_the_variant_starts_with_one_warning_where_its_warm_image_is_lost(node, version, registry):
    lost = add_warm(node, version, {})
    digest = lost.partition("@sha256:")[2]
    blob = registry.data / f"docker/registry/v2/blobs/sha256/{digest[:2]}/{digest}/data"
    kept = blob.read_bytes()
    blob.unlink()
    registry.kill()  # it remembers blobs
    registry.start()
    try:
        for command in (("run", "--rm", "--gpus", "none", version, "cat", "/variant"), ("pull", version)):
            done = node.imagematrix(*command)
            assert done.returncode == 0, done.stderr
            assert done.stderr.count("is started, not its warm image") == 1, done.stderr
            assert "-warm-" not in done.stdout
    finally:
        blob.write_bytes(kept)
    never = run(node, version, "cat", "/variant", options=["--pull", "never"])
    assert (never.returncode, never.stdout) == (0, "any\n"), never.stderr
    assert never.stderr.count("is started, not its warm image") == 1


def test_what_was_made_for_a_number_of_cpus_starts_on_no_other(node, version):
    count = int(node.docker("info", "--format", "{{.NCPU}}").stdout)
    add_warm(node, version, {"cpus": count})
    assert run(node, version, *CACHE).returncode == 0
    limited = run(node, version, *CACHE, options=["--cpuset-cpus", "0"])
    assert (limited.returncode, limited.stdout) == (1, "")
