"""Retiring versions: what nothing names any more goes, and an interruption harms nothing."""

import json

import pytest
from distribution import CONFIG, MANIFEST, digest
from hypothesis import given
from hypothesis import strategies as st
from publishing import warm_label

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.build.retire.retention import Retention
from imagematrix.build.retire.retire import apply_retirement, plan_retirement, survey_repository
from imagematrix.build.stores.inventory import Inventory, RepositoryManifest
from imagematrix.errors import EngineError, UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog import labels
from imagematrix.images.oci.manifest import ATTESTED, INDEX

NEWEST = Retention(keep=1)
DIGESTS = [f"sha256:{number:064x}" for number in range(8)]
SOME = st.lists(st.sampled_from(DIGESTS), max_size=2, unique=True)


@pytest.fixture
def versions(registry, add_variant):
    """Call it with names of versions to publish each with two variants."""

    def call(*names):
        for name in names:
            for cell in "ab":
                add_variant(cell, version=name, layer=cell.encode())
            publish(registry, name)

    return call


@pytest.fixture
def attach(repository):
    """Call it with a digest to attach something to that manifest, perhaps under a tag; return its digest."""

    def call(subject, suffix=".sig", *, tagged=True):
        raw = json.dumps({"payload": subject}).encode()
        repository.blobs |= {digest(raw): raw}
        blob = {"mediaType": "text/plain", "digest": digest(raw), "size": len(raw)}
        document = {"mediaType": MANIFEST, "config": blob, "layers": [], "subject": {"digest": subject}}
        tag = f"{subject.replace(':', '-')}{suffix}" if tagged else None
        return repository.put(tag, json.dumps(document).encode(), MANIFEST)

    return call


@pytest.fixture
def attested(repository, registry, labels_of):
    """Call it with a version to publish one with an attested variant; return what the variant's tag names."""

    def call(version):
        own = labels_of("a", version=version)
        image = repository.image(None, own)
        statement = repository.image(None, {}, config=version.encode())
        entry = {"mediaType": MANIFEST, "size": 1}
        annotations = {ATTESTED: image, "vnd.docker.reference.type": "attestation-manifest"}
        entries = [{**entry, "digest": image}, {**entry, "digest": statement, "annotations": annotations}]
        raw = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}).encode()
        tag = labels.make_tag(*(own[key] for key in (labels.VERSION, labels.CELL, labels.INPUT)))
        index = repository.put(tag, raw, INDEX)
        publish(registry, version)
        return {index, image, statement}

    return call


def until(end):
    """Return a function whose call number `end` + 1 fails."""
    calls = iter(range(end))
    return lambda _: next(calls)


def remove(image, retention=NEWEST):
    shown = survey_repository(image, retention)
    apply_retirement(shown, retention, lambda _: None)
    return shown


def test_versions_beyond_the_newest_go_with_all_that_is_theirs(image, repository, versions):
    versions("v2", "v10", "v9")
    before = dict(repository.tags)
    shown = survey_repository(image, Retention(keep=2))
    assert [(version, fate.why) for version, fate in shown.decisions.items()] == [
        ("v2", ""),
        ("v9", "newest 2"),
        ("v10", "newest 2"),
    ]
    gone = {tag for tag in before if tag.startswith("v2")}
    assert {tag for one in shown.removals for tag in one.tags} == gone
    assert repository.tags == before, "nothing is removed yet"
    apply_retirement(shown, Retention(keep=2), lambda _: None)
    assert repository.tags == {tag: value for tag, value in before.items() if tag not in gone}
    assert {*repository.manifests} == {*repository.tags.values()}
    assert (
        shown.size
        == sum(
            len(raw) for _, raw in [repository.manifests.get(one.digest, ("", b"")) for one in shown.removals]
        )
        + shown.size
    )


def test_the_size_counts_what_nothing_else_has(image, repository, registry, add_variant):
    add_variant("a", layer=b"shared")
    add_variant("b", layer=b"only here")
    publish(registry, "v1")
    add_variant("a", version="v2", layer=b"shared")
    publish(registry, "v2")
    before = {**repository.blobs} | {key: raw for key, (_, raw) in repository.manifests.items()}
    shown = remove(image)
    repository.collect()
    after = {**repository.blobs} | {key: raw for key, (_, raw) in repository.manifests.items()}
    assert digest(b"shared") in after
    assert shown.size == sum(len(raw) for key, raw in before.items() if key not in after)


@pytest.mark.parametrize("name", ["latest", "stable-2"])
def test_a_version_stays_if_an_alias_names_it(image, registry, repository, versions, add_variant, name):
    versions("v1", "v2")
    raw = repository.manifests[repository.tags["v1"]][1]
    registry.push_manifest(name, raw, INDEX)
    assert survey_repository(image, NEWEST).decisions["v1"].why == f"tag {name}"
    add_variant("c", version="v1")
    publish(registry, "v1")
    assert repository.tags["v1"] != repository.tags[name]
    shown = remove(image)
    assert shown.decisions["v1"].why == f"tag {name}", "an alias of the index before cells were added"
    assert not shown.removals


def test_a_version_stays_if_it_is_protected_or_in_another_index(image, registry, repository, versions):
    versions("v1", "v2", "v3", "v4")
    index, (kind, raw) = repository.tags["v2"], repository.manifests[repository.tags["v2"]]
    nested = {"mediaType": INDEX, "manifests": [{"mediaType": kind, "digest": index, "size": len(raw)}]}
    registry.push_manifest("bundle", json.dumps(nested).encode(), INDEX)
    shown = remove(image, Retention(protect=frozenset(["v3"])))
    assert {version: fate.why for version, fate in shown.decisions.items() if fate.is_kept} == {
        "v2": "tag bundle",
        "v3": "protected",
    }
    assert {"v2", "v3", "bundle"} < repository.tags.keys()
    assert not {"v1", "v4"} & repository.tags.keys()


def test_what_another_index_names_stays(image, registry, repository, versions):
    versions("v1", "v2")
    tag = next(tag for tag in repository.tags if tag.startswith("v1-a-"))
    kept = repository.tags[tag]
    entry = {"mediaType": MANIFEST, "digest": kept, "size": len(repository.manifests[kept][1])}
    registry.push_manifest("mine", json.dumps({"mediaType": INDEX, "manifests": [entry]}).encode(), INDEX)
    remove(image)
    assert {tag for tag in repository.tags if tag.startswith("v1")} == {tag}
    assert kept in repository.manifests
    again = survey_repository(image, NEWEST)
    assert (again.removals, again.decisions["v1"].why) == ((), "other tags name its images")


def test_attestations_and_signatures_go_with_their_images(image, repository, attested, attach):
    old, new = attested("v1"), attested("v2")
    index = {version: repository.tags[version] for version in ("v1", "v2")}
    signatures = {one: attach(one) for one in (*old, *new, *index.values())}
    nested = attach(signatures[index["v1"]], ".att")
    foreign = attach(digest(b"elsewhere"))
    shown = remove(image)
    gone = {*old, index["v1"], nested, *(signatures[one] for one in (*old, index["v1"]))}
    assert {one.digest for one in shown.removals} == gone
    assert {*repository.manifests} == {*new, index["v2"], foreign} | {
        signatures[one] for one in (*new, index["v2"])
    }


def test_referrers_go_where_the_registry_tells_of_them(server, image, repository, versions, attach):
    versions("v1", "v2")
    server.tells = True
    subjects = {tag: repository.tags[tag] for tag in ("v1", "v2")}
    referrers = {tag: attach(subject, tagged=False) for tag, subject in subjects.items()}
    second = attach(referrers["v1"], tagged=False)
    shown = remove(image)
    assert {referrers["v1"], second} < {one.digest for one in shown.removals}
    assert referrers["v2"] in repository.manifests
    assert not {referrers["v1"], second} & repository.manifests.keys()


def test_registries_may_refuse_to_delete_what_an_index_names_or_a_tag_has(
    server, image, repository, attested
):
    attested("v1")
    kept = attested("v2")
    server.strict = True
    remove(image)
    assert {*repository.manifests} == {*kept, repository.tags["v2"]}
    assert not [tag for tag in repository.tags if tag.startswith("v1")]


def test_what_something_without_a_tag_names_stays_without_its_tags(server, image, repository, versions):
    versions("v1", "v2")
    kept = repository.tags["v1"]
    entry = {"mediaType": INDEX, "digest": kept, "size": len(repository.manifests[kept][1])}
    repository.put(None, json.dumps({"mediaType": INDEX, "manifests": [entry]}).encode(), INDEX)
    server.strict = True
    stuck = apply_retirement(survey_repository(image, NEWEST), NEWEST, until(0))
    assert (stuck[0].digest, len(stuck)) == (kept, 3)
    assert {tag.partition("-")[0] for tag in repository.tags} == {"v2"}
    assert not survey_repository(image, NEWEST).removals


def test_a_registry_that_deletes_nothing_more_is_told(server, image, repository, versions):
    versions("v1", "v2")
    server.fails("DELETE", "", times=99, status=409)
    with pytest.raises(EngineError, match="refuses to delete"):
        remove(image)
    assert "v1" in repository.tags


def test_a_registry_without_deletion_is_told(server, image, versions):
    versions("v1", "v2")
    body = b'{"errors": [{"code": "UNSUPPORTED"}]}'
    server.fails("DELETE", "", times=99, status=405, body=body)
    with pytest.raises(EngineError, match="permits no deletion") as caught:
        remove(image)
    assert "enable deletion" in caught.value.remedy


def test_pushed_images_stay_while_they_may_be_in_the_making(image, repository, versions, add_variant):
    versions("v1", "v3")
    for version in ("v2", "v4", "v0"):
        add_variant("a", version=version)
    shown = survey_repository(image, NEWEST)
    assert {version: fate.why for version, fate in shown.decisions.items()} == {
        "v0": "",
        "v1": "",
        "v2": "",
        "v3": "newest",
        "v4": "not published yet",
    }
    assert survey_repository(image, Retention(keep=2)).decisions["v2"].why == "not published yet"
    assert (
        survey_repository(image, Retention(protect=frozenset(["v0", "v1"]))).decisions["v0"].why
        == "protected"
    )
    remove(image)
    assert sorted(tag.partition("-")[0] for tag in repository.tags) == ["v3", "v3", "v3", "v4"]


def test_the_newest_version_that_serves_a_host_stays(image, registry, add_variant, variant, profiles):
    for version, marches in (("v1", ["x86-64-v2", "znver4"]), ("v2", ["x86-64-v2"]), ("v3", ["znver4"])):
        for march in marches:
            add_variant(march, version=version, VARIANT=variant(march))
        publish(registry, version)
    laptop = Host.load(profiles["laptop"])
    arm = Host.load(profiles["grace-hopper"])
    shown = survey_repository(image, Retention(hosts={"laptop": laptop, "arm": arm}))
    assert {version: fate.hosts for version, fate in shown.decisions.items()} == {
        "v1": (),
        "v2": ("laptop",),
        "v3": (),
    }
    assert shown.unserved == ("arm",)
    assert shown.decisions["v2"].why == "serves laptop"


def test_a_version_whose_image_is_lost_serves_nobody(
    image, registry, repository, add_variant, variant, profiles
):
    for version in ("v1", "v2"):
        add_variant("x86-64-v2", version=version, VARIANT=variant("x86-64-v2"))
        publish(registry, version)
    tag = next(tag for tag in repository.tags if tag.startswith("v2-"))
    del repository.manifests[repository.tags.pop(tag)]
    shown = survey_repository(image, Retention(hosts={"laptop": Host.load(profiles["laptop"])}))
    assert shown.decisions["v1"].hosts == ("laptop",)


def test_nothing_goes_if_the_registry_has_changed(image, registry, repository, versions):
    versions("v1", "v2", "v3")
    shown = survey_repository(image, NEWEST)
    before = {**repository.manifests}
    registry.push_manifest("latest", repository.manifests[repository.tags["v1"]][1], INDEX)
    with pytest.raises(EngineError, match="changed meanwhile: nothing was removed"):
        apply_retirement(shown, NEWEST, lambda _: None)
    assert repository.manifests == before


def test_what_is_named_during_the_removal_stays(image, registry, repository, versions):
    versions("v1", "v2", "v3")
    shown = survey_repository(image, NEWEST)
    raw = repository.manifests[repository.tags["v2"]][1]
    done: set[str] = set()

    def move(removal):
        if not done:
            registry.push_manifest("latest", raw, INDEX)
        done.add(removal.version)

    with pytest.raises(EngineError, match="3 of 6 manifests stay"):
        apply_retirement(shown, NEWEST, move)
    assert done == {"v1"}
    assert {"v2", "latest"} < repository.tags.keys()


def test_a_version_disappears_at_once_if_the_rest_can_be_found_without_it(image, versions, attested):
    versions("v1", "v2")
    attested("v0")
    first = [one.tags for one in survey_repository(image, NEWEST).removals]
    assert first[0] == ("v0",)
    assert first[-3] == ("v1",)


def test_a_newest_version_keeps_its_index_to_the_end(image, versions):
    versions("v1", "v2")
    *_, last = survey_repository(image, Retention(protect=frozenset(["v1"]))).removals
    assert last.tags == ("v2",), "without it, the images would look like a version in the making"


def test_a_version_with_images_without_tags_keeps_its_index_to_the_end(image, repository, versions):
    versions("v1", "v2")
    for tag in [tag for tag in repository.tags if tag.startswith("v1-")]:
        del repository.tags[tag]
    shown = survey_repository(image, NEWEST)
    assert shown.removals[-1].tags == ("v1",)
    assert len(shown.removals) == 3


@pytest.mark.parametrize("retention", [NEWEST, Retention(protect=frozenset(["v1"]))])
def test_interrupted_after_any_manifest_a_second_run_completes(
    server, image, repository, attested, attach, retention
):
    for version in ("v1", "v2"):
        attested(version)
        attach(repository.tags[version])
    saved = dict(repository.manifests), dict(repository.tags)
    remove(image, retention)
    expected = dict(repository.manifests), dict(repository.tags)
    total = len(saved[0]) - len(expected[0])
    for strict in (False, True):
        server.strict = strict
        for end in range(1, total):
            repository.manifests, repository.tags = dict(saved[0]), dict(saved[1])
            with pytest.raises(StopIteration):
                apply_retirement(survey_repository(image, retention), retention, until(end))
            remove(image, retention)
            assert repository.tags == expected[1]
            assert strict or repository.manifests == expected[0]


def test_an_index_that_another_tool_changed_stays(image, repository, versions):
    versions("v1", "v2")
    raw = repository.manifests[repository.tags["v1"]][1]
    document = json.loads(raw)
    document["manifests"].pop()
    repository.put("v1", json.dumps(document).encode(), INDEX)
    shown = remove(image)
    assert "v1" in repository.tags
    assert len(shown.removals) == 1, "only the image that it does not name"


def test_an_alias_may_begin_as_a_version_does(image, repository, versions):
    versions("v1", "v2")
    repository.tags["v1-latest"] = repository.tags["v1"]
    assert survey_repository(image, NEWEST).decisions["v1"].why == "tag v1-latest"


def test_something_damaged_is_told(image, repository, versions):
    versions("v1")
    repository.put("x", b'{"manifests": 1}', INDEX)
    with pytest.raises(UsageError):
        survey_repository(image, NEWEST)


def test_an_image_without_its_configuration_is_left_alone(image, repository, versions):
    versions("v1", "v2")
    lost = repository.image("nightly-test", None)
    del repository.blobs[json.loads(repository.manifests[lost][1])["config"]["digest"]]
    shown = survey_repository(image, NEWEST)
    assert not shown.decisions["v1"].why
    assert "nightly-test" not in {tag for removal in shown.removals for tag in removal.tags}


def test_images_with_other_content_are_left_alone(image, repository, versions):
    versions("v1", "v2")
    other = repository.image("v1-foreign-0123456789ab", {}, kind=CONFIG)
    remove(image)
    assert repository.tags["v1-foreign-0123456789ab"] == other


def goes(found, own):
    """Return what goes with the tags `own`, by definition: look at everything until nothing more goes."""
    tags = {*own}
    while True:
        kept = found.compute_closure(digest for tag, digest in found.tags.items() if tag not in tags)
        gone = found.compute_closure(found.tags[tag] for tag in tags) - kept
        more = {tag for tag, subject in found.attached.items() if subject in gone} - tags
        if not more:
            return gone
        tags |= more


@given(
    names=st.dictionaries(st.sampled_from(DIGESTS), SOME),
    referrers=st.dictionaries(st.sampled_from(DIGESTS), SOME),
    attached=st.lists(st.tuples(st.sampled_from(DIGESTS), st.sampled_from(DIGESTS)), max_size=6),
    others=SOME,
    own=SOME,
)
def test_what_is_attached_goes_with_what_goes_whatever_names_what(names, referrers, attached, others, own):
    signatures = {f"s{number}": pair for number, pair in enumerate(attached)}
    pushed = {f"v1-{number}-0123456789ab": digest for number, digest in enumerate(own)}
    found = Inventory(
        tags={"v2": "sha256:v2", **dict(zip("abc", others, strict=False)), **pushed}
        | {tag: content for tag, (content, _) in signatures.items()},
        items={one: RepositoryManifest(names=tuple(some), blobs={}) for one, some in names.items()},
        published={"v2": ()},
        pushed=dict.fromkeys(pushed, "v1"),
        aliases={},
        attached={tag: subject for tag, (_, subject) in signatures.items()},
        referrers={one: tuple(some) for one, some in referrers.items()},
    )
    shown = plan_retirement("t", found, NEWEST)
    gone = goes(found, pushed)
    assert shown.stays == found.items.keys() - gone
    assert {removal.digest for removal in shown.removals} <= gone


def test_warm_images_go_with_their_version(image, repository, registry, add_variant, add_warm, attach):
    for name in ("v1", "v2"):
        base = add_variant("a", version=name, layer=name.encode())
        warm = add_warm(base, version=name, layer=f"{name} caches".encode())
        attach(warm.digest)
        publish(registry, name, selection=IndexSelection(warm=[warm]))
    inherited = json.dumps(warm_label(repository.tags["v2"]))
    built_on_it = repository.image("mine-warm-0", {labels.WARM: inherited})
    remove(image)
    repository.collect()
    assert {tag for tag in repository.tags if tag.startswith("v1")} == set()
    assert b"v1 caches" not in repository.blobs.values()
    assert b"v2 caches" in repository.blobs.values()
    assert built_on_it in repository.manifests
    assert len([tag for tag in repository.tags if tag.startswith("v2-warm-")]) == 1
