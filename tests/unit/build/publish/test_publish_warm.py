"""Publishing warm images: one checked blob is taken from staging, and all else is written anew."""

import gzip
import json
import tarfile
from dataclasses import replace

import pytest
import zstandard
from compiling import compiled
from cryptography.hazmat.primitives.asymmetric import ec
from distribution import MANIFEST, digest
from fatbins import cubin
from images import special, tar
from publishing import labels_of, tag
from signing import pem
from staging import CPU, FLAGS, KEY, MATCH, NUMBA, WARM_UP, cpu_with

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.build.publish.publish_warm import WarmPublisher
from imagematrix.build.publish.sign import sign_manifests
from imagematrix.common import record
from imagematrix.errors import AuditError, SignatureError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.registry import load_catalog
from imagematrix.images.catalog.warm_image import make_warm_tag
from imagematrix.images.catalog.warm_up import write_warm_up
from imagematrix.images.trust.policy import load_policies
from imagematrix.images.trust.signature import Key
from imagematrix.images.trust.signing_key import SigningKey
from imagematrix.images.warm.tools import ROOT

GPUS = {"count": 1, "compute": "9.0", "name": "NVIDIA H100", "memory_mib": 81559, "mig": ""}
GPU_VARIANT = {"platform": "linux/amd64", "cuda": "12.4", "cubins": ["90"], "driver": {"mode": "host"}}
LIBRARY = f"inductor/5a/c{'a' * 51}.main.so"
KERNEL = f"triton/{'A' * 52}/add.cubin"


@pytest.fixture
def publisher(registry, tmp_path):
    """Call it to get a publisher of the version v1."""

    def call(policies=()):
        folder = tmp_path / "drafts"
        folder.mkdir(exist_ok=True)
        return WarmPublisher(registry, "v1", folder, policies)

    return call


@pytest.fixture
def drafted(publisher):
    """Call it with the name of a staged image to get the draft of a warm image of v1."""
    return lambda source: publisher().make_draft(source)


def documents(repository, pushed):
    manifest = json.loads(repository.manifests[pushed][1])
    return manifest, json.loads(repository.blobs[manifest["config"]["digest"]])


def test_only_the_layer_is_taken(registry, repository, add_base, stage, publisher, caches, image, drafted):
    base = add_base()
    before = {*repository.blobs}
    draft = drafted(stage(base))
    assert {*repository.blobs} == before, "nothing is pushed before it is approved"
    publisher().push_image(draft)
    publish(registry, "v1", selection=IndexSelection(warm=[draft.make_entry()]))

    manifest, config = documents(repository, draft.digest)
    base_manifest, base_config = documents(repository, base)
    layer = caches()
    assert {*repository.blobs} - before == {digest(layer), manifest["config"]["digest"]}
    assert manifest["layers"][:-1] == base_manifest["layers"]
    assert manifest["layers"][-1] == {
        "mediaType": "application/vnd.oci.image.layer.v1.tar+zstd",
        "digest": digest(layer),
        "size": len(layer),
    }
    assert manifest["annotations"] == {"org.example.team": "ml"}
    assert config["rootfs"]["diff_ids"] == [*base_config["rootfs"]["diff_ids"], draft.layer.diff_id]
    assert config["history"][:-1] == base_config["history"]
    assert len(config["history"]) == len(manifest["layers"])
    settings = config["config"]
    assert {*settings.pop("Labels")} == {"owner", labels.WARM}
    assert settings == {"Env": ["HOME=/work"], "Entrypoint": ["/app"]}
    tag = make_warm_tag("v1", base, KEY)
    assert repository.tags[tag] == draft.digest

    catalog = load_catalog(f"{image}:v1")
    (warm,) = catalog.warm
    assert (warm.base, warm.reference, warm.digest) == (base, f"{image}:{tag}", draft.digest)
    assert warm.size == len(b"base") + len(layer)
    assert [variant.digest for variant in catalog.variants] == [base]


def test_what_a_warm_up_prints_is_taken(add_base, stage, drafted, staging):
    base = add_base()
    source = stage(base)
    named = f"{source}@{staging.tags['w']}"
    draft = drafted(named)
    assert (draft.source, draft.digest) == (named, drafted(source).digest)
    stage(base, seconds={"cold": 1.0, "warm": 0.5})  # moves the tag
    assert drafted(named).digest == draft.digest != drafted(source).digest
    with pytest.raises(UnknownImageError, match="is not there"):
        drafted(f"{source}@{KEY}")
    with pytest.raises(UsageError, match="invalid image reference"):
        drafted(f"{source}@sha256:12")


def stored(folder, staging):
    """Return the name of a layout with the staged image."""
    (folder / "blobs/sha256").mkdir(parents=True)
    _, manifest = staging.manifests[staging.tags["w"]]
    for blob in (manifest, *staging.blobs.values()):
        (folder / "blobs/sha256" / digest(blob).removeprefix("sha256:")).write_bytes(blob)
    entry = {"mediaType": MANIFEST, "digest": digest(manifest), "size": len(manifest)}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    return f"oci:{folder}"


def test_a_layout_is_read_with_the_same_checks(add_base, stage, drafted, staging, caches, tmp_path):
    base = add_base()
    source = stage(base)
    folder = tmp_path / "layout"
    layout = stored(folder, staging)
    assert drafted(layout).digest == drafted(source).digest
    blobs = folder / "blobs/sha256"
    layer = blobs / digest(caches()).removeprefix("sha256:")
    layer.write_bytes(caches(**{f"{NUMBA}.nbi": b"other"}))
    with pytest.raises(AuditError, match="does not match its digest"):
        drafted(layout)
    layer.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        drafted(layout)
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": []}))
    with pytest.raises(UsageError, match="has 0 images; expected one"):
        drafted(layout)
    with pytest.raises(UsageError, match="cannot be read"):
        drafted(f"oci:{tmp_path}/none")


def test_the_label_names_the_tools_of_the_layer(add_base, stage, drafted):
    draft = drafted(stage(add_base(), tools={"jax": "1", "warp": None}))
    assert draft.label.tools == (("numba", None),)


def test_a_plain_publication_keeps_warm_images(registry, repository, add_base, stage, publisher, drafted):
    draft = drafted(stage(add_base()))
    publisher().push_image(draft)
    first = publish(registry, "v1", selection=IndexSelection(warm=[draft.make_entry()]))
    assert publish(registry, "v1").digest == first.digest
    assert not repository.moved or {*repository.moved} == {"v1"}


def test_what_is_there_already_stands(registry, add_base, stage, publisher, caches, server, drafted):
    base = add_base()
    first = drafted(stage(base))
    publisher().push_image(first)
    written = server.count("PUT")
    other = drafted(stage(base, caches(**{f"{NUMBA}.nbi": b"of another run"}), name="x"))
    assert other.is_present
    assert (other.digest, other.label) == (first.digest, first.label)
    publisher().push_image(other)
    assert server.count("PUT") == written
    assert registry.digest(make_warm_tag("v1", base, KEY)) == first.digest


def test_of_two_at_once_the_first_tag_stands(add_base, stage, publisher, caches, drafted):
    base = add_base()
    first = drafted(stage(base))
    second = drafted(stage(base, caches(**{f"{NUMBA}.nbi": b"other"}), name="x"))
    publisher().push_image(first)
    with pytest.raises(TagMovedError, match="at the same time") as error:
        publisher().push_image(second)
    assert error.value.exit_code == 7
    assert drafted(second.source).digest == first.digest


def test_a_tag_with_another_key_never_moves(repository, add_base, stage, publisher, drafted):
    base = add_base()
    key = f"sha256:{'c' * 12}{'d' * 52}"
    publisher().push_image(drafted(stage(base, key=key)))
    with pytest.raises(TagMovedError, match=f"with the key {key}, not {KEY}") as error:
        drafted(stage(base, name="x"))
    assert error.value.exit_code == 7
    assert not {make_warm_tag("v1", base, KEY)} & {*repository.moved}


def test_a_foreign_image_under_the_tag_is_not_adopted(repository, add_base, stage, drafted, staging):
    base = add_base()
    source = stage(base)
    tag = make_warm_tag("v1", base, KEY)
    repository.image(tag, {})
    with pytest.raises(TagMovedError, match="exists, and is no warm image"):
        drafted(source)
    # Its label and its layer may be right: it counts only if it is what would be published.
    media_type, raw = staging.manifests[staging.tags["w"]]
    repository.blobs |= staging.blobs
    repository.put(tag, raw, media_type)
    with pytest.raises(TagMovedError, match="exists, and is not as it is published"):
        drafted(source)


HOSTILE_LABELS = {
    "another command": ({"command": ["sh", "-c", "evil"]}, AuditError, "claims a command or inputs"),
    "another input": (
        {"inputs": {"model": {"path": "/etc", "digest": KEY}}},
        AuditError,
        "claims a command or inputs",
    ),
    "no input": ({"inputs": {}}, AuditError, "claims a command or inputs"),
    "a variant of another version": ({"base": KEY}, UnknownImageError, "is no variant of"),
    "no digest as its base": ({"base": "latest"}, UsageError, "base"),
    "a newer schema": ({"schema": 2}, UsageError, "newer than this release"),
    "reproducible": ({"reproducible": True}, UsageError, "reproducible"),
    "a key with a path": ({"key": "../../x"}, UsageError, "key"),
    "two lines in a date": ({"date": "2026-11-29T12:00:00Z\n"}, UsageError, "date"),
    "a match of nothing": ({"match": {}}, AuditError, "does not state cpu.flags, cpu.name"),
    "no name of the CPU": (
        {"match": {"cpu": {key: CPU[key] for key in ("vendor", "flags", "without")}}},
        AuditError,
        "does not state cpu.name",
    ),
    "an unknown fact": ({"match": MATCH | {"moon": "full"}}, AuditError, "has no value for moon"),
    "no flags": (
        {"match": MATCH | {"cpu": CPU | {"flags": [], "without": []}}},
        AuditError,
        "does not say whether the CPU has 3dnow, 3dnowext, abm, .* more",
    ),
    "a flag less": (
        {"match": MATCH | {"cpu": CPU | {"without": [flag for flag in CPU["without"] if flag != "avx512f"]}}},
        AuditError,
        "does not say whether the CPU has avx512f$",
    ),
    "no proofs": ({"proofs": {}}, AuditError, "claims no proof that the image's user finds its caches"),
    "the image's user misses": (
        {"proofs": {"image-user": "missed", "root": "proved"}},
        AuditError,
        "claims no proof that the image's user",
    ),
    "only others are proved": ({"proofs": {"read-only": "proved"}}, AuditError, "claims no proof"),
    "root misses": ({"proofs": {"root": "missed"}}, AuditError, "claims no proof"),
    "another content": ({"content": "audited"}, AuditError, "claims the content 'audited'"),
    "a null": ({"match": MATCH | {"cpus": None}}, AuditError, "has no value for cpus"),
}


def test_what_is_always_root_proves_only_that(add_base, stage, drafted):
    assert drafted(stage(add_base(), proofs={"root": "proved", "read-only": "missed"})).label.proofs


@pytest.mark.parametrize(("changes", "kind", "why"), HOSTILE_LABELS.values(), ids=HOSTILE_LABELS)
def test_hostile_labels_are_refused(repository, add_base, stage, drafted, changes, kind, why):
    base = add_base()
    before = {*repository.blobs}
    source = stage(base, **changes)
    with pytest.raises(kind, match=why) as error:
        drafted(source)
    assert "\n" not in str(error.value)
    assert {*repository.blobs} == before


HOSTILE_CONFIGS = {
    "no label": ({"config": {"Labels": {}}}, "has no label"),
    "no labels": ({}, "has no label"),
    "a number as a label": ({"config": {"Labels": {labels.WARM: 1}}}, "has no label"),
    "no JSON in the label": ({"config": {"Labels": {labels.WARM: "{"}}}, "label io.imagematrix.warm"),
    "depth in the label": ({"config": {"Labels": {labels.WARM: "[" * 99_999}}}, "label io.imagematrix.warm"),
    "a list": ([], "object"),
}


@pytest.mark.parametrize(("config", "why"), HOSTILE_CONFIGS.values(), ids=HOSTILE_CONFIGS)
def test_hostile_configurations_are_refused(add_base, stage, drafted, config, why):
    source = stage(add_base(), config=config)
    with pytest.raises(UsageError, match=why):
        drafted(source)


def test_hostile_manifests_are_refused(add_base, stage, drafted, staging, server):
    base = add_base()
    with pytest.raises(UsageError, match="has 2 layers; expected the layer of caches alone"):
        drafted(stage(base, more_layers=[b"another"]))
    staging.put("index", json.dumps({"schemaVersion": 2, "manifests": []}).encode(), MANIFEST)
    with pytest.raises(UsageError, match="is no image with a layer of caches"):
        drafted(f"{server.address}/ml/staging:index")
    with pytest.raises(UnknownImageError, match=r"/ml/staging:none is not there"):
        drafted(f"{server.address}/ml/staging:none")


def hostile_layer(name="var/cache/warm/numba", mode=0o4755):
    home = special("var/cache/warm", tarfile.DIRTYPE)
    home.mode = 0o777
    return gzip.compress(tar(home, (name, b"x", mode)))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (hostile_layer(), "is no file that a tool of the table keeps"),
        (hostile_layer("etc/ld.so.preload"), "is outside /var/cache/warm"),
        (hostile_layer("var/cache/warm/.wh..wh..opq"), "removes something of the image"),
        (b"", "cannot be read"),
        (tar("x"), "is refused"),
    ],
)
def test_the_layer_is_checked(add_base, stage, drafted, layer, why):
    with pytest.raises(AuditError, match=why):
        drafted(stage(add_base(), layer))


def test_a_layer_without_compression_is_refused(add_base, stage, drafted, caches):
    raw = zstandard.ZstdDecompressor().decompressobj().decompress(caches())
    with pytest.raises(AuditError, match="compressed neither with gzip nor with zstd"):
        drafted(stage(add_base(), raw))


def test_more_than_the_variant_allows_is_refused(add_base, stage, drafted, caches):
    layer = caches(**{f"{NUMBA}.1.nbc": bytes((1 << 20) + 1)})
    with pytest.raises(AuditError, match="its files have more than 1048576 bytes"):
        drafted(stage(add_base(), layer))


def test_a_blob_with_another_content_is_refused(staging, add_base, stage, drafted, caches):
    source = stage(add_base())
    staging.blobs[digest(caches())] = caches(**{f"{NUMBA}.nbi": b"other"})
    with pytest.raises(AuditError, match="does not match its digest"):
        drafted(source)


def test_a_variant_without_a_warm_up_gets_no_caches(add_base, stage, drafted):
    with pytest.raises(UsageError, match="has no warm-up"):
        drafted(stage(add_base(warm_up=None)))


def test_a_version_that_is_not_published_gets_no_caches(publisher):
    with pytest.raises(UnknownImageError, match="has no published variants") as error:
        publisher()
    assert "imagematrix publish" in error.value.remedy


AVX512 = "#include <immintrin.h>\n__m512i f(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }"


def test_flags_of_code_have_to_be_in_the_match(add_base, stage, drafted, caches, tmp_path):
    path = compiled(tmp_path / "code.so", AVX512, "-shared", "-fPIC", "-O2", "-mavx512f")
    layer = caches(**{LIBRARY: path.read_bytes()})
    base = add_base()
    with pytest.raises(AuditError, match=f"{ROOT}/{LIBRARY} needs avx512f, which its match does not state"):
        drafted(stage(base, layer))
    cpu = cpu_with(*FLAGS, "avx512f")
    assert drafted(stage(base, layer, match={**MATCH, "cpu": cpu})).layer.tools == ("inductor",)
    with pytest.raises(AuditError, match=r"does not state cpu\.flags"):
        drafted(stage(base, layer, match={"cpus": 2}))


def test_damaged_code_is_refused(add_base, stage, drafted, caches):
    with pytest.raises(AuditError, match=f"{ROOT}/{LIBRARY} is damaged"):
        drafted(stage(add_base(), caches(**{LIBRARY: b"\x7fELF" + bytes(100)})))


def test_device_code_has_to_run_on_the_gpus_of_the_match(add_base, stage, drafted, caches):
    layer = caches(**{KERNEL: cubin_of(90)})
    warm_up = record.replace(WARM_UP, gpus="all")
    base = add_base(warm_up=warm_up, VARIANT=json.dumps(GPU_VARIANT))
    with pytest.raises(AuditError, match=r"does not state gpus\.compute"):
        drafted(stage(base, layer))
    with pytest.raises(AuditError, match=r"has device code for 90, not for 8\.9"):
        drafted(stage(base, layer, match=MATCH | {"gpus": GPUS | {"compute": "8.9"}}))
    assert drafted(stage(base, layer, match=MATCH | {"gpus": GPUS})).layer.tools == ("triton",)


def test_caches_of_a_product_are_not_for_all_of_its_capability(add_base, stage, drafted, caches):
    layer = caches(**{f"inductor/fxgraph/aa/f{'a' * 51}/{'b' * 51}": b"x"})
    base = add_base(
        warm_up=record.replace(WARM_UP, gpus="all", match="compute"), VARIANT=json.dumps(GPU_VARIANT)
    )
    with pytest.raises(AuditError, match="has caches of inductor, which `match: compute` is too wide for"):
        drafted(stage(base, layer, match=MATCH | {"gpus": GPUS}))


def cubin_of(target):
    raw = bytearray(cubin("kernel"))
    raw[18:20] = (190).to_bytes(2, "little")  # the machine is CUDA
    raw[48:52] = (target << 16 | target).to_bytes(4, "little")
    return bytes(raw)


def test_signatures_come_before_the_tag(registry, repository, add_base, stage, publisher, tmp_path, image):
    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pub").write_bytes(pem(private.public_key()))
    key = SigningKey(private=private, public=Key(name="key.pub", public=private.public_key()))
    rules = [{"repository": "*", "keys": ["key.pub"]}]
    policy = tmp_path / "policy.json"
    document = {"schema": "imagematrix.policy/v1", "rules": rules, "otherwise": "deny"}
    policy.write_text(json.dumps(document))
    policies = load_policies([str(policy)])

    base = add_base()
    with pytest.raises(SignatureError):
        publisher(policies)
    signed: list[str] = []

    def sign(digests):
        assert make_warm_tag("v1", base, KEY) not in repository.tags or signed
        signed.extend(digests)
        return sign_manifests(registry, key, digests)

    publish(registry, "v1", sign=lambda digests: sign_manifests(registry, key, digests))
    draft = publisher(policies).make_draft(stage(base))
    publisher(policies).push_image(draft, sign)
    publish(registry, "v1", selection=IndexSelection(warm=[draft.make_entry()]), sign=sign)
    assert signed[0] == draft.digest
    assert f"{draft.digest.replace(':', '-')}.sig" in repository.tags
    assert load_catalog(f"{image}:v1", policies).warm


def test_layers_of_a_classic_engine_get_the_names_of_oci(repository, registry, add_base, stage, drafted):
    base = add_base()
    media_type, raw = repository.manifests[base]
    old = json.loads(raw)
    old["layers"][0]["mediaType"] = "application/vnd.docker.image.rootfs.diff.tar.gzip"
    own = labels_of("b") | {labels.WARM_UP: write_warm_up(WARM_UP)}
    old["annotations"] = labels.select_annotations(own)
    docker = repository.put(tag(own), json.dumps(old).encode(), media_type)
    publish(registry, "v1")
    manifest = json.loads(drafted(stage(docker)).manifest)
    assert [layer["mediaType"].rpartition("+")[2] for layer in manifest["layers"]] == ["gzip", "zstd"]
    assert not any("docker" in layer["mediaType"] for layer in manifest["layers"])


def test_drafts_say_what_they_are(add_base, stage, drafted, image):
    base = add_base()
    draft = drafted(stage(base))
    tag = make_warm_tag("v1", base, KEY)
    assert draft.to_json() == {
        "reference": f"{image}:{tag}",
        "digest": draft.digest,
        "base": base,
        "match": MATCH,
    }
    assert draft.base.startswith(f"{image}:v1-a-")
    assert replace(draft, source="x").digest == draft.digest
