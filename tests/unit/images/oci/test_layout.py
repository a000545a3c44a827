"""An OCI layout, and the archive for `docker load`."""

import io
import json
import os
import tarfile

import pytest

from imagematrix.errors import UsageError
from imagematrix.images.oci.layout import LayoutFolder, LayoutImage, get_blob_path


@pytest.fixture
def image(layout, tmp_path):
    return LayoutImage(tmp_path, layout(tmp_path, b"lower", b"upper"))


def unpacked(image, reference, layers):
    file = io.BytesIO(b"".join(image.stream_archive(reference, layers)))
    with tarfile.open(fileobj=file) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def test_layers_are_in_order(image):
    assert [path.read_bytes() for path in image.layer_files] == [b"lower", b"upper"]
    assert [f"sha256:{path.name}" for path in image.layer_files] == list(image.layers)


def test_archive_contains_the_image_and_requested_layers(image):
    files = unpacked(image, "training:v1-x", image.layers[1:])
    index = json.loads(files.pop("index.json"))
    (entry,) = index["manifests"]
    assert entry["digest"] == image.digest
    assert entry["annotations"] == {"io.containerd.image.name": "docker.io/library/training:v1-x"}
    manifest = files.pop(f"blobs/sha256/{image.digest[7:]}")
    assert entry["size"] == len(manifest)
    config = json.loads(manifest)["config"]["digest"]
    assert files == {
        f"blobs/sha256/{config[7:]}": image.get_blob_path(config).read_bytes(),
        f"blobs/sha256/{image.layers[1][7:]}": b"upper",
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
    }


@pytest.mark.parametrize(
    ("reference", "full"),
    [
        ("training:v1", "docker.io/library/training:v1"),
        ("ml/training:v1", "docker.io/ml/training:v1"),
        ("index.docker.io/ml/training:v1", "docker.io/ml/training:v1"),
        ("library/training:v1", "docker.io/library/training:v1"),
        ("reg.example/ml/training:v1", "reg.example/ml/training:v1"),
        ("reg:5000/training:v1", "reg:5000/training:v1"),
        ("localhost/training:v1", "localhost/training:v1"),
    ],
)
def test_archive_has_the_fully_qualified_name(image, reference, full):
    index = json.loads(unpacked(image, reference, ())["index.json"])
    assert index["manifests"][0]["annotations"]["io.containerd.image.name"] == full


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    folder, digest = LayoutFolder(tmp_path, UsageError), f"sha256:{'0' * 64}"
    blob = get_blob_path(tmp_path, digest)
    blob.parent.mkdir(parents=True)
    for path in (tmp_path / "index.json", blob):
        make(path)
    with pytest.raises(UsageError, match=r"index\.json is no file"):
        folder.read_index()
    with pytest.raises(UsageError, match=f"{blob.name} cannot be read"):
        folder.open(digest)
    assert folder.find_small_blob(digest) is None
