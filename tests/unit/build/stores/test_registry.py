"""A registry as a store: images are tagged last, and tags never move."""

import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from distribution import MANIFEST, digest, error
from images import link, tar
from publishing import labels_of, tag

from imagematrix.audit.images.layers import Layers
from imagematrix.build.executor.image_rewriter import label_image
from imagematrix.build.plan.protocols import BuildRequest, BuildSources, StoredImageInfo
from imagematrix.build.publish.publish import publish
from imagematrix.build.stores.registry import CompletenessCheck, RegistryStore, survey_version
from imagematrix.errors import AuditError, EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import image_index as indexes
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.labels import hash_content
from imagematrix.images.catalog.registry import read_entry
from imagematrix.images.oci.compression import DEFAULT
from imagematrix.images.oci.manifest import INDEX
from imagematrix.images.oci.registry import Registry
from imagematrix.images.oci.retry import TRIES


@pytest.fixture
def one(make_image):
    """The image of the cell a."""
    return make_image("a")


def store(remote, one):
    return remote.store(one.order, one.made)


def test_image_is_tagged_after_all_its_blobs_are_pushed(server, remote, repository, one):
    assert store(remote, one) == one.made.digest
    assert repository.tags == {one.tag: one.made.digest}
    assert set(repository.blobs) >= {digest(b"one"), digest(b"two")}
    assert [request.path for request in server.requests if request.method == "PUT"][-1].endswith(one.tag)
    assert (
        remote.find_source(one.order.reference, local=True)
        == f"docker-image://{one.order.reference}@{one.made.digest}"
    )
    assert remote.find_source("another", local=True) is None


def test_stored_image_is_described(remote, repository, one):
    store(remote, one)
    configuration = one.made.layout_image.configuration
    described = StoredImageInfo(
        digest=one.made.digest, layers=("sha256:1", "sha256:2"), configuration=configuration
    )
    assert remote.inspect_image(one.order.reference) == described
    assert remote.keeps_layers(one.made)
    repository.manifests.clear()
    with pytest.raises(UnknownImageError, match="no longer in its registry"):
        remote.inspect_image(one.order.reference)


def test_uncompressed_layers_are_listed(remote, repository, one):
    assert remote.list_layers(one.order.reference) == frozenset()
    store(remote, one)
    assert remote.list_layers(one.order.reference) == {"sha256:1", "sha256:2"}
    media_type, _ = repository.manifests[one.made.digest]
    repository.manifests[one.made.digest] = media_type, b"damaged"
    assert remote.list_layers(one.order.reference) == frozenset(), "whoever uses it reports that"


def test_base_is_there_if_every_repository_has_its_layers(remote, one):
    store(remote, one)
    reference = one.order.reference
    assert remote.has_base("", [digest(b"one"), digest(b"two")], [reference, f"{reference}-again"])
    assert not remote.has_base("", [digest(b"one"), digest(b"three")], [reference])
    other = reference.replace(":v", "-other:v")
    assert not remote.has_base("", [digest(b"one")], [reference, other])


ZSTD = DEFAULT.media_type


@pytest.mark.parametrize(
    "refusal", [(400, error("MANIFEST_INVALID")), (415, b""), (406, b"no"), (422, error("UNSUPPORTED"))]
)
def test_registry_that_refuses_zstd_is_an_error_with_the_remedy(
    server, remote, repository, make_image, refusal
):
    server.refusal = refusal
    with pytest.raises(EngineError, match=f"answered {refusal[0]} for ") as caught:
        store(remote, make_image("a", kind=ZSTD))
    assert "compression: gzip" in caught.value.remedy
    assert not repository.tags
    assert store(remote, make_image("a")), "gzip"
    server.refusal = None
    assert store(remote, make_image("b", kind=ZSTD)), "nothing of the refused push is in the way"


def test_missing_blob_of_a_zstd_image_is_no_refusal(server, remote, make_image):
    server.refusal = (400, error("MANIFEST_BLOB_UNKNOWN"))
    with pytest.raises(EngineError, match="answered 400") as caught:
        store(remote, make_image("a", kind=ZSTD))
    assert "gzip" not in caught.value.remedy


def test_image_that_only_the_engine_has_is_a_source_for_builds_there(remote, docker, one):
    docker.store(one.order, one.made)
    assert remote.find_source(one.order.reference, local=True).startswith("docker-image://held:")
    assert remote.find_source(one.order.reference, local=False) is None


def test_present_layers_are_not_pushed(server, remote, make_image):
    store(remote, make_image("a"))
    before = server.count("POST")
    store(remote, make_image("b"))
    assert server.count("POST") == before + 1  # its configuration


def test_concurrent_pushes_upload_shared_layers_once(server, remote, repository, make_image):
    made = [make_image(f"cell{number}") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda one: store(remote, one), made)) == [one.made.digest for one in made]
    assert server.count("POST") == 2 + 8
    assert len(repository.tags) == 8
    assert not repository.moved


def test_image_with_the_same_inputs_is_kept(server, remote, repository, make_image):
    first, second = make_image("a", layers=[b"first"]), make_image("a", layers=[b"second"])
    store(remote, first)
    assert store(remote, second) == first.made.digest
    assert repository.tags == {first.tag: first.made.digest}
    assert server.count("POST") == 2
    assert remote.find_source(first.order.reference, local=True).endswith(first.made.digest)


def test_image_is_pushed_if_another_client_withdraws_its_own(server, remote, repository, labels_of, one):
    """Another client pushed the same inputs, and withdraws its image because of a third client's push."""
    theirs = repository.image(one.tag, labels_of("a"))

    def withdraw():
        del repository.manifests[theirs], repository.tags[one.tag]

    server.fails("GET", f"manifests/{theirs}", then=withdraw)
    assert store(remote, one) == one.made.digest
    assert repository.tags == {one.tag: one.made.digest}


def test_tag_of_another_image_is_refused(remote, repository, labels_of, one):
    other = repository.image(one.tag, labels_of("a", "2"))
    with pytest.raises(TagMovedError) as caught:
        store(remote, one)
    assert one.order.reference in str(caught.value)
    assert other in str(caught.value)
    assert f"v1-a-{digest(b'2')[7:19]}" in str(caught.value)
    assert "raise the version" in caught.value.remedy
    assert repository.tags == {one.tag: other}
    repository.tags[one.tag] = repository.image(None, {"by": "somebody"})
    with pytest.raises(TagMovedError, match="not an image of imagematrix"):
        store(remote, one)


def test_earlier_concurrent_push_is_kept(server, remote, repository, make_image):
    """An image with the same inputs but other bytes is pushed during the upload of layers."""
    ours, theirs = make_image("a", layers=[b"ours"]), make_image("a", layers=[b"theirs"])
    repository.image("theirs", ours.order.labels, layer=b"theirs")
    earlier = repository.tags["theirs"]
    server.fails("PUT", "uploads", then=lambda: repository.tags.update({ours.tag: earlier}))
    assert store(remote, ours) == earlier
    assert repository.tags[theirs.tag] == earlier


@pytest.mark.parametrize("same", [True, False])
def test_tag_moved_after_the_push_is_detected(server, remote, repository, labels_of, same, one):
    other = repository.image("other", labels_of("a", "1" if same else "2"))
    # The third request reads back the pushed tag.
    server.fails("HEAD", one.tag, after=2, then=lambda: repository.tags.update({one.tag: other}))
    if same:
        assert store(remote, one) == other
        return
    with pytest.raises(TagMovedError) as caught:
        store(remote, one)
    assert caught.value.exit_code == 7
    assert other in str(caught.value)
    assert one.made.digest in str(caught.value)
    assert "who pushes" in caught.value.remedy


def test_tag_deleted_after_the_push_is_detected(server, remote, repository, one):
    server.fails("HEAD", one.tag, after=2, then=repository.tags.clear)
    with pytest.raises(TagMovedError, match="the registry does not have it"):
        store(remote, one)


@pytest.mark.parametrize(("method", "path"), [("PUT", "uploads"), ("PUT", "manifests"), ("HEAD", "blobs")])
@pytest.mark.parametrize("after", range(3))
def test_interrupted_push_is_completed_by_the_next(server, remote, repository, method, path, after, one):
    if path == "manifests" and after > 1:
        after = 1  # one by digest, one by tag
    server.fails(method, path, after=after, times=TRIES, drop=True)
    with pytest.raises(EngineError):
        store(remote, one)
    assert not repository.tags, "an incomplete image has no tag"
    kept = dict(repository.blobs)
    assert store(remote, one) == one.made.digest
    assert repository.tags == {one.tag: one.made.digest}
    assert kept.items() <= repository.blobs.items()


def test_image_without_a_layout_is_pushed_by_the_engine(remote, docker, repository, one):
    made = replace(one.made, layout=None)
    docker.store(one.order, made)
    assert remote.store(one.order, made) == repository.tags[one.tag]
    assert docker.pushed == [one.order.reference]
    assert remote.store(one.order, made) == repository.tags[one.tag]
    assert docker.pushed == [one.order.reference]


def test_image_in_the_engine_is_adopted(remote, docker, repository, one):
    docker.store(one.order, one.made)
    docker.has_manifests = False
    assert remote.adopt(one.order.reference) == repository.tags[one.tag]
    assert docker.pushed == [one.order.reference]
    # The tag exists by now, and the engine would overwrite it.
    assert remote.adopt(one.order.reference) == repository.tags[one.tag]
    assert docker.pushed == [one.order.reference]


def test_image_built_on_a_variant_is_not_adopted_as_the_variant(remote, docker, repository, one):
    """It inherits the labels, and can get the name with `docker tag`."""
    docker.store(one.order, one.made)
    config: dict[str, Any] = {
        "architecture": "amd64",
        "config": {"Labels": one.order.labels},
        "rootfs": {"diff_ids": [digest(tar())]},
    }
    made = {**config, "config": {"Labels": {**one.order.labels, labels.CONTENT: hash_content(config)}}}
    docker.saved[one.order.reference] = (
        {**made, "rootfs": {"diff_ids": [digest(tar())] * 2}},
        [tar(), tar()],
    )
    with pytest.raises(AuditError, match="but an image built on the variant"):
        remote.adopt(one.order.reference)
    docker.saved[one.order.reference] = {**made, "config": {**made["config"], "Env": ["X=y"]}}, [tar()]
    with pytest.raises(AuditError, match="but an image built on the variant"):
        remote.adopt(one.order.reference)
    assert not docker.pushed
    docker.saved[one.order.reference] = made, [tar()]
    assert remote.adopt(one.order.reference) == repository.tags[one.tag]


def test_adopted_image_is_audited(remote, docker, one):
    docker.store(one.order, one.made)
    layer = tar(("usr/lib/libcuda.so.550.163.01", b""))
    docker.saved[one.order.reference] = {"config": {"Labels": one.order.labels}}, [tar(), layer]
    with pytest.raises(AuditError, match="promise no user-mode driver, but /usr/lib/libcuda"):
        remote.adopt(one.order.reference)
    assert not docker.pushed


def test_image_that_the_engine_built_is_audited_before_its_push(remote, docker, one):
    """A build cannot audit an image of the classic store, which is in no layout."""
    made = replace(one.made, layout=None)
    docker.store(one.order, made)
    layer = tar(("usr/lib/libcuda.so.550.163.01", b""))
    docker.saved[one.order.reference] = {"config": {"Labels": one.order.labels}}, [layer]
    docker.tag_image = lambda *_: pytest.fail("it is tagged")
    with pytest.raises(AuditError, match="promise no user-mode driver, but /usr/lib/libcuda"):
        remote.store(one.order, made)
    assert not docker.pushed


def test_shared_layer_of_adopted_images_is_read_once(remote, docker, make_image, layers_read):
    for cell in ("a", "b"):
        one = make_image(cell)
        docker.store(one.order, one.made)
        remote.adopt(one.order.reference)
    assert len(layers_read) == 1
    listed = json.dumps([{"Config": "c.json", "Layers": ["1/layer.tar"]}]).encode()
    one = make_image("c")
    docker.store(one.order, one.made)
    rootfs = {"diff_ids": [digest(tar())]}
    config = json.dumps({"config": {"Labels": one.order.labels}, "rootfs": rootfs}).encode()
    files = (("c.json", config), ("1/layer.tar", tar()), ("manifest.json", listed))
    docker.save = lambda _: io.BytesIO(tar(*files))
    remote.adopt(one.order.reference)
    assert layers_read[1:] == ["1/layer.tar"], "a name that is not a digest proves nothing"


@pytest.mark.parametrize(
    ("target", "refused"), [("../1/layer.tar", None), ("../../layer.tar", "cannot be read from the engine")]
)
def test_image_with_equal_layers_is_adopted_from_older_engines(remote, docker, target, refused, one):
    """They save the second layer as a link to the first."""
    docker.store(one.order, one.made)
    rootfs = {"diff_ids": [digest(tar())] * 2}
    config = json.dumps({"config": {"Labels": one.order.labels}, "rootfs": rootfs}).encode()
    listed = json.dumps([{"Config": "c.json", "Layers": ["1/layer.tar", "2/layer.tar"]}]).encode()
    files = (("c.json", config), ("1/layer.tar", tar()), ("manifest.json", listed))
    docker.save = lambda _: io.BytesIO(tar(*files, link("2/layer.tar", target)))
    with pytest.raises(AuditError, match=refused) if refused else nullcontext():
        remote.adopt(one.order.reference)
    assert bool(docker.pushed) == (refused is None)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "nowhere", "a/../../b"])
def test_invalid_archive_is_reported(remote, docker, name, one):
    docker.store(one.order, one.made)
    listed = json.dumps([{"Config": name, "Layers": []}]).encode()
    docker.save = lambda _: io.BytesIO(tar(("manifest.json", listed), ("../x", b"")))
    with pytest.raises(AuditError, match="cannot be read from the engine"):
        remote.adopt(one.order.reference)
    docker.save = lambda _: io.BytesIO(b"no archive")
    with pytest.raises(AuditError, match="cannot be read from the engine"):
        remote.adopt(one.order.reference)


def test_image_replaced_during_the_push_is_reported(remote, docker, one):
    docker.store(one.order, one.made)
    ids = iter([one.made.digest, "sha256:other"])
    docker.get_image_id = lambda _: next(ids)
    with pytest.raises(TagMovedError, match="was replaced by another image during the push"):
        remote.adopt(one.order.reference)


def test_adopted_image_does_not_replace_another(remote, docker, repository, labels_of, one):
    docker.store(one.order, one.made)
    other = repository.image(one.tag, labels_of("b"))
    with pytest.raises(TagMovedError, match="built from other inputs"):
        remote.adopt(one.order.reference)
    assert not docker.pushed
    assert repository.tags == {one.tag: other}


def test_published_and_unpublished_variants_are_listed(
    remote, repository, add_variant, image, labels_of, registry
):
    first = add_variant("a")
    repository.put("v1", index(registry, first), INDEX)
    del repository.tags[f"v1-a-{digest(b'1')[7:19]}"]
    add_variant("b", "2")
    add_variant("c", version="v10")
    add_variant("d", version="v2")
    repository.image("v1-x-0123456789ab", labels_of("y"))  # its labels name another cell
    repository.image("v1-by-others", {"by": "somebody"})
    repository.image("v1-without", None)
    result = remote.list_variants(image, "v1")
    assert [(one.reference, one.cell, one.input_digest, one.lost) for one in result] == [
        (f"{image}:v1-{cell}-{digest(inputs)[7:19]}", cell, digest(inputs), False)
        for cell, inputs in (("a", b"1"), ("b", b"2"))
    ]
    assert [one.labels[labels.CELL] for one in result] == ["a", "b"]
    assert remote.get_components(result[1].reference) == {"dockerfile": "2"}
    assert remote.get_components(result[0].reference) == {"dockerfile": "1"}


def index(registry, *digests):
    return indexes.write_index([read_entry(registry, one) for one in digests], registry.name, "v1")


def test_deleted_image_has_no_components(remote, repository, add_variant, image):
    add_variant("a")
    (result,) = remote.list_variants(image, "v1")
    repository.manifests.clear()
    assert remote.get_components(result.reference) == {}


def test_non_image_manifests_are_skipped(registry, repository, add_variant):
    assert read_entry(registry, "nothing") is None
    repository.put("index", index(registry, add_variant("a")), INDEX)
    assert read_entry(registry, "index") is None
    repository.image("chart", None, config=b"not JSON", kind="application/vnd.cncf.helm.config.v1+json")
    assert read_entry(registry, "chart") is None
    repository.put("odd", b"{}", MANIFEST)
    assert read_entry(registry, "odd") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "expected an object"),
        (b'{"config": []}', "expected an object"),
    ],
)
def test_error_for_a_damaged_configuration_names_the_image(registry, repository, image, config, message):
    repository.image("v1-a-0123456789ab", None, config=config)
    with pytest.raises(UsageError, match=message) as caught:
        survey_version(registry, "v1")
    assert f"{image}:v1-a-0123456789ab" in str(caught.value)


def test_missing_or_altered_configuration_is_reported(registry, repository, add_variant):
    add_variant("a")
    (config,) = (one for one, raw in repository.blobs.items() if b"Labels" in raw)
    repository.blobs[config] = b"{}"
    with pytest.raises(EngineError, match=f"content that does not match {config}"):
        survey_version(registry, "v1")
    del repository.blobs[config]
    with pytest.raises(UnknownImageError, match=config):
        survey_version(registry, "v1")


def test_configuration_is_fetched_only_by_a_valid_digest(server, registry, repository):
    raw = b'{"config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "../../x"}}'
    repository.put("v1-a", raw, MANIFEST)
    with pytest.raises(UsageError, match="is not a sha256 digest"):
        survey_version(registry, "v1")
    assert not server.count("GET", "blobs")


def test_labels_that_are_not_strings_are_ignored(registry, repository):
    repository.image("v1-a", {labels.CELL: 5, labels.VERSION: "v1"})
    assert read_entry(registry, "v1-a").annotations.keys() == {labels.VERSION, labels.SIZE}
    assert survey_version(registry, "v1").variants == ()


def test_configuration_is_not_read_if_the_manifest_has_annotations(
    server, registry, repository, add_variant, labels_of
):
    labelled = add_variant("a")
    own = labels_of("a")
    repository.image("annotated", own, annotations={**own, "by": "somebody"})
    before = server.count("GET", "blobs")
    result = read_entry(registry, "annotated")
    assert server.count("GET", "blobs") == before, "one request is enough"
    assert result.annotations.keys() == read_entry(registry, labelled).annotations.keys()
    assert result.tag == read_entry(registry, labelled).tag


def test_conflicting_push_of_a_cell_is_withdrawn(server, remote, repository, add_variant, one):
    rival = f"v1-a-{digest(b'2')[7:19]}"
    # It is pushed between the check and the tag.
    server.fails("PUT", f"manifests/{one.tag}", then=lambda: add_variant("a", "2"))
    with pytest.raises(
        TagMovedError, match=f"also pushed from other inputs: {rival}; this image is withdrawn"
    ) as caught:
        store(remote, one)
    assert caught.value.exit_code == 7
    assert "--choose" in caught.value.remedy
    assert repository.tags.keys() == {rival}
    assert remote.find_source(one.order.reference, local=True) is None


def test_image_that_cannot_be_deleted_is_reported(server, remote, repository, add_variant, one):
    server.deletes = False
    add_variant("a", "2")
    with pytest.raises(TagMovedError, match="does not allow this image to be deleted"):
        store(remote, one)
    assert len(repository.tags) == 2


def test_published_image_is_not_withdrawn(server, remote, repository, add_variant, registry, one):

    def other():
        publish(registry, "v1")
        add_variant("a", "2")

    server.fails("GET", "tags/list", then=other)
    assert store(remote, one) == repository.tags[one.tag]
    assert len(repository.tags) == 3


@pytest.mark.parametrize("status", [404, 405, 401, 403, 202])
def test_failed_deletion_is_detected(server, remote, add_variant, status, one):
    add_variant("a", "2")
    server.fails("DELETE", "manifests", status=status, times=99, headers={"WWW-Authenticate": "Basic"})
    with pytest.raises(TagMovedError, match="does not allow this image to be deleted"):
        store(remote, one)


@pytest.mark.parametrize("rival", ["b", "a-b", "a-"])
def test_images_of_other_cells_do_not_conflict(remote, repository, add_variant, labels_of, rival, one):
    add_variant(rival, "2")
    repository.image("v1-a-by-somebody", None)
    repository.image("v1-a-somebody", labels_of("y"))
    repository.image("v10-a-0123456789ab", labels_of("a", version="v10"))
    assert store(remote, one) == repository.tags[one.tag]


def test_image_pushed_by_the_engine_is_checked_for_conflicts(
    server, remote, docker, repository, add_variant, one
):
    docker.store(one.order, one.made)
    docker.has_manifests = False
    server.fails("GET", "tags/list", then=lambda: add_variant("a", "2"))
    with pytest.raises(TagMovedError, match="this image is withdrawn"):
        remote.adopt(one.order.reference)
    assert one.tag not in repository.tags


@pytest.mark.parametrize("number", range(5))
def test_conflicting_pushes_never_both_succeed(docker, image, repository, make_image, registry, number):  # noqa: ARG001
    made = [make_image("a", made_of) for made_of in ("1", "2")]
    barrier = threading.Barrier(2)

    def push(one):
        with RegistryStore(docker, Layers()) as remote:
            barrier.wait()
            try:
                return store(remote, one)
            except TagMovedError:
                return None

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(push, made))
    assert None in done
    assert repository.tags.keys() >= {one.tag for one, succeeded in zip(made, done, strict=True) if succeeded}
    assert repository.tags, "one always stays"


def test_of_images_that_are_withdrawn_at_the_same_time_one_stays(docker, repository, make_image, monkeypatch):
    made = [make_image("a", made_of) for made_of in ("1", "2")]
    both_tagged, both_listed = (threading.Barrier(2, timeout=60) for _ in range(2))
    list_tags, withdraw = Registry.list_tags, Registry.withdraw
    withdrawn: list[str] = []

    def list_when_both_are_tagged(self):
        if not withdrawn:
            both_tagged.wait()
        return list_tags(self)

    def withdraw_when_both_have_listed(self, tag, digest):
        if tag not in withdrawn:
            both_listed.wait()
        withdrawn.append(tag)
        return withdraw(self, tag, digest)

    monkeypatch.setattr(Registry, "list_tags", list_when_both_are_tagged)
    monkeypatch.setattr(Registry, "withdraw", withdraw_when_both_have_listed)

    def push(one):
        with RegistryStore(docker, Layers()) as remote, pytest.raises(TagMovedError) as caught:
            store(remote, one)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(push, made))
    kept = {
        one.tag for one, text in zip(made, texts, strict=True) if text.endswith("this image is there again")
    }
    assert repository.tags.keys() == kept
    assert kept


def test_registry_that_names_another_image_each_time_is_told(remote, one, monkeypatch):
    monkeypatch.setattr(Registry, "digest", lambda *_: digest(os.urandom(9)))
    with pytest.raises(EngineError, match=r"named another image for .* each time"):
        store(remote, one)


@pytest.fixture
def is_complete(server, repository):
    """Return whether the registry has all blobs of an image with these layers."""

    def call(*layers):
        raw = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers}).encode()
        repository.put("v1", raw, MANIFEST)
        with Registry(f"{server.address}/ml/training") as registry:
            return CompletenessCheck(registry)(digest(raw))

    return call


def test_layers_that_registries_need_not_have_are_not_missed(is_complete):
    foreign = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
    layer = {"digest": digest(b"lost"), "size": 4}
    assert is_complete({"mediaType": foreign, **layer, "urls": ["https://example.com/layer"]})
    assert not is_complete({"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **layer})


@pytest.mark.parametrize("layer", ["x", {}, {"digest": 7, "size": 4}, {"digest": "../../x", "size": 4}])
def test_damaged_manifests_of_images_are_errors(is_complete, layer):
    with pytest.raises(UsageError, match="layers"):
        is_complete(layer)


def labelled_anew(remote, earlier, folder, version, made_of="1"):
    """Take over an image under another version, as a build does."""
    before = remote.load_without_layers(earlier, folder)
    own = labels_of("a", made_of, version=version)
    image, _, _ = earlier.rpartition(":")
    order = BuildRequest(
        reference=f"{image}:{tag(own)}",
        dockerfile="",
        sources=BuildSources(context=folder, platform="linux/amd64"),
        labels=own,
    )
    return order, label_image(before, own)


@pytest.fixture
def earlier(remote, one):
    """The reference of an image of version v1 in the registry, as `build` pushes one, and its digest."""
    made = label_image(one.made, one.order.labels)
    remote.store(one.order, made)
    return one.order.reference, made.digest


def test_image_of_an_earlier_version_is_taken_over_without_its_layers(
    server, remote, repository, earlier, image, tmp_path
):
    reference, before = earlier
    assert remote.find_earlier_versions(image, {"a": digest(b"2"), "b": digest(b"1")}) == {}
    assert remote.find_earlier_versions(image, {"a": digest(b"1"), "b": digest(b"1")}) == {"a": reference}
    server.requests.clear()
    order, made = labelled_anew(remote, reference, tmp_path / "taken", "v2")
    stored = remote.store(order, made)
    assert repository.tags[tag(order.labels)] == stored != before
    uploads = [request for request in server.requests if request.method == "POST"]
    assert len(uploads) == 1, "only the configuration"
    entry = read_entry(remote.open_registry(image), tag(order.labels))
    assert (entry.ours, entry.annotations[labels.VERSION]) == (True, "v2")
    other = RegistryStore(remote, Layers())
    assert other.find_earlier_versions(image, {"a": digest(b"1")})["a"] in (reference, order.reference)


def test_images_that_only_look_like_earlier_ones_are_not_taken_over(
    remote, repository, earlier, image, make_image
):
    """The tag has only a part of the input digest, and says nothing of the blobs."""
    reference, _ = earlier
    assert remote.find_earlier_versions(image, {"a": f"{digest(b'1')[:-1]}0"}) == {}
    assert remote.find_earlier_versions(image, {"b-a": digest(b"1")}) == {}, "a cell whose name ends alike"
    classic = make_image("classic")  # without a label of its content
    remote.store(classic.order, classic.made)
    lost = repository.image(f"v0-a-{digest(b'1')[7:19]}", None)
    del repository.blobs[json.loads(repository.manifests[lost][1])["config"]["digest"]]
    assert RegistryStore(remote, Layers()).find_earlier_versions(image, {"a": digest(b"1")}) == {
        "a": reference
    }
    for cell in ("classic", "none"):
        assert RegistryStore(remote, Layers()).find_earlier_versions(image, {cell: digest(b"1")}) == {}
    del repository.blobs[digest(b"two")]
    assert RegistryStore(remote, Layers()).find_earlier_versions(image, {"a": digest(b"1")}) == {}
    assert remote.open_registry(image).digest(reference.rpartition(":")[2])


def test_image_built_on_an_earlier_one_is_not_taken_over(remote, repository, earlier, image, make_image):
    reference, _ = earlier
    derived = make_image("a", layers=(b"one", b"two", b"three"))
    config = json.loads(repository.blobs[digest_of_config(repository, reference)])
    inherited = label_image(derived.made, config["config"]["Labels"])
    raw = json.loads((inherited.layout / "blobs/sha256" / inherited.digest[7:]).read_bytes())
    blobs = inherited.layout / "blobs/sha256"
    old = json.loads((blobs / raw["config"]["digest"][7:]).read_bytes())
    old["config"]["Labels"][labels.CONTENT] = config["config"]["Labels"][labels.CONTENT]
    changed = json.dumps(old).encode()
    raw["config"] |= {"digest": digest(changed), "size": len(changed)}
    repository.blobs |= {digest(changed): changed, digest(b"three"): b"three"}
    repository.put(reference.rpartition(":")[2], json.dumps(raw).encode(), MANIFEST)
    assert RegistryStore(remote, Layers()).find_earlier_versions(image, {"a": digest(b"1")}) == {}


def digest_of_config(repository, reference):
    manifest = repository.manifests[repository.tags[reference.rpartition(":")[2]]]
    raw = manifest[1] if isinstance(manifest, tuple) else manifest
    return json.loads(raw)["config"]["digest"]


def test_earlier_image_that_was_deleted_is_reported(remote, repository, earlier, image, tmp_path):
    reference, _ = earlier
    assert remote.find_earlier_versions(image, {"a": digest(b"1")}) == {"a": reference}
    repository.manifests.clear()
    with pytest.raises(UnknownImageError, match="is no longer in its registry"):
        remote.load_without_layers(reference, tmp_path / "taken")
