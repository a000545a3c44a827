"""Signing what is published, with the checks of policies and of cosign as judges."""

import json
import shutil
import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from distribution import MANIFEST
from resolving import Front, SimulatedNode
from signing import pem

from imagematrix.build.publish.publish import publish
from imagematrix.build.publish.sign import is_signed, sign_manifests
from imagematrix.common.record import replace
from imagematrix.errors import SignatureError
from imagematrix.images.catalog.sources import open_catalog, require_signed
from imagematrix.images.oci.manifest import INDEX
from imagematrix.images.oci.registry import Registry
from imagematrix.images.trust.policy import SignaturePolicy
from imagematrix.images.trust.signature import TRIED, Key, make_signature_tag
from imagematrix.images.trust.signing_key import SigningKey


@pytest.fixture
def new_key(tmp_path):
    """Call it with a name to get a new key, whose public half is in a file of this name."""

    def make(name="cosign.pub"):
        private = ec.generate_private_key(ec.SECP256R1())
        (tmp_path / name).write_bytes(pem(private.public_key()))
        return SigningKey(private=private, public=Key(name=name, public=private.public_key()))

    return make


@pytest.fixture
def policy(tmp_path):
    """Call it with the name of a key to get a policy that requires its signature everywhere."""

    def write(key="cosign.pub"):
        rules = [{"repository": "*", "keys": [key]}]
        file = tmp_path / f"{key}.json"
        document = {"schema": "imagematrix.policy/v1", "rules": rules, "otherwise": "deny"}
        file.write_text(json.dumps(document))
        return file

    return write


def by(registry, key):
    return lambda digests: sign_manifests(registry, key, digests)


def test_published_version_and_its_variants_are_signed(registry, add_variant, image, new_key, policy):
    for cell in ("a", "b"):
        add_variant(cell)
    done = publish(registry, "v1", sign=by(registry, new_key()))
    whole = open_catalog(f"{image}:v1", policy=policy())
    assert len(whole.variants) == 2
    for variant in whole.variants:
        assert open_catalog(f"{image}@{variant.digest}", policy=policy()).variants
        assert registry.find_manifest(f"{variant.digest.replace(':', '-')}.sig"), (
            "it has a signature of its own"
        )
    assert done.digest == registry.digest("v1")


def test_what_the_tag_of_an_attested_variant_names_is_signed(
    server, registry, repository, add_variant, image, new_key, policy
):
    """An engine knows an image by the digest that its tag had, and a resolver is asked for the tag."""
    variant = add_variant("a")
    (tag,) = repository.tags
    attested = repository.attest(tag, variant)
    publish(registry, "v1", sign=by(registry, new_key()))
    (catalog_variant,) = open_catalog(f"{image}:{tag}", policy=policy()).variants
    for digest in (variant, attested):
        own = replace(catalog_variant, digest=digest)
        assert require_signed(own, policy(), version="v1") == digest
    required = SignaturePolicy.load(policy()).with_registry(server.address)
    front = Front(server.address, SimulatedNode("laptop"), policies=[required])
    try:
        assert front.pull(tag) == attested
    finally:
        front.close()


def test_what_the_tag_of_an_attested_variant_names_is_to_be_signed_by_publish(
    registry, repository, add_variant, image, new_key, policy
):
    """cosign would sign whatever the registry has there."""
    variant = add_variant("a")
    (tag,) = repository.tags
    attested = repository.attest(tag, variant)
    sign_manifests(registry, new_key(), [publish(registry, "v1").digest])
    (catalog_variant,) = open_catalog(f"{image}:{tag}", policy=policy()).variants
    assert require_signed(catalog_variant, policy(), version="v1") == variant
    pulled_by_tag = replace(catalog_variant, digest=attested)
    with pytest.raises(SignatureError, match="has no signature") as caught:
        require_signed(pulled_by_tag, policy(), version="v1")
    assert f"`imagematrix publish {image}:v1 --sign KEY` signs it" in caught.value.remedy


@pytest.mark.parametrize("how", ["as another image", "as an attestation"])
def test_an_index_that_has_more_than_a_variant_and_its_attestations_is_not_signed(
    registry, repository, add_variant, new_key, how
):
    """Engines choose by platform, so one that somebody else's image is in could give them that."""
    variant = add_variant("a")
    (tag,) = repository.tags
    evil = repository.image(None, {"by": "somebody"})
    notes = {"vnd.docker.reference.digest": variant} if how == "as an attestation" else {}
    platform = {"os": "linux", "architecture": "arm64"}
    entry = {"mediaType": MANIFEST, "digest": evil, "size": 1, "annotations": notes, "platform": platform}
    attested = repository.attest(tag, variant, entry)
    assert publish(registry, "v1", sign=by(registry, new_key())).unsigned == (tag,)
    assert is_signed(registry, variant)
    assert not is_signed(registry, attested)


@pytest.mark.parametrize("name", ["Manifests", "manife\u017fts", "Digest", "Platform", "OS"])
def test_an_index_that_engines_read_as_another_one_is_not_signed(
    registry, repository, add_variant, new_key, name
):
    """They take fields whatever the case of their names, and the last one of several."""
    variant = add_variant("a")
    (tag,) = repository.tags
    evil = repository.image(None, {"by": "somebody"})
    platform = {"os": "linux", "architecture": "arm64"}
    _, raw = repository.manifests[repository.attest(tag, variant)]
    document = json.loads(raw)
    entry = document["manifests"][1]
    place, value = {
        "Digest": (entry, evil),
        "Platform": (entry, platform),
        "OS": (entry["platform"], "linux"),
    }.get(name, (document, [{"mediaType": MANIFEST, "digest": evil, "size": 1, "platform": platform}]))
    place[name] = value
    changed = repository.put(tag, json.dumps(document).encode(), INDEX)
    publish(registry, "v1", sign=by(registry, new_key()))
    assert is_signed(registry, variant)
    assert not is_signed(registry, changed)


@pytest.mark.parametrize("raw", [b"garbage", b'{"manifests": 3}'])
def test_a_tag_that_leads_to_no_manifest_any_more_stays_unsigned(
    registry, repository, add_variant, new_key, raw
):
    variant = add_variant("a")
    (tag,) = repository.tags
    publish(registry, "v1")
    repository.put(tag, raw, INDEX)
    assert publish(registry, "v1", sign=by(registry, new_key())).unsigned == (tag,)
    assert is_signed(registry, variant)
    assert not is_signed(registry, repository.tags[tag])


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("form", ["list", "bundle"])
def test_what_is_signed_is_told(registry, repository, server, add_variant, new_key, form, tells):
    server.tells = tells
    add_variant("a")
    digest = publish(registry, "v1").digest
    assert not is_signed(registry, digest)
    publish(registry, "v1", sign=by(registry, new_key()))
    for tag in {*repository.tags}:
        if tag.startswith("sha256-") and tag.endswith(".sig") == (form == "bundle"):
            del repository.tags[tag]
    if form == "list":
        repository.manifests = {
            name: stored for name, stored in repository.manifests.items() if b'"subject"' not in stored[1]
        }
    assert is_signed(registry, digest)


def test_a_version_that_is_no_longer_signed_is_told(registry, add_variant, new_key):
    key = new_key()
    for cell, is_signed_now, is_told in (
        ("a", False, False),
        ("b", True, False),
        ("c", True, False),
        ("d", False, True),
        ("e", False, False),
    ):
        add_variant(cell)
        done = publish(registry, "v1", sign=by(registry, key) if is_signed_now else None)
        assert done.lost_signature == is_told
        assert not publish(registry, "v1").lost_signature, "it stays as it is"


def test_tag_is_never_there_without_its_signature(registry, repository, add_variant, image, new_key, policy):
    add_variant("a")
    key, seen = new_key(), []

    def signing(digests):
        seen.append(repository.tags.get("v1"))
        sign_manifests(registry, key, digests)

    first = publish(registry, "v1", sign=signing)
    assert seen[0] is None
    add_variant("b")
    seen.clear()
    second = publish(registry, "v1", ["latest"], sign=signing)
    assert seen[0] == first.digest != second.digest
    assert open_catalog(f"{image}:v1", policy=policy()).variants


def test_signing_again_writes_nothing_and_other_signatures_stay(
    server, registry, add_variant, image, new_key, policy
):
    add_variant("a")
    first, second = new_key("first.pub"), new_key("second.pub")
    publish(registry, "v1", sign=by(registry, first))
    written = server.count("POST")
    publish(registry, "v1", sign=by(registry, first))
    assert server.count("POST") == written
    publish(registry, "v1")
    with pytest.raises(SignatureError, match=r"it is not signed with second\.pub"):
        open_catalog(f"{image}:v1", policy=policy("second.pub"))
    publish(registry, "v1", sign=by(registry, second))
    for key in ("first.pub", "second.pub"):
        assert open_catalog(f"{image}:v1", policy=policy(key)).variants


def test_a_new_signature_is_read_behind_any_number_of_others(registry, add_variant, image, new_key, policy):
    add_variant("a")
    published = publish(registry, "v1", sign=by(registry, new_key("first.pub")))
    tag = make_signature_tag(published.digest)
    present = json.loads(registry.find_manifest(tag).raw)
    layer = present["layers"][0]
    others = [layer | {"annotations": layer["annotations"] | {"n": str(number)}} for number in range(TRIED)]
    raw = json.dumps(present | {"layers": others}).encode()
    registry.push_manifest(tag, raw, present["mediaType"])
    publish(registry, "v1", sign=by(registry, new_key("second.pub")))
    assert open_catalog(f"{image}:v1", policy=policy("second.pub")).variants


def test_manifest_that_the_registry_lacks_is_not_signed(registry, new_key):
    with pytest.raises(SignatureError, match="cannot be signed: the registry does not have it"):
        sign_manifests(registry, new_key(), [f"sha256:{'1' * 64}"])


@pytest.mark.skipif(shutil.which("cosign") is None, reason="cosign is not installed")
@pytest.mark.parametrize("form", ["tag", "bundle", "bundle without the API for referrers"])
def test_cosign_accepts_both_forms(registry, add_variant, image, new_key, tmp_path, monkeypatch, form):
    add_variant("a")
    if form.endswith("referrers"):
        monkeypatch.setattr(Registry, "list_referrers", lambda *_: None)
    done = publish(registry, "v1", sign=by(registry, new_key()))
    new_key("other.pub")
    (tmp_path / "root.json").write_text(
        '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}'
    )
    words = ["verify"]
    if form != "tag":
        kind = "https://sigstore.dev/cosign/sign/v1"
        words = ["verify-attestation", "--new-bundle-format", "--trusted-root=root.json", f"--type={kind}"]
    for digest in (done.digest, open_catalog(f"{image}:v1").variants[0].digest):
        for key, code in (("cosign.pub", 0), ("other.pub", 1)):
            command = ["cosign", *words, f"--key={key}", "--insecure-ignore-tlog", f"{image}@{digest}"]
            ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert min(ended.returncode, 1) == code, ended.stderr
