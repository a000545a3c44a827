"""Two builds of an image: differences are named with their place."""

import gzip
import io
import json
import tarfile

import pytest
from distribution import digest

from imagematrix.build.executor.image_difference import compare_with_stored, find_difference
from imagematrix.build.plan.protocols import StoredImageInfo
from imagematrix.errors import BuildError
from imagematrix.images.catalog import labels
from imagematrix.images.oci.layout import LayoutImage


def layer(*files):
    """Return a layer of `files`, each a name, its bytes and other attributes of its header."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data, facts in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for fact, value in facts.items():
                setattr(info, fact, value)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def image(tmp_path):
    """Call it with layers, and optionally a configuration, to get an image."""

    def call(*layers, config=b"{}"):
        blobs = tmp_path / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        manifest = {
            "config": {"digest": digest(config), "size": len(config)},
            "layers": [{"digest": digest(layer), "size": len(layer)} for layer in layers],
        }
        raw = json.dumps(manifest).encode()
        for blob in (*layers, config, raw):
            (blobs / digest(blob)[7:]).write_bytes(blob)
        return LayoutImage(tmp_path, digest(raw))

    return call


A: tuple[str, bytes, dict[str, str]] = ("a", b"1", {})
B: tuple[str, bytes, dict[str, str]] = ("b", b"2", {})


def test_identical_images_do_not_differ(image):
    assert find_difference(image(layer(A, B)), image(layer(A, B))) is None


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([A, ("b", b"3", {})], "b differs in content"),
        ([A, ("b", b"2", {"mode": 0o755})], "b differs in mode"),
        ([A, ("b", b"2", {"mtime": 5})], "b differs in time"),
        ([A, ("b", b"2", {"uid": 5})], "b differs in owner"),
        ([A, ("b", b"2", {"gid": 5})], "b differs in owner"),
        ([A, ("b", b"3", {"mode": 0, "mtime": 5})], "b differs in mode and time and content"),
        ([A, ("b", b"", {"type": tarfile.SYMTYPE, "linkname": "a"})], "kind and target and content"),
        ([A], "one has b where the other has nothing more"),
        ([A, B, ("c", b"", {})], "one has nothing more where the other has c"),
        ([B, A], "one has a where the other has b"),
    ],
)
def test_first_differing_file_is_named(image, other, expected):
    base = layer(("base", b"", {}))
    result = find_difference(image(base, layer(A, B)), image(base, layer(*other)))
    assert result.startswith("layer 2 of 2: ")
    assert result.endswith(expected)


def test_different_compression_is_reported(image):
    plain = layer(A)
    result = find_difference(image(gzip.compress(plain, 1, mtime=0)), image(gzip.compress(plain, 9, mtime=0)))
    assert result == "layer 1 of 1: the files are the same, but in another order or compression"


def test_different_number_of_layers_is_reported(image):
    assert find_difference(image(layer(A)), image(layer(A), layer(B))) == "one has 1 layers, the other 2"
    assert find_difference(image(layer(A), layer(B)), image(layer(A))) == "one has 2 layers, the other 1"


def test_different_configuration_is_reported(image):
    result = find_difference(image(layer(A)), image(layer(A), config=b'{"a": 1}'))
    assert result == "the layers are the same, but the configuration differs"


def configure(*, architecture="amd64", by="us", **changes):
    """Return a configuration with a label of its content."""
    own_labels = {"by": by}
    document = {"os": "linux", "architecture": architecture, "rootfs": {"diff_ids": ["sha256:1"]}}
    document["config"] = {"Env": ["PATH=/bin"], "Labels": own_labels} | changes
    own_labels[labels.CONTENT] = labels.hash_content(document)
    return document


@pytest.mark.parametrize(
    "changes",
    [
        {"Env": ["PATH=/bin", "LD_PRELOAD=/theirs.so"]},
        {"Entrypoint": ["/theirs"]},
        {"User": "0"},
        {"architecture": "arm64"},
    ],
)
@pytest.mark.parametrize("is_labelled_as_ours", [True, False])
def test_a_stored_image_with_other_settings_is_another_one(image, changes, is_labelled_as_ours):
    """Whatever it says of itself: who may push it writes its labels, too."""
    built, stored = configure(), configure(**changes)
    if is_labelled_as_ours:
        stored["config"]["Labels"] = built["config"]["Labels"]
    again = image(layer(A), config=json.dumps(built).encode())
    info = StoredImageInfo(digest="sha256:0", layers=("sha256:1",), configuration=stored)
    with pytest.raises(BuildError, match="the layers are those of the stored image sha256:0, but"):
        compare_with_stored(info, again)


def test_a_stored_image_may_have_other_labels_or_another_compression(image):
    again = image(layer(A), config=json.dumps(configure()).encode())
    relabelled, same = (
        StoredImageInfo(digest="sha256:0", layers=("sha256:1",), configuration=configuration)
        for configuration in (configure(by="an earlier release"), configure())
    )
    assert compare_with_stored(relabelled, again) is None
    assert "other compressed layers" in compare_with_stored(same, again)
