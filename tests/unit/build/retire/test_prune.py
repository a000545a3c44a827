"""Pruning an engine: what goes, what stays, and why."""

import datetime as dt
from functools import partial

import pytest

from imagematrix.build.retire.prune import apply_pruning, survey_engine
from imagematrix.build.retire.retention import Retention
from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog import labels

NOW = dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
NEWEST = Retention(keep=1)


def whys(retention=NEWEST, **more):
    return {
        f"{one.version} {one.images[0]}": one.reasons
        for one in survey_engine(retention, now=NOW, **more).images
    }


def prune(retention=NEWEST, **more):
    look = partial(survey_engine, retention, now=NOW, **more)
    apply_pruning(look(), look, lambda _: None)


def test_older_versions_go_with_all_their_names(node):
    old = node.add("a", "v2")
    gone = node.images[old]["RepoTags"] + node.images[old]["RepoDigests"]
    node.add("a", "v10")
    node.add("a", "v1", image="other")
    assert whys() == {"v1 other": "newest", "v2 training": "", "v10 training": "newest"}
    prune()
    assert node.removed == gone
    assert len(node.images) == 2


def test_what_a_container_uses_stays(node):
    by_id, by_name = node.add("a", "v1"), node.add("b", "v1")
    node.add("a", "v2")
    node.start("one", by_id)
    node.start("two", "sha256:other", by=node.images[by_name]["RepoTags"][0])
    reasons = sorted(one.reasons for one in survey_engine(NEWEST, now=NOW).images)
    assert reasons == ["container one", "container two", "newest"]


def test_images_with_names_of_somebody_else_stay(node):
    node.add("a", "v1", names=["mine:prod"])
    node.add("a", "v2")
    assert whys()["v1 training"] == "also named mine:prod"
    prune()
    assert not node.removed


def test_the_name_of_a_version_is_ours_only_if_it_was_pulled(node):
    node.add("a", "v1", names=["reg.example/training:v1"], image="reg.example/training")
    node.add("a", "v2", image="reg.example/training")
    node.add("b", "v1", names=["somebody:v1"])
    node.add("b", "v2")
    assert whys()["v1 training"] == "also named somebody:v1"
    prune()
    assert "reg.example/training:v1" in node.removed
    assert "somebody:v1" not in node.removed


def test_images_that_were_pulled_by_digest_only_count(node):
    node.add("a", "v1", image="reg.example/training", pulled=True)
    node.add("a", "v2", image="reg.example/training")
    prune()
    assert len(node.images) == 1


def test_names_with_a_digest_among_the_tags_are_no_other_names(node):
    old = node.images[node.add("a", "v1", image="reg.example/training")]
    old["RepoTags"] += old["RepoDigests"]
    node.add("a", "v2", image="reg.example/training")
    prune()
    assert len(node.images) == 1


def test_images_built_on_a_variant_stay(node):
    child = node.add("a", "v1")
    node.images[child]["RootFS"]["Layers"].append("sha256:mine")
    node.add("a", "v2")
    assert whys()["v1 training"] == "built on the variant of its name"


def test_what_is_built_on_a_variant_of_a_classic_store_is_told_by_its_name(node):
    """There no content digest shows that labels are inherited."""
    names = [
        ("reg.example/team/app:v1", "reg.example/team/app@sha256:1"),
        ("reg.example/team/app@sha256:2",),
        ("reg.example/ml/training:v1",),
        ("mirror.example/copies/ml/training@sha256:4",),
        ("reg.example/ml/renamed:{tag}", "reg.example/ml/renamed:v1"),
        ("reg.example/ml/training:v1", "reg.example/team/app@sha256:6"),
    ]
    images = [node.images[node.add("a", "v1")] for _ in names]
    for image, given in zip(images, names, strict=True):
        own_tag = image["RepoTags"][0].partition(":")[2]
        tags = [name.format(tag=own_tag) for name in given]
        image["RepoTags"] = [name for name in tags if "@" not in name]
        image["RepoDigests"] = [name for name in tags if "@" in name]
        image["Config"]["Labels"] = {
            key: text for key, text in image["Config"]["Labels"].items() if key != labels.CONTENT
        }
    shown = survey_engine(Retention(protect=frozenset(["v2"])), now=NOW)
    assert {image.id for image in shown.removals} == {images[number]["Id"] for number in (2, 3, 4)}
    (kept,) = (image for image in shown.images if image.is_kept)
    assert kept.reasons == "also named reg.example/team/app@sha256:6"


def test_images_without_our_labels_and_damaged_ones_are_left_alone(node):
    for change in ({labels.VERSION: None}, {labels.CELL: None}, {labels.INPUT: ""}):
        image = node.images[node.add("a", "v1")]
        own = image["Config"]["Labels"]
        image["Config"]["Labels"] = {key: change.get(key, value) for key, value in own.items()}
    unnamed = node.images[node.add("b", "v1")]
    unnamed["RepoTags"] = unnamed["RepoDigests"] = ["<none>:<none>"]
    node.add("a", "v2")
    assert list(whys()) == ["v2 training"]


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("2026-01-31T23:00:00.123456789Z", "younger"),
        ("2026-01-31T23:00:00+01:00", "younger"),
        ("2026-01-30T23:00:00Z", ""),
        ("0001-01-01T00:00:00Z", "unknown age"),
        ("yesterday", "unknown age"),
        ("2026-01-01T00:00:00", "unknown age"),
        ("", "unknown age"),
    ],
)
def test_young_images_stay(node, named, why):
    node.add("a", "v1", named=named)
    assert whys(Retention(), newer_s=86400) == {"v1 training": why}


def test_an_image_stays_if_one_of_its_names_does(node):
    image = node.add("a", "v1")
    node.images[image]["RepoTags"].append(
        node.images[image]["RepoTags"][0].replace("training", "reg.example/ml/training")
    )
    node.add("a", "v2")
    assert whys() == {"v1 reg.example/ml/training": "newest", "v2 training": "newest"}


def test_the_newest_version_that_serves_a_host_stays(node, variant, profiles):
    for version, march in (("v1", "x86-64-v2"), ("v2", "x86-64-v2"), ("v3", "znver4")):
        node.add(march, version, VARIANT=variant(march))
    hosts = {name: Host.load(profiles[name]) for name in ("laptop", "grace-hopper")}
    shown = survey_engine(Retention(hosts=hosts), now=NOW)
    assert [one.reasons for one in shown.images] == ["", "serves laptop", ""]
    assert shown.unserved == ("grace-hopper",)


def test_only_named_images_are_considered(node):
    for image in ("training", "other"):
        for version in ("v1", "v2"):
            node.add("a", version, image=image)
    assert list(whys(only=["other"])) == ["v1 other", "v2 other"]
    with pytest.raises(UnknownImageError, match="no variant of trainin") as caught:
        whys(only=["trainin"])
    assert "training" in caught.value.remedy


def test_names_that_podman_qualified_are_one_image(node):
    node.add("a", "v1", image="localhost/training")
    node.add("a", "v2", image="docker.io/library/training")
    assert whys() == {"v1 training": "", "v2 training": "newest"}


def test_nothing_goes_if_the_engine_has_changed(node):
    old = node.add("a", "v1")
    node.add("a", "v2")
    shown = survey_engine(NEWEST, now=NOW)
    node.start("late", old)
    with pytest.raises(EngineError, match="changed meanwhile: nothing was removed"):
        apply_pruning(shown, partial(survey_engine, NEWEST, now=NOW), lambda _: None)
    assert not node.removed


def test_an_engine_that_refuses_is_told_and_a_second_run_completes(node):
    first, second = node.add("a", "v1"), node.add("b", "v1")
    node.add("a", "v2")
    look = partial(survey_engine, NEWEST, now=NOW)
    with pytest.raises(EngineError, match="a container is using its image"):
        apply_pruning(look(), look, lambda _: node.start("late", second))
    assert first not in node.images
    assert second in node.images
    node.containers.clear()
    prune()
    assert len(node.images) == 1


def test_warm_images_go_with_their_version(node):
    bases = [f"sha256:{digit * 64}" for digit in "ab"]
    old, new = (node.add_warm(base, version) for base, version in zip(bases, ("v1", "v2"), strict=True))
    mine = node.add_warm(f"sha256:{'c' * 64}", "v1", names=["mine:prod"])
    built_on_it = node.add_warm(f"sha256:{'d' * 64}", "v1")
    node.images[built_on_it]["RepoTags"] = ["training:v1-of-somebody"]
    node.add("a", "v2")
    both = node.add("b", "v2")
    node.images[both]["Config"]["Labels"][labels.WARM] = "damaged"
    plan = survey_engine(NEWEST, now=NOW)
    assert len(plan.images) == 5
    assert {image.id for image in plan.removals} == {old}
    prune()
    assert {new, mine, built_on_it, both} <= node.images.keys()
    assert old not in node.images


def test_a_warm_image_stays_for_the_hosts_that_would_start_it(node, variant, profiles):
    """By its match where its variant is not there, and else with its variant."""
    laptop = Host.load(profiles["laptop"])
    keep = Retention(hosts={"laptop": laptop})
    here, there = {"cpu": {"vendor": laptop.cpu.vendor}, "cpus": 1}, {"cpu": {"vendor": "another"}}
    alone = {
        version: node.add_warm(f"sha256:{number * 64}", version, match=match)
        for version, number, match in (("v1", "a", here), ("v2", "b", here), ("v3", "c", there))
    }
    base = node.add("znver4", "v4", VARIANT=variant("znver4"))
    beside = node.add_warm(base, "v4", match=here)
    shown = survey_engine(keep, now=NOW)
    assert [image.id for image in shown.images if image.is_kept] == [alone["v2"]]
    assert shown.unserved == ()
    assert {image.id for image in shown.removals} == {alone["v1"], alone["v3"], base, beside}
    served = node.add("x86-64-v2", "v4", VARIANT=variant("x86-64-v2"))
    shown = survey_engine(keep, now=NOW)
    assert {image.id for image in shown.images if image.is_kept} == {base, beside, served}
