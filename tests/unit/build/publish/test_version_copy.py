"""Copying versions between registries in memory: what is copied, what is refused, and what nobody sees."""

import json
from contextlib import nullcontext

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from distribution import MANIFEST, Server, digest
from publishing import put_warm
from signing import Signer, attach, pem

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.build.publish.sign import is_signed, sign_manifests
from imagematrix.build.publish.version_copy import copy_version
from imagematrix.errors import EngineError, SignatureError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.oci.manifest import INDEX
from imagematrix.images.oci.registry import Registry
from imagematrix.images.trust.policy import load_policies
from imagematrix.images.trust.signature import TRIED, Key, make_signature_tag
from imagematrix.images.trust.signing_key import SigningKey


@pytest.fixture
def mirror():
    """Another registry, which is a server of its own."""
    other = Server()
    yield other
    other.close()


@pytest.fixture
def target(mirror):
    with Registry(f"{mirror.address}/ml/training") as client:
        yield client


@pytest.fixture
def key(tmp_path):
    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "cosign.pub").write_bytes(pem(private.public_key()))
    return SigningKey(private=private, public=Key(name="cosign.pub", public=private.public_key()))


@pytest.fixture
def policies(tmp_path, key):
    """Call it with the registry in the names of signed repositories to get policies that require `key`."""

    def load(registry=None):
        rules = [{"repository": "*", "keys": [key.public.name]}]
        document = {"schema": "imagematrix.policy/v1", "rules": rules, "otherwise": "deny"}
        (tmp_path / "policy.json").write_text(
            json.dumps(document | ({"registry": registry} if registry else {}))
        )
        return load_policies([tmp_path / "policy.json"])

    return load


def test_copy_has_the_same_digests_and_is_complete(registry, target, add_variant, repository, mirror):
    digests = {add_variant(cell, layer=cell.encode()) for cell in ("a", "b")}
    first = publish(registry, "v1", selection=IndexSelection(plain_pull={"linux/amd64": "b"}))
    noted: list[str] = []
    done = copy_version(registry, target, "v1", ["latest"], on_step=noted.append)
    assert done.digest == first.digest
    copied = mirror.repository("ml/training")
    assert copied.manifests.keys() == repository.manifests.keys()
    assert copied.blobs == repository.blobs
    assert copied.tags == repository.tags | {"latest": first.digest}
    assert sorted(noted) == sorted(f"copied {tag}" for tag in repository.tags if tag != "v1")
    assert {variant.digest for variant in open_catalog(f"{target.name}:v1").variants} == digests

    noted.clear()
    written = mirror.count("POST")
    assert copy_version(registry, target, "v1", on_step=noted.append).digest == first.digest
    assert (noted, mirror.count("POST")) == ([], written), "nothing is sent again"
    add_variant("c")
    assert publish(registry, "v1").variants == 3
    assert copy_version(registry, target, "v1").digest == registry.digest("v1"), "cells may be added"


def test_copy_in_a_repository_of_another_name_has_another_index(registry, mirror, add_variant):
    kept = add_variant("a")
    first = publish(registry, "v1")
    with Registry(f"{mirror.address}/other/name") as target:
        done = copy_version(registry, target, "v1")
        assert done.digest != first.digest, "an index has the name of its repository"
        assert [variant.digest for variant in open_catalog(f"{target.name}:v1").variants] == [kept]


def test_images_that_others_pushed_are_not_published_with_a_copy(registry, target, add_variant, mirror):
    add_variant("a")
    publish(registry, "v1")
    stray = {
        labels.IMAGE: "training",
        labels.VERSION: "v1",
        labels.CELL: "stray",
        labels.INPUT: digest(b"1"),
        labels.INPUTS: "{}",
        labels.VARIANT: json.dumps({"platform": "linux/amd64"}),
    }
    mirror.repository("ml/training").image(labels.make_tag("v1", "stray", digest(b"1")), stray)
    assert copy_version(registry, target, "v1").variants == 1


def test_nothing_that_is_there_is_replaced(registry, target, add_variant, mirror, repository):
    add_variant("a")
    publish(registry, "v1")
    (tag,) = (tag for tag in repository.tags if tag != "v1")
    copied = mirror.repository("ml/training")
    other = copied.image(tag, {"another": "image"})
    with pytest.raises(TagMovedError, match=f"exists as {other}"):
        copy_version(registry, target, "v1")
    assert copied.tags == {tag: other}


def test_copy_of_another_version_or_of_nothing_is_refused(registry, target, add_variant, repository):
    with pytest.raises(UnknownImageError, match="no published version"):
        copy_version(registry, target, "v1")
    add_variant("a")
    publish(registry, "v1")
    repository.manifests = {
        one: kept for one, kept in repository.manifests.items() if one == repository.tags["v1"]
    }
    with pytest.raises(UnknownImageError, match="the registry lost"):
        copy_version(registry, target, "v1")


def test_layer_with_other_bytes_is_not_copied(registry, target, add_variant, repository, mirror):
    add_variant("a", layer=b"right")
    publish(registry, "v1")
    repository.blobs[digest(b"right")] = b"wrong"
    with pytest.raises(EngineError, match="has other content than its digest says"):
        copy_version(registry, target, "v1")
    assert not mirror.repository("ml/training").tags


def test_blob_without_end_does_not_fill_the_disk(registry, target, add_variant, mirror):
    class Endless:
        sent = 0

        def read(self, size):
            self.sent += size
            assert self.sent < 1 << 20, "more than the layer has"
            return bytes(size)

    add_variant("a", layer=b"right")
    publish(registry, "v1")
    registry.open = lambda _: nullcontext(Endless())
    with pytest.raises(EngineError, match="has other content than its digest says"):
        copy_version(registry, target, "v1")
    assert not mirror.repository("ml/training").tags


def test_image_with_attestations_keeps_them(registry, target, add_variant, repository, mirror):
    image = add_variant("a")
    (tag,) = repository.tags
    empty = {"mediaType": "application/vnd.in-toto+json", "digest": digest(b"layer"), "size": 5}
    document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": empty, "layers": [empty]}
    attestation = repository.put(None, json.dumps(document).encode(), MANIFEST)
    kind = "application/vnd.oci.image.index.v1+json"
    notes = {"vnd.docker.reference.digest": image, "vnd.docker.reference.type": "attestation-manifest"}
    entries = [
        {"mediaType": MANIFEST, "digest": image, "size": 1},
        {"mediaType": MANIFEST, "digest": attestation, "size": 1, "annotations": notes},
    ]
    index = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
    repository.put(tag, json.dumps(index).encode(), kind)
    first = publish(registry, "v1")
    assert copy_version(registry, target, "v1").digest == first.digest
    assert mirror.repository("ml/training").manifests.keys() >= {image, attestation, first.digest}


@pytest.mark.parametrize("tells", [False, True])
def test_signatures_go_with_what_they_sign(
    registry, target, add_variant, key, policies, mirror, server, tells
):
    server.tells = mirror.tells = tells
    image = add_variant("a")
    first = publish(registry, "v1", sign=lambda digests: sign_manifests(registry, key, digests))
    own = policies(server.address)
    done = copy_version(registry, target, "v1", policies=own)
    assert done.digest == first.digest
    copied = mirror.repository("ml/training")
    for one in (image, first.digest):
        assert f"{one.replace(':', '-')}.sig" in copied.tags
        subjects = [json.loads(raw).get("subject", {}).get("digest") for _, raw in copied.manifests.values()]
        assert subjects.count(one) == 1, "the bundle"
        assert (f"{one.replace(':', '-')}" in copied.tags) is not tells
    before = dict(copied.tags)
    copy_version(registry, target, "v1", policies=own)
    assert copied.tags == before, "no signature is there twice"


@pytest.mark.parametrize(
    ("artifact", "listed_as"),
    [
        ({"artifactType": "application/spdx+json"}, "application/spdx+json"),
        ({}, "application/vnd.oci.empty.v1+json"),
    ],
)
def test_what_else_refers_to_an_image_is_copied_as_what_it_is(
    registry, target, repository, add_variant, mirror, server, artifact, listed_as
):
    """An SBOM is no signature, also where the target's registry does not list referrers by itself."""
    server.tells = True
    image = add_variant("a")
    publish(registry, "v1")
    repository.blobs[digest(b"{}")] = b"{}"
    config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest(b"{}"), "size": 2}
    document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": []} | artifact
    document["subject"] = {"mediaType": MANIFEST, "digest": image, "size": 1}
    raw = json.dumps(document).encode()
    registry.push_manifest(digest(raw), raw, MANIFEST)
    copy_version(registry, target, "v1")
    copied = mirror.repository("ml/training")
    assert digest(raw) in copied.manifests
    (entry,) = json.loads(copied.manifests[copied.tags[image.replace(":", "-")]][1])["manifests"]
    assert (entry["digest"], entry["artifactType"]) == (digest(raw), listed_as)
    assert not is_signed(target, image)


def test_what_is_listed_as_referring_to_an_image_and_is_gone_is_left_out(
    registry, target, repository, add_variant
):
    image = add_variant("a")
    first = publish(registry, "v1")
    entry = {"mediaType": MANIFEST, "digest": digest(b"gone"), "size": 4}
    listed = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
    repository.put(image.replace(":", "-"), json.dumps(listed).encode(), INDEX)
    assert copy_version(registry, target, "v1").digest == first.digest


def test_copy_without_the_signature_that_a_policy_requires_gets_no_tag(
    registry, target, add_variant, key, policies, mirror, tmp_path
):
    add_variant("a")
    publish(registry, "v1")
    required = policies()
    with pytest.raises(SignatureError, match="has no signature"):
        copy_version(registry, target, "v1", policies=required)
    assert not mirror.repository("ml/training").tags
    sign_manifests(registry, key, [registry.digest("v1")])
    # A signature has the name of the registry: it is none for the mirror's.
    with pytest.raises(SignatureError, match=f"not of {target.name}") as caught:
        copy_version(registry, target, "v1", policies=required)
    assert caught.value.remedy == "signatures name their registry: sign the copy with `--sign KEY`"
    assert "v1" not in mirror.repository("ml/training").tags
    copy_version(
        registry, target, "v1", policies=required, sign=lambda all_: sign_manifests(target, key, all_)
    )
    assert open_catalog(f"{target.name}:v1", policy=tmp_path / "policy.json").variants


def test_a_source_cannot_hide_the_signatures_of_the_target(
    registry, repository, target, add_variant, key, policies, mirror, tmp_path
):
    """Only the first ones are verified, and anybody who can push to the source can put some there."""
    add_variant("a")
    index = publish(registry, "v1").digest
    copy_version(registry, target, "v1", sign=lambda all_: sign_manifests(target, key, all_))
    policies()
    file = tmp_path / "policy.json"
    assert open_catalog(f"{target.name}:v1", policy=file).variants
    repository.blobs[digest(b"{}")] = b"{}"
    evil = Signer(tmp_path, "evil")
    attach(repository, index, [evil.sealed(repository, b"junk %d" % number) for number in range(TRIED + 1)])
    copy_version(registry, target, "v1")
    assert open_catalog(f"{target.name}:v1", policy=file).variants
    (listed,) = (
        json.loads(mirror.repository("ml/training").manifests[name][1])["layers"]
        for tag, name in mirror.repository("ml/training").tags.items()
        if tag == make_signature_tag(index)
    )
    assert len(listed) == 1 + TRIED, "more would never be verified"


def test_a_copy_made_while_the_source_had_others_signatures_only_gets_the_valid_one(
    registry, repository, target, add_variant, key, policies, server, mirror, tmp_path
):
    """Behind the others it would never be verified."""
    add_variant("a")
    index = publish(registry, "v1").digest
    repository.blobs[digest(b"{}")] = b"{}"
    evil = Signer(tmp_path, "evil")
    attach(repository, index, [evil.sealed(repository, b"junk %d" % number) for number in range(TRIED)])
    copy_version(registry, target, "v1")
    del repository.tags[make_signature_tag(index)]
    sign_manifests(registry, key, [index])
    copy_version(registry, target, "v1")  # without a policy it comes last
    required = policies(server.address)
    copied = mirror.repository("ml/training")
    for _ in range(2):
        copy_version(registry, target, "v1", policies=required)
        assert open_catalog(f"{target.name}:v1", policy=tmp_path / "policy.json").variants
        _, raw = copied.manifests[copied.tags[make_signature_tag(index)]]
        assert len(json.loads(raw)["layers"]) == TRIED + 1, "it is there once"


def test_signatures_of_others_in_the_target_stay(registry, target, add_variant, tmp_path, mirror, key):
    image = add_variant("a")
    publish(registry, "v1", sign=lambda digests: sign_manifests(registry, key, digests))
    copied = mirror.repository("ml/training")
    copied.blobs[digest(b"{}")] = b"{}"
    Signer(tmp_path, "other").sign(copied, image, "theirs")
    copy_version(registry, target, "v1")
    _, raw = copied.manifests[copied.tags[f"{image.replace(':', '-')}.sig"]]
    assert len(json.loads(raw)["layers"]) == 2


def test_image_of_another_version_in_an_index_is_refused(registry, target, add_variant, mirror):
    add_variant("a", version="v2")
    publish(registry, "v2")
    manifest = registry.find_manifest("v2")
    document = json.loads(manifest.raw)
    document["annotations"][labels.VERSION] = "v1"
    registry.push_manifest("v1", json.dumps(document).encode(), manifest.media_type)
    with pytest.raises(UsageError, match="which is an image of another version"):
        copy_version(registry, target, "v1")
    assert not mirror.repository("ml/training").tags


def test_warm_images_are_copied_with_their_variants(
    registry, target, add_variant, add_warm, repository, mirror, key
):
    base = add_variant("a")
    kept, lost = add_warm(base), add_warm(base, digest(b"lost"))
    first = publish(
        registry,
        "v1",
        selection=IndexSelection(warm=[kept, lost]),
        sign=lambda digests: sign_manifests(registry, key, digests),
    )
    assert copy_version(registry, target, "v1").digest == first.digest
    copied = mirror.repository("ml/training")
    assert copied.manifests.keys() == repository.manifests.keys(), "with their signatures"
    assert copied.tags == repository.tags
    (warm, other) = open_catalog(f"{target.name}:v1").warm
    assert {warm.digest, other.digest} == {kept.digest, lost.digest}
    del repository.manifests[lost.digest]
    with Registry(f"{mirror.address}/ml/elsewhere") as third:
        copy_version(registry, third, "v1")
        assert [warm.digest for warm in open_catalog(f"{third.name}:v1").warm] == [kept.digest]


def test_warm_image_that_the_target_made_itself_stands(registry, target, add_variant, add_warm, mirror):
    """Equal nodes at two sites have the same key, and never the same bytes."""
    base = add_variant("a")
    publish(registry, "v1")
    copy_version(registry, target, "v1")
    own = put_warm(mirror.repository("ml/training"), base, layer=b"the target's")
    publish(target, "v1", selection=IndexSelection(warm=[own]))
    publish(registry, "v1", selection=IndexSelection(warm=[add_warm(base, layer=b"the source's")]))
    add_variant("b")
    publish(registry, "v1")

    noted: list[str] = []
    copy_version(registry, target, "v1", on_step=noted.append)
    catalog = open_catalog(f"{target.name}:v1")
    assert [warm.digest for warm in catalog.warm] == [own.digest]
    assert len(catalog.variants) == 2
    assert f" exists as {own.digest}, not as " in noted[-1]
    assert own.digest in mirror.repository("ml/training").tags.values()


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_warm_image_whose_layer_is_lost_or_damaged_is_left_out(
    registry, target, add_variant, add_warm, repository, mirror, content
):
    base = add_variant("a")
    warm = add_warm(base, layer=b"caches")
    publish(registry, "v1", selection=IndexSelection(warm=[warm]))
    if content is None:
        del repository.blobs[digest(b"caches")]
    else:
        repository.blobs[digest(b"caches")] = content
    noted: list[str] = []
    assert copy_version(registry, target, "v1", on_step=noted.append).variants == 1
    assert open_catalog(f"{target.name}:v1").warm == ()
    tag, _, why = noted[-1].partition(" left out: ")
    assert repository.tags[tag] == warm.digest
    assert digest(b"caches") in why
    assert tag not in mirror.repository("ml/training").tags
