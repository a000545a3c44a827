"""The default image of a published version for plain clients: one per architecture, which stays."""

import itertools
import json

import pytest
from distribution import digest
from matrices import add_option

from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.plan import PlanContext, PlanStatus
from imagematrix.build.plan.planner import plan
from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.errors import UsageError
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.sources import open_catalog

UNKNOWN = {"architecture": "unknown", "os": "unknown"}
AMD64 = {"architecture": "amd64", "os": "linux"}
ARM64 = {"architecture": "arm64", "os": "linux"}


def platforms(repository, tag="v1"):
    """Return the platforms in an index, by cell."""
    _, raw = repository.manifests[repository.tags[tag]]
    return {one.annotations.get(labels.CELL): one.platform for one in image_index.parse_index(raw, tag)}


def test_default_is_the_cpu_only_variant_with_the_lowest_requirements(
    registry, repository, add_variant, variant, image
):
    add_variant("gpu", VARIANT=variant("x86-64", cuda="12.4"))
    add_variant("a", VARIANT=variant("znver4"))
    add_variant("b", VARIANT=variant("x86-64-v2"))
    add_variant("c", VARIANT=variant("x86-64-v3"))
    add_variant("d", VARIANT=variant("neoverse-n1", platform="linux/arm64"))
    add_variant("e", VARIANT=variant("armv8-a", platform="linux/arm64"))
    done = publish(registry, "v1", ["latest"])
    assert platforms(repository) == platforms(repository, "latest")
    assert platforms(repository) == {
        **dict.fromkeys(("gpu", "a", "c", "d"), UNKNOWN),
        "b": AMD64,
        "e": ARM64,
    }
    amd64, arm64 = done.plain
    assert (amd64.platform, arm64.platform) == ("linux/amd64", "linux/arm64")
    assert amd64.needs == ("cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3")
    assert arm64.needs == ()
    # The rules use the platform in the label, whatever the platform in the index.
    assert {one.platform for one in open_catalog(f"{image}:v1").variants} == {
        "linux/amd64",
        "linux/arm64",
    }


def test_published_default_never_changes(registry, repository, add_variant, variant):
    add_variant("c", VARIANT=variant("x86-64-v3"))
    publish(registry, "v1")
    add_variant("b", VARIANT=variant("x86-64"))
    done = publish(registry, "v1", selection=IndexSelection(plain_pull={"linux/amd64": "b"}))
    assert platforms(repository) == {"b": UNKNOWN, "c": AMD64}
    (one,) = done.plain
    assert (one.variant.march, one.why) == ("x86-64-v3", "a version's default stays once it is published")


def test_matrix_can_name_the_default(registry, repository, add_variant, variant):
    add_variant("a", VARIANT=variant("x86-64"))
    done = publish(registry, "v1", selection=IndexSelection(plain_pull={"linux/amd64": "gpu"}))
    assert platforms(repository) == {"a": UNKNOWN}
    assert done.plain[0].variant is None
    assert done.plain[0].why == "plain_pull names the cell gpu, which is not pushed yet"
    add_variant("gpu", VARIANT=variant("x86-64-v3", cuda="12.4"))
    for _ in range(2):
        done = publish(registry, "v1", selection=IndexSelection(plain_pull={"linux/amd64": "gpu"}))
        assert platforms(repository) == {"a": UNKNOWN, "gpu": AMD64}
        assert done.plain[0].why == "plain_pull names it"
        assert done.plain[0].to_json()["cuda"] == "12.4"


def test_gpu_only_version_has_no_default(registry, repository, add_variant, variant):
    add_variant("gpu", VARIANT=variant("x86-64", cuda="12.4"))
    done = publish(registry, "v1")
    assert platforms(repository) == {"gpu": UNKNOWN}
    assert done.plain[0].why == "there is no CPU-only variant"
    add_variant("a", VARIANT=variant("znver4"))
    publish(registry, "v1")
    assert platforms(repository) == {"gpu": UNKNOWN, "a": AMD64}


def test_default_has_the_default_value_of_each_axis(registry, repository, add_variant, variant):
    defaults = {"DEFAULTS": json.dumps({"python": "3.13"})}
    for march, python in itertools.product(("x86-64", "x86-64-v2"), ("3.11", "3.13")):
        add_variant(f"{python}-{march}", VARIANT=variant(march, axes={"python": python}), **defaults)
    publish(registry, "v1")
    assert [cell for cell, platform in platforms(repository).items() if platform == AMD64] == ["3.13-x86-64"]


def test_default_does_not_depend_on_push_order(registry, add_variant, variant):
    answers = set()
    for number, cells in enumerate(itertools.permutations("abc")):
        for cell in cells:
            add_variant(cell, version=f"v{number}", VARIANT=variant("x86-64-v2"))
        answers.add(publish(registry, f"v{number}").plain[0].variant.reference.split("-")[1])
    assert answers == {"a"}


def test_variants_with_different_preferences_are_not_published(registry, repository, add_variant):
    add_variant("a")
    publish(registry, "v1")
    before = repository.tags["v1"]
    add_variant("b", PREFER="cuda")
    with pytest.raises(UsageError, match="differ in their preferences"):
        publish(registry, "v1")
    assert repository.tags["v1"] == before


def test_oversized_index_is_not_pushed(server, registry, add_variant, monkeypatch):
    monkeypatch.setattr("imagematrix.build.publish.publish.LIMIT", 100)
    add_variant("a")
    with pytest.raises(UsageError, match="an index of 1 variants is too large"):
        publish(registry, "v1")
    assert not server.count("PUT")


def test_plain_pull_is_not_part_of_the_identity(project):
    stated = add_option("plain_pull: {cuda: none, march: znver4}")
    identities = []
    for changes in ((), (stated,)):
        path = project(*changes)
        (path.parent / ".dockerignore").write_text("*\n")
        planned = plan(load_matrix(path), PlanContext(resolve=lambda name: digest(name.encode())))
        identities.append([item.identity for item in planned.with_status(PlanStatus.BUILD)])
    assert identities[0] == identities[1] != []
