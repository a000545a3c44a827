"""Catalogs of OCI layouts and archives: which variants they have, whoever wrote them."""

import json
from pathlib import Path

import pytest
from images import Parts, archived, digest, index, layout, saved, tar
from publishing import labels_of, tag
from signing import Signer
from storing import LAYERS, variant, warm

from imagematrix.errors import AuditError, SignatureError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog import saved_images as source
from imagematrix.images.catalog.sources import open_catalog, require_not_built_on


def references(catalog):
    return [one.reference for one in catalog.variants]


@pytest.fixture
def two():
    return variant("one")[0], variant("two", tar("x"))[0]


@pytest.mark.parametrize("kind", ["layout", "archive"])
def test_the_variants_are_those_whose_configurations_say_so(tmp_path, two, kind):
    plain = Parts(tar("plain"))
    if kind == "layout":
        name = f"oci:{layout(tmp_path / 'l', *two, plain)}"
    else:
        name = archived(tmp_path / "a.tar", *two, plain)
    catalog = open_catalog(name, image="training:v1")
    assert references(catalog) == [f"training:{variant(cell)[1]}" for cell in ("one", "two")]
    assert [one.digest for one in catalog.variants] == [image.digest for image in two]
    assert catalog.variants[0].size == sum(len(two[0].blobs[layer]) for layer in two[0].layers)
    assert open_catalog(name) == catalog == open_catalog(name, image="training")


@pytest.mark.parametrize("kind", ["layout", "archive"])
def test_warm_images_are_those_of_the_variants_that_are_there(tmp_path, two, kind):
    """What is built on a warm image as a variant has its label, too, and is a variant."""
    fitting, tag_of_it = warm(two[0])
    of_another, _ = warm(variant("absent")[0])
    damaged = Parts(tar("x"), labels={labels.WARM: "{"})
    own = labels_of("three") | {labels.WARM: json.dumps({"base": two[0].digest})}
    images = (fitting, of_another, damaged, Parts(tar("built"), labels=own), *two)
    if kind == "layout":
        name = f"oci:{layout(tmp_path / 'l', *images)}"
    else:
        name = archived(tmp_path / "a.tar", *images)
    catalog = open_catalog(name, image="training:v1")
    assert len(catalog.variants) == 3
    (one,) = catalog.warm
    assert (one.reference, one.digest, one.base) == (f"training:{tag_of_it}", fitting.digest, two[0].digest)
    assert one.size == sum(len(fitting.blobs[layer]) for layer in fitting.layers)
    assert open_catalog(name, image=f"training:{variant('two')[1]}").warm == ()


def test_warm_images_alone_are_no_catalog(tmp_path, two):
    with pytest.raises(UnknownImageError, match="has no variant of imagematrix"):
        open_catalog(f"oci:{layout(tmp_path / 'l', warm(two[0])[0])}")


def test_an_archive_of_an_old_engine_has_the_digest_of_its_configuration(tmp_path):
    image, _ = variant()
    catalog = open_catalog(saved(tmp_path / "a.tar", image, *LAYERS), image="training:v1")
    assert [one.digest for one in catalog.variants] == [image.config]
    assert catalog.variants[0].size is None


def test_an_index_in_a_layout_is_followed(tmp_path, two):
    folder = Path(layout(tmp_path / "l", *two))
    inner = index(two[0].entry(), two[1].entry(), {**two[0].entry(), "digest": digest(b"not copied")})
    path = folder / "blobs" / "sha256" / digest(inner)[7:]
    path.write_bytes(inner)
    described = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": digest(inner),
        "size": len(inner),
    }
    (folder / "index.json").write_bytes(index(described, two[0].entry()))
    assert len(open_catalog(f"oci:{folder}").variants) == 2


def test_indexes_nested_too_deeply_are_refused(tmp_path, two):
    folder = Path(layout(tmp_path / "l", *two))
    inner = index(two[0].entry())
    for _ in range(4):
        (folder / "blobs" / "sha256" / digest(inner)[7:]).write_bytes(inner)
        inner = index({"mediaType": "x", "digest": digest(inner), "size": len(inner)})
    (folder / "index.json").write_bytes(inner)
    with pytest.raises(AuditError, match="nested too deeply"):
        open_catalog(f"oci:{folder}")


@pytest.mark.parametrize(
    "name", ["training", "training:v1", "localhost:5000/training:v1", "registry.example/training"]
)
def test_an_image_may_be_named_with_a_registry_or_without(tmp_path, two, name):
    assert len(open_catalog(f"oci:{layout(tmp_path / 'l', *two)}", image=name).variants) == 2


def test_a_variant_may_be_named(tmp_path, two):
    name = f"oci:{layout(tmp_path / 'l', *two)}"
    for wanted in (f"training:{variant('two')[1]}", f"r:5000/training@{two[1].digest}"):
        assert [one.digest for one in open_catalog(name, image=wanted).variants] == [two[1].digest]


@pytest.mark.parametrize(
    "image", ["other", "training:v2", "ml/training:v1", "r:5000/ml/training:v1", "training:v1-none"]
)
def test_what_it_does_not_have_is_named(tmp_path, two, image):
    with pytest.raises(UnknownImageError, match=f"has no variant of {image}") as caught:
        open_catalog(f"oci:{layout(tmp_path / 'l', *two)}", image=image)
    assert caught.value.remedy == "it has training:v1"


def test_of_several_versions_one_has_to_be_named(tmp_path):
    images = variant("one")[0], variant("one", version="v2")[0]
    name = f"oci:{layout(tmp_path / 'l', *images)}"
    assert open_catalog(name, image="training:v2").version == "v2"
    for image in (None, "training"):
        with pytest.raises(UnknownImageError, match="has several versions") as caught:
            open_catalog(name, image=image)
        assert caught.value.remedy == "name one of training:v1, training:v2"


def test_an_image_that_was_built_on_a_variant_is_none(tmp_path):
    own = labels_of("one")
    plain = Parts(tar("a"), labels=own)
    own[labels.CONTENT] = labels.hash_content(json.loads(plain.blobs[plain.config]))
    kept = Parts(tar("a"), labels=own)
    built_on = Parts(tar("a"), tar("b"), labels=own)
    name = f"oci:{layout(tmp_path / 'l', kept, built_on)}"
    assert [one.digest for one in open_catalog(name).variants] == [kept.digest]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: path, UsageError, "is not an OCI layout: oci-layout not found"),
        (lambda path: layout(path / "l"), UnknownImageError, "has no variant of imagematrix"),
        (
            lambda path: layout(path / "l", Parts(tar("a"))),
            UnknownImageError,
            "has no variant of imagematrix",
        ),
        (
            lambda path: layout(path / "l", variant()[0], entries=[{"digest": "x", "size": 1}]),
            UsageError,
            "not a sha256",
        ),
    ],
)
def test_layouts_without_variants_are_errors(tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        open_catalog(f"oci:{make(tmp_path)}")


def test_an_index_that_is_a_manifest_is_refused(tmp_path):
    image, _ = variant()
    folder = Path(layout(tmp_path / "l", image))
    (folder / "index.json").write_bytes(image.raw)
    with pytest.raises(UsageError, match=r"index\.json is not an index"):
        open_catalog(f"oci:{folder}")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, UsageError, "No such file"),
        (b"no tar" * 200, AuditError, "cannot be read"),
        (tar("a"), UnknownImageError, "neither manifest.json nor index.json"),
        (tar(("manifest.json", b"[]")), UnknownImageError, "has no variant"),
    ],
)
def test_archives_without_images_are_errors(tmp_path, content, error, message):
    path = tmp_path / "a.tar"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        open_catalog(str(path))


def test_damaged_labels_are_an_error(tmp_path):
    image = Parts(tar("a"), labels=labels_of("one", VARIANT="{"))
    with pytest.raises(UsageError, match=r"io\.imagematrix\.variant"):
        open_catalog(f"oci:{layout(tmp_path / 'l', image)}")


@pytest.mark.parametrize(
    ("rules", "otherwise", "message"),
    [
        ([], "deny", "the policy allows no images of training"),
        (
            [{"repository": "training", "keys": ["cosign.pub"]}],
            "allow",
            "has no signature: it is in no registry",
        ),
    ],
)
def test_a_policy_holds_for_them_too(tmp_path, two, rules, otherwise, message):
    policy = tmp_path / "policy.json"
    Signer(tmp_path)
    document = {"schema": "imagematrix.policy/v1", "rules": rules, "otherwise": otherwise}
    policy.write_text(json.dumps(document))
    with pytest.raises(SignatureError, match=message):
        open_catalog(f"oci:{layout(tmp_path / 'l', *two)}", policy=policy)
    policy.write_text(json.dumps(document | {"rules": [], "otherwise": "allow"}))
    assert open_catalog(f"oci:{tmp_path / 'l'}", policy=policy).variants


@pytest.mark.usefixtures("no_engine")
def test_the_engine_is_not_asked_about_them():
    require_not_built_on("training:v1", "oci:layout", ["training:v1-x"])
    require_not_built_on("training:v1", "images.tar", ["training:v1-x"])


def test_a_source_of_images_is_found_by_the_name(tmp_path, two):
    name = f"oci:{layout(tmp_path / 'l', *two)}"
    assert source.open_source(name).read_parts(two[0].digest).layers == tuple(two[0].layers)
    path = archived(tmp_path / "a.tar", *two)
    assert len(source.open_source(path).read_parts(two[0].digest).layers) == 2
    assert tag(labels_of("one")) == variant("one")[1]
