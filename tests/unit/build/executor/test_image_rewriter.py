"""Clamping the times in layers: each layer once, those of the base never."""

import gzip
import io
import json
import os
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from building import TAR, digest

from imagematrix.build.executor import image_rewriter
from imagematrix.build.executor.image_rewriter import Rewriter, label_image
from imagematrix.build.plan.protocols import BuiltImage
from imagematrix.errors import BuildError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.labels import hash_content
from imagematrix.images.oci.compression import DEFAULT, Compression
from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.manifest import ATTESTED
from imagematrix.images.oci.mtimes import clamp_mtimes as clamped_tar


def tar(name, time, size=0, content=b""):
    content = content or bytes(size)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.mtime, info.size = time, len(content)
        archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


OWN = {labels.CELL: "a", "by": "us"}


class Blobs:
    """The blobs of a layout."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True)

    def put(self, raw):
        raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
        (self.folder / digest(raw).removeprefix("sha256:")).write_bytes(raw)
        return {"digest": digest(raw), "size": len(raw)}

    def image(self, *layers, history=None, **more):
        """Write an image with layers, compressed or not, and return its descriptor."""
        diff_ids = [digest(unpacked(raw)) for raw in layers]
        config = {
            "architecture": "amd64",
            "config": {"Labels": {"of": "the base", "by": "somebody"}},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            **({"history": history} if history else {}),
        }
        return self.put(
            {"schemaVersion": 2, "config": self.put(config), "layers": list(map(self.layer, layers)), **more}
        )

    def layer(self, raw):
        kinds = {b"\x1f": f"{TAR}+gzip", b"\x28": f"{TAR}+zstd"}
        return {"mediaType": kinds.get(raw[:1], TAR), **self.put(raw)}

    def read(self, name):
        raw = (self.folder / name.removeprefix("sha256:")).read_bytes()
        assert name == digest(raw)
        return raw

    def json(self, name):
        return json.loads(self.read(name))


def unpacked(raw):
    return DecompressedStream(io.BytesIO(raw)).read()


@pytest.fixture
def blobs(tmp_path):
    return Blobs(tmp_path / "blobs" / "sha256")


@pytest.fixture
def rewriter(blobs):
    return Rewriter(blobs.folder, 0)


def rewritten(rewriter, *arguments):
    """Return the new digest of an image without attestations."""
    image, attested = rewriter.rewrite_image(*arguments)
    assert attested is None
    return image


def test_rewritten_image_refers_to_its_new_layers(blobs, rewriter):
    base = gzip.compress(tar("base", 5))
    before = blobs.image(base, gzip.compress(tar("a", 7, 3_000_000)), tar("b", 0), annotations={"a": "b"})
    kept = {digest(base)}
    after = blobs.json(rewritten(rewriter, before["digest"], kept, DEFAULT))
    assert after["annotations"] == {"a": "b"}
    assert after["layers"][0] == blobs.json(before["digest"])["layers"][0], "a base keeps its layers"
    config = blobs.json(after["config"]["digest"])
    assert after["config"]["size"] == len(blobs.read(after["config"]["digest"]))
    assert config["architecture"] == "amd64"
    assert config["config"]["Labels"] == {"of": "the base", "by": "somebody"}
    for layer, diff_id in zip(after["layers"], config["rootfs"]["diff_ids"], strict=True):
        raw = blobs.read(layer["digest"])
        assert len(raw) == layer["size"]
        assert digest(unpacked(raw)) == diff_id
    times = [times_of(blobs, layer) for layer in after["layers"]]
    assert times == [[5], [0], [0]]
    assert [layer["mediaType"] for layer in after["layers"]] == [f"{TAR}+gzip", *[f"{TAR}+zstd"] * 2]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["tar", "gzip", "zstd"])
@pytest.mark.parametrize("level", [1, 9])
@pytest.mark.parametrize("kind", ["zstd", "gzip"])
def test_layers_of_any_compression_get_that_of_the_image(blobs, rewriter, kind, level, pack):
    own = tar("own", 5, content=b"".join(b"%d\n" % number for number in range(300_000)))
    before = blobs.image(pack(own))
    wanted = Compression(type=kind, level=level)
    image = rewritten(rewriter, before["digest"], set(), wanted)
    (layer,) = blobs.json(image)["layers"]
    assert layer["mediaType"] == f"{TAR}+{kind}"
    raw = blobs.read(layer["digest"])
    assert raw.startswith(b"\x1f\x8b" if kind == "gzip" else b"\x28\xb5\x2f\xfd")
    assert times_of(blobs, layer) == [0]
    assert rewritten(rewriter, before["digest"], set(), Compression(type=kind, level=5)) != image
    assert rewritten(rewriter, before["digest"], set(), wanted) == image


def test_images_of_one_layer_may_have_two_compressions(blobs, rewriter):
    before = blobs.image(tar("own", 5, 1_000_000))["digest"]
    images = [
        blobs.json(rewritten(rewriter, before, set(), wanted))
        for wanted in (DEFAULT, Compression(type="gzip", level=6))
    ]
    assert [image["layers"][0]["mediaType"] for image in images] == [f"{TAR}+zstd", f"{TAR}+gzip"]
    assert len({blobs.json(image["config"]["digest"])["rootfs"]["diff_ids"][0] for image in images}) == 1


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
            rewritten(Rewriter(blobs.folder, 0), before["digest"], (), DEFAULT)
        assert f"free disk space in {disk} " in caught.value.remedy
        assert set(disk.rglob("*")) == files
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_labels_are_added_to_an_image_with_its_layers(blobs, tmp_path):
    before = blobs.image(gzip.compress(tar("a", 0)), annotations={"a": "b"})["digest"]
    made = label_image(BuiltImage(digest=before, layout=tmp_path, stored_layers=frozenset("x")), OWN)
    assert made == BuiltImage(digest=made.digest, layout=tmp_path, stored_layers=frozenset("x"))
    first, second = blobs.json(before), blobs.json(made.digest)
    assert second["annotations"] == {"a": "b", labels.CELL: "a"}
    assert second["layers"] == first["layers"]
    assert second["config"]["size"] == len(blobs.read(second["config"]["digest"]))
    config = blobs.json(second["config"]["digest"])
    own = {"of": "the base", **OWN, labels.CONTENT: hash_content(config)}
    assert config["config"]["Labels"] == own, "of the base, too"
    assert label_image(made, OWN) == made, "labels that an image has already change nothing"
    assert label_image(BuiltImage(digest=before), OWN) == BuiltImage(digest=before), (
        "the engine's store has labelled it"
    )


def test_labels_of_another_image_of_imagematrix_are_dropped(blobs, tmp_path):
    """Those of its base, or of an earlier version, exempt files from the audit or state other terms."""
    others = {labels.OPTIONAL: '["*"]', labels.DEVELOPMENT: "true", labels.DEFAULTS: "{}"}
    before = blobs.image(gzip.compress(tar("a", 0)), annotations=others)["digest"]
    base = label_image(BuiltImage(digest=before, layout=tmp_path), others)
    made = blobs.json(label_image(base, OWN).digest)
    assert made["annotations"] == {labels.CELL: "a"}
    config = blobs.json(made["config"]["digest"])
    assert config["config"]["Labels"] == {"of": "the base", **OWN, labels.CONTENT: hash_content(config)}


def times_of(blobs, layer):
    with tarfile.open(fileobj=io.BytesIO(unpacked(blobs.read(layer["digest"])))) as archive:
        return [member.mtime for member in archive]


def test_base_layers_are_not_rewritten(blobs, rewriter):
    base, own = tar("base", 5), tar("own", 5)
    before = blobs.image(base, own)
    after = blobs.json(rewritten(rewriter, before["digest"], {digest(base)}, DEFAULT))
    assert [times_of(blobs, layer) for layer in after["layers"]] == [[5], [0]]
    assert after["layers"][0] == blobs.json(before["digest"])["layers"][0]
    assert [layer["mediaType"] for layer in after["layers"]] == [TAR, f"{TAR}+zstd"]
    first = blobs.json(after["config"]["digest"])["rootfs"]["diff_ids"][0]
    assert first == digest(base) == after["layers"][0]["digest"]
    on_another = blobs.json(rewritten(rewriter, before["digest"], set(), DEFAULT))
    assert [times_of(blobs, layer) for layer in on_another["layers"]] == [[0], [0]], (
        "here it is not part of the base"
    )


def test_equal_files_with_other_times_give_the_same_image(blobs, rewriter):
    first, second = (blobs.image(gzip.compress(tar("a", time), mtime=time)) for time in (5, 9))
    assert first["digest"] != second["digest"]
    made = {rewritten(rewriter, one["digest"], set(), DEFAULT) for one in (first, second)}
    assert len(made) == 1
    assert made == {rewritten(Rewriter(blobs.folder, 0), first["digest"], set(), DEFAULT)}
    assert made == {rewritten(rewriter, made.copy().pop(), set(), DEFAULT)}, "nothing is left to rewrite"


def test_shared_layer_is_rewritten_once(blobs, rewriter, monkeypatch):
    calls = []
    together = threading.Barrier(4)

    def clamped(file, latest, real=clamped_tar):
        calls.append(latest)
        return real(file, latest)

    monkeypatch.setattr(image_rewriter, "clamp_mtimes", clamped)
    shared = tar("shared", 5)
    images = [blobs.image(shared, tar(f"own{number}", 5))["digest"] for number in range(4)]

    def make(image):
        together.wait(10)
        return rewritten(rewriter, image, set(), DEFAULT)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(make, images))) == 4
    assert len(calls) == 1 + 4


def test_attestations_refer_to_the_new_image(blobs, rewriter, tmp_path):
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
    made, index = rewriter.rewrite_image(index["digest"], {digest(base)}, DEFAULT)
    assert made == rewritten(rewriter, image["digest"], {digest(base)}, DEFAULT), (
        "with and without attestations"
    )
    refers_to_the_image(blobs, index, made)
    both = label_image(BuiltImage(digest=made, layout=tmp_path, attested=index), OWN)
    alone = label_image(BuiltImage(digest=made, layout=tmp_path), OWN)
    assert (both.digest, alone.attested) == (alone.digest, None)
    assert both.digest != made
    refers_to_the_image(blobs, both.attested, both.digest)


def refers_to_the_image(blobs, index, made):
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
        (b"\x28\xb5\x2f\xfd rest", "cannot be read"),
        (
            zstandard.compress(tar("a", 5, content=os.urandom(900_000)))[:400_000],
            "not a readable tar: it is truncated",
        ),
        (gzip.compress(tar("a", 5))[:-20], "cannot be read"),
        (gzip.compress(tar("a", 5))[:40] + b"xxxxxxx" + bytes(99), "cannot be read"),
        (b"\x1f\x8b\x00 no gzip", "cannot be read"),
        (b"x" * 600, "not a readable tar"),
    ],
    ids=["no zstd", "zstd cut off", "cut off", "damaged", "no gzip", "no tar"],
)
def test_invalid_layer_is_a_build_error(blobs, rewriter, layer, why):
    config = blobs.put({"rootfs": {"diff_ids": [digest(layer)]}})
    image = blobs.put({"config": config, "layers": [blobs.layer(layer)]})
    for _ in range(2):
        with pytest.raises(BuildError, match=why):
            rewritten(rewriter, image["digest"], set(), DEFAULT)


@pytest.mark.parametrize("own", ["EXPOSE map[80/tcp:{}]", "EXPOSE [80/tcp]"])
def test_history_has_only_steps_with_layers_after_the_base(tmp_path, own):
    blobs = Blobs(tmp_path / "blobs")
    base, added = tar("base", 5), tar("added", 5)
    history = [
        {"created_by": "ADD base"},
        {"created_by": "EXPOSE map[80/tcp:{}]", "empty_layer": True},
        {"created_by": "COPY base"},
        {"created_by": own, "empty_layer": True},
        {"created_by": "RUN add", "empty_layer": False},
        {"created_by": own, "empty_layer": True},
    ]
    second = tar("second", 5)
    image = blobs.image(base, second, added, history=history)
    kept = {digest(base), digest(second)}
    made = blobs.json(rewritten(Rewriter(blobs.folder, 0), image["digest"], kept, DEFAULT))
    config = blobs.json(made["config"]["digest"])
    assert config["history"] == [*history[:3], history[4]]
