"""Policies of signatures for catalogs, with a registry that an attacker controls."""

import json

import pytest
from distribution import digest
from images import Parts, tar
from publishing import labels_of
from resolving import Published, variant
from signing import ANNOTATION, Signer, attach

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.common.record import replace
from imagematrix.errors import EngineError, SignatureError, UnknownImageError, UsageError
from imagematrix.images.catalog.signature_guard import require_variants
from imagematrix.images.catalog.sources import (
    list_catalogs,
    load_image_policies,
    open_catalog,
    open_stored_catalog,
    require_signed,
    require_signed_warm_image,
)
from imagematrix.images.catalog.warm_image import WarmMatch
from imagematrix.images.oci.manifest import DOCKER_LIST, IMAGE, INDEX
from imagematrix.images.oci.registry import Registry
from imagematrix.images.trust import files
from imagematrix.images.trust.files import list_policy_files
from imagematrix.images.trust.signature import make_signature_tag

OTHER = digest(b"another image")


@pytest.fixture
def published(server):
    """The version v1 with two variants."""
    made = Published(server)
    made.publish({"cpu-v2": variant(), "cpu-v3": variant("x86-64-v3", ["avx2"])})
    return made


@pytest.fixture
def name(server):
    return f"{server.address}/ml/training"


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


@pytest.fixture
def policy(tmp_path, signer):
    """Call it with a file's name and changes to get the file: ml/* has to be signed, all else is allowed."""

    def write(file="policy.json", **changes):
        rules = [{"repository": "ml/*", "keys": [signer.public.name], "aliases": ["stable"]}]
        document = {"schema": "imagematrix.policy/v1", "rules": rules, "otherwise": "allow"}
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document | changes))
        return path

    return write


@pytest.fixture
def sign(published, signer, name):
    """Call it to sign the index of a version, or another digest."""

    def call(wanted=None, by=signer):
        by.sign(published.repository, wanted or published.repository.tags["v1"], name)

    return call


def refused(*arguments, **options):
    """Return the message with which a catalog is refused."""
    with pytest.raises(SignatureError) as caught:
        open_catalog(*arguments, **options)
    assert caught.value.exit_code == 12
    return str(caught.value)


def tag_of(published, cell):
    return next(tag for tag in published.repository.tags if f"-{cell}-" in tag)


def test_signed_index_is_enough_for_all_that_it_lists(published, policy, sign, name):
    file = policy()
    index = published.repository.tags["v1"]
    assert f"{name}@{index} has no signature" in refused(f"{name}:v1", policy=file)
    assert len(open_catalog(f"{name}:v1").variants) == 2, "nothing is required without a policy"
    sign()
    assert len(open_catalog(f"{name}:v1", policy=file).variants) == 2
    assert len(open_stored_catalog(f"{name}:v1", print, file).variants) == 2
    assert [one.version for one in list_catalogs(name, policy=file)] == ["v1"]
    for part in (f":{tag_of(published, 'cpu-v2')}", f"@{published.digests['cpu-v2']}"):
        (one,) = open_catalog(name + part, policy=file).variants
        assert one.digest == published.digests["cpu-v2"]
    assert len(open_catalog(f"{name}@{index}", policy=file).variants) == 2


def test_signed_variant_is_enough_for_itself(published, policy, sign, name):
    sign(published.digests["cpu-v2"])
    file = policy()
    assert open_catalog(f"{name}:{tag_of(published, 'cpu-v2')}", policy=file).variants
    assert "has no signature" in refused(f"{name}:v1", policy=file)
    assert "has no signature" in refused(f"{name}:{tag_of(published, 'cpu-v3')}", policy=file)
    with pytest.raises(SignatureError):
        list_catalogs(name, policy=file)


def test_wrong_key_and_signature_of_another_digest_are_refused(published, policy, sign, name, tmp_path):
    repository, index = published.repository, published.repository.tags["v1"]
    sign(by=Signer(tmp_path, "other"))
    assert refused(f"{name}:v1", policy=policy()).endswith("it is not signed with cosign.pub")
    sign(OTHER)
    repository.tags[f"{index.replace(':', '-')}.sig"] = repository.tags[f"{OTHER.replace(':', '-')}.sig"]
    assert refused(f"{name}:v1", policy=policy()).endswith(f"the signature is for {OTHER}")


@pytest.mark.parametrize("changes", [{"digest": OTHER}, {"annotations": {ANNOTATION: "!"}}])
def test_an_unreadable_signature_hides_no_valid_one(published, policy, signer, name, changes):
    repository, index = published.repository, published.repository.tags["v1"]
    good = signer.layer(repository, index, name)
    attach(repository, index, [good | changes, good])
    assert len(open_catalog(f"{name}:v1", policy=policy()).variants) == 2
    attach(repository, index, [good | changes])
    assert "has no valid signature: " in refused(f"{name}:v1", policy=policy())


def test_a_payload_with_other_bytes_than_its_digest_says_hides_no_valid_signature(
    published, policy, signer, name
):
    repository, index = published.repository, published.repository.tags["v1"]
    good, wrong = signer.layer(repository, index, name), signer.sealed(repository, b"payload")
    repository.blobs[wrong["digest"]] = b"other"
    attach(repository, index, [wrong, good])
    assert len(open_catalog(f"{name}:v1", policy=policy()).variants) == 2
    attach(repository, index, [wrong])
    with pytest.raises(EngineError, match="does not match"):  # what it should have been is unknown
        open_catalog(f"{name}:v1", policy=policy())


def test_a_payload_that_is_too_large_for_one_hides_no_valid_signature(published, policy, signer, name):
    repository, index = published.repository, published.repository.tags["v1"]
    good, large = signer.layer(repository, index, name), signer.sealed(repository, b" " * (64 * 1024 + 1))
    attach(repository, index, [large, good])
    assert len(open_catalog(f"{name}:v1", policy=policy()).variants) == 2
    attach(repository, index, [large])
    assert refused(f"{name}:v1", policy=policy()).endswith("a payload has more than 64 KiB")


@pytest.mark.parametrize("restated", [True, False])
def test_swapped_entry_is_refused(published, policy, sign, name, restated):
    """Whether or not the index states its own entries again: nobody but the key's owner can sign it."""
    sign()
    repository = published.repository
    raw = repository.manifests[repository.tags["v1"]][1]
    swapped = raw.replace(published.digests["cpu-v3"].encode(), published.digests["cpu-v2"].encode())
    if restated:
        document = json.loads(swapped)
        document["annotations"].pop("io.imagematrix.content")
        swapped = json.dumps(document).encode()
    repository.put("v1", swapped, INDEX)
    assert f"{name}@{digest(swapped)} has no signature" in refused(f"{name}:v1", policy=policy())


def test_moved_tags_are_refused(published, policy, sign, name):
    sign()
    repository, file = published.repository, policy()
    repository.tags["v2"] = repository.tags["stable"] = repository.tags["v1"]
    assert open_catalog(f"{name}:stable", policy=file).variants, "the policy names the alias"
    assert f"{name}:v2 is signed as v1" in refused(f"{name}:v2", policy=file)
    moved = tag_of(published, "cpu-v3")
    repository.tags[moved] = published.digests["cpu-v2"]
    assert (
        refused(f"{name}:{moved}", policy=file)
        == f"{name}:{moved} is signed as {tag_of(published, 'cpu-v2')}"
    )


def test_an_alias_stands_for_a_version_and_not_for_one_of_its_variants(published, policy, sign, name):
    """Behind the alias, the registry would choose the variant of every node, whatever fits there."""
    for signed in (None, *published.digests.values()):
        sign(signed)
    repository, file = published.repository, policy()
    repository.tags["stable"] = repository.tags["v1"]
    variant = open_catalog(f"{name}:stable", policy=file).variants[0]
    assert require_signed(variant, file, version="stable") == variant.digest
    repository.tags["stable"] = published.digests["cpu-v2"]
    signed = tag_of(published, "cpu-v2")
    assert refused(f"{name}:stable", policy=file) == f"{name}:stable is signed as {signed}"
    with pytest.raises(SignatureError, match=f"stable is signed as {signed}") as caught:
        require_signed(replace(variant, reference=f"{name}:stable", digest=repository.tags["stable"]), file)
    assert caught.value.remedy is None, "as an alias it would not be accepted either"


@pytest.mark.parametrize("sent_as", [INDEX, DOCKER_LIST, IMAGE, "application/json"])
def test_a_signed_index_with_attestations_states_the_tag_of_its_image(published, policy, sign, name, sent_as):
    """Whatever media type the registry sends: a signature does not cover that."""
    repository, tag = published.repository, tag_of(published, "cpu-v2")
    attested = repository.attest(tag, published.digests["cpu-v2"])
    sign(attested)
    repository.manifests[attested] = sent_as, repository.manifests[attested][1]
    variant = next(one for one in open_catalog(f"{name}:v1").variants if one.reference.endswith(tag))
    own = replace(variant, digest=attested)
    assert require_signed(own, policy(), version="v1") == attested
    moved = f"{name}:{tag.replace('v1', 'v2', 1)}"
    with pytest.raises(SignatureError, match=f"^{moved} is signed as {tag}$"):
        require_signed(replace(own, reference=moved), policy(), version="v2")


def test_index_sent_as_an_image_is_no_catalog(published, policy, sign, name):
    sign()
    repository, index = published.repository, published.repository.tags["v1"]
    repository.manifests[index] = IMAGE, repository.manifests[index][1]
    with pytest.raises(UnknownImageError, match="index without variants"):
        open_catalog(f"{name}:v1", policy=policy())


def test_index_sent_as_something_unknown_has_to_be_signed(published, policy, sign, name):
    index = published.repository.tags["v1"]
    published.repository.manifests[index] = "application/json", published.repository.manifests[index][1]
    file = policy()
    assert f"{name}@{index} has no signature" in refused(f"{name}:v1", policy=file)
    with pytest.raises(SignatureError):
        list_catalogs(name, policy=file)
    sign()
    assert len(open_catalog(f"{name}:v1", policy=file).variants) == 2


def test_image_of_the_engine_has_to_be_a_signed_entry(published, engine, policy, sign, name):
    """The registry has no such version any longer, or the image was never in one."""
    sign(published.digests["cpu-v2"])
    file, catalog = policy(), open_catalog(f"{name}:v1")
    kept, other = catalog.variants
    published.repository.tags.pop("v1")
    engine.add_catalog(replace(catalog, variants=(kept,)))
    engine.images[0]["RepoDigests"] = [f"{name}@{kept.digest}"]
    notes: list[str] = []
    assert open_stored_catalog(f"{name}:v1", notes.append, file).variants[0].digest == kept.digest
    assert "using the engine's images" in notes[0]
    engine.images.clear()
    engine.add_catalog(replace(catalog, variants=(other,)))
    with pytest.raises(SignatureError, match="has no signature"):
        open_stored_catalog(f"{name}:v1", notes.append, file)
    with pytest.raises(SignatureError):
        list_catalogs(policy=file)
    assert list_catalogs()


def test_image_that_is_only_in_the_engine_cannot_be_signed(engine, shipped_catalog, policy):
    engine.add_catalog(shipped_catalog)
    assert open_catalog("training:v1", policy=policy()).variants, "no rule is about it"
    assert "has no signature: it is in no registry" in refused(
        "training:v1", policy=policy(rules=[{"repository": "*", "keys": ["cosign.pub"]}])
    )
    assert (
        refused("training:v1", policy=policy(otherwise="deny")) == "the policy allows no images of training"
    )


def test_variants_of_a_saved_catalog_are_checked_by_digest(policy, sign, name):
    file = policy()
    first, second = open_catalog(f"{name}:v1").variants
    for one in (first, second):
        with pytest.raises(SignatureError, match="has no signature"):
            require_signed(one, file)
        assert require_signed(one) is None, "nothing is required without a policy"
    sign()
    assert require_signed(first, file) == first.digest
    assert require_signed(replace(first, reference=f"{first.reference}@{first.digest}"), file) == first.digest
    for changes, fault in [
        ({"digest": OTHER}, f"{OTHER} has no signature"),
        ({"digest": second.digest}, f"{second.digest} has no signature"),
        ({"digest": None}, "has no digest in its catalog, so its signature cannot be checked"),
        ({"reference": f"{first.reference}@{OTHER}"}, "is not sha256:"),
        ({"reference": f"{name}@{OTHER}", "digest": None}, f"{OTHER} has no signature"),
    ]:
        with pytest.raises(SignatureError, match=fault):
            require_signed(replace(first, **changes), file)
    assert require_signed(replace(first, reference="training:v1-x"), file) is None, "no rule is about it"


def test_an_old_version_is_not_taken_for_a_new_one(policy, sign, name):
    """A catalog that nothing has checked lists what is signed under another tag or version."""
    first, second = open_catalog(f"{name}:v1").variants
    for one in (first, second):
        sign(one.digest)
    file, old = policy(), f"{name}:v0"
    tag, other = (one.reference.rpartition(":")[2] for one in (first, second))
    renamed = f"{name}:v2{tag.removeprefix('v1')}"
    for changes, version, fault in [
        ({"reference": renamed}, "v2", f"{renamed} is signed as {tag}"),
        ({"reference": renamed}, None, f"{renamed} is signed as {tag}"),
        ({"digest": second.digest}, "v1", f"{first.reference} is signed as {other}"),
        ({}, "v0", f"{old} is signed as v1"),
        ({"reference": f"{name}@{first.digest}"}, "v0", f"{old} is signed as v1"),
    ]:
        with pytest.raises(SignatureError, match=f"^{fault}$"):
            require_signed(replace(first, **changes), file, version=version)
    for version in ("v1", "stable", None):
        assert require_signed(first, file, version=version) == first.digest


def test_the_signed_index_of_a_version_is_read_once_for_all_of_its_variants(policy, sign, name, server):
    """One is checked at each start of an image that an engine has, which may have all of them."""
    sign()
    catalog = open_catalog(f"{name}:v1")
    requests = []
    for variants in (catalog.variants[:1], catalog.variants):
        server.requests.clear()
        assert require_variants(variants, load_image_policies(policy()), "v1")
        requests.append(sorted(request.path for request in server.requests))
    own = [path for path in requests[1] if path not in requests[0]]
    assert len(requests[1]) == len({*requests[1]}), "nothing is read twice"
    assert {path.rpartition("/")[2] for path in own} == {
        catalog.variants[1].digest,
        make_signature_tag(catalog.variants[1].digest),
    }


@pytest.mark.parametrize("raw", [b"\xff", b'{"manifests": 3}', b'{"manifests": []}', "changed"])
def test_an_unsigned_variant_of_a_damaged_version_has_no_signature(published, policy, sign, name, raw):
    """Whatever the registry has under the version: that it lists nothing is no other fault."""
    sign()
    repository = published.repository
    if raw == "changed":
        document = json.loads(repository.manifests[repository.tags["v1"]][1])
        raw = json.dumps(document | {"manifests": document["manifests"][:1]}).encode()
    repository.put("v1", raw, INDEX)
    image = published.digests["cpu-v2"]
    assert refused(f"{name}@{image}", policy=policy()) == f"{name}@{image} has no signature"


@pytest.mark.parametrize("content", [OTHER, None])
def test_an_image_that_was_built_on_a_variant_may_have_any_tag(published, policy, sign, name, content):
    """Without a digest of the content in its labels, it cannot be told from the variant."""
    more = {} if content is None else {"CONTENT": content}
    image = Parts(tar("own"), labels=labels_of("cpu", **more))
    published.repository.blobs |= image.blobs
    published.repository.put("own", image.raw, IMAGE)
    sign(image.digest)
    one = replace(open_catalog(f"{name}:v1").variants[0], reference=f"{name}:own", digest=image.digest)
    if content:
        assert require_signed(one, policy(), version="mine") == image.digest
    else:
        with pytest.raises(SignatureError, match="own is signed as v1-cpu-"):
            require_signed(one, policy(), version="mine")


def test_a_signed_image_that_its_registry_lacks_is_refused(published, policy, sign, name):
    first = open_catalog(f"{name}:v1").variants[0]
    sign(first.digest)
    published.repository.manifests.pop(first.digest)
    with pytest.raises(SignatureError, match="is not in its registry"):
        require_signed(first, policy())


def test_registry_that_cannot_be_asked_proves_nothing(policy, sign, name, server):
    sign()
    (first, _), file = open_catalog(f"{name}:v1").variants, policy()
    server.close()
    with pytest.raises(EngineError):
        require_signed(first, file)


def test_both_the_site_and_the_user_have_to_be_satisfied(policy, sign, name, tmp_path, monkeypatch):
    other = Signer(tmp_path, "other")
    rules = [{"repository": "*", "keys": ["../other.pub"]}]
    policy("etc/policy.json", rules=rules)
    user = policy()
    sign()
    assert refused(f"{name}:v1").endswith("it is not signed with ../other.pub"), "a user cannot relax it"
    assert refused(f"{name}:v1", policy=user).endswith("it is not signed with ../other.pub")
    sign(by=other)
    assert open_catalog(f"{name}:v1").variants
    assert refused(f"{name}:v1", policy=user).endswith("it is not signed with cosign.pub")
    monkeypatch.setenv("IMAGEMATRIX_POLICY", str(user))
    assert refused(f"{name}:v1").endswith("it is not signed with cosign.pub")


def test_files_of_policies(monkeypatch, tmp_path):
    """An explicit file replaces the variable's, and never the site's."""
    assert list_policy_files() == ()
    monkeypatch.setenv("IMAGEMATRIX_POLICY", "")
    assert list_policy_files() == ()
    assert list_policy_files("") == ("",), "an empty option is a mistake"
    monkeypatch.setenv("IMAGEMATRIX_POLICY", "mine.json")
    assert list_policy_files() == ("mine.json",)
    assert list_policy_files(tmp_path / "given.json") == (str(tmp_path / "given.json"),)
    site = tmp_path / "etc" / "policy.json"
    site.parent.mkdir()
    site.symlink_to("nowhere")
    assert list_policy_files() == (str(site), "mine.json")
    assert list_policy_files(site) == (str(site),)
    monkeypatch.setattr(files, "SITE", "x" * 5000)
    with pytest.raises(UsageError, match="File name too long"):
        list_policy_files()


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "imagematrix.policy/v1", "otherwise": "perhaps"}'])
def test_unreadable_policy_refuses_everything(tmp_path, text):
    file = tmp_path / "policy.json"
    with pytest.raises(UsageError, match="No such file"):
        open_catalog("training:v1", policy=file)
    file.write_text(text)
    with pytest.raises(UsageError, match=str(file)):
        open_catalog("training:v1", policy=file)


@pytest.fixture
def warm_image(published, name, add_warm):
    """The warm image of a variant in the index of v1, as the catalog has it."""
    entry = add_warm(published.digests["cpu-v2"])
    with Registry(name) as registry:
        publish(registry, "v1", selection=IndexSelection(warm=[entry]))
    (image,) = open_catalog(f"{name}:v1").warm
    return image


def test_a_warm_image_is_signed_by_itself_or_in_the_index_of_its_version(warm_image, policy, sign, published):
    file = policy()
    require_signed_warm_image(warm_image, version="v1")
    with pytest.raises(SignatureError, match="has no signature"):
        require_signed_warm_image(warm_image, file, version="v1")
    sign(warm_image.digest)
    require_signed_warm_image(warm_image, file, version="v1")
    published.repository.tags.pop(f"{warm_image.digest.replace(':', '-')}.sig")
    sign()
    require_signed_warm_image(warm_image, file, version="v1")


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({"base": OTHER}, "v1"),
        ({"match": WarmMatch()}, "v1"),
        ({"reference": "v1-warm-a-b"}, "v1"),
        ({}, "v2"),
    ],
)
def test_a_signed_warm_image_stands_for_nothing_but_what_it_says(
    warm_image, policy, sign, name, changes, version
):
    """A catalog may be from anybody: it could give an old image, or one for other CPUs, to new variants."""
    sign(warm_image.digest)
    if "reference" in changes:
        changes = {"reference": f"{name}:{changes['reference']}"}
    with pytest.raises(SignatureError, match="signed as another image than its catalog says"):
        require_signed_warm_image(replace(warm_image, **changes), policy(), version=version)


def test_a_signed_image_that_is_no_warm_image_is_none(warm_image, policy, sign, published):
    variant = published.digests["cpu-v3"]
    sign(variant)
    with pytest.raises(SignatureError, match="signed as another image than its catalog says"):
        require_signed_warm_image(replace(warm_image, digest=variant), policy(), version="v1")
    with pytest.raises(SignatureError, match="it is in no registry"):
        require_signed_warm_image(replace(warm_image, reference="ml/x:v1-warm-a-b"), policy(), version="v1")


@pytest.mark.parametrize("version", ["v2", None])
def test_a_signed_warm_image_is_no_variant(warm_image, policy, sign, name, version):
    """Its signature says nothing of a version, so an old one would pass as a variant of a new version."""
    sign(warm_image.digest)
    variant = open_catalog(f"{name}:v1").variants[0]
    own = warm_image.reference.rpartition(":v1")[2]
    for tag in (f"v2-cpu-{'0' * 12}", f"v2{own}"):
        swapped = replace(variant, reference=f"{name}:{tag}", digest=warm_image.digest)
        with pytest.raises(SignatureError, match=rf"{tag} is signed as \?{own}$"):
            require_signed(swapped, policy(), version=version)
