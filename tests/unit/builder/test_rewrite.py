"""Clamping the times in layers: each layer once, those of the base never."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imagematrix.builder import rewrite
from imagematrix.builder.rewrite import Rewriter
from imagematrix.catalog import labels
from imagematrix.catalog.index import ATTESTED
from imagematrix.catalog.labels import content
from imagematrix.errors import BuildError
from imagematrix.oci.clamp import clamped as clamped_tar
from imagematrix.planning.backend import Order, Sources


def tar(name, time, size=0, content=b""):
    content = content or bytes(size)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.mtime, info.size = time, len(content)
        archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


OWN = {labels.CELL: "a", "by": "us"}
ORDER = Order(reference="t:v1", dockerfile="", sources=Sources(context=Path(), platform="any"), labels=OWN)


class Blobs:
    """The blobs of a layout."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True)

    def put(self, raw):
        raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
        digest = hashlib.sha256(raw).hexdigest()
        (self.folder / digest).write_bytes(raw)
        return {"digest": f"sha256:{digest}", "size": len(raw)}

    def image(self, *layers, **more):
        """Write an image with layers, compressed or not, and return its descriptor."""
        diff_ids = [digest(gzip.decompress(raw) if raw[:1] == b"\x1f" else raw) for raw in layers]
        config = {
            "architecture": "amd64",
            "config": {"Labels": {"of": "the base", "by": "somebody"}},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
        return self.put(
            {"schemaVersion": 2, "config": self.put(config), "layers": list(map(self.layer, layers)), **more}
        )

    def layer(self, raw):
        kind = rewrite.LAYER if raw[:1] == b"\x1f" else rewrite.TAR
        return {"mediaType": kind, **self.put(raw)}

    def read(self, digest):
        raw = (self.folder / digest.removeprefix("sha256:")).read_bytes()
        assert digest == f"sha256:{hashlib.sha256(raw).hexdigest()}"
        return raw

    def json(self, digest):
        return json.loads(self.read(digest))


def digest(raw):
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


@pytest.fixture
def blobs(tmp_path):
    return Blobs(tmp_path / "blobs" / "sha256")


@pytest.fixture
def rewriter(blobs):
    return Rewriter(blobs.folder, 0)


def test_rewritten_image_refers_to_its_new_layers(blobs, rewriter):
    base = gzip.compress(tar("base", 5))
    before = blobs.image(base, gzip.compress(tar("a", 7, 3_000_000)), tar("b", 0), annotations={"a": "b"})
    kept = {digest(base)}
    after = blobs.json(rewriter.image(before["digest"], ORDER, kept))
    assert after["annotations"] == {"a": "b", labels.CELL: "a"}
    assert after["layers"][0] == blobs.json(before["digest"])["layers"][0], "a base keeps its layers"
    config = blobs.json(after["config"]["digest"])
    assert after["config"]["size"] == len(blobs.read(after["config"]["digest"]))
    assert config["architecture"] == "amd64"
    own = {"of": "the base", **OWN, labels.CONTENT: content(config)}
    assert config["config"]["Labels"] == own, "and all other layers"
    for layer, diff_id in zip(after["layers"], config["rootfs"]["diff_ids"], strict=True):
        raw = blobs.read(layer["digest"])
        assert len(raw) == layer["size"]
        assert digest(gzip.decompress(raw)) == diff_id
    times = [times_of(blobs, layer) for layer in after["layers"]]
    assert times == [[5], [0], [0]]
    assert all("gzip" in layer["mediaType"] for layer in after["layers"][1:])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_full_disk_is_reported_and_leaves_no_files(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        blobs = Blobs(disk / "build" / "layout" / "sha256")
        noise = os.urandom(600_000)  # incompressible
        before = blobs.image(tar("a", 7, content=noise))
        files = set(disk.rglob("*"))
        with pytest.raises(BuildError, match=f"^{disk}/build/layout: No space left") as caught:
            Rewriter(blobs.folder, 0).image(before["digest"], ORDER, ())
        assert f"free disk space in {disk} " in caught.value.remedy
        assert set(disk.rglob("*")) == files
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def times_of(blobs, layer):
    with tarfile.open(fileobj=io.BytesIO(blobs.read(layer["digest"]))) as archive:
        return [member.mtime for member in archive]


def test_base_layers_are_not_rewritten(blobs, rewriter):
    base, own = tar("base", 5), tar("own", 5)
    before = blobs.image(base, own)
    after = blobs.json(rewriter.image(before["digest"], ORDER, {digest(base)}))
    assert [times_of(blobs, layer) for layer in after["layers"]] == [[5], [0]]
    assert after["layers"][0] == blobs.json(before["digest"])["layers"][0]
    assert [layer["mediaType"] for layer in after["layers"]] == [rewrite.TAR, rewrite.LAYER]
    first = blobs.json(after["config"]["digest"])["rootfs"]["diff_ids"][0]
    assert first == digest(base) == after["layers"][0]["digest"]
    on_another = blobs.json(rewriter.image(before["digest"], ORDER, set()))
    assert [times_of(blobs, layer) for layer in on_another["layers"]] == [[0], [0]], (
        "here it is not part of the base"
    )


def test_equal_files_with_other_times_give_the_same_image(blobs, rewriter):
    first, second = (blobs.image(gzip.compress(tar("a", time), mtime=time)) for time in (5, 9))
    assert first["digest"] != second["digest"]
    made = {rewriter.image(one["digest"], ORDER, set()) for one in (first, second)}
    assert len(made) == 1
    assert made == {Rewriter(blobs.folder, 0).image(first["digest"], ORDER, set())}
    assert made == {rewriter.image(made.copy().pop(), ORDER, set())}, "nothing is left to rewrite"


def test_shared_layer_is_rewritten_once(blobs, rewriter, monkeypatch):
    calls = []
    together = threading.Barrier(4)

    def clamped(file, latest, real=clamped_tar):
        calls.append(latest)
        return real(file, latest)

    monkeypatch.setattr(rewrite, "clamped", clamped)
    shared = tar("shared", 5)
    images = [blobs.image(shared, tar(f"own{number}", 5))["digest"] for number in range(4)]

    def make(image):
        together.wait(10)
        return rewriter.image(image, ORDER, set())

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(make, images))) == 4
    assert len(calls) == 1 + 4


def test_attestations_refer_to_the_new_image(blobs, rewriter):
    base = tar("base", 5)
    image = blobs.image(base, tar("a", 5))
    layer = blobs.json(image["digest"])["layers"][1]["digest"]
    statement = {"subject": [{"digest": {"sha256": image["digest"][7:]}}], "predicate": {"layer": layer}}
    result = blobs.put(statement)
    attestation = blobs.put(
        {"config": blobs.put({"rootfs": {"diff_ids": [result["digest"]]}}), "layers": [result]}
    )
    index = blobs.put(
        {"manifests": [image, attestation | {"annotations": {ATTESTED: image["digest"], "type": "x"}}]}
    )
    made, index = rewriter.index(index["digest"], ORDER, {digest(base)})
    assert made == rewriter.image(image["digest"], ORDER, {digest(base)}), "with and without attestations"
    first, second = blobs.json(index)["manifests"]
    assert first["digest"] == made
    assert second["annotations"] == {ATTESTED: made, "type": "x"}
    for one in (first, second):
        assert one["size"] == len(blobs.read(one["digest"]))
    manifest = blobs.json(second["digest"])
    (result,) = manifest["layers"]
    assert result["size"] == len(blobs.read(result["digest"]))
    assert blobs.json(result["digest"]) == {
        "subject": [{"digest": {"sha256": made[7:]}}],
        "predicate": {"layer": blobs.json(made)["layers"][1]["digest"]},
    }
    assert blobs.json(manifest["config"]["digest"])["rootfs"]["diff_ids"] == [result["digest"]]


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (b"\x28\xb5\x2f\xfd rest", "zstd"),
        (gzip.compress(tar("a", 5))[:-20], "cannot be read"),
        (gzip.compress(tar("a", 5))[:40] + b"xxxxxxx" + bytes(99), "cannot be read"),
        (b"\x1f\x8b\x00 no gzip", "cannot be read"),
        (b"x" * 600, "not a readable tar"),
    ],
    ids=["zstd", "cut off", "damaged", "no gzip", "no tar"],
)
def test_invalid_layer_is_a_build_error(blobs, rewriter, layer, why):
    config = blobs.put({"rootfs": {"diff_ids": [digest(layer)]}})
    image = blobs.put({"config": config, "layers": [blobs.layer(layer)]})
    for _ in range(2):
        with pytest.raises(BuildError, match=why):
            rewriter.image(image["digest"], ORDER, set())
