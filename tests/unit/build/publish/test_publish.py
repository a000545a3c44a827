"""Publishing: entries are only added to an index, whatever the order and number of publishers."""

import json
from dataclasses import replace
from typing import Any

import pytest
from distribution import MANIFEST, Server, digest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from publishing import labels_of, tag

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.errors import EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.registry import load_catalogs
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.oci.manifest import ATTESTED, DOCKER_LIST, INDEX
from imagematrix.images.oci.registry import Registry


def cells(repository, tag="v1"):
    _, raw = repository.manifests[repository.tags[tag]]
    return [one.annotations[labels.CELL] for one in image_index.parse_index(raw, tag)]


def test_all_pushed_variants_are_published(registry, repository, add_variant, image):
    add_variant("b")
    flags = sorted(marches.get_required_flags("x86-64-v2", "gcc-14"))
    entry = {"platform": "linux/amd64", "march": "x86-64-v2", "cpu_flags": flags}
    add_variant("a", layer=b"123456", VARIANT=json.dumps(entry))
    done = publish(registry, "v1")
    assert (done.digest, done.variants, done.new) == (repository.tags["v1"], 2, 2)
    assert cells(repository) == ["a", "b"]
    catalog = open_catalog(f"{image}:v1")
    assert [(one.march, one.size, one.platform) for one in catalog.variants] == [
        ("x86-64-v2", 6, "linux/amd64"),
        ("znver4", 5, "linux/amd64"),
    ]
    first, second = image_index.parse_index(repository.manifests[done.digest][1], "v1")
    assert labels.INPUTS not in first.annotations
    assert first.platform == {"architecture": "unknown", "os": "unknown"}
    assert second.platform == {"architecture": "amd64", "os": "linux"}, "it has lower requirements"


def test_publishing_again_writes_nothing(server, registry, add_variant):
    add_variant("a")
    first = publish(registry, "v1")
    written = server.count("PUT")
    again = publish(registry, "v1")
    assert (again.digest, again.variants, again.new) == (first.digest, 1, 0)
    assert server.count("PUT") == written


UNKNOWN = {"architecture": "unknown", "os": "unknown"}
PLAIN = {"architecture": "amd64", "os": "linux"}


def rewrite(repository, tag, *added, kind=INDEX, removed=(), **changes):
    """Write the index of a tag as another tool would, with entries added or without some of its keys."""
    _, raw = repository.manifests[repository.tags[tag]]
    document = {key: value for key, value in json.loads(raw).items() if key not in removed} | changes
    document["manifests"] = [*document["manifests"], *added]
    return repository.put(tag, json.dumps(document).encode(), kind)


def restate(repository, image, *added):
    """Write the index of v1 as `publish` would with more entries."""
    _, raw = repository.manifests[repository.tags["v1"]]
    document = json.dumps({"manifests": [*json.loads(raw)["manifests"], *added]}).encode()
    return repository.put(
        "v1", image_index.write_index(image_index.parse_index(document, image), image, "v1"), INDEX
    )


def foreign(repository, **changes):
    """Return the entry of an image of somebody else."""
    by_somebody = repository.image(None, {"by": "somebody"})
    return {"mediaType": MANIFEST, "digest": by_somebody, "size": 5, "platform": PLAIN} | changes


def test_entries_of_an_index_are_kept(registry, repository, add_variant, image):
    """Some are results of BuildKit."""
    kept = foreign(repository, platform=UNKNOWN, annotations={"vnd.docker.reference.type": "other"})
    add_variant("a")
    publish(registry, "v1")
    restate(repository, image, kept)
    done = publish(registry, "v1")
    assert (done.variants, done.new) == (1, 0)
    assert kept in json.loads(repository.manifests[done.digest][1])["manifests"]
    repository.tags.pop(f"v1-a-{digest(b'1')[7:19]}")
    assert publish(registry, "v1").digest == done.digest
    add_variant("b")
    done = publish(registry, "v1")
    assert (done.variants, done.new) == (2, 1)
    assert kept in json.loads(repository.manifests[done.digest][1])["manifests"]


def others_image(repository, **_):
    return repository.image("v1", {"by": "somebody"})


def others_index(repository, **_):
    raw = json.dumps({"mediaType": DOCKER_LIST, "manifests": [foreign(repository)]}).encode()
    return repository.put("v1", raw, DOCKER_LIST)


def attested_image(repository, **_):
    """An image with an attestation, as `docker buildx build --push` makes it."""
    pushed = foreign(repository)
    result = foreign(repository, platform=UNKNOWN, annotations={ATTESTED: pushed["digest"]})
    return repository.put(
        "v1", json.dumps({"mediaType": INDEX, "manifests": [pushed, result]}).encode(), INDEX
    )


def with_an_image_of_others(repository, registry, **_):
    publish(registry, "v1")
    return rewrite(repository, "v1", foreign(repository), removed=["annotations"])


def without_an_entry(repository, registry, **_):
    publish(registry, "v1")
    return rewrite(repository, "v1", manifests=[])


def with_another_platform(repository, registry, **_):
    publish(registry, "v1")
    (entry,) = json.loads(repository.manifests[repository.tags["v1"]][1])["manifests"]
    return rewrite(repository, "v1", manifests=[entry | {"platform": PLAIN | {"variant": "v3"}}])


def another_version(repository, registry, add_variant):
    add_variant("a", version="v0")
    repository.tags["v1"] = publish(registry, "v0").digest
    return repository.tags["v1"]


def two_versions(repository, registry, add_variant):
    """An index that another tool merged."""
    add_variant("b", version="v0")
    publish(registry, "v0")
    publish(registry, "v1")
    _, raw = repository.manifests[repository.tags["v0"]]
    return rewrite(repository, "v1", *json.loads(raw)["manifests"], removed=["annotations"])


def another_repository(repository, registry, **_):
    publish(registry, "v1")
    _, raw = repository.manifests[repository.tags["v1"]]
    stated = json.loads(raw)["annotations"] | {labels.IMAGE: "ml/inference"}
    return rewrite(repository, "v1", annotations=stated)


CHANGED = [with_an_image_of_others, without_an_entry, with_another_platform, two_versions]


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize(
    "make", [others_image, others_index, attested_image, another_version, another_repository, *CHANGED]
)
def test_version_tag_with_anything_else_is_refused(registry, repository, add_variant, image, make, repair):
    """A plain pull would get the other image, or select an image of another version."""
    add_variant("a")
    found = make(repository=repository, registry=registry, add_variant=add_variant)
    with pytest.raises(TagMovedError) as caught:
        publish(registry, "v1", repair=repair)
    assert f"{image}:v1" in str(caught.value)
    assert found in str(caught.value)
    assert "raise the version" in caught.value.remedy
    assert repository.tags["v1"] == found


@pytest.mark.parametrize("make", CHANGED)
def test_changed_index_is_not_read(registry, repository, add_variant, image, make):
    add_variant("a")
    found = make(repository=repository, registry=registry, add_variant=add_variant)
    for read in (lambda: open_catalog(f"{image}:v1"), lambda: load_catalogs(image)):
        with pytest.raises(TagMovedError, match=f"{image}:v1 is not as imagematrix published it: {found}"):
            read()


def test_copy_of_a_repository_is_read_and_extended(server, registry, repository, add_variant):
    """Another address of the registry, or a mirror, has the same bytes."""
    add_variant("a")
    done = publish(registry, "v1")
    elsewhere = registry.name.replace("127.0.0.1", "localhost")
    with Registry(elsewhere) as other:
        assert publish(other, "v1").digest == done.digest
    copy = server.repository("mirror/training")
    copy.tags, copy.manifests, copy.blobs = repository.tags, repository.manifests, repository.blobs
    assert len(open_catalog(f"{server.address}/mirror/training:v1").variants) == 1


def test_only_aliases_move(registry, repository, add_variant):
    add_variant("a")
    publish(registry, "v1", ["stable", "latest"])
    add_variant("a", version="v2")
    done = publish(registry, "v2", ["latest"])
    assert repository.tags["latest"] == repository.tags["v2"] == done.digest
    assert repository.tags["stable"] == repository.tags["v1"] != done.digest
    assert repository.moved == ["latest"]


@pytest.mark.parametrize(
    "alias", ["v1", "v2", "v3", "v4", "v1-a-6b86b273ff34", "of-others", "index-of-others"]
)
def test_alias_cannot_take_an_immutable_tag(server, registry, repository, add_variant, alias):
    add_variant("a")
    add_variant("a", version="v2")
    publish(registry, "v2")
    add_variant("a", version="v3")  # not published yet
    repository.image("of-others", None)
    repository.image("v5-of-others", {})
    raw = json.dumps({"mediaType": INDEX, "manifests": [foreign(repository)]}).encode()
    repository.put("index-of-others", raw, INDEX)
    before, written = dict(repository.tags), server.count("PUT")
    with pytest.raises(TagMovedError, match=alias) as caught:
        publish(registry, "v1", ["latest", alias], versions=["v1", "v4"])
    assert "choose another alias" in caught.value.remedy
    assert (repository.tags, server.count("PUT")) == (before, written)
    publish(registry, "v1", ["latest", "v5"], versions=["v1", "v4"])


@pytest.mark.parametrize("alias", ["", "a/b", "v1?x", "../v2", "-"])
def test_invalid_alias_is_rejected(server, registry, alias):
    with pytest.raises(UsageError, match="--alias"):
        publish(registry, "v1", [alias])
    assert not server.requests


def test_version_without_variants_is_not_published(registry, add_variant):
    add_variant("a", version="v2")
    with pytest.raises(UnknownImageError, match="has no variant of") as caught:
        publish(registry, "v1")
    assert "build --push" in caught.value.remedy


def test_two_images_for_one_cell_are_not_published(registry, repository, add_variant):
    add_variant("a", "1")
    add_variant("a", "2")
    with pytest.raises(TagMovedError) as caught:
        publish(registry, "v1")
    for made_of in (b"1", b"2"):
        assert f"v1-a-{digest(made_of)[7:19]}" in str(caught.value)
    assert "v1" not in repository.tags


def test_image_without_a_media_type_is_not_replaced(registry, repository, add_variant):
    """It is optional in a manifest."""
    add_variant("a")
    _, raw = repository.manifests[repository.image("v1", {"by": "somebody"})]
    document = json.loads(raw)
    del document["mediaType"]
    found = repository.tags["v1"] = repository.put(None, json.dumps(document).encode(), MANIFEST)
    with pytest.raises(TagMovedError, match=f"{found}.* is a single image, not an index"):
        publish(registry, "v1")
    assert repository.tags["v1"] == found


@pytest.mark.parametrize("variant", ["", "{", "[]", '{"platform": 5}'])
@pytest.mark.parametrize("annotated", [False, True])
def test_error_for_a_damaged_label_names_the_image(
    registry, repository, labels_of, image, variant, annotated
):
    own = labels_of("a", VARIANT=variant)
    repository.image(
        labels.make_tag("v1", "a", own[labels.INPUT]), own, annotations=own if annotated else None
    )
    with pytest.raises(UsageError, match=f"{image}:v1-a-.*"):
        publish(registry, "v1")
    assert "v1" not in repository.tags


def test_overwritten_index_is_completed(server, registry, repository, add_variant):
    """A publisher with an outdated list of tags drops a variant, which a retry restores."""
    add_variant("a")
    publish(registry, "v1")
    older = repository.tags["v1"]
    add_variant("b")
    # After the index is written, another publisher overwrites it with an older one.
    server.fails("GET", "manifests/v1$", after=1, then=lambda: repository.tags.update(v1=older))
    done = publish(registry, "v1")
    assert cells(repository) == ["a", "b"]
    assert (done.digest, done.new) == (repository.tags["v1"], 1)


def test_variant_pushed_during_publish_is_kept(server, registry, repository, add_variant):
    """It is pushed and published after this publisher listed the tags."""
    add_variant("a")

    def other():
        add_variant("b")
        with Registry(registry.name) as another:
            publish(another, "v1")

    server.fails("PUT", "manifests/v1$", then=other)
    done = publish(registry, "v1")
    assert cells(repository) == ["a", "b"]
    assert done.variants == 2


def test_alias_is_not_left_behind_the_version(server, registry, repository, add_variant):
    """Another client publishes, and moves the alias, just before this one does."""
    add_variant("a")

    def other():
        add_variant("b")
        with Registry(registry.name) as another:
            publish(another, "v1", ["latest"])

    server.fails("PUT", "manifests/latest", then=other)
    done = publish(registry, "v1", ["latest"])
    assert done.variants == 2
    assert repository.tags["latest"] == repository.tags["v1"] == done.digest


def test_push_conflict_gives_up_after_retries(server, registry, repository, add_variant):
    add_variant("a")
    add_variant("b")
    publish(registry, "v1")
    older = repository.tags["v1"]
    add_variant("c")
    server.fails("GET", "manifests/v1$", times=99, then=lambda: repository.tags.update(v1=older))
    with pytest.raises(EngineError, match="another process keeps publishing") as caught:
        publish(registry, "v1")
    assert "publish again later" in caught.value.remedy


@pytest.mark.parametrize(("method", "path"), [("GET", "manifests"), ("GET", "tags"), ("PUT", "manifests")])
@pytest.mark.parametrize("after", [0, 1])
def test_interrupted_publish_is_completed_by_the_next(
    server, registry, repository, add_variant, method, path, after
):
    add_variant("a")
    publish(registry, "v1", ["latest"])
    add_variant("b")
    server.fails(method, path, after=after, times=3, status=500)
    with pytest.raises(EngineError):
        publish(registry, "v1", ["latest"])
    assert set(cells(repository)) >= {"a"}
    done = publish(registry, "v1", ["latest"])
    assert cells(repository) == ["a", "b"]
    assert repository.tags["latest"] == done.digest


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abcdef"), st.sampled_from(["v1", "v2"])),
        st.tuples(st.just("publish"), st.sampled_from(["v1", "v2"]), st.sampled_from(["latest", "stable"])),
    ),
    max_size=12,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_pushes_and_publishes_in_any_order_only_add(docker_host, labels_of, steps):  # noqa: ARG001
    server = Server()
    try:
        repository = server.repository("ml/training")
        pushed: dict[str, set[str]] = {"v1": set(), "v2": set()}
        published: dict[str, dict[str, Any]] = {"v1": {}, "v2": {}}
        with Registry(f"{server.address}/ml/training") as registry:
            for kind, first, second in steps:
                if kind == "push":
                    own = labels_of(first, version=second)
                    repository.image(labels.make_tag(second, first, own[labels.INPUT]), own)
                    pushed[second].add(first)
                elif not pushed[first]:
                    with pytest.raises(UnknownImageError):
                        publish(registry, first)
                else:
                    done = publish(registry, first, [second])
                    _, raw = repository.manifests[repository.tags[first]]
                    now = {
                        one.annotations[labels.CELL]: one.to_json()
                        for one in image_index.parse_index(raw, first)
                    }
                    assert now.keys() == pushed[first]
                    assert published[first].items() <= now.items(), "existing entries are unchanged"
                    assert done.new == len(now) - len(published[first])
                    assert publish(registry, first).digest == done.digest == repository.tags[second]
                    assert (
                        image_index.write_index(image_index.parse_index(raw, first), registry.name, first)
                        == raw
                    )
                    published[first] = now
    finally:
        server.close()


TEXTS = st.text(max_size=5)
ENTRIES = st.lists(
    st.builds(
        image_index.IndexEntry,
        digest=st.binary(max_size=4).map(digest),
        size=st.integers(0, 2**60),
        media_type=st.sampled_from([INDEX, MANIFEST, ""]),
        annotations=st.dictionaries(st.sampled_from([labels.CELL, labels.INPUT, "other"]), TEXTS),
        platform=st.dictionaries(TEXTS, TEXTS, max_size=2),
    ),
    unique_by=lambda one: one.digest,
)


@given(ENTRIES, st.randoms())
def test_index_round_trips_unchanged(entries, random):
    raw = image_index.write_index(entries, "ml/training", "v1")
    assert image_index.write_index(image_index.parse_index(raw, "x"), "ml/training", "v1") == raw
    random.shuffle(entries)
    assert image_index.write_index(entries, "reg:5000/ml/training", "v1") == raw
    assert sorted(image_index.parse_index(raw, "x"), key=lambda one: one.digest) == sorted(
        entries, key=lambda one: one.digest
    )


def lose(repository, manifest):
    """Remove a manifest from the registry, but not its tags."""
    del repository.manifests[manifest]


def test_version_with_a_lost_image_is_not_published(server, registry, repository, add_variant):
    add_variant("a")
    publish(registry, "v1")
    lost = add_variant("b")
    done = publish(registry, "v1")
    lose(repository, lost)
    written = server.count("PUT")
    with pytest.raises(UnknownImageError, match=f"the registry lost images .*\n.*-b-.*@{lost}") as caught:
        publish(registry, "v1")
    assert "`imagematrix publish --repair " in caught.value.remedy
    assert (repository.tags["v1"], server.count("PUT")) == (done.digest, written)


def test_repair_removes_lost_images_with_their_attestations(registry, repository, add_variant, image):
    add_variant("a")
    lost = add_variant("b")
    result = repository.image(None, {"by": "BuildKit"})
    publish(registry, "v1")
    attestation = foreign(repository, digest=result, platform=UNKNOWN, annotations={ATTESTED: lost})
    restate(repository, image, attestation)
    lose(repository, lost)
    done = publish(registry, "v1", repair=True)
    assert cells(repository) == ["a"]
    assert (done.variants, done.new, done.dropped) == (1, 0, (f"{image}:v1-b-{digest(b'1')[7:19]}@{lost}",))
    assert publish(registry, "v1") == publish(registry, "v1", repair=True)


@pytest.mark.parametrize("deletes", [True, False])
@pytest.mark.parametrize(("kind", "published"), [("layer", True), ("layer", False), ("config", True)])
def test_repair_deletes_an_image_with_a_lost_blob(
    server, registry, repository, add_variant, image, kind, deletes, published
):
    server.deletes = deletes
    add_variant("a")
    if not published:
        publish(registry, "v1")
    damaged = add_variant("b", layer=b"own")
    if published:
        publish(registry, "v1")
    manifest = json.loads(repository.manifests[damaged][1])
    del repository.blobs[(manifest["config"] if kind == "config" else manifest["layers"][0])["digest"]]
    if kind == "layer":
        assert publish(registry, "v1").variants == 2, "only a repair checks each layer"
    done = publish(registry, "v1", repair=True)
    assert cells(repository) == ["a"]
    reference = f"{image}:v1-b-{digest(b'1')[7:19]}@{damaged}"
    assert (done.dropped, done.stuck) == ((reference,), () if deletes else (reference,))
    assert (damaged in repository.manifests) == (not deletes)


def test_repair_withdraws_the_tag_of_an_image_with_attestations(registry, repository, add_variant):
    """Its tag names the index of both; few registries can delete a tag alone."""
    add_variant("a")
    own = labels_of("b")
    image = repository.image(None, own, layer=b"own")
    result = foreign(repository, platform=UNKNOWN, annotations={ATTESTED: image})
    pushed = {"mediaType": MANIFEST, "digest": image, "size": 3, "platform": PLAIN}
    raw = json.dumps({"mediaType": INDEX, "manifests": [pushed, result]}).encode()
    repository.put(tag(own), raw, INDEX)
    assert publish(registry, "v1").variants == 2
    del repository.blobs[digest(b"own")]
    done = publish(registry, "v1", repair=True)
    assert (cells(repository), done.stuck) == (["a"], ())
    assert tag(own) not in repository.tags


def test_shared_layers_are_checked_once(server, registry, repository, add_variant):
    for cell in "abc":
        add_variant(cell)
    publish(registry, "v1")
    before = server.count("HEAD", "blobs")
    assert publish(registry, "v1", repair=True).variants == 3
    assert server.count("HEAD", "blobs") - before == len(repository.blobs)


def test_repair_replaces_a_lost_image_that_was_rebuilt(registry, repository, add_variant):
    """With the classic store the same inputs give another digest."""
    lost = add_variant("a", layer=b"once")
    publish(registry, "v1")
    lose(repository, lost)
    again = add_variant("a", layer=b"twice")
    with pytest.raises(UnknownImageError):
        publish(registry, "v1")
    done = publish(registry, "v1", repair=True)
    assert (done.variants, done.new, len(done.dropped)) == (1, 1, 1)
    (entry,) = image_index.parse_index(repository.manifests[done.digest][1], "v1")
    assert entry.digest == again
    assert entry.platform == PLAIN, "the lost default is replaced by another variant"


def test_choose_resolves_two_images_for_one_cell(registry, repository, add_variant):
    add_variant("a", "1")
    wanted = add_variant("a", "2")
    first, second = (f"v1-a-{digest(made_of)[7:19]}" for made_of in (b"1", b"2"))
    with pytest.raises(TagMovedError) as caught:
        publish(registry, "v1")
    assert f"{first} and {second}" in str(caught.value) or f"{second} and {first}" in str(caught.value)
    assert "--choose" in caught.value.remedy
    with pytest.raises(TagMovedError, match="several images for one cell"):
        publish(registry, "v1", selection=IndexSelection(tags=[first, second]))
    with pytest.raises(UnknownImageError, match="has no variant v1-x"):
        publish(registry, "v1", selection=IndexSelection(tags=["v1-x"]))
    assert "v1" not in repository.tags
    done = publish(registry, "v1", selection=IndexSelection(tags=[second]))
    assert done.others == (first,)
    (entry,) = image_index.parse_index(repository.manifests[done.digest][1], "v1")
    assert entry.digest == wanted
    again = publish(registry, "v1")
    assert (again.digest, again.others) == (done.digest, (first,))
    with pytest.raises(TagMovedError, match="was published with another image") as caught:
        publish(registry, "v1", selection=IndexSelection(tags=[first]))
    assert repository.tags["v1"] == done.digest


def test_conflicting_concurrent_choices_are_refused(server, registry, repository, add_variant):
    add_variant("a", "1")
    add_variant("a", "2")
    first, second = (f"v1-a-{digest(made_of)[7:19]}" for made_of in (b"1", b"2"))

    def other():
        with Registry(registry.name) as another:
            publish(another, "v1", selection=IndexSelection(tags=[second]))

    server.fails("GET", "tags/list", then=other)
    with pytest.raises(TagMovedError, match="was published with another image"):
        publish(registry, "v1", selection=IndexSelection(tags=[first]))
    (entry,) = image_index.parse_index(repository.manifests[repository.tags["v1"]][1], "v1")
    assert entry.tag == second


def test_warm_images_stay_in_the_index_with_their_variants(
    registry, repository, add_variant, add_warm, image
):
    base = add_variant("a")
    signed: list[str] = []
    done = publish(
        registry,
        "v1",
        selection=IndexSelection(warm=[warm := add_warm(base), add_warm(digest(b"another"))]),
        sign=signed.extend,
    )
    assert (done.variants, done.new) == (1, 1)
    assert [*dict.fromkeys(signed)] == [done.digest, base, warm.digest]
    catalog = open_catalog(f"{image}:v1")
    (entry,) = catalog.warm
    assert (entry.base, entry.digest, entry.size) == (base, warm.digest, 6)
    assert repository.tags[entry.reference.rpartition(":")[2]] == warm.digest
    assert publish(registry, "v1").digest == done.digest, "nothing is written again"
    add_variant("b")
    done = publish(registry, "v1")
    assert (done.variants, done.new) == (2, 1)
    assert open_catalog(f"{image}:v1").warm == catalog.warm
    assert open_catalog(f"{image}:v1-a-{digest(b'1')[7:19]}").warm == ()


def test_programs_that_know_no_warm_images_do_not_see_them(registry, repository, add_variant, add_warm):
    """They take entries with these annotations for variants, and engines choose by platform."""
    publish(registry, "v1", selection=IndexSelection(warm=[add_warm(add_variant("a"))]))
    _, raw = repository.manifests[repository.tags["v1"]]
    (warm,) = [entry for entry in json.loads(raw)["manifests"] if labels.WARM in entry["annotations"]]
    assert warm["annotations"].keys() == {labels.WARM, labels.SIZE}
    assert warm["platform"] == UNKNOWN
    variant = {labels.VARIANT, labels.VERSION, labels.CELL, labels.INPUT}
    assert variant.isdisjoint(warm["annotations"])
    ours = [one for one in image_index.parse_index(raw, "v1") if one.ours]
    assert len(ours) == len(json.loads(raw)["manifests"]) - 1


def test_repair_removes_warm_images_that_are_lost_or_whose_variant_is(
    registry, repository, add_variant, add_warm, image
):
    bases = [add_variant(cell, layer=cell.encode()) for cell in "ab"]
    warm = [add_warm(base) for base in bases] + [add_warm(bases[0], digest(b"other"))]
    publish(registry, "v1", selection=IndexSelection(warm=warm))
    del repository.manifests[warm[0].digest]
    with pytest.raises(UnknownImageError, match=f"lost images(?s:.*){warm[0].digest}") as caught:
        publish(registry, "v1")
    assert "--repair" in caught.value.remedy
    assert publish(registry, "v1", repair=True).dropped == (f"{image}@{warm[0].digest}",)
    assert {one.digest for one in open_catalog(f"{image}:v1").warm} == {warm[1].digest, warm[2].digest}
    del repository.manifests[bases[1]]
    publish(registry, "v1", repair=True)
    assert [one.digest for one in open_catalog(f"{image}:v1").warm] == [warm[2].digest]


DAMAGE: list[dict[str, object]] = [
    {"schema": 2},
    {"base": "sha256:1"},
    {"match": None},
    {"command": []},
    {"proofs": {"root": "perhaps"}},
]


@pytest.mark.parametrize("changes", DAMAGE)
def test_a_damaged_warm_image_keeps_no_node_from_its_variant(registry, add_variant, add_warm, image, changes):
    base = add_variant("a")
    good, bad = add_warm(base), add_warm(base, digest(b"bad"))
    text = json.dumps(json.loads(bad.annotations[labels.WARM]) | changes)
    damaged = replace(bad, annotations={labels.WARM: text})
    deep = replace(bad, digest=base, annotations={labels.WARM: "[" * 100_000})
    raw = image_index.write_index([*published_entries(registry), good, damaged, deep], image, "v1")
    registry.push_manifest("v1", raw, INDEX)
    catalog = open_catalog(f"{image}:v1")
    assert [variant.digest for variant in catalog.variants] == [base]
    assert [warm.digest for warm in catalog.warm] == [good.digest]


def published_entries(registry):
    publish(registry, "v1")
    return image_index.parse_index(registry.find_manifest("v1").raw, "v1")


def test_of_two_warm_images_of_one_name_the_first_counts(registry, add_variant, add_warm, image):
    base = add_variant("a")
    warm = [add_warm(base, layer=layer) for layer in (b"one", b"two")]
    publish(registry, "v1", selection=IndexSelection(warm=warm))
    assert [one.digest for one in open_catalog(f"{image}:v1").warm] == [min(one.digest for one in warm)]


def test_a_warm_image_is_no_variant(registry, add_variant, add_warm, image):
    base = add_variant("a")
    warm = add_warm(base)
    publish(registry, "v1", selection=IndexSelection(warm=[warm]))
    (entry,) = open_catalog(f"{image}:v1").warm
    for name in (entry.reference, f"{image}@{warm.digest}"):
        with pytest.raises(UnknownImageError, match="is a warm image, and no variant"):
            open_catalog(name)


def test_what_was_built_on_a_warm_image_is_what_its_labels_say(
    registry, repository, add_warm, image, labels_of
):
    """It has the label too: as a variant it is one, and with another name it is nothing of ours."""
    own = labels_of("a") | {labels.WARM: add_warm(digest(b"base")).annotations[labels.WARM]}
    tag = labels.make_tag(*(own[key] for key in (labels.VERSION, labels.CELL, labels.INPUT)))
    pushed = repository.image(tag, own)
    publish(registry, "v1")
    catalog = open_catalog(f"{image}:v1")
    assert [variant.digest for variant in catalog.variants] == [pushed]
    assert catalog.warm == ()
    _, raw = repository.manifests[repository.tags["v1"]]
    assert labels.WARM not in json.loads(raw)["manifests"][0]["annotations"]
