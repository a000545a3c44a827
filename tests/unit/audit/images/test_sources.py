"""Reading images from layouts, archives, an engine and a registry."""

import bz2
import contextlib
import errno
import gzip
import itertools
import json
import lzma
import os
import tarfile
import threading
from pathlib import Path

import pytest
import zstandard
from distribution import Server
from images import Parts, archived, digest, index, layout, link, saved, saved_with_blobs, sparse, tar
from publishing import labels_of

from imagematrix.audit.images.layers import Layers
from imagematrix.audit.images.sources import read_images
from imagematrix.audit.report import audit_image
from imagematrix.errors import AuditError, EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.oci.manifest import INDEX

CUBIN = (Path(__file__).parents[1] / "data" / "80.cubin").read_bytes()
LAYER = tar(("k.cubin", CUBIN))
OTHER = tar(("opt/text", b"text"))
PLATFORM = "linux/amd64"


@pytest.fixture
def one():
    return Parts(LAYER, OTHER, labels={"a": "b"}, env=["LD_LIBRARY_PATH=/opt:/usr/lib", "EMPTY"])


def images(reference, layers=None, platform=PLATFORM):
    return list(read_images(reference, platform, layers or Layers()))


def only(reference):
    (result,) = images(reference)
    assert audit_image(result).cubins == ("80",)
    return result


def test_oci_layout_is_read(one, tmp_path):
    image = only(layout(tmp_path / "oci", one))
    assert (image.digest, image.platform) == (one.digest, PLATFORM)
    assert image.labels == {"a": "b"}
    assert image.environment == {"LD_LIBRARY_PATH": "/opt:/usr/lib", "EMPTY": ""}
    assert list(image.sizes) == one.layers


def test_oci_archive_is_read(one, tmp_path):
    assert only(archived(tmp_path / "a.tar", one)).digest == one.digest


def test_docker_save_archive_is_read(one, tmp_path):
    image = only(saved(tmp_path / "a.tar", one, LAYER, OTHER))
    assert (image.digest, image.sizes) == (one.config, {})


@pytest.mark.parametrize("packed", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("write", [archived, lambda path, one: saved(path, one, LAYER, OTHER)])
def test_compressed_archive_is_read(one, tmp_path, write, packed):
    path = Path(write(tmp_path / "a.tar", one))
    plain = only(str(path))
    path.write_bytes(packed(path.read_bytes()))
    assert only(str(path)) == plain


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[: len(raw) // 2], lambda raw: raw[:40] + b"\xff" * 40 + raw[80:]]
)
@pytest.mark.parametrize("packed", [gzip.compress, zstandard.compress])
def test_damaged_compressed_archive_is_rejected(one, tmp_path, packed, damage):
    path = Path(archived(tmp_path / "a.tar", one))
    path.write_bytes(damage(packed(path.read_bytes())))
    with pytest.raises(AuditError, match="cannot be read"):
        images(str(path))


@pytest.mark.parametrize(("packed", "name"), [(bz2.compress, "bzip2"), (lzma.compress, "xz")])
def test_unsupported_compression_is_named(one, tmp_path, packed, name):
    path = Path(archived(tmp_path / "a.tar", one))
    path.write_bytes(packed(path.read_bytes()))
    with pytest.raises(AuditError) as raised:
        images(str(path))
    assert str(raised.value) == f"the archive {path} cannot be read: compression {name} is not supported"
    assert "gzip or zstd" in raised.value.remedy


def test_docker_save_archive_with_manifests_is_read(one, tmp_path):
    image = only(saved_with_blobs(tmp_path / "a.tar", one, ("index.json", index(one.entry()))))
    assert image.digest == one.digest
    assert image.sizes == {own: len(one.blobs[own]) for own in one.layers}


def test_linked_layers_of_docker_save_are_read(tmp_path):
    one = Parts(LAYER, LAYER)
    path = tmp_path / "a.tar"
    listed = [{"Config": "c.json", "RepoTags": [], "Layers": ["1/layer.tar", "2/layer.tar"]}]
    path.write_bytes(
        tar(
            ("1/layer.tar", LAYER),
            link("2/layer.tar", "../1/layer.tar"),
            ("c.json", one.blobs[one.config]),
            ("manifest.json", json.dumps(listed).encode()),
        )
    )
    assert len(only(str(path)).layers) == 2


@pytest.mark.parametrize("layers", [(LAYER,), (OTHER, LAYER), (LAYER, LAYER), (LAYER, OTHER, OTHER)])
def test_layers_that_do_not_match_the_configuration_are_rejected(one, tmp_path, layers):
    with pytest.raises(AuditError, match="do not match its configuration"):
        images(saved(tmp_path / "a.tar", one, *layers))


def test_blobs_that_do_not_match_the_manifest_are_rejected(one, tmp_path):
    with pytest.raises(AuditError, match="do not match its configuration"):
        images(saved_with_blobs(tmp_path / "a.tar", one, layers=one.layers[::-1]))


def test_compressed_layer_without_a_digest_gets_the_digest_of_its_tar(one, tmp_path):
    """As Bazel and Jib write them."""
    path = saved(tmp_path / "a.tar", one, gzip.compress(LAYER), OTHER)
    (image,) = images(path)
    assert [layer.digest for layer in image.layers] == one.diffs
    (file,) = audit_image(image).files
    assert file.layer == one.diffs[0]


def test_shared_layer_is_read_once(one, tmp_path):
    seen: list[int] = []
    layers = Layers(on_read=seen.append)
    images(layout(tmp_path / "1", one), layers)
    first = sum(seen)
    images(layout(tmp_path / "2", one, Parts(LAYER), entries=[one.entry()]), layers)
    assert sum(seen) == first == sum(len(one.blobs[layer]) for layer in one.layers)


@pytest.fixture
def several():
    return Parts(LAYER), Parts(OTHER, architecture="arm64")


def test_foreign_index_has_one_image_per_platform(several, tmp_path):
    entries = [
        image.entry(platform={"os": "linux", "architecture": arch})
        for image, arch in zip(several, ("amd64", "arm64"), strict=True)
    ]
    attestation = several[0].entry(annotations={"vnd.docker.reference.type": "attestation-manifest"})
    path = layout(tmp_path / "oci", *several, entries=[*entries, attestation])
    assert [image.platform for image in images(path)] == ["linux/amd64"]
    assert [image.platform for image in images(path, platform="linux/arm64")] == ["linux/arm64"]
    with pytest.raises(UnknownImageError, match="no image for linux/s390x"):
        images(path, platform="linux/s390x")


def test_published_index_contains_all_variants(tmp_path):
    several = [Parts(layer, labels={labels.VARIANT: "{}"}) for layer in (LAYER, OTHER)]
    entries = [image.entry(annotations={labels.VARIANT: "{}"}) for image in several]
    path = layout(tmp_path / "oci", *several, entries=entries)
    assert [image.reference for image in images(path)] == [f"{path}@{image.digest}" for image in several]


@pytest.mark.parametrize(
    ("stated", "differing"),
    [
        ({labels.VARIANT: '{"march": "x86-64"}'}, labels.VARIANT),
        ({labels.PREFER: "cpu-flags"}, labels.PREFER),
        ({labels.DEFAULTS: None}, labels.DEFAULTS),
        ({labels.VARIANT: None, labels.WARM: "{}"}, labels.WARM),
    ],
)
def test_index_with_other_labels_than_those_of_its_images_is_rejected(tmp_path, stated, differing):
    """A selection reads the annotations of the index, which covers the digests but not the labels."""
    own = labels_of("cpu", DEFAULTS="{}")
    image = Parts(OTHER, labels=own)
    published = {name: text for name, text in own.items() if name != labels.INPUTS}
    changed = {name: text for name, text in (published | stated).items() if text is not None}
    path = layout(tmp_path / "oci", image, entries=[image.entry(annotations=changed)])
    with pytest.raises(AuditError, match=f"{path} states another {differing} of {image.digest}"):
        images(path)
    assert len(images(layout(tmp_path / "same", image, entries=[image.entry(annotations=published)]))) == 1


def test_index_of_a_version_that_another_tool_changed_is_rejected(tmp_path):
    own = labels_of("cpu")
    image = Parts(OTHER, labels=own)
    inner = index(image.entry(annotations=own))
    image.blobs[digest(inner)] = inner
    entry = {"mediaType": INDEX, "digest": digest(inner), "size": len(inner)}
    with pytest.raises(TagMovedError, match=r"as imagematrix published it: .* does not state its entries"):
        images(layout(tmp_path / "oci", image, entries=[entry]))


def test_every_name_of_a_layout_is_an_image(several, tmp_path):
    """As skopeo and umoci write them, with or without platforms; one of them has two names."""
    tag, name = "org.opencontainers.image.ref.name", "io.containerd.image.name"
    first, second = several
    inner = index(second.entry(platform={"os": "linux", "architecture": "arm64"}))
    second.blobs[digest(inner)] = inner
    nested = {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": digest(inner), "size": 1}
    entries = [
        first.entry(annotations={tag: "v1"}),
        {**nested, "annotations": {tag: "v2", name: "docker.io/ml/t:v2"}},
        first.entry(annotations={tag: "latest"}),
    ]
    path = layout(tmp_path / "oci", *several, entries=entries)
    assert [(image.reference, image.names) for image in images(path)] == [
        (f"{path}@{first.digest}", ()),
        (f"{path}@{second.digest}", ("docker.io/ml/t:v2",)),
    ]


@pytest.mark.parametrize("more", [{}, {"platform": {"os": "linux", "architecture": "amd64"}}])
def test_unnamed_images_for_the_same_platform_are_all_read(several, tmp_path, more):
    """As crane writes several images into one layout."""
    path = layout(tmp_path / "oci", *several, entries=[image.entry(**more) for image in several])
    assert [image.digest for image in images(path)] == [image.digest for image in several]


def test_empty_layout_has_no_image(tmp_path):
    with pytest.raises(UnknownImageError, match="has no image for linux/amd64"):
        images(layout(tmp_path / "oci", entries=[]))


def test_nested_indexes_are_followed(one, tmp_path):
    inner = index(one.entry())
    one.blobs[digest(inner)] = inner
    entry = {"mediaType": "application/vnd.oci.image.index.v1+json", "digest": digest(inner), "size": 1}
    assert only(layout(tmp_path / "oci", one, entries=[entry])).digest == one.digest


@pytest.mark.usefixtures("no_engine", "no_pause")
def test_image_is_read_from_a_registry(one):
    with contextlib.closing(Server()) as server:
        repository = server.repository("ml/t")
        repository.blobs |= one.blobs
        repository.put("v1", one.raw, "application/vnd.oci.image.manifest.v1+json")
        reference = f"{server.address}/ml/t:v1"
        assert only(reference).digest == one.digest
        server.basic = "Basic never"
        with pytest.raises(EngineError, match="denies access"):
            images(reference)
        server.basic = None
        with pytest.raises(UnknownImageError, match="has no"):
            images(f"{server.address}/ml/t:v2")
        server.fails("GET", f"blobs/{one.layers[0]}", cut=True, times=30)
        with pytest.raises(EngineError, match="truncates its answers"):
            images(reference)
        server.faults.clear()
        server.fails("GET", f"blobs/{one.layers[0]}", status=500, times=30)
        with pytest.raises(EngineError, match="answered 500"):
            images(reference)
        server.faults.clear()
        server.fails("GET", f"blobs/{one.layers[0]}", drop=True, times=3)
        with pytest.raises(EngineError, match="cannot be reached"):
            images(reference)
        del repository.blobs[one.layers[0]]
        with pytest.raises(UnknownImageError, match="has no"):
            images(reference)


def test_blob_with_a_wrong_digest_is_rejected(one, tmp_path):
    one.blobs[one.layers[0]] = one.blobs[one.layers[1]]
    with pytest.raises(AuditError, match="does not match its digest"):
        images(layout(tmp_path / "oci", one))
    with pytest.raises(AuditError, match="does not match its digest"):
        images(archived(tmp_path / "a.tar", one))
    one.blobs[one.config] = b"{}"
    with pytest.raises(AuditError, match="does not match its digest"):
        images(layout(tmp_path / "other", one))


@pytest.mark.parametrize("kind", [layout, archived])
@pytest.mark.parametrize("which", ["config", "digest"])
def test_configuration_or_manifest_with_a_wrong_digest_is_rejected(one, tmp_path, kind, which):
    own = getattr(one, which)
    one.blobs[own] = json.dumps(json.loads(one.blobs[own]) | {"annotations": {"a": "b"}}).encode()
    with pytest.raises(AuditError, match=f"the content of blob {own} does not match its digest"):
        images(kind(tmp_path / "image", one))


def test_saved_configuration_with_a_wrong_digest_is_rejected(one, tmp_path):
    with pytest.raises(AuditError, match="does not match its digest"):
        images(saved_with_blobs(tmp_path / "a.tar", one, layers=(), blobs={one.config: b"{}"}))


@pytest.mark.parametrize("lost", ["config", "layers"])
def test_missing_blob_is_rejected(one, tmp_path, lost):
    del one.blobs[one.config if lost == "config" else one.layers[0]]
    with pytest.raises(AuditError, match=r"cannot be read|not found in"):
        images(layout(tmp_path / "oci", one))
    with pytest.raises(AuditError, match="not found in the archive"):
        images(archived(tmp_path / "a.tar", one))


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"{",
        b'{"manifests": 1}',
        b'{"manifests": [{"digest": "sha256:../../etc/passwd"}]}',
        b'{"layers": [], "config": null}',
        b'{"layers": [{"digest": 1}], "config": {"digest": "x"}}',
        json.dumps({"manifests": [{"digest": digest(b"")}] * 2000}).encode(),
        b" " * (5 << 20),
    ],
)
def test_invalid_index_is_rejected(one, tmp_path, raw):
    path = Path(layout(tmp_path / "oci", one))
    (path / "index.json").write_bytes(raw)
    with pytest.raises(AuditError):
        images(str(path))


def test_recursive_index_is_rejected(one, tmp_path):
    entry = one.entry()
    for _ in range(6):
        raw = index(entry)
        one.blobs[digest(raw)] = raw
        entry = {"mediaType": "index", "digest": digest(raw), "size": len(raw)}
    with pytest.raises(AuditError, match="nested too deeply"):
        images(layout(tmp_path / "oci", one, entries=[entry]))


@pytest.mark.parametrize("raw", [b"", b"text" * 1000, tar("a/b"), tar(("manifest.json", b"{}"))])
def test_file_that_is_not_an_image_is_rejected(tmp_path, raw):
    path = tmp_path / "file"
    path.write_bytes(raw)
    with pytest.raises((AuditError, UnknownImageError)):
        images(str(path))


def test_folder_that_is_not_a_layout_is_rejected(tmp_path):
    with pytest.raises(UnknownImageError, match="not an OCI layout: oci-layout not found"):
        images(str(tmp_path))


@pytest.mark.parametrize("kind", [archived, layout])
def test_image_that_cannot_be_opened_is_rejected(one, tmp_path, monkeypatch, kind):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    path = kind(tmp_path / "image", one)
    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(AuditError, match=r"image cannot be read: Permission denied"):
        images(path)


def test_archive_may_come_through_a_pipe(one, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    raw = Path(archived(tmp_path / "a.tar", one)).read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(raw,))
    writer.start()
    assert only(str(pipe)).digest == one.digest
    writer.join()


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000 + "a:v1"])
def test_reference_too_long_for_a_path_is_an_image_name(name):
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        images(name)


def test_truncated_archive_is_rejected(one, tmp_path):
    path = Path(archived(tmp_path / "a.tar", one))
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises((AuditError, UnknownImageError)):
        images(str(path))


def test_archive_with_too_many_files_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("imagematrix.images.oci.archive.MOST", 3)
    path = tmp_path / "a.tar"
    path.write_bytes(tar(*map(str, range(9))))
    with pytest.raises(AuditError, match="more than 3 files"):
        images(str(path))


def test_archive_with_a_huge_sparse_file_is_rejected(tmp_path):
    """It takes a kilobyte, and would be read as a layer of any size."""
    path = tmp_path / "a.tar"
    path.write_bytes(sparse(1 << 30, name="layer.tar", byte=b"\0"))
    with pytest.raises(AuditError, match=r"a.tar cannot be read: the sparse file layer.tar is too large"):
        images(str(path))


def test_archive_with_too_many_documents_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("imagematrix.images.oci.archive.ALL_DOCUMENTS", 30)
    path = tmp_path / "a.tar"
    path.write_bytes(tar(*((str(name), b"{" + 9 * b" " + b"}") for name in range(3))))
    with pytest.raises(AuditError, match="more than 30 bytes of documents"):
        images(str(path))


def test_invalid_layer_is_an_error_only_if_an_image_lists_it(one, tmp_path):
    junk = b"\x01junk"
    one.blobs[digest(junk)] = junk
    assert only(archived(tmp_path / "a.tar", one)).digest == one.digest
    bad = Parts(tarfile.NUL * 3, packed=lambda _: junk)
    with pytest.raises(AuditError, match="the layer"):
        images(archived(tmp_path / "b.tar", bad))


@pytest.mark.usefixtures("no_engine")
def test_unreachable_engine_and_registry_are_errors():
    with pytest.raises(EngineError):
        images("training:v1")
    with pytest.raises(EngineError):
        images("127.0.0.1:1/training:v1")
    with pytest.raises(UsageError):
        images("127.0.0.1:1/Training:v1")


def test_image_not_in_the_engine_is_unknown(engine):
    engine.images = []
    with pytest.raises(UnknownImageError, match="the engine has no image"):
        images("training:v1")


def test_image_is_read_from_the_engine(engine, one, tmp_path):
    path = Path(saved(tmp_path / "a.tar", one, LAYER, OTHER))
    engine.responses["GET", "/json"] = 200, json.dumps({"Id": one.config}).encode()
    engine.responses["GET", "/get"] = 200, path.read_bytes()
    assert only("training:v1").digest == one.config


def test_image_whose_name_moves_while_it_is_read_is_read_again(engine, one, tmp_path):
    """The digest of one image must not be reported with the bytes of another."""
    other = Parts(LAYER)
    meanings = [(other, (LAYER,)), (one, (LAYER, OTHER))]

    def mean(image, layers):
        engine.responses["GET", "/json"] = 200, json.dumps({"Id": image.config}).encode()
        path = Path(saved(tmp_path / "a.tar", image, *layers))
        engine.responses["GET", "/get"] = 200, path.read_bytes()

    mean(*meanings[0])
    engine.before_response["GET", "/get"] = lambda: mean(*meanings[1])
    assert only("training:v1").digest == one.config
    turns = itertools.cycle(meanings)
    engine.before_response["GET", "/get"] = lambda: mean(*next(turns))
    with pytest.raises(EngineError, match="keeps changing"):
        images("training:v1")


def test_invalid_manifests_of_the_classic_store_are_ignored(engine, one, tmp_path):
    path = saved_with_blobs(tmp_path / "a.tar", one, ("index.json", index(one.entry())))
    engine.responses["GET", "/json"] = 200, json.dumps({"Id": one.config}).encode()
    engine.responses["GET", "/get"] = 200, Path(path).read_bytes()
    assert only("training:v1").digest == one.config
    engine.responses["GET", "/json"] = 200, json.dumps({"Id": one.digest}).encode()
    assert only("training:v1").digest == one.digest
