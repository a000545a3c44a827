"""An OCI layout as the upstream: an image for a node without a network."""

import json

import pytest
from distribution import MANIFEST, digest

from imagematrix.errors import EngineError, UsageError
from imagematrix.images.oci.layout import LayoutFolder
from imagematrix.images.oci.manifest import INDEX
from imagematrix.integrations.resolver.upstream import open_upstream

LAYER = b"cpu-v3" * 1000


@pytest.fixture
def layout(tmp_path, published):
    """The images of `published` as `skopeo copy --all` writes them."""
    blobs = tmp_path / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (tmp_path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    result = published.repository
    for name, raw in [*result.blobs.items(), *((name, raw) for name, (_, raw) in result.manifests.items())]:
        (blobs / name.removeprefix("sha256:")).write_bytes(raw)
    entries = [
        {
            "mediaType": result.manifests[of][0],
            "digest": of,
            "size": len(result.manifests[of][1]),
            "annotations": {"org.opencontainers.image.ref.name": f"ml/training:{tag}"},
        }
        for tag, of in result.tags.items()
    ]
    (tmp_path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    return tmp_path


def test_layout_answers_like_a_registry(front, layout, published):
    node = front("genoa-h200", name=f"oci:{layout}")
    assert node.pull("v1") == published.digests["sm90"]
    assert node.pull("v1-cpu") == published.digests["cpu-v3"]
    assert node.pull("v2")[0] == node.pull("v1", "other/name")[0] == 404
    assert "v1" in node.get("/v2/ml/training/tags/list").json()["tags"]
    assert node.pull(published.digests["cpu-v2"]) == published.digests["cpu-v2"]


def test_manifests_need_no_media_type(front, layout):
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(b"{}"), "size": 2}
    image = json.dumps({"schemaVersion": 2, "config": config, "layers": []}).encode()
    listed = {"mediaType": MANIFEST, "digest": digest(image), "size": len(image)}
    index = json.dumps({"schemaVersion": 2, "manifests": [listed]}).encode()
    node = front(name=f"oci:{layout}")
    for tag, raw, media_type in (("image", image, MANIFEST), ("index", index, INDEX)):
        (layout / "blobs" / "sha256" / digest(raw).removeprefix("sha256:")).write_bytes(raw)
        entry = {"mediaType": media_type, "digest": digest(raw), "size": len(raw)}
        entry["annotations"] = {"org.opencontainers.image.ref.name": f"debian:{tag}"}
        (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
        for name in (tag, digest(raw)):
            answer = node.get(f"/v2/debian/manifests/{name}")
            assert (answer.content, answer.headers["Content-Type"]) == (raw, media_type)


def test_layout_blobs_support_ranges(front, layout):
    node = front(name=f"oci:{layout}")
    path = f"/v2/ml/training/blobs/{digest(LAYER)}"
    assert node.get(path).content == LAYER
    part = node.get(path, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, LAYER[10:20])
    assert part.headers["Content-Range"] == f"bytes 10-19/{len(LAYER)}"
    assert node.get(path, headers={"Range": "bytes=99999-"}).status_code == 416
    assert node.get(path, method="HEAD").headers["Content-Length"] == str(len(LAYER))
    assert node.get(f"/v2/ml/training/blobs/{digest(b'?')}").status_code == 404


def test_damaged_layouts_are_rejected(tmp_path, layout, published):
    upstream = open_upstream(f"oci:{layout}")
    path = layout / "blobs" / "sha256" / published.digests["sm90"].removeprefix("sha256:")
    path.write_bytes(path.read_bytes().replace(b"v1", b"v2"))
    with pytest.raises(EngineError, match="does not match its digest"):
        upstream.find_manifest("ml/training", published.digests["sm90"])
    path.write_bytes(bytes((4 << 20) + 1))
    with pytest.raises(EngineError, match="more than 4 MiB"):
        upstream.find_manifest("ml/training", published.digests["sm90"])
    (layout / "index.json").unlink()
    with pytest.raises(EngineError, match=r"index.json cannot be read: No such file"):
        upstream.list_tags("ml/training")
    with pytest.raises(UsageError, match="is not an OCI layout"):
        open_upstream(f"oci:{tmp_path / 'blobs'}")


def test_a_link_out_of_the_layout_is_no_blob(front, layout, tmp_path_factory):
    """Whoever made the layout would read what the resolver's user may read."""
    outside = tmp_path_factory.mktemp("other") / "secret"
    outside.write_text("secret")
    blobs = layout / "blobs" / "sha256"
    (blobs / ("a" * 64)).symlink_to(outside)
    (blobs / ("b" * 64)).symlink_to(blobs / ("b" * 64))
    (blobs / ("c" * 64)).symlink_to(digest(LAYER).removeprefix("sha256:"))
    node = front(name=f"oci:{layout}")
    for name in "ab":
        assert node.get(f"/v2/ml/training/blobs/sha256:{name * 64}").status_code == 404
        assert node.pull(f"sha256:{name * 64}")[0] == 404
    assert node.get(f"/v2/ml/training/blobs/sha256:{'c' * 64}").content == LAYER
    with pytest.raises(EngineError, match="there is no such file in the layout"):
        LayoutFolder(layout, EngineError).open(f"sha256:{'a' * 64}")
