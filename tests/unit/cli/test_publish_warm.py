"""publish --warm: what the node claims is shown and approved, and only then published."""

import json

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from staging import KEY, NUMBA_FILES

from imagematrix.images.catalog.warm_image import make_warm_tag

UNENCRYPTED = (
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.NoEncryption(),
)


@pytest.fixture
def base(add_base):
    return add_base()


def test_claims_are_shown_and_published(cli, image, repository, base, stage, conforms):
    source = stage(base)
    result = cli("publish", f"{image}:v1", "--warm", source, "--yes", "--json")
    assert result.code == 0, result.err
    document = conforms(json.loads(result.out))
    (warm,) = document["warm"]
    tag = make_warm_tag("v1", base, KEY)
    assert (warm["reference"], warm["base"]) == (f"{image}:{tag}", base)
    assert warm["digest"] == repository.tags[tag]
    assert (document["variants"], document["new"], document["unneeded"]) == (1, 0, [])
    for line in (
        f"{source}: 2 files of numba, 0.0 MB, for {image}:v1-a-",
        "these are claims of the node that made it:",
        "cpu.flags: avx, avx2, bmi1, bmi2, f16c, fma, sse4_2, ssse3",
        "command  python warm.py",
        f"input    model at /models/m, {KEY}",
        "seconds  48.2, cold",
        "proof    root: proved",
        f"{image}:{tag}@{repository.tags[tag]} starts in place of",
    ):
        assert line in result.err
    again = cli("publish", f"{image}:v1", "--warm", source, "--yes")
    assert again.out == f"{image}:v1@{document['digest']}\n"
    assert "(there already)" in again.err
    assert "warm" not in json.loads(cli("publish", f"{image}:v1", "--json").out)


def test_nothing_is_published_without_approval(cli, image, repository, base, stage):
    before = {*repository.blobs}, dict(repository.tags)
    refused = cli("publish", f"{image}:v1", "--warm", stage(base))
    refused.refuses(2, "1 warm image not published: the claims are not approved")
    assert "if they are right, add --yes" in refused.err
    assert ({*repository.blobs}, repository.tags) == before


def test_two_layers_for_one_tag_are_refused_before_one_is_pushed(cli, image, repository, base, stage, caches):
    """Two nodes that are equal have warmed up the same variant, and no two runs write the same bytes."""
    other = stage(base, caches(**dict.fromkeys(NUMBA_FILES, b"of another run")), name="other")
    before = {*repository.blobs}, dict(repository.tags)
    refused = cli("publish", f"{image}:v1", "--warm", stage(base), "--warm", other, "--yes")
    refused.refuses(2, f"are of the same warm-up on equal nodes: both would be {image}:v1-warm-")
    assert f"leave out one of them, such as --warm {other}" in refused.err
    assert ({*repository.blobs}, repository.tags) == before
    same = stage(base, name="same")
    assert cli("publish", f"{image}:v1", "--warm", stage(base), "--warm", same, "--yes").code == 0


def test_a_signed_version_does_not_lose_its_signature(cli, image, repository, base, stage, tmp_path):
    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pem").write_bytes(private.private_bytes(*UNENCRYPTED))
    assert cli("publish", f"{image}:v1", "--sign", tmp_path / "key.pem").code == 0
    before = {*repository.blobs}, dict(repository.tags)
    refused = cli("publish", f"{image}:v1", "--warm", stage(base), "--yes")
    refused.refuses(2, f"{image}:v1 is signed, and with a warm image it would not be")
    assert "add --sign KEY" in refused.err
    assert ({*repository.blobs}, repository.tags) == before
    signed = cli("publish", f"{image}:v1", "--warm", stage(base), "--yes", "--sign", tmp_path / "key.pem")
    assert signed.code == 0, signed.err


def test_a_version_that_loses_its_signature_is_told(cli, image, base, add_variant, tmp_path):  # noqa: ARG001
    """It may be signed afterwards, with a key that is elsewhere."""
    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pem").write_bytes(private.private_bytes(*UNENCRYPTED))
    assert "its new index" not in cli("publish", f"{image}:v1", "--sign", tmp_path / "key.pem").err
    add_variant("another")
    done = cli("publish", f"{image}:v1")
    assert done.code == 0
    assert f"{image}:v1 was signed, and its new index is not" in done.err
    assert f"or sign {done.out.strip().partition('@')[2]} with cosign" in done.err


def test_claims_stay_on_their_lines(cli, image, base, stage):
    refused = cli("publish", f"{image}:v1", "--warm", stage(base, tools={"numba": "1\x1b[2J"}))
    assert refused.code == 2
    assert "\x1b" not in refused.err


@pytest.mark.parametrize("options", [("--repair",), ("--choose", "x"), ("--at-most", "1")])
def test_warm_images_are_published_alone(cli, image, base, stage, options):
    cli("publish", f"{image}:v1", "--warm", stage(base), "--yes", *options).refuses(2, "and nothing else")


def test_what_is_pushed_is_not_published_by_the_way(cli, image, repository, add_variant, base, stage):
    add_variant("b")
    assert cli("publish", f"{image}:v1", "--warm", stage(base), "--yes").code == 0
    assert json.loads(repository.manifests[repository.tags["v1"]][1])["manifests"][2:] == []
