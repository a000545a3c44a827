"""The catalog of a local engine, from the labels of its images."""

import json

import pytest
from publishing import warm_label

from imagematrix import Catalog
from imagematrix.build.stores.engine import EngineStore
from imagematrix.errors import AuditError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Variant
from imagematrix.images.catalog.engine import load_catalog, load_catalogs
from imagematrix.images.catalog.sources import open_catalog, require_not_built_on
from imagematrix.images.catalog.warm_image import make_warm_tag

SHORT = "0123456789ab"
DIGEST, OTHER = (f"sha256:{digit * 64}" for digit in "de")


def one(image="training", version="v1", cell="cpu-znver4", **facts):
    variant = Variant(
        reference=f"{image}:{version}-{cell}-{SHORT}", digest=None, platform="linux/amd64", **facts
    )
    return Catalog(image=image, version=version, variants=(variant,))


def test_labels_restore_the_catalog(engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    result = open_catalog("training:v1")
    assert result == load_catalog("training")
    assert len(engine.requests) == 2
    assert {variant.size for variant in result.variants} == {81_000_000}
    references = [variant.reference for variant in result.variants]
    assert references == sorted(variant.reference for variant in shipped_catalog.variants)


def inspected(own, **settings):
    """What an engine tells of an image, with all that it leaves out or adds as empty."""
    return {
        "Id": DIGEST,
        "Os": "linux",
        "Architecture": "amd64",
        "Variant": "",
        "Created": "1970-01-01T00:00:00Z",
        "DockerVersion": "26.1.5",
        "Config": {"Labels": own, "Hostname": "", "Volumes": None, "WorkingDir": "", "Env": ["A=B"]}
        | settings,
        "RootFS": {"Type": "layers", "Layers": ["sha256:1", "sha256:2"]},
    }


def configured(own, **settings):
    """The configuration of the same image."""
    return {
        "os": "linux",
        "architecture": "amd64",
        "created": "1970-01-01T00:00:00Z",
        "history": [{"created_by": "RUN make"}],
        "config": {"Labels": own, "Env": ["A=B"], "ArgsEscaped": True} | settings,
        "rootfs": {"type": "layers", "diff_ids": ["sha256:1", "sha256:2"]},
    }


def test_content_digest_is_the_same_from_a_configuration_and_from_an_engine():
    own = {"x": "y"}
    made = labels.hash_content(configured(own))
    own[labels.CONTENT] = made
    assert not labels.has_inherited(configured(own))
    assert not labels.has_inherited(inspected(own))
    changes: tuple[dict[str, object], ...] = (
        {"Cmd": ["sh"]},
        {"Env": ["A=C"]},
        {"Entrypoint": ["sh"]},
        {"User": "root"},
        {"WorkingDir": "/x"},
        {"Volumes": {"/x": {}}},
        {"Labels": {**own, "x": "z"}},
        {"Labels": {**own, "z": ""}},
    )
    for changed in changes:
        assert labels.has_inherited(configured(own) | {"config": configured(own)["config"] | changed})
        assert labels.has_inherited(inspected(own, **changed))
    for raw in (configured(own), inspected(own)):
        layers = (
            {"rootfs": {"diff_ids": ["sha256:1"]}} if "os" in raw else {"RootFS": {"Layers": ["sha256:1"]}}
        )
        assert labels.has_inherited(raw | layers)
        assert labels.has_inherited(raw | {"architecture" if "os" in raw else "Architecture": "arm64"})


@pytest.mark.parametrize(
    "raw", [{}, {"config": []}, {"config": {"Labels": 5}}, {"Config": {"Labels": ["x"]}}]
)
def test_damaged_configuration_has_no_labels(raw):
    assert labels.get_labels(raw) == {}
    assert not labels.has_inherited(raw)
    assert labels.hash_content(raw).startswith("sha256:")


def add_image(engine, **settings):
    """Put an image with the labels of a variant into the engine, perhaps changed, and return its name."""
    engine.add_catalog(one())
    (entry,) = engine.images
    entry["Labels"][labels.INPUTS] = "{}"
    entry["Labels"][labels.CONTENT] = labels.hash_content(configured(entry["Labels"]))
    (reference,) = entry["RepoTags"]
    document = inspected(entry["Labels"], **settings)
    engine.responses["GET", f"/images/{reference}/json"] = 200, json.dumps(document).encode()
    return reference


def test_image_that_took_the_name_of_its_variant_is_refused(engine):
    """`FROM $REF` with another command, tagged $REF."""
    reference = add_image(engine, Cmd=["sh"])
    message = f"{reference} is not the variant of this name, but an image built on the variant"
    with EngineStore() as store:
        for read in (
            lambda: require_not_built_on("training:v1", None, [reference]),
            lambda: require_not_built_on(None, None, [reference]),
            lambda: store.list_variants("training", "v1"),
        ):
            with pytest.raises(AuditError, match=message) as caught:
                read()
            assert caught.value.remedy == f"run `docker image rm {reference}` and build again"
    for image, name in (("training:v1", "saved.json"), ("reg:5000/training:v1", None)):
        require_not_built_on(image, name, [reference])  # its digest tells


def test_variant_with_its_name_is_confirmed(engine):
    reference = add_image(engine)
    require_not_built_on("training:v1", None, [reference, "training:gone"])
    with EngineStore() as store:
        assert [one.reference for one in store.list_variants("training", "v1")] == [reference]


def test_catalog_is_read_with_one_request(engine):
    add_image(engine)
    assert len(load_catalog("training:v1").variants) == 1
    assert len(engine.requests) == 1


@pytest.mark.parametrize("full", ["docker.io/library/", "localhost/"])
def test_podman_prefix_of_short_names_is_removed(engine, full):
    engine.add_catalog(one())
    (reference,) = engine.images[0]["RepoTags"]
    engine.images[0] |= {"RepoTags": [full + reference], "RepoDigests": [f"{full}training@{DIGEST}"]}
    (variant,) = load_catalog("training:v1").variants
    assert (variant.reference, variant.digest) == (reference, DIGEST)


@pytest.mark.parametrize(
    ("image", "listed"),
    [
        ("docker.io/ml/training", "ml/training"),
        ("docker.io/library/training", "training"),
        ("index.docker.io/training", "training"),
        ("library/training", "training"),
        ("library/ml/training", "library/ml/training"),
        ("reg:5000/library/training", "reg:5000/library/training"),
    ],
)
def test_images_of_docker_hub_are_found_as_docker_lists_them(engine, image, listed):
    engine.add_catalog(one(image=image))
    (reference,) = engine.images[0]["RepoTags"]
    engine.images[0] |= {
        "RepoTags": [reference.replace(image, listed)],
        "RepoDigests": [f"{listed}@{DIGEST}"],
    }
    (variant,) = load_catalog(f"{image}:v1").variants
    assert (variant.reference, variant.digest) == (reference, DIGEST)
    engine.images[0]["Labels"][labels.INPUTS] = "{}"
    with EngineStore() as store:
        assert [one.reference for one in store.list_variants(image, "v1")] == [reference]


def test_digest_is_the_manifest_s_or_the_image_id(engine):
    engine.add_catalog(one(cell="cpu-znver3"))
    engine.add_catalog(one())
    engine.images[1]["RepoDigests"] = ["other@sha256:1", f"training@{DIGEST}"]
    first, second = load_catalog("training:v1").variants
    assert first.digest == engine.images[0]["Id"]
    assert second.digest == DIGEST


@pytest.mark.parametrize(
    "foreign",
    [
        None,
        {},
        {labels.IMAGE: "training"},
        {labels.IMAGE: "training", labels.VERSION: "v1", labels.CELL: "x"},
        # Built on a variant: it inherits the labels, but has another name.
        {labels.IMAGE: "training", labels.VERSION: "v1", labels.CELL: "x", labels.INPUT: "sha256:1"},
    ],
)
def test_foreign_images_are_skipped(engine, foreign):
    engine.add_catalog(one())
    engine.add_image(foreign, RepoTags=["derived:latest"])
    engine.add_image(foreign, RepoTags=None)
    assert len(load_catalog("training").variants) == 1


def test_malformed_entries_are_skipped(engine):
    engine.add_catalog(one())
    engine.images += ["text", None, 3, []]
    assert len(load_catalogs()) == 1


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("{", "not JSON"),
        (None, "is not JSON"),
        ("[]", "is not an object"),
        ('{"platform": "linux/amd64", "cuda": "x"}', "cuda: 'x' is not a CUDA release"),
        ("{}", "platform is missing"),
    ],
)
def test_error_for_damaged_labels_names_the_image(engine, label, expected):
    engine.add_catalog(one())
    own = engine.images[0]["Labels"]
    own[labels.VARIANT] = label
    if label is None:
        del own[labels.VARIANT]
    with pytest.raises(UsageError, match=rf"training:v1-cpu-znver4-{SHORT}: .*{expected}"):
        load_catalog("training:v1")


def test_invalid_size_is_rejected(engine):
    engine.add_catalog(one())
    engine.images[0]["Size"] = "big"
    with pytest.raises(UsageError, match="size: expected an integer, found a string"):
        load_catalog("training:v1")


def test_several_versions_require_a_choice(engine):
    engine.add_catalog(one(version="v2"))
    engine.add_catalog(one())
    assert [(item.image, item.version) for item in load_catalogs("training")] == [
        ("training", "v1"),
        ("training", "v2"),
    ]
    assert load_catalog("training:v2").version == "v2"
    with pytest.raises(UnknownImageError, match="training has several versions") as caught:
        load_catalog("training")
    assert caught.value.remedy == "name one of training:v1, training:v2"
    assert caught.value.exit_code == 4


def test_error_for_an_unknown_image_lists_existing_ones(engine):
    with pytest.raises(UnknownImageError, match="the engine has no variant of training:v1") as caught:
        load_catalog("training:v1")
    assert caught.value.remedy == "build variants with `imagematrix build`"
    engine.add_catalog(one(image="reg:5000/ml/serving"))
    with pytest.raises(UnknownImageError) as caught:
        load_catalog("training:v1")
    assert caught.value.remedy == "it has reg:5000/ml/serving:v1"
    with pytest.raises(UnknownImageError, match="no variant of reg:5000/ml/serving:v9"):
        load_catalog("reg:5000/ml/serving:v9")


def test_catalog_takes_the_preference_of_its_images(engine):
    engine.add_catalog(one(cell="cpu-znver3"))
    engine.add_catalog(one())
    for item in engine.images:
        item["Labels"][labels.PREFER] = "cuda,driver"
    assert load_catalog("training:v1").prefer == ("cuda", "driver")
    del engine.images[0]["Labels"][labels.PREFER]
    with pytest.raises(UsageError, match="differ in their preferences: the usual order and cuda,driver"):
        load_catalog("training:v1")
    engine.images[0]["Labels"] |= {labels.PREFER: "cuda,driver", labels.DEFAULTS: '{"python":"3.13"}'}
    with pytest.raises(
        UsageError, match=r"differ in their preferences: cuda,driver and cuda,driver python=3\.13"
    ):
        load_catalog("training:v1")
    engine.images[1]["Labels"][labels.DEFAULTS] = '{"python":"3.13"}'
    assert load_catalog("training:v1").defaults == (("python", "3.13"),)
    for damaged in ("3.13", "[]", '{"cuda": "12.4"}', '{"python": 3}', "[" * 100_000):
        engine.images[0]["Labels"][labels.DEFAULTS] = damaged
        with pytest.raises(UsageError, match=r"io\.imagematrix\.defaults"):
            load_catalog("training:v1")
    del engine.images[0]["Labels"][labels.DEFAULTS]
    engine.images[0]["Labels"][labels.PREFER] = "speed"
    with pytest.raises(UsageError, match="'speed' is not one of gpu, device-code"):
        load_catalog("training:v1")


def test_variant_is_found_by_reference_or_digest(engine):
    engine.add_catalog(one(cell="cpu-znver3"))
    engine.add_catalog(one())
    own = load_catalog("training:v1").variants[0]
    for name in (own.reference, f"training@{own.digest}", f"{own.reference}@{own.digest}"):
        result = load_catalog(name)
        assert (result.version, result.variants) == ("v1", (own,))
    with pytest.raises(UnknownImageError):
        load_catalog(f"other@{own.digest}")


def test_misspelled_name_gets_a_suggestion(engine):
    engine.add_catalog(one())
    engine.add_catalog(one(image="serving"))

    def remedy(name):
        with pytest.raises(UnknownImageError) as caught:
            load_catalog(name)
        return caught.value.remedy

    (variant,) = load_catalog("training").variants
    assert remedy("trainign") == "did you mean 'training'?"
    assert remedy("trainign:v1") == "did you mean 'training:v1'?"
    assert remedy("training:v9") == "did you mean 'training:v1'?"
    assert remedy(variant.reference[:-1]) == f"did you mean {variant.reference!r}?"
    assert remedy("x") == "it has serving:v1, training:v1"


@pytest.mark.parametrize("labelled", [None, {}, {labels.IMAGE: "training", labels.VERSION: "v1"}])
def test_image_without_labels_of_its_own_is_to_be_adopted(engine, labelled):
    """It is there, and a name that is near is no better."""
    engine.add_catalog(one(image="app", version="v2"))
    engine.add_image(labelled, RepoTags=["app:plain"])
    there = json.dumps({"Config": {"Labels": labelled}}).encode()
    engine.responses["GET", "/images/app:plain/json"] = 200, there
    with pytest.raises(UnknownImageError) as caught:
        load_catalog("app:plain")
    assert str(caught.value) == "app:plain has no labels of its own that say which hosts it fits"
    adopt = "`imagematrix adopt app:plain --as app:plain -o app-plain.json`"
    then = "then pass --catalog app-plain.json"
    assert caught.value.remedy == f"{adopt} reads it from the image's files; {then}"


def add_warm_version(engine, *, warm_up=True, tag=None):
    """Add a variant, perhaps with a warm-up, and a warm image of it, perhaps with another tag."""
    engine.add_catalog(one())
    variant = engine.images[-1]
    variant["RepoDigests"] = [f"training@{DIGEST}"]
    if warm_up:
        variant["Labels"][labels.WARM_UP] = "{}"
    label = warm_label(DIGEST)
    tag = tag or make_warm_tag("v1", DIGEST, label["key"])
    names = {"RepoTags": [f"training:{tag}"], "RepoDigests": [f"training@{OTHER}"]}
    engine.add_image({labels.WARM: json.dumps(label)}, **names)
    return f"training:{tag}"


def test_warm_images_that_the_engine_has_belong_to_its_variants(engine):
    name = add_warm_version(engine)
    engine.add_image({labels.WARM: "damaged"}, RepoTags=["training:v1-warm-a-b"])
    (warm,) = load_catalog("training:v1").warm
    assert (warm.reference, warm.base, warm.digest, warm.size) == (name, DIGEST, OTHER, 81_000_000)
    with pytest.raises(UnknownImageError):
        load_catalog(f"training@{OTHER}")


@pytest.mark.parametrize("changes", [{"warm_up": False}, {"tag": "v1-mine"}, {"tag": "v2-warm-1-2"}])
def test_without_a_warm_up_or_its_own_name_there_is_no_warm_image(engine, changes):
    add_warm_version(engine, **changes)
    assert load_catalog("training:v1").warm == ()
    assert len(engine.requests) == (1 if "warm_up" in changes else 2)
