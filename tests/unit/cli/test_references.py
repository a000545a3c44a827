"""Variants by reference, and the versions in a registry."""

import json

import pytest
from distribution import MANIFEST

from imagematrix.build.publish.publish import publish
from imagematrix.cli.shared.inputs import find_catalog
from imagematrix.errors import UnknownImageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.oci.manifest import INDEX

V2 = {"platform": "linux/amd64", "march": "x86-64-v2", "cpu_flags": []}


def own(python, **more):
    return {"VARIANT": json.dumps(V2 | {"axes": {"python": python}} | more), "DEFAULTS": '{"python":"3.13"}'}


@pytest.fixture
def published(add_variant, registry):
    """The digests of two images of v1 for two versions of Python, one of them the default."""
    digests = {python: add_variant(f"cpu-{python}", **own(python)) for python in ("3.9", "3.13")}
    publish(registry, "v1")
    return digests


def reference(image, python, made_of="6b86b273ff34"):
    return f"{image}:v1-cpu-{python}-{made_of}"


@pytest.mark.usefixtures("docker_host")
def test_variant_is_found_by_reference_or_digest(image, published):
    for name in (reference(image, "3.9"), f"{image}@{published['3.9']}"):
        result = find_catalog(name, None)
        assert (result.image, result.version, result.defaults) == (image, "v1", ())
        assert [one.reference for one in result.variants] == [reference(image, "3.9")]
        assert result.variants[0].digest == published["3.9"]


def test_unpublished_variant_is_found_by_reference(image, add_variant):
    pushed = add_variant("cpu-3.9", **own("3.9"))
    catalog = open_catalog(reference(image, "3.9"))
    assert [one.digest for one in catalog.variants] == [pushed]


def test_rules_apply_to_a_variant_selected_by_reference(cli, profiles, image, add_variant, published):
    add_variant("arm", VARIANT=json.dumps(V2 | {"platform": "linux/arm64"}))
    host = ("--host", profiles["laptop"])
    assert cli("select", reference(image, "3.9"), *host).out == f"{reference(image, '3.9')}\n"
    assert cli("select", f"{image}:v1", *host).out == f"{reference(image, '3.13')}\n"
    shown = cli("run", "--dry-run", *host, reference(image, "3.9"))
    assert shown.out.endswith(f" {reference(image, '3.9')}@{published['3.9']}\n")
    result = cli("explain", f"{image}:v1-arm-6b86b273ff34", *host)
    assert result.code == 3
    assert "the image is for linux/arm64" in result.out


def test_foreign_image_is_not_a_variant(image, repository):
    repository.image("v1-x", {"some": "label"})
    with pytest.raises(UnknownImageError, match="has no labels of its own"):
        open_catalog(f"{image}:v1-x")


@pytest.mark.usefixtures("published")
def test_error_for_a_missing_version_lists_existing_ones(cli, image, add_variant, registry):
    add_variant("cpu", version="v2.1")
    publish(registry, "v2.1")

    def remedy(name):
        with pytest.raises(UnknownImageError) as caught:
            find_catalog(name, None)
        assert str(caught.value).endswith(f"has no {name}")
        return caught.value.remedy

    assert remedy(f"{image}:v9") == "it has v1, v2.1"
    assert remedy(f"{image}:v2.2") == "did you mean 'v2.1'?"
    assert remedy(reference(image, "3.8")) == "did you mean 'v1-cpu-3.9-6b86b273ff34'?"
    assert remedy(f"{image}s:v1") == "check the name; the registry has no such repository"
    assert cli("select", f"{image}:v9").code == 4


def test_unpublished_version_is_reported(image, add_variant):
    add_variant("cpu")
    for name in (f"{image}:v1", image):
        with pytest.raises(UnknownImageError) as caught:
            find_catalog(name, None)
        publish = f"run `imagematrix publish {image}:v1`"
        assert caught.value.remedy == f"its images are pushed but not published yet: {publish}"


def test_image_without_labels_is_to_be_adopted(image, repository):
    repository.image("plain", {})
    of_others = {"mediaType": MANIFEST, "digest": repository.image("amd64", {}), "size": 1}
    many = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [of_others]}
    repository.put("multi", json.dumps(many).encode(), INDEX)
    for version in ("plain", "multi"):
        with pytest.raises(UnknownImageError, match=f"^{image}:{version} has no labels of its own") as caught:
            find_catalog(f"{image}:{version}", None)
        assert f"`imagematrix adopt {image}:{version} --as {image}:{version} -o " in caught.value.remedy


@pytest.mark.usefixtures("published")
def test_unpublished_version_beside_a_published_one_is_reported(image, add_variant):
    add_variant("cpu", version="v2")
    with pytest.raises(UnknownImageError) as caught:
        find_catalog(f"{image}:v2", None)
    assert caught.value.remedy.endswith(f"`imagematrix publish {image}:v2`")


@pytest.mark.usefixtures("published")
def test_ls_of_a_registry_image_lists_versions(cli, image, add_variant, registry, repository, conforms):
    add_variant("cpu", version="v10", VARIANT=json.dumps(V2 | {"platform": "linux/arm64"}))
    publish(registry, "v10", aliases=("latest",))
    repository.image("other", {"some": "label"})
    head, _, *rows = cli("ls", image).out.splitlines()
    assert head.split() == ["version", "variants", "platforms", "axes"]
    assert [row.split() for row in rows] == [
        [f"{image}:latest", "1", "linux/arm64", "-"],
        [f"{image}:v1", "2", "linux/amd64", "python", "3.9|3.13"],
        [f"{image}:v10", "1", "linux/arm64", "-"],
    ]
    (row,) = cli("ls", image, "--where", "python=3.9").out.splitlines()[2:]
    assert row.split()[:2] == [f"{image}:v1", "1"]
    documents = conforms(json.loads(cli("ls", image, "--json").out))["versions"]
    for document in documents:
        conforms(document)
    assert [document["version"] for document in documents] == ["latest", "v1", "v10"]
    rows = cli("ls", reference(image, "3.9")).out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == [reference(image, "3.9")]


def test_ls_of_an_unpublished_image_reads_the_engine(cli, image, engine, server):
    results = {
        labels.IMAGE: image,
        labels.VERSION: "v1",
        labels.CELL: "cpu",
        labels.INPUT: f"sha256:{'0' * 64}",
        labels.VARIANT: json.dumps(V2),
    }
    engine.add_image(results, RepoTags=[f"{image}:v1-cpu-000000000000"])
    assert f"{image}:v1 " in cli("ls", image).out
    cli("ls", f"{server.address}/ml/nothing").refuses(4, "the engine has no variant of")


def test_publish_rejects_a_digest(cli, image, published):
    result = cli("publish", f"{image}@{published['3.9']}")
    assert (result.code, result.out) == (2, "")
