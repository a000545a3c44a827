"""What a warm-up leaves for `publish --warm`, in a folder and in a staging repository."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from distribution import Server

from imagematrix.errors import EngineError, TagMovedError, UsageError
from imagematrix.images.catalog.warm_image import WarmLabel, WarmMatch
from imagematrix.images.oci.compression import DEFAULT
from imagematrix.images.oci.manifest import compute_digest
from imagematrix.images.oci.registry import Registry
from imagematrix.images.warm.layer import WarmLayer
from imagematrix.launcher.warm_up.staged_image import (
    KeptWarmUp,
    find_staged_image,
    leave_on_error,
    make_new_folder,
    make_staged_image,
    push_staged_image,
    require_push,
    write_staged_layout,
)

BYTES = b"a layer"
TAG = "v1-warm-000000000000-111111111111"
KEY = f"sha256:{'1' * 64}"
LABEL = WarmLabel(
    base=f"sha256:{'0' * 64}",
    key=KEY,
    match=WarmMatch(),
    command=("train",),
    inputs=(),
    date="2026-11-29T12:00:00Z",
    seconds=(("cold", 2.0), ("warm", 1.0)),
    tools=(("numba", None),),
    proofs=(("image-user", "proved"),),
    why_not_reproducible="times",
)


@pytest.fixture
def make(tmp_path):
    """Call it to get a staged image; its label may have another date."""
    (tmp_path / "layer").write_bytes(BYTES)
    layer = WarmLayer(
        digest=compute_digest(BYTES),
        size=len(BYTES),
        diff_id=f"sha256:{'2' * 64}",
        unpacked=7,
        paths=("/var/cache/warm/x",),
        tools=("numba",),
    )

    def make_image(date=LABEL.date):
        label = WarmLabel.from_json({**LABEL.to_json(), "date": date})
        return make_staged_image(layer, tmp_path / "layer", label, DEFAULT, "linux/arm64/v8")

    return make_image


@pytest.fixture
def server():
    with Server() as started:
        yield started


@pytest.fixture
def registry(server):
    with Registry(f"{server.address}/staging") as opened:
        yield opened


def test_a_layout_has_the_manifest_the_configuration_and_one_layer(make, tmp_path):
    image = make()
    write_staged_layout(image, TAG, tmp_path / "out")
    blobs = {path.name: path.read_bytes() for path in (tmp_path / "out/blobs/sha256").iterdir()}
    (entry,) = json.loads((tmp_path / "out/index.json").read_text())["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": TAG}
    manifest = json.loads(blobs.pop(entry["digest"].removeprefix("sha256:")))
    config = json.loads(blobs.pop(manifest["config"]["digest"].removeprefix("sha256:")))
    (layer,) = manifest["layers"]
    assert blobs == {layer["digest"].removeprefix("sha256:"): BYTES}
    assert layer["mediaType"] == "application/vnd.oci.image.layer.v1.tar+zstd"
    assert (config["os"], config["architecture"], config["variant"]) == ("linux", "arm64", "v8")
    (text,) = config["config"]["Labels"].values()
    assert json.loads(text) == LABEL.to_json()
    assert len(config["rootfs"]["diff_ids"]) == len(config["history"]) == 1


def test_a_layout_is_written_to_a_new_or_empty_folder_only(make, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new/folder", tmp_path / "empty"):
        with make_new_folder(folder):
            write_staged_layout(make(), TAG, folder)
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="no empty folder"), make_new_folder(taken):
            pass


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file/new", Path("/proc/new")):
        with (
            pytest.raises(UsageError, match=f"{folder} cannot be written") as raised,
            make_new_folder(folder),
        ):
            pytest.fail("it was taken")
        assert raised.value.remedy


def test_a_new_folder_goes_with_a_failed_warm_up(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new", tmp_path / "empty"):
        with pytest.raises(KeyboardInterrupt), make_new_folder(folder):
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["empty"]


def test_a_missing_right_to_push_is_found_before(registry, server):
    require_push(registry)
    server.fails("POST", "/blobs/uploads/", times=9, status=403)
    with pytest.raises(EngineError):
        require_push(registry)


def test_a_layout_that_cannot_be_written_is_removed(make, tmp_path):
    image = make()
    (tmp_path / "layer").unlink()
    with pytest.raises(FileNotFoundError), make_new_folder(tmp_path / "out"):
        write_staged_layout(image, TAG, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layout_whose_writing_is_interrupted_is_removed(make, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", interrupt)
    with pytest.raises(KeyboardInterrupt), make_new_folder(tmp_path / "out"):
        write_staged_layout(make(), TAG, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_two_that_write_to_one_folder_the_first_one_s_layout_stays(make, tmp_path):
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # both begin while it is empty
            stack.enter_context(make_new_folder(out))
        write_staged_layout(make(), TAG, out)
        before = {path: path.is_file() and path.read_bytes() for path in out.rglob("*")}
        with pytest.raises(UsageError, match="not empty any more") as raised:
            write_staged_layout(make("2026-11-29T12:00:01Z"), TAG, out)
    assert raised.value.remedy
    assert {path: path.is_file() and path.read_bytes() for path in out.rglob("*")} == before


def test_what_cannot_be_kept_is_left_in_a_folder(make, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "disk"))
    left: list[Path] = []
    with pytest.raises(EngineError, match="refused"), leave_on_error(make(), TAG, left.append):
        raise EngineError("refused")
    assert left == [*(tmp_path / "disk").iterdir()]
    assert (left[0] / "oci-layout").exists()
    with leave_on_error(make(), TAG, left.append):
        pass
    (tmp_path / "layer").unlink()
    with pytest.raises(EngineError, match="refused"), leave_on_error(make(), TAG, left.append):
        raise EngineError("refused")
    assert left == [*(tmp_path / "disk").iterdir()]


def test_an_image_is_staged_once(make, registry):
    assert find_staged_image(registry, TAG, KEY) is None
    image = make()
    staged = KeptWarmUp(digest=image.digest, label=image.label)
    assert push_staged_image(registry, image, TAG, KEY) == staged
    assert find_staged_image(registry, TAG, KEY) == staged
    assert push_staged_image(registry, make("2026-11-29T12:00:01Z"), TAG, KEY) == staged


@pytest.mark.parametrize("other", ["other key", "no label", "damaged label", "an index"])
def test_a_tag_of_something_else_is_not_taken(make, registry, server, other):
    if other == "an index":
        raw = b'{"schemaVersion": 2, "manifests": []}'
        registry.push_manifest(TAG, raw, "application/vnd.oci.image.index.v1+json")
    elif other == "other key":
        push_staged_image(registry, make(), TAG, KEY)
    else:
        labels = {"no label": {}, "damaged label": {"io.imagematrix.warm": "{"}}[other]
        server.repository("staging").image(TAG, labels)
    with pytest.raises(TagMovedError, match=f"{TAG} exists and is no image of this warm-up") as raised:
        push_staged_image(registry, make(), TAG, f"sha256:{'3' * 64}")
    assert raised.value.remedy
