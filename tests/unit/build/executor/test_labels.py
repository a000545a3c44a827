"""Labels: the selector reads what a build writes."""

import json

import pytest
from matrices import add_axis, add_option

from imagematrix.build.executor import labels as written
from imagematrix.build.matrix import promised_variants
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import UserModeDriver
from imagematrix.images.catalog.warm_up import WarmUp, read_warm_up
from imagematrix.images.oci.manifest import compute_digest

FLAGS = frozenset({"avx2", "avx512f"})
GPU = "cuda=12.4,compute=8.9,driver=550.163.01,march=znver4"


def labels_of(item, flags=FLAGS):
    return written.compose_labels(item, promised_variants.make_variant(item.cell, flags, item.reference))


@pytest.mark.parametrize("only", ["cuda=none,march=znver4", GPU])
def test_catalog_entry_round_trips_through_labels(planned, only):
    (item,) = planned(only=only).with_status("build")
    own = labels_of(item)
    variant = labels.read_variant(own, reference=item.reference, digest=None, size=None)
    assert variant == promised_variants.make_variant(item.cell, FLAGS, item.reference)


def test_labels_that_not_every_image_has_may_be_empty(planned):
    """The classic image store cannot remove them from an image whose base has them."""
    (item,) = planned(only=GPU).with_status("build")
    written_always = {name for name in labels_of(item) if name.startswith("io.imagematrix.")}
    stated = {value for value in vars(labels).values() if str(value).startswith("io.imagematrix.")}
    assert {*labels.OCCASIONAL} | written_always == stated - {labels.SIZE, labels.WARM}
    empty = dict.fromkeys(labels.OCCASIONAL, "")
    assert labels.read_terms(empty, item.reference) == labels.Terms()
    assert labels.read_optional(empty) == ()
    assert read_warm_up(empty) is None
    assert not labels.has_inherited({"config": {"Labels": empty}})


def test_label_states_signed_return_addresses(planned):
    (item,) = planned(only="cuda=none,march=znver4").with_status("build")
    for flags in (FLAGS, FLAGS | marches.SIGNING):
        label = labels_of(item, flags)[labels.VARIANT]
        assert ("signed_returns" in json.loads(label)) is (flags != FLAGS)
        variant = labels.read_variant(
            {labels.VARIANT: label}, reference=item.reference, digest=None, size=None
        )
        assert variant.signed_returns is (flags != FLAGS)


def test_labels_have_the_documented_contents(planned):
    (item,) = planned(only=GPU).with_status("build")
    own = labels_of(item)
    assert json.loads(own.pop(labels.INPUTS)) == item.identity.components
    assert json.loads(own.pop(labels.VARIANT)) == {
        "platform": "linux/amd64",
        "cuda": "12.4",
        "cubins": ["89"],
        "ptx": [],
        "compressed_fatbin": False,
        "driver": {"mode": "exact", "version": "550.163.01"},
        "march": "znver4",
        "cpu_flags": ["avx2", "avx512f"],
        "vendor": "amd",
    }
    assert own == {
        "io.imagematrix.image": "training",
        "io.imagematrix.version": "v1",
        "io.imagematrix.cell": "cuda12.4-sm89-drv550.163.01-znver4",
        "io.imagematrix.input": item.identity.digest,
        "org.opencontainers.image.title": "training",
        "org.opencontainers.image.version": "v1",
        "org.opencontainers.image.base.name": "debian:trixie",
        "org.opencontainers.image.base.digest": item.identity.components["base debian:trixie"],
        "com.nvidia.cuda.version": "12.4",
    }


def test_preference_is_in_labels_and_identity(planned):
    (usual,) = planned(only=GPU).with_status("build")
    (item,) = planned(add_option("prefer: [cuda, driver]"), only=GPU).with_status("build")
    assert labels.read_terms(labels_of(item), item.reference).prefer == ("cuda", "driver")
    assert labels.read_terms(labels_of(usual), item.reference) == labels.Terms()
    assert "prefer" in item.identity.find_changed_components(usual.identity.components)


WARM = add_option("warm_up: {command: [train], gpus: 2, inputs: {model: /models/m}}")


@pytest.mark.parametrize(("only", "gpus"), [("cuda=none,march=znver4", "none"), (GPU, "2")])
def test_warm_up_is_in_labels_and_identity_where_it_is_stated(planned, only, gpus):
    (usual,) = planned(only=only).with_status("build")
    assert labels.WARM_UP not in labels_of(usual)
    (item,) = planned(WARM, only=only).with_status("build")
    own = labels_of(item)
    assert read_warm_up(own) == WarmUp(command=("train",), gpus=gpus, inputs=(("model", "/models/m"),))
    assert "warm_up" in item.identity.find_changed_components(usual.identity.components)
    assert own.keys() - labels_of(usual).keys() == {labels.WARM_UP}
    # An index has the inputs of each variant, which stay small.
    assert item.identity.components["warm_up"] == compute_digest(own[labels.WARM_UP].encode())
    assert labels.WARM_UP not in labels.select_annotations(own)


OWN = add_axis("python: ['3.11', '3.13']\n  cc: [gcc-14]")


def test_own_axes_are_in_labels(planned):
    result = [
        labels.read_variant(labels_of(item), reference=item.reference, digest=None, size=None).axes
        for item in planned(OWN, only=f"{GPU},cc=gcc-14").with_status("build")
    ]
    assert result == [(("cc", "gcc-14"), ("python", python)) for python in ("3.11", "3.13")]


def test_defaults_are_in_labels_and_identity(planned):
    usual, _ = planned(OWN, only=GPU).with_status("build")
    stated = add_option("defaults: {python: '3.13', cc: gcc-14}")
    item, _ = planned(OWN, stated, only=GPU).with_status("build")
    assert labels.read_terms(labels_of(item), item.reference).defaults == (
        ("cc", "gcc-14"),
        ("python", "3.13"),
    )
    assert labels.DEFAULTS not in labels_of(usual)
    assert item.identity.components["defaults"] == "cc=gcc-14,python=3.13"
    assert "defaults" not in usual.identity.components


def test_an_order_of_defaults_is_in_labels_and_identity(planned):
    stated = add_option("defaults: {python: ['3.13', '3.11'], cc: gcc-14}")
    item, _ = planned(OWN, stated, only=GPU).with_status("build")
    terms = labels.read_terms(labels_of(item), item.reference)
    assert terms.defaults == (("cc", "gcc-14"), ("python", "3.13"))
    assert terms.default_order == (("python", ("3.13", "3.11")),)
    assert str(terms) == "the usual order cc=gcc-14 python=3.13,3.11"
    assert labels_of(item)[labels.DEFAULTS] == '{"cc":"gcc-14","python":"3.13"}'  # as older selectors read it
    assert labels_of(item)[labels.DEFAULT_ORDER] == '{"python":["3.13","3.11"]}'
    assert labels.DEFAULT_ORDER in labels.select_annotations(labels_of(item))
    assert item.identity.components["default order"] == '[["python", ["3.13", "3.11"]]]'
    other, _ = planned(OWN, add_option("defaults: {python: '3.13', cc: gcc-14}"), only=GPU).with_status(
        "build"
    )
    assert labels.DEFAULT_ORDER not in labels_of(other)
    assert "default order" in item.identity.find_changed_components(other.identity.components)
    assert "default order" not in other.identity.components


def test_memory_is_in_labels_and_identity(planned):
    usual, _ = planned(OWN, only=GPU).with_status("build")
    item, _ = planned(OWN, add_option("memory: 15000MiB"), only=GPU).with_status("build")
    variant = labels.read_variant(labels_of(item), reference=item.reference, digest=None, size=None)
    assert (variant.gpu_memory_mib, variant.source("memory")) == (15000, "claim")
    assert item.identity.components["memory"] == "15000 MiB"
    assert "memory" not in usual.identity.components
    assert "memory" not in labels_of(usual)[labels.VARIANT]


def test_renamed_axis_changes_the_identity(planned):
    first, _ = planned(OWN, only=f"{GPU},cc=gcc-14").with_status("build")
    renamed = tuple(text.replace("  cc:", "  compiled:") for text in OWN)
    other, _ = planned(renamed, only=GPU).with_status("build")
    assert first.cell.id == other.cell.id
    assert "axes" in first.identity.find_changed_components(other.identity.components)


def test_cpu_only_image_has_no_gpu_labels(planned):
    (item,) = planned(only="cuda=none,march=znver4", template="FROM scratch\n").with_status("build")
    own = labels_of(item)
    assert "com.nvidia.cuda.version" not in own
    assert "org.opencontainers.image.base.name" not in own
    variant = labels.read_variant(own, reference=item.reference, digest=None, size=None)
    assert (variant.cuda, variant.cubins, variant.driver, variant.gpu) == (None, (), None, False)


@pytest.mark.parametrize(
    ("change", "driver"),
    [
        (("[535.261.03, 550.163.01]", "[host, 550.163.01]"), UserModeDriver(mode="host")),
        (("  driver: [535.261.03, 550.163.01]\n", ""), UserModeDriver(mode="host")),
    ],
)
def test_image_without_a_driver_is_host_mode(project, change, driver):
    rule = '- {cuda: "11.8", driver: 550.163.01, why: they have the newer toolkit}'
    cells = expand_matrix(load_matrix(project(change, (rule, '- {cuda: "11.8"}')))).cells
    cell = next(cell for cell in cells if cell.cuda and cell.axes.get("driver") in (None, "host"))
    assert promised_variants.make_variant(cell, FLAGS, "training:x").driver == driver
