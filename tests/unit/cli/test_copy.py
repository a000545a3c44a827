"""`imagematrix copy` between registries in memory."""

import json

import pytest

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.images.oci.registry import Registry


def test_copy_prints_the_index_and_names_what_it_copied(cli, server, image, registry, add_variant, conforms):
    add_variant("a")
    done = publish(registry, "v1")
    target = f"{server.address}/mirror/training"
    copied = cli("copy", f"{image}:v1", target, "--alias", "stable")
    assert copied.code == 0
    name, at, digest = copied.out.strip().partition("@")
    assert (name, at) == (f"{target}:v1", "@")
    assert "copied v1-a-" in copied.err
    assert f"{target}:v1: 1 variant, 1 new\n" in copied.err
    with Registry(target) as mirror:
        assert mirror.digest("stable") == mirror.digest("v1") == digest != done.digest
    again = cli("copy", f"{image}:v1", f"{target}:v1", "--json")
    document = conforms(json.loads(again.out))
    assert (document["digest"], document["new"]) == (digest, 0)
    assert "copied" not in again.err


def test_copy_names_a_warm_image_that_it_leaves_out(cli, image, registry, repository, add_variant, add_warm):
    warm = add_warm(add_variant("a"))
    publish(registry, "v1", selection=IndexSelection(warm=[warm]))
    del repository.manifests[warm.digest]
    copied = cli("copy", f"{image}:v1", f"{image}2")
    assert copied.code == 0
    assert f" left out: the registry lost {image}@{warm.digest}" in copied.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("{image}:v1", "{image}"), 2, "would be copied to itself"),
        (("{image}:v1", "{image}2:v2"), 2, "leave out :v2, or pass --alias v2"),
        (("{image}", "{image}2"), 2, "is not an image with a registry and a version"),
        (("training:v1", "{image}2"), 2, "is not an image with a registry and a version"),
        (("{image}:v1", "training"), 2, "is not the name of an image in a registry"),
        (("{image}:v1", "{image}2"), 4, "has no published version"),
    ],
)
def test_what_cannot_be_copied_is_refused(cli, image, words, code, message):
    cli("copy", *(word.format(image=image) for word in words)).refuses(code, message)


@pytest.mark.parametrize("name", ["training:v1", "ml/training:v1", "{image}", "{image}@sha256:" + 64 * "0"])
def test_only_a_version_in_a_registry_is_copied_or_published(cli, image, name):
    """A name without a registry would be Docker Hub's, where nobody looks for it."""
    for words in (("copy", name.format(image=image), f"{image}2"), ("publish", name.format(image=image))):
        done = cli(*words)
        assert (done.code, done.out) == (2, "")
        assert "is not an image with a registry and a version" in done.err
