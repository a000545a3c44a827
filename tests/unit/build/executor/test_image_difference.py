"""Two builds of an image: differences are named with their place."""

import gzip
import io
import json
import tarfile

import pytest
from distribution import digest

from imagematrix.build.executor.image_difference import find_difference
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
