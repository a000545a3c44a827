"""The order of the variants that fit, one criterion at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import CRITERIA, Catalog
from imagematrix.selection.order import make_sort_key, order_criteria
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import select
from imagematrix.selection.variant_index import VariantIndex


@pytest.fixture(scope="module")
def first():
    """Call it to get the best of some variants, and to check that sort key and index agree."""

    def ask(target, *variants):
        result = {
            min(some, key=lambda variant: make_sort_key(order_criteria(), target, variant))
            for some in itertools.permutations(variants)
        }
        (best,) = result
        index = VariantIndex(variants, order_criteria())
        assert index.get_best(target, index.everything) is best
        return best.reference

    return ask


@pytest.fixture
def target(make):
    one = make.host(make.gpu(), march="znver4", vendor="AuthenticAMD", driver="580.65.06")
    return Target(host=one, gpus=one.gpus, allow_cpu=True)


def test_gpu_variant_beats_cpu_variant(first, target, make):
    worst = make.variant("z", cubins=(), ptx=[("50", "7.7")], driver=make.umd("host"), cuda="11.8")
    assert first(target, worst, make.cpu_variant("a", cpu_flags=make.flags("znver4"), vendor="amd")) == "z"


def test_native_code_beats_nearest_minor_beats_ptx(first, target, make):
    native, near, far = (
        make.variant("z", cubins=("89",)),
        make.variant("y", cubins=("86",)),
        make.variant("x", cubins=("80",)),
    )
    ptx = make.variant("w", cubins=(), ptx=[("89", "8.4")])
    assert first(target, native, near, far, ptx) == "z"
    assert first(target, near, far, ptx) == "y"
    assert first(target, far, ptx) == "x"
    assert first(target, make.variant("z", cubins=("80", "86", "89")), near) == "z"


def test_worst_match_among_gpus_decides(first, make):
    mixed = make.host(make.gpu(0, compute="8.0"), make.gpu(1, compute="8.9"))
    target = Target(host=mixed, gpus=mixed.gpus)
    assert first(target, make.variant("a", cubins=("80",)), make.variant("b", cubins=("80", "86"))) == "b"
    assert (
        first(
            target, make.variant("a", cubins=("80",)), make.variant("b", cubins=("80",), ptx=[("89", "8.4")])
        )
        == "a"
    )


def test_device_code_outranks_driver_mode(first, target, make):
    assert first(target, make.variant("z", driver=make.umd("host")), make.variant("a", cubins=("86",))) == "z"


def test_driver_mode_order_is_exact_compat_host(first, target, make):
    exact = make.variant("z", driver=make.umd("exact", "580.65.06"), cuda="11.8")
    compat, by_host = (
        make.variant("y", driver=make.umd("compat", "590.44.01")),
        make.variant("x", driver=make.umd("host")),
    )
    assert first(target, exact, compat, by_host) == "z"
    assert first(target, compat, by_host) == "y"


def test_newest_cuda_release_is_compared_numerically(first, target, make):
    assert (
        first(
            target,
            make.variant("z", cuda="12.10"),
            make.variant("a", cuda="12.9"),
            make.variant("b", cuda="9.2"),
        )
        == "z"
    )


def test_cuda_release_outranks_cpu(first, target, make):
    assert (
        first(
            target,
            make.variant("z", cuda="12.4"),
            make.variant("a", cuda="12.2", cpu_flags=make.flags("znver4")),
        )
        == "z"
    )


def test_cpu_level_outranks_vendor_and_flag_count(first, target, make):
    level_4 = make.cpu_variant("z", cpu_flags=make.flags("x86-64-v4"))
    other_4 = make.cpu_variant("y", cpu_flags=make.flags("skylake-avx512"), vendor="intel")
    own_3 = make.cpu_variant("a", cpu_flags=make.flags("znver3"), vendor="amd")
    assert first(target, level_4, own_3) == "z"
    assert first(target, other_4, own_3) == "y"
    goldmont = make.cpu_variant("a", cpu_flags=make.flags("goldmont"), vendor="intel")  # many flags, no AVX
    assert first(target, make.cpu_variant("z", cpu_flags=make.flags("x86-64-v3")), goldmont) == "z"


def test_own_vendor_beats_generic_beats_other_vendor(first, target, make):
    need = make.flags("x86-64-v3")
    own, other = (
        make.cpu_variant("z", cpu_flags=need, vendor="amd"),
        make.cpu_variant("a", cpu_flags=need, vendor="intel"),
    )
    none, generic = (
        make.cpu_variant("y", cpu_flags=need),
        make.cpu_variant("x", cpu_flags=need, vendor="generic"),
    )
    assert first(target, own, none, generic, other) == "z"
    assert first(target, none, generic, other) == "x"
    assert first(target, none, other) == "y"


def test_unknown_vendor_prefers_generic_code(first, make):
    unknown = Target(host=make.host(vendor=None), gpus=())
    assert first(unknown, make.cpu_variant("z"), make.cpu_variant("a", vendor="intel")) == "z"


def test_most_required_flags_win(first, target, make):
    more, less = make.flags("znver4"), make.flags("x86-64-v4")
    assert first(target, make.cpu_variant("z", cpu_flags=more), make.cpu_variant("a", cpu_flags=less)) == "z"
    ignored = less | {"sgx", "pku", "mwaitx"}  # ignored flags do not count
    assert (
        first(target, make.cpu_variant("z", cpu_flags=ignored), make.cpu_variant("a", cpu_flags=less)) == "a"
    )


def test_reference_breaks_ties(first, target, make):
    assert first(target, make.variant("b"), make.variant("a"), make.variant("c")) == "a"
    assert first(target, make.cpu_variant("b"), make.cpu_variant("a")) == "a"


def test_catalog_preference_reorders_criteria(target, make):
    native = make.variant("t:native", cubins=("89",), cuda="12.4", driver=make.umd("host"))
    newest = make.variant("t:newest", cubins=("80",), cuda="13.0", driver=make.umd("host"))
    usual = Catalog(image="t", version="v1", variants=(native, newest))
    assert select(target.host, usual).selected == "t:native"
    prefers = replace(usual, prefer=("cuda",))
    assert select(target.host, prefers).selected == "t:newest"
    assert Catalog.from_json(prefers.to_json()) == prefers


def test_criteria_without_preference_keep_their_order():
    assert [order_criteria().index(criterion) for criterion in order_criteria(("cpu-flags", "cuda"))] == [
        0,
        6,
        3,
        1,
        2,
        4,
        5,
    ]


# The variants that say nothing of what a criterion compares, each with another that does.
UNKNOWN_FLAGS = (("cpu_flags", "unknown"),)
SILENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "device-code": (
        {"cubins": (), "facts": (("cubins", "unknown"),)},
        {"cubins": (), "ptx": [("50", "7.7")]},
    ),
    "cuda": ({"cuda": None, "facts": (("cuda", "unknown"),)}, {"cuda": "11.8"}),
    "cpu-level": ({"cpu_flags": frozenset({"avx2"}), "facts": UNKNOWN_FLAGS}, {}),
    "cpu-flags": ({"cpu_flags": frozenset({"avx2"}), "facts": UNKNOWN_FLAGS}, {}),
}


@pytest.mark.parametrize("criterion", SILENT)
@pytest.mark.parametrize("preferred", [True, False])
def test_unknown_ranks_last_in_every_criterion(make, target, criterion, preferred):
    silent, stated = (make.variant(driver=make.umd("host"), **facts) for facts in SILENT[criterion])
    variants = (replace(silent, reference="t:a"), replace(stated, reference="t:z"))
    catalog = Catalog(image="t", version="v1", variants=variants, prefer=(criterion,) if preferred else ())
    assert select(target.host, catalog).selected == "t:z"


@pytest.mark.parametrize("criterion", CRITERIA)
def test_no_preference_puts_an_unused_gpu_first(make, target, criterion):
    idle = make.cpu_variant("t:a", cpu_flags=make.flags("znver4"), vendor="amd", march="znver4")
    catalog = Catalog(image="t", version="v1", variants=(idle, make.variant(driver=make.umd("host"))))
    for prefer in ((criterion,), (criterion, "cuda", "device-code", "gpu")):
        wish = replace(catalog, prefer=tuple(dict.fromkeys(prefer)))
        assert select(target.host, wish, allow_cpu=True).selected == "t:gpu"


def test_device_code_makes_a_gpu_variant(make):
    assert make.variant(cuda=None, driver=None).gpu
    assert make.variant(cuda=None, driver=None, cubins=(), ptx=[("89", "8.4")]).gpu
    assert not make.cpu_variant().gpu


@pytest.mark.parametrize("prefer", [["cdua"], ["cuda", "cuda"], [1], "cuda"])
def test_invalid_preference_is_rejected(prefer):
    data = {"schema": "imagematrix.catalog/v1", "image": "t", "version": "v1", "variants": []}
    with pytest.raises(UsageError, match="prefer"):
        Catalog.from_json(data | {"prefer": prefer})
