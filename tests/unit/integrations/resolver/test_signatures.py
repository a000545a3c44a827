"""A policy that requires signatures, with a registry that an attacker controls."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from distribution import MANIFEST, digest
from publishing import put_warm
from signing import ANNOTATION, PAYLOAD, Signer, attach, pem

from imagematrix.errors import UsageError
from imagematrix.images.oci.manifest import INDEX
from imagematrix.images.trust.policy import SignaturePolicy

NAME = "registry.example:5000/ml/training"


@pytest.fixture
def signer(tmp_path):
    return Signer(tmp_path)


@pytest.fixture
def policy(tmp_path, signer):
    """Call it with changes of the file to get a policy: ml/* has to be signed, all else is denied."""

    def load(**changes):
        file = tmp_path / "policy.json"
        rules = [{"repository": "ml/*", "keys": [signer.public.name], "aliases": ["stable"]}]
        document = {"schema": "imagematrix.policy/v1", "rules": rules, "otherwise": "deny"}
        file.write_text(json.dumps({**document, "registry": "registry.example:5000", **changes}))
        return SignaturePolicy.load(file)

    return load


@pytest.fixture
def node(front, policy):
    """A resolver with the policy."""
    return front(policies=[policy()])


def test_signed_version_is_answered_and_its_key_logged(front, published, signer, policy):
    signer.sign(published.repository, published.repository.tags["v1"], NAME)
    node = front("genoa-h200", policies=[policy()])
    assert node.pull("v1") == published.digests["sm90"]
    assert node.pull("v1-cpu") == published.digests["cpu-v3"]
    assert node.notes[0].endswith("the best of 1 that fit out of 3, signed with cosign.pub")
    assert node.pull(published.digests["sm90"]) == published.digests["sm90"], "the index names it"
    assert node.pull(published.repository.tags["v1"]) == published.repository.tags["v1"]


def test_missing_signature_is_reported_in_answer_log_and_explain(node, published):
    status, message = node.pull("v1")
    assert status == 403
    index = published.repository.tags["v1"]
    command = f"cosign sign --key KEY --tlog-upload=false {NAME}@{index}"
    assert f"ml/training@{index} has no signature; sign it with cosign 2: {command}" in message
    assert f"ml/training@{index} has no signature" in node.notes[-1]
    explained = node.get("/explain/ml/training:v1")
    assert (explained.status_code, "has no signature" in explained.text) == (403, True)
    assert node.pull(published.digests["cpu-v3"])[0] == node.pull(index)[0] == 403, "nor by digest"


@pytest.mark.parametrize("repository", ["ml/training:x", "ml/training%3Ax", f"ml/training@{digest(b'x')}"])
def test_no_other_name_leads_to_an_image_without_signature(front, published, policy, repository):
    rule = {"repository": "ml/training", "keys": ["cosign.pub"]}
    node = front(policies=[policy(rules=[rule], otherwise="allow")])
    assert node.pull("v1")[0] == 403
    assert node.pull("v1", repository)[0] == 400
    assert node.pull(published.digests["cpu-v3"], repository)[0] == 400
    assert node.get(f"/explain/{repository}:v1").status_code == 403


def test_later_signature_is_accepted(node, published, signer):
    assert node.pull("v1")[0] == 403
    signer.sign(published.repository, published.repository.tags["v1"], NAME)
    assert node.pull("v1") == published.digests["cpu-v3"]


@pytest.mark.parametrize(
    ("about", "identity", "kind", "fault"),
    [
        (None, "registry.example:5000/ml/other", "cosign container image signature",
         f"the signature is for an image of registry.example:5000/ml/other, not of {NAME}"),
        (digest(b"another"), NAME, "cosign container image signature",
         f"the signature is for {digest(b'another')}"),
        (None, NAME, "a shopping list", "the signature is not for an image"),
    ],
)  # fmt: skip
def test_signature_of_another_image_is_rejected(
    front, published, signer, policy, about, identity, kind, fault
):
    index = published.repository.tags["v1"]
    layer = signer.layer(published.repository, about or index, identity, kind=kind)
    attach(published.repository, index, [layer])
    status, message = front(policies=[policy()]).pull("v1")
    assert (status, message) == (403, f"ml/training@{index} has no valid signature: {fault}")


def test_unknown_key_is_rejected_and_one_valid_signature_suffices(
    front, node, published, signer, policy, tmp_path
):
    repository, index = published.repository, published.repository.tags["v1"]
    other = Signer(tmp_path, "other")
    other.sign(repository, index, NAME)
    assert node.pull("v1")[1].endswith("it is not signed with cosign.pub")
    attach(repository, index, [other.layer(repository, index, NAME), signer.layer(repository, index, NAME)])
    assert node.pull("v1") == published.digests["cpu-v3"]
    rule = {"repository": "ml/training", "keys": ["other.pub", "cosign.pub"]}
    other.sign(repository, index, NAME)
    assert front(policies=[policy(rules=[rule])]).pull("v1") == published.digests["cpu-v3"]


def test_modified_payload_is_rejected(node, published, signer):
    """The bytes are signed: an attacker can neither edit a payload nor move a signature to another one."""
    repository, index = published.repository, published.repository.tags["v1"]
    good = signer.layer(repository, digest(b"another"), NAME)
    forged = repository.blobs[good["digest"]].replace(digest(b"another").encode(), index.encode())
    repository.blobs[digest(forged)] = forged
    attach(repository, index, [{**good, "digest": digest(forged)}])
    assert node.pull("v1")[1].endswith("it is not signed with cosign.pub")
    repository.blobs[good["digest"]] = (
        forged  # from a registry that answers with other content than requested
    )
    attach(repository, index, [good])
    assert node.pull("v1")[0] == 502


def test_signed_variant_in_a_forged_index_is_rejected(node, published, signer):
    """The index decides which variant a node gets, so its signature counts, not those of its images."""
    repository = published.repository
    for one in published.digests.values():
        signer.sign(repository, one, NAME)
    assert node.pull("v1")[0] == 403
    assert node.pull(published.digests["cpu-v2"]) == published.digests["cpu-v2"], "it is signed itself"
    (tag,) = (one for one in repository.tags if "cpu-v2" in one)
    assert node.pull(tag) == published.digests["cpu-v2"]


@pytest.mark.parametrize("annotated", [True, False])
def test_signed_variant_is_not_a_version(node, published, signer, annotated):
    """Its annotations name its only valid tag; if an engine wrote none, its labels do."""
    repository = published.repository
    (tag,) = (one for one in repository.tags if "cpu-v2" in one)
    variant = published.digests["cpu-v2"]
    if not annotated:
        document = json.loads(repository.manifests[variant][1])
        annotations = document.pop("annotations")
        variant = repository.image(tag, annotations, layer=b"cpu-v2" * 1000)
    signer.sign(repository, variant, NAME)
    assert node.pull(tag) == variant
    repository.tags["v1"] = repository.tags["tool"] = variant
    for wrong in ("v1", "tool"):
        assert node.pull(wrong)[1].startswith(f"ml/training:{wrong} is signed as {tag}")


def test_an_alias_stands_for_a_version_and_not_for_one_of_its_variants(front, published, signer, policy):
    """The registry would choose the variant of every node, whatever fits there."""
    repository = published.repository
    for signed in (repository.tags["v1"], *published.digests.values()):
        signer.sign(repository, signed, NAME)
    repository.tags["stable"] = repository.tags["v1"]
    assert front(policies=[policy()]).pull("stable") == published.digests["cpu-v3"]
    repository.tags["stable"] = published.digests["sm90"]
    status, message = front(policies=[policy()]).pull("stable")
    assert status == 403
    assert message.startswith("ml/training:stable is signed as v1-sm90-")
    assert "alias" not in message, "as an alias it would not be accepted either"


def test_a_signed_index_with_attestations_states_the_tag_of_its_image(front, published, signer, policy):
    """The tag of an image that was built with attestations names this index, so it gets signed, too."""
    repository = published.repository
    (tag,) = (one for one in repository.tags if "cpu-v2" in one)
    attested = repository.attest(tag, published.digests["cpu-v2"])
    signer.sign(repository, attested, NAME)
    node = front(policies=[policy()])
    assert node.pull(tag) == attested
    moved = tag.replace("v1", "v2", 1)
    repository.tags["v2"] = repository.tags["stable"] = repository.tags[moved] = attested
    for wrong in ("v2", "stable", moved):
        assert node.pull(wrong)[1].startswith(f"ml/training:{wrong} is signed as {tag}")
    del repository.manifests[published.digests["cpu-v2"]]
    for wrong in (moved, tag):
        status, message = front(policies=[policy()]).pull(wrong)
        assert (status, message.endswith("so it is unknown what it is signed as")) == (403, True)


def test_signed_warm_image_is_not_a_version(node, published, signer):
    """It states no version, so an old one would pass as any new one; it has its own tags only."""
    repository = published.repository
    warm = put_warm(repository, published.digests["cpu-v2"])
    signer.sign(repository, warm.digest, NAME)
    (own,) = (tag for tag, image in repository.tags.items() if image == warm.digest)
    assert node.pull(own) == warm.digest
    repository.tags["v3"] = repository.tags["v3-cpu-v2-0123456789ab"] = warm.digest
    for wrong in ("v3", "v3-cpu-v2-0123456789ab"):
        signed = f"ml/training:{wrong} is signed as v3{own.removeprefix('v1')}"
        assert node.pull(wrong)[1].startswith(signed)


def test_media_type_sent_by_the_registry_is_not_trusted(front, published, signer, policy):
    """An index sent as an image would be passed through, and engines would take its default."""
    repository, index = published.repository, published.repository.tags["v1"]
    signer.sign(repository, index, NAME)
    repository.manifests[index] = MANIFEST, repository.manifests[index][1]
    node = front("genoa-h200", policies=[policy()])
    assert node.pull("v1") == published.digests["sm90"]
    raw = b"{"
    repository.put("v7", raw, MANIFEST)
    assert node.pull("v7")[0] == 502


def test_old_version_cannot_replace_a_new_one(node, published, signer):
    """Tags are not signed: the registry can point any tag to any signed index."""
    repository = published.repository
    signer.sign(repository, repository.tags["v1"], NAME)
    for tag in ("v2", "stable"):
        repository.tags[tag] = repository.tags["v1"]
    status, message = node.pull("v2")
    assert (status, message) == (
        403,
        "ml/training:v2 is signed as v1; if v2 is an alias, add it to the aliases in the policy",
    )
    assert node.pull("stable") == published.digests["cpu-v3"]


def test_variant_tag_is_covered_by_the_signed_index(node, published, signer):
    repository = published.repository
    signer.sign(repository, repository.tags["v1"], NAME)
    tags = {cell: tag for cell in published.digests for tag in repository.tags if f"-{cell}-" in tag}
    assert node.pull(tags["cpu-v2"]) == published.digests["cpu-v2"]
    repository.tags[tags["cpu-v3"]] = published.digests["cpu-v2"]
    assert node.pull(tags["cpu-v3"])[0] == 403, "it is signed, but as another variant"
    other = repository.image("v1-other", {}, layer=b"other")
    assert node.pull("v1-other")[0] == 403
    assert node.pull(other)[0] == 403
    repository.image("v7-other", {}, layer=b"other")
    assert node.pull("v7-other")[0] == 403, "there is no index v7"


def test_images_without_variants_need_their_own_signature(node, upstream, signer):
    repository = upstream.repository("ml/tools")
    image = repository.image("trixie", {"a": "label"})
    entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": image, "size": 3}
    raw = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}).encode()
    index = repository.put("all", raw, INDEX)
    assert node.pull("trixie", "ml/tools")[0] == node.pull("all", "ml/tools")[0] == 403
    signer.sign(repository, index, "registry.example:5000/ml/tools")
    assert node.pull("all", "ml/tools") == index
    assert node.pull(image, "ml/tools") == image, "the signed index lists it"
    signer.sign(repository, image, "registry.example:5000/ml/tools")
    assert node.pull("trixie", "ml/tools") == image
    assert node.pull(digest(b"nothing"), "ml/tools")[0] == 404


@pytest.mark.parametrize("config", [b"\0", b"[]", b""])
def test_a_signed_artifact_is_answered_whatever_its_configuration_is(node, upstream, signer, config):
    repository = upstream.repository("ml/tools")
    image = repository.image("sif", None, config=config, kind="application/vnd.sylabs.sif.config.v1+json")
    signer.sign(repository, image, "registry.example:5000/ml/tools")
    assert node.pull("sif", "ml/tools") == image


def test_policy_has_a_default_for_other_images(front, upstream, published, policy):
    other = upstream.repository("library/debian").image("trixie", {})
    status, message = front(policies=[policy()]).pull("trixie", "library/debian")
    assert (status, message) == (403, "the policy allows no images of library/debian")
    assert front(policies=[policy()]).pull(other, "library/debian")[0] == 403
    assert front(policies=[policy(otherwise="allow")]).pull("trixie", "library/debian") == other
    assert front(policies=[policy(otherwise="allow")]).pull("v1")[0] == 403
    assert published.digests


@pytest.mark.parametrize(
    "raw",
    [b'{"layers": 3}', b'{"layers": []}', b'{"layers": [{}]}',
     b'{"layers": [{"mediaType": "%s", "digest": "sha256:x", "annotations": {"%s": "AA=="}}]}',
     b'{"layers": [{"mediaType": "%s", "digest": "sha256:%064d", "annotations": {"%s": "AA=="}}]}',
     b'{"layers": [{"mediaType": "%s", "digest": "sha256:%064d", "annotations": {"%s": "A"}}]}'],
)  # fmt: skip
def test_unreadable_signatures_are_ignored(front, published, policy, raw):
    words = [PAYLOAD.encode(), *([0] if b"%064d" in raw else []), ANNOTATION.encode()]
    raw = raw % tuple(words) if b"%" in raw else raw
    index = published.repository.tags["v1"]
    published.repository.put(
        f"{index.replace(':', '-')}.sig", raw, "application/vnd.oci.image.manifest.v1+json"
    )
    status, message = front(policies=[policy()]).pull("v1")
    assert status == 403
    assert "cannot be read" in message or "has no valid signature" in message


@pytest.mark.parametrize("changes", [{"digest": digest(b"lost")}, {"annotations": {ANNOTATION: "!"}}])
def test_an_unreadable_signature_hides_no_valid_one(front, published, signer, policy, changes):
    """A registry that collects garbage, or another tool's copy, may lose a payload."""
    repository, index = published.repository, published.repository.tags["v1"]
    good = signer.layer(repository, index, NAME)
    attach(repository, index, [good | changes, good])
    assert front(policies=[policy()]).pull("v1") == published.digests["cpu-v3"]
    attach(repository, index, [good | changes])
    assert front(policies=[policy()]).pull("v1")[0] == 403


def test_a_list_without_signatures_is_told_from_a_damaged_one(front, published, policy):
    index = published.repository.tags["v1"]
    attach(published.repository, index, [{"mediaType": "x", "digest": digest(b"x"), "size": 1}])
    message = "no entry is a signature as cosign 2 writes it"
    assert front(policies=[policy()]).pull("v1")[1].endswith(message)


@pytest.mark.parametrize("payload", [b"{", b"[]", b'{"critical": 3}', b'{"critical": {}}'])
def test_malformed_payload_is_rejected(front, published, signer, policy, payload):
    index = published.repository.tags["v1"]
    attach(published.repository, index, [signer.sealed(published.repository, payload)])
    assert front(policies=[policy()]).pull("v1")[0] == 403


def test_policy_defaults_to_the_upstream_registry(policy):
    assert (
        policy(registry=None).with_registry("other:1/mirror").get_requirement("ml/a").identity
        == "other:1/mirror/ml/a"
    )
    assert policy().with_registry("other:1").get_requirement("ml/a").identity == "registry.example:5000/ml/a"
    assert policy(registry=None).with_registry("").get_requirement("ml/a").identity == "ml/a"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"otherwise": "maybe"}, "otherwise: expected allow or deny, found 'maybe'"),
        ({"schema": "imagematrix.host/v1"}, "expected 'imagematrix.policy/v1'"),
        ({"rule": []}, "rule: unknown field: expected schema, registry, rules, otherwise"),
        ({"rules": [{"repository": "ml/*", "keys": []}]}, "at least one file with a public key is needed"),
        ({"rules": [{"repository": "ml/*", "key": "a"}]}, "key: unknown field"),
        ({"rules": [{"repository": "ML?", "keys": ["a"]}]}, "'ML?' matches no repository"),
        ({"rules": [{"repository": "ml", "keys": ["nowhere.pub"]}]}, "nowhere.pub cannot be read: No such"),
        ({"rules": [{"repository": "ml", "keys": ["policy.json"]}]}, "policy.json is not a public key"),
        ({"rules": [{"repository": "ml", "keys": ["rsa.pub"]}]}, "rsa.pub: only ECDSA keys are supported"),
    ],
)  # fmt: skip
def test_invalid_policy_is_reported(policy, tmp_path, changes, fault):
    key = rsa.generate_private_key(65537, 2048)
    (tmp_path / "rsa.pub").write_bytes(pem(key.public_key()))
    with pytest.raises(UsageError) as caught:
        policy(**changes)
    assert fault in str(caught.value)


def test_first_matching_rule_applies(policy, tmp_path):
    Signer(tmp_path, "first")
    rules = [
        {"repository": "ml/training", "keys": ["first.pub"]},
        {"repository": "*", "keys": ["cosign.pub"]},
    ]
    loaded = policy(rules=rules)
    assert [loaded.get_requirement(name).keys[0].name for name in ("ml/training", "ml/other", "other")] == [
        "first.pub",
        "cosign.pub",
        "cosign.pub",
    ]
