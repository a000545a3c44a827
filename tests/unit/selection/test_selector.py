"""Selections, their reasons, and errors if nothing fits."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import find_candidates
from imagematrix.hardware.host import fabric
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.selection import selector as module
from imagematrix.selection.query import _share_query
from imagematrix.selection.selection import NothingFits, Selection
from imagematrix.selection.selector import Selector, explain, find_feasible_gpu_sets, select, select_many

PATIENCE = 300  # seconds, in case a pool hangs
DIGEST = f"sha256:{'0' * 64}"


@pytest.fixture
def fleet(make):
    """Return hosts of several kinds, some with equal hardware."""
    return [
        make.host(make.gpu(0)),
        make.host(make.gpu(0, uuid="GPU-other")),
        make.host(),
        make.host(make.gpu(0, compute="7.0", name="Tesla V100")),
        make.host(make.gpu(0), make.gpu(1)),
        make.host(make.gpu(0)),
    ]


def test_document_matches_the_contract(make, conforms):
    fits = make.variant("t:b", digest=DIGEST, cpu_flags=make.flags("x86-64-v3"))
    selection = select(make.host(make.gpu(0), make.gpu(1)), make.catalog(make.cpu_variant("t:a"), fits))
    document = conforms(selection.to_json())
    assert {key: document[key] for key in list(document)[:6]} == {
        "schema": "imagematrix.selection/v1",
        "image": "t",
        "version": "v1",
        "selected": "t:b",
        "digest": DIGEST,
        "gpus": ["GPU-0", "GPU-1"],
    }
    assert list(document)[6:] == ["warm", "candidates"]
    assert document["warm"] is None
    best, other = document["candidates"]
    assert list(best) == ["reference", "rank", "fits", "rules"]
    assert (best["reference"], best["rank"], best["fits"]) == ("t:b", 1, True)
    assert best["rules"][1] == {
        "rule": "driver-exact",
        "ok": True,
        "need": "550.163.01",
        "have": "550.163.01",
        "why": "the driver in the image is the one that the kernel has loaded",
        "fix": None,
        "change": None,
        "source": "claim",
    }
    assert (other["reference"], other["rank"], other["fits"]) == ("t:a", None, False)
    assert json.loads(json.dumps(document)) == document


def test_selection_keeps_what_a_launch_needs(make):
    node = make.host(make.gpu(0), make.gpu(1))
    fits = make.variant()
    selection = select(node, make.catalog(fits), gpus="device=1")
    assert selection.variant is fits
    assert selection.chosen_gpus == (node.gpus[1],)
    assert selection.host is node
    assert repr(selection) == "<Selection t:gpu for GPUs ['GPU-1']>"


def test_candidates_are_ranked(make):
    selection = select(
        make.host(make.gpu()),
        make.catalog(
            make.variant("t:80", cubins=("80",)), make.variant("t:no", cubins=("90",)), make.variant()
        ),
    )
    assert [(one.reference, one.rank, one.fits) for one in selection.candidates] == [
        ("t:gpu", 1, True),
        ("t:80", 2, True),
        ("t:no", None, False),
    ]


def test_cpu_only_image_is_selected_only_without_gpus(make):
    both = make.catalog(make.cpu_variant(), make.variant(cubins=("90",)))
    assert select(make.host(), both).selected == "t:cpu"
    assert select(make.host(make.gpu()), both, gpus="none").selected == "t:cpu"
    assert select(make.host(make.gpu()), both, allow_cpu=True).selected == "t:cpu"
    with pytest.raises(NothingFits) as caught:
        select(make.host(make.gpu()), both)
    assert "t:gpu" in str(caught.value)
    assert select(make.host(make.gpu(compute="9.0")), both, allow_cpu=True).selected == "t:gpu"


def test_all_gpus_of_a_host_without_any_are_no_answer(make):
    """As for a count: whoever asks for GPUs by a word consents to no image that uses none."""
    host, catalog = make.host(), make.catalog(make.cpu_variant("t:cpu"), make.variant("t:gpu"))
    for ask in (select, explain):
        with pytest.raises(UsageError, match="all GPUs are requested, and the host has none") as caught:
            ask(host, catalog, gpus="all")
        assert "gpus='none'" in (caught.value.remedy or "")
        assert "--gpus none" in (caught.value.shown or "")
    assert select(host, catalog).selected == select(host, catalog, gpus="none").selected == "t:cpu"
    with_gpu = make.host(make.gpu(0))
    assert select(with_gpu, catalog, gpus="all").selected == select(with_gpu, catalog).selected


def test_nothing_fits_names_the_nearest_variant_and_its_fix(make):
    far = make.variant("t:a", driver=make.umd("exact", "535.261.03"), cubins=("90",))
    near = make.variant("t:b", driver=make.umd("exact", "535.261.03"))
    with pytest.raises(NothingFits) as caught:
        select(make.host(make.gpu()), make.catalog(far, near))
    assert "none of the 2 variants of t:v1 fits this host; the nearest is t:b" in str(caught.value)
    assert "driver 535.261.03" in str(caught.value)
    assert caught.value.remedy == "build a variant with driver 550.163.01"
    assert caught.value.selection.selected is None
    assert caught.value.selection.digest is None
    assert [one.reference for one in caught.value.selection.candidates] == ["t:b", "t:a"]
    assert caught.value.exit_code == 3


def test_a_variant_alone_is_neither_the_nearest_nor_the_only_one(make):
    # Others of its version are left out if the question names it.
    other = make.variant("t:v1-other", driver=make.umd("exact", "535.261.03"))
    with pytest.raises(NothingFits) as caught:
        select(make.host(make.gpu()), make.catalog(make.variant("t:v1-one"), other).named("t:v1-other"))
    assert str(caught.value).startswith("t:v1-other does not fit this host: the image carries driver 535")


EXACT = ("470.256.02", "535.261.03", "550.163.01", "580.95.05")


def nearest(host, *variants):
    selection = explain(host, Catalog(image="t", version="v1", variants=variants))
    assert selection.selected is None
    first = selection.candidates[0].reference
    why = selection.miss.why
    assert f"the nearest is {first}, but" in why or "one fits GPU" in why
    return first


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("550.54.14", "t:550.163.01"),
        ("535.54.03", "t:535.261.03"),
        ("530.30.02", "t:535.261.03"),
        ("615.31", "t:580.95.05"),
        ("418.39", "t:470.256.02"),
    ],
)
def test_nearest_driver_version_is_suggested(make, kernel, expected):
    variants = [make.variant(f"t:{own}", cuda="11.0", driver=make.umd("exact", own)) for own in EXACT]
    assert nearest(make.host(make.gpu(), driver=kernel), *variants) == expected


def test_nearest_variant_for_each_rule(make):
    l40s, compat = make.gpu(), make.umd("compat", "580.95.05", (535, 550))
    assert (
        nearest(
            make.host(l40s, march="x86-64-v2"),
            make.variant("t:a", cpu_flags=make.flags("x86-64-v4")),
            make.variant("t:b", cpu_flags=make.flags("x86-64-v3")),
        )
        == "t:b"
    )
    codes = [make.variant(f"t:{code}", cubins=(code,)) for code in ("70", "75", "90")]
    assert nearest(make.host(l40s), *codes, make.variant("t:none", cubins=())) == "t:75"
    two = make.host(l40s, make.gpu(1, compute="9.0"))
    assert nearest(two, make.variant("t:70", cubins=("70",)), make.variant("t:90", cubins=("90",))) == "t:90"
    assert (
        nearest(
            make.host(l40s, driver="570.124.06"),
            make.variant("t:a", driver=make.umd("compat", "580.95.05", (470,))),
            make.variant("t:b", driver=compat),
        )
        == "t:b"
    )
    assert (
        nearest(
            make.host(l40s, driver="470.256.02"),
            make.variant("t:12.4", driver=make.umd("host")),
            make.variant("t:13.0", cuda="13.0", driver=make.umd("host")),
            make.variant("t:14.0", cuda="14.0", driver=make.umd("host")),
        )
        == "t:12.4"
    )
    packed = {"driver": make.umd("host"), "cuda": "11.8", "compressed_fatbin": True}
    both = [make.variant("t:z", **packed), make.variant("t:y", **packed, cubins=("70",))]
    assert nearest(make.host(l40s, driver="535.54.03"), *both) == "t:z"
    old = {"compute": "7.0", "pci_device_id": "1db5"}
    host = {"driver": make.umd("host"), "cubins": ("70",)}
    assert (
        nearest(make.host(make.gpu(**old), driver="595.45"), make.variant("t:x", **host), make.variant("t:w"))
        == "t:x"
    )
    assert nearest(make.host(make.gpu(), driver=None), make.variant("t:v"), make.variant("t:u")) == "t:u"


def test_missing_hardware_is_farther_than_another_driver(make):
    driver = make.variant("t:z", driver=make.umd("exact", "535.261.03"), cuda="11.0")
    code = make.variant("t:a", cubins=("90",))
    assert nearest(make.host(make.gpu()), driver, code) == "t:z"


def test_fix_names_an_existing_variant_instead_of_a_build(make):
    v4, v3 = make.flags("x86-64-v4"), make.flags("x86-64-v3")
    znver = make.variant("t:znver5", cpu_flags=v4 | {"avx512_vp2intersect"})
    other = make.variant("t:v4-new", cpu_flags=v4, driver=make.umd("exact", "580.95.05"))
    selection = explain(make.host(make.gpu()), make.catalog(znver, make.variant("t:v4", cpu_flags=v4), other))
    fixes = {one.reference: [rule.fix for rule in one.failing] for one in selection.candidates}
    assert fixes["t:znver5"] == ["use t:v4, which differs only in this"]
    assert fixes["t:v4-new"] == ["use t:v4, which differs only in this"]
    # this one differs only in the CPU, but the host's driver blocks it
    selection = explain(
        make.host(make.gpu(), march="x86-64-v3"),
        make.catalog(other, make.variant("t:v3-new", cpu_flags=v3, driver=make.umd("exact", "580.95.05"))),
    )
    fixes = {one.reference: [rule.fix for rule in one.failing] for one in selection.candidates}
    assert fixes["t:v3-new"] == ["build a variant with driver 550.163.01"]
    assert fixes["t:v4-new"] == [
        "build a variant with driver 550.163.01",
        "use t:v3-new, which differs only in this",
    ]


def test_nearest_variant_has_the_same_architecture(make):
    arm = make.cpu_variant("t:arm", platform="linux/arm64")
    bad = make.variant("t:bad", driver=make.umd("exact", "535.261.03"), cubins=("90",), cuda="13.0")
    for variants in ((arm, bad, make.cpu_variant("t:cpu")), (make.cpu_variant("t:cpu"), bad, arm)):
        with pytest.raises(NothingFits) as caught:
            select(make.host(make.gpu()), make.catalog(*variants))
        assert "nearest is t:bad" in str(caught.value)
        references = [one.reference for one in caught.value.selection.candidates]
        assert references == ["t:bad", "t:cpu", "t:arm"]
    for host, variant in ((make.host(), arm), (make.host(make.gpu()), make.cpu_variant())):
        with pytest.raises(NothingFits, match=rf"^{variant.reference} does not fit this host"):
            select(host, make.catalog(variant))


def test_remedy_for_a_mixed_node_names_the_gpus_that_fit(make):
    v100 = {"compute": "7.0", "name": "Tesla V100", "brand": "tesla"}
    mixed = make.host(make.gpu(0), make.gpu(1, **v100), make.gpu(2), make.gpu(3, compute="9.0"))
    two = make.catalog(make.variant("t:89"), make.variant("t:70", cubins=("70",)))
    with pytest.raises(NothingFits) as caught:
        select(mixed, two)
    assert caught.value.remedy == "pass gpus='0,2'"
    assert "GPU 0 (NVIDIA L40S), GPU 2 (NVIDIA L40S)" in str(caught.value)
    assert select(mixed, two, gpus="0,2").selected == "t:89"
    assert select(mixed, two, gpus="device=1").selected == "t:70"
    with pytest.raises(NothingFits) as caught:
        select(mixed, two, gpus="1,3")
    assert caught.value.remedy == "pass gpus='device=1'"
    fat = make.variant("t:fat", cubins=("70", "86", "90"))
    assert select(mixed, make.catalog(fat)).selected == "t:fat"


def test_remedy_names_the_gpus_of_a_single_variant(make):
    mixed = make.host(make.gpu(0, compute="7.0"), make.gpu(1, compute="7.5"), make.gpu(2, compute="9.0"))
    with pytest.raises(NothingFits) as caught:
        select(mixed, make.catalog(make.variant("t:7", cubins=("70",)), make.variant("t:9", cubins=("90",))))
    assert caught.value.remedy == "pass gpus='0,1'"


@pytest.mark.parametrize("gpus", [(), []])
def test_no_gpus_in_a_list_is_no_consent(make, gpus):
    catalog = make.catalog(make.cpu_variant(), make.variant())
    with pytest.raises(UsageError, match="the list of GPUs is empty"):
        select(make.host(make.gpu()), catalog, gpus=gpus)


def test_other_types_are_usage_errors(make):
    catalog = make.catalog(make.variant())
    cases: list[Any] = [
        ("node.json", catalog, "is not a Host", "Host.load(path)"),
        (make.host().to_json(), catalog, "is not a Host", "probe()"),
        (make.host(), "t:v1", "is not a Catalog", "open_catalog(name)"),
    ]
    for host, some, why, remedy in cases:
        with pytest.raises(UsageError, match=why) as caught:
            select(host, some)
        assert remedy in caught.value.remedy


@pytest.mark.parametrize("hosts", [None, 3, "fleet.ndjson", Path("fleet")])
def test_what_is_no_list_of_hosts_is_a_usage_error(make, hosts):
    with pytest.raises(UsageError, match="is not a list of hosts") as caught:
        select_many(hosts, make.catalog(make.variant()))
    assert "load_hosts(path)" in caught.value.remedy


def test_a_single_host_is_no_list(make):
    with pytest.raises(UsageError, match="a single host instead of several"):
        select_many(make.host(), make.catalog(make.variant()))


def test_select_many_takes_hosts_by_name_and_iterators(fleet, make):
    catalog = make.catalog(make.variant())
    expected = [*map(repr, select_many(fleet, catalog))]
    assert [*map(repr, select_many(dict(zip("abcdef", fleet, strict=True)), catalog))] == expected
    assert [*map(repr, select_many(iter(fleet), catalog))] == expected


def test_select_many_keeps_the_order_of_hosts(fleet, make):
    answers = select_many(fleet, make.catalog(make.variant()))
    assert [one.selected if isinstance(one, Selection) else None for one in answers] == [
        "t:gpu", "t:gpu", None, None, "t:gpu", "t:gpu",
    ]  # fmt: skip
    assert [one.host for one in answers if isinstance(one, Selection)] == [
        fleet[0], fleet[1], fleet[4], fleet[5],
    ]  # fmt: skip
    first, *_, last = (one.decision for one in answers if isinstance(one, Selection))
    assert first is last


def test_select_many_returns_usage_errors_per_host(fleet, make):
    answers = select_many(fleet, make.catalog(make.variant()), gpus="2")
    assert [type(one).__name__ for one in answers] == ["UsageError"] * 4 + ["Selection", "UsageError"]


def test_equal_hardware_shares_a_decision_but_keeps_its_own_gpus(make):
    selector = Selector(make.catalog(make.variant()))
    one, other = (
        selector.select(make.host(make.gpu(0, uuid="GPU-a"))),
        selector.select(make.host(make.gpu(0, uuid="GPU-b"))),
    )
    assert one.decision is other.decision
    assert (one.gpus, other.gpus) == (("GPU-a",), ("GPU-b",))
    different = selector.explain(make.host(make.gpu(0, state="lost")))
    assert different.decision is not one.decision


def test_catalogs_are_cached_by_identity(make):
    a, b = make.catalog(make.cpu_variant("t:a")), make.catalog(make.cpu_variant("t:b"))
    assert [select(make.host(), one).selected for one in (a, b, a)] == ["t:a", "t:b", "t:a"]
    assert module._IdentityHashedCatalog(a) == module._IdentityHashedCatalog(a)
    assert module._IdentityHashedCatalog(a) != module._IdentityHashedCatalog(b)
    assert module._IdentityHashedCatalog(a) != a


def test_selector_cache_is_bounded(make):
    selector = Selector(make.catalog(make.variant()), keep=2)
    for index in range(5):
        assert selector.select(make.host(make.gpu(index))).selected == "t:gpu"
        assert len(selector._decisions) <= 2


NEWER = "580.95.05"


def test_an_unpickled_selection_equals_its_original(make):
    catalog = make.catalog(make.variant("t:v1-a"), make.variant("t:v1-b", driver=make.umd("exact", NEWER)))
    host, other = make.host(make.gpu(0)), make.host(make.gpu(0), driver=NEWER)
    selection = select(host, catalog)
    sent = pickle.loads(pickle.dumps(selection))  # noqa: S301 - our own bytes
    _share_query.cache_clear()  # as in another process
    again = pickle.loads(pickle.dumps(selection))  # noqa: S301 - our own bytes
    assert sent == selection == again
    assert len({sent, selection, again}) == 1
    assert selection.decision != select(other, catalog).decision
    assert selection != select(host, make.catalog(make.variant("t:v1-a")))
    assert selection != select(host, catalog, where={"driver": selection.variant.driver.version})
    assert selection.decision != "a decision"
    assert selection.decision.question != "a question"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_copied_refusal_keeps_every_reason(make, copied):
    (error,) = select_many([make.host(make.gpu())], make.catalog(make.variant(cubins=("90",))))
    assert isinstance(error, NothingFits)
    result = copied(error)
    assert (str(result), result.remedy) == (str(error), error.remedy)
    assert result.selection.to_json() == error.selection.to_json()


def pools():
    """Yield functions that map over worker pools, as a user of the library would."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        yield lambda ask, hosts: pool.map_async(ask, hosts).get(timeout=PATIENCE)
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        yield lambda ask, hosts: list(executor.map(ask, hosts, timeout=PATIENCE))


def test_pool_workers_return_selections_and_refusals(make):
    catalog = make.catalog(make.variant(), *(make.variant(f"t:{n}", cubins=("90",)) for n in range(500)))
    hosts = [[make.host(make.gpu(compute=compute))] for compute in ("8.9", "7.0", "8.9", "7.0")]
    local = [select_many(one, catalog)[0] for one in hosts]
    for ask in pools():
        remote = [one for (one,) in ask(partial(select_many, catalog=catalog), hosts)]
        assert [str(one) for one in remote] == [str(one) for one in local]
        assert [isinstance(one, NothingFits) for one in remote] == [False, True, False, True]
        decisions = [remote[0].decision, remote[1].selection.decision]
        assert decisions[0].catalog is decisions[1].catalog  # one for all results
        assert len(decisions[1].candidates) == 501


def test_pickled_selection_contains_the_catalog_once(make):
    catalog = make.catalog(*(make.variant(f"t:{n}", march=f"m{n}") for n in range(200)))
    selection = select(make.host(make.gpu()), catalog)
    assert len(pickle.dumps(selection)) < len(pickle.dumps(catalog)) + 10_000


def test_cached_decisions_hold_no_reasons(make):
    catalog = make.catalog(*(make.variant(f"t:{n}", cubins=("90",)) for n in range(1000)))
    hosts = [make.host(make.gpu(name=f"NVIDIA L40S {n}")) for n in range(100)]
    selector = Selector(catalog)
    assert selector.explain(make.host(make.gpu())).miss  # which loads modules and tables
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = [selector.explain(host) for host in hosts]
        assert all(len(one.candidates) == 1000 for one in result[:3])
        assert all(one.miss for one in result)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 1024 * 1024


def test_select_imports_no_heavy_modules():
    heavy = {"docker", "jinja2", "yaml", "rich", "typer", "pathlib", "subprocess", "requests", "pynvml"}
    code = "import sys, imagematrix.selection.selector; print(*sys.modules)"
    # The coverage tool loads many modules.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, env=plain, capture_output=True, text=True, check=True).stdout
    assert not heavy & set(loaded.split())


T4 = {"compute": "7.5", "name": "Tesla T4", "memory_mib": 15360}
A100 = {"compute": "8.0", "name": "NVIDIA A100-SXM4-40GB", "memory_mib": 40960}


@pytest.mark.parametrize(
    ("cubins", "wanted", "expected"),
    [
        ([("75",), ("80",)], "1", [[0, 1, 2, 3, 4]]),  # each alone gets one
        ([("75",), ("80",)], "2", [[0, 2, 4], [1, 3]]),
        ([("75",), ("80",)], "3", [[0, 2, 4]]),
        ([("75",), ("80",)], "4", [[0, 1, 2, 3, 4]]),  # nothing fits, and select explains why
        ([("80",)], "1", [[1, 3]]),
        ([("80",)], "2", [[1, 3]]),
        ([("75",), ("80",), ("75", "80")], "2", [[0, 1, 2, 3, 4]]),
        ([("75",), ("80",)], "2,memory>=20G", [[1, 3]]),
        ([("75",), ("80",)], "0,1", [[0, 1]]),  # named: there is no choice
        ([], "2", [[0, 1, 2, 3, 4]]),
    ],
)
def test_gpu_sets_returns_the_gpu_sets_that_fit(make, cubins, wanted, expected):
    host = make.host(*(make.gpu(index, **(A100 if index % 2 else T4)) for index in range(5)))
    variants = (make.variant(f"t:{number}", cubins=one) for number, one in enumerate(cubins))
    choice = find_candidates(host.gpus, wanted)
    choices = find_feasible_gpu_sets(host, make.catalog(*variants, make.cpu_variant()), choice)
    assert [[gpu.index for gpu in one.gpus] for one in choices] == expected
    assert {one.count for one in choices} == {choice.count}


def test_selection_takes_the_gpus_that_run_takes(make):
    v100 = {"compute": "7.0", "name": "Tesla V100", "brand": "tesla"}
    host = make.host(make.gpu(0, **v100), make.gpu(1, **v100), make.gpu(2, **A100), make.gpu(3, **A100))
    catalog = make.catalog(make.variant(cubins=("80",)))
    selections = [select(host, catalog, gpus=wanted) for wanted in (1, "2", "1,memory>=1G")]
    assert [one.gpus for one in selections] == [("GPU-2",), ("GPU-2", "GPU-3"), ("GPU-2",)]
    both = make.catalog(make.variant("t:70", cubins=("70",)), make.variant("t:80", cubins=("80",)))
    assert select(host, both, gpus=1).selected == "t:70"
    with pytest.raises(NothingFits):
        select(host, catalog, gpus="device=1")
    first, *others = (Selector(catalog).select(host, gpus=1) for _ in range(3))
    assert all(one.gpus == first.gpus for one in others)


def test_narrowed_choices_are_cached_for_each_kind_of_hardware(make):
    selector = Selector(make.catalog(make.variant(cubins=("80",))), keep=2)
    for number in range(5):
        gpus = (make.gpu(number, **T4), make.gpu(number + 1, **A100))
        assert selector.select(make.host(*gpus), gpus=1).gpus == (f"GPU-{number + 1}",)
        assert len(selector._gpu_sets) <= 2


def test_a_node_on_which_cuda_fails_is_a_warning(make):
    """Whoever starts the image would see error 802 only, and `select` had named an image."""
    text = f"8 NVSwitches, but no fabric manager running; {fabric.REMEDY}"
    host = replace(make.host(make.gpu()), warnings=("something else", text))
    catalog = make.catalog(make.variant(), make.cpu_variant())
    assert [warning.text for warning in select(host, catalog).warnings] == [text]
    assert select(host, catalog, gpus="none").warnings == ()
    assert explain(host, make.catalog(make.variant(cubins=("70",)))).warnings == ()  # nothing is chosen


def test_an_unknown_user_mode_driver_of_the_node_is_a_warning(make, conforms):
    """An image without a driver of its own may be started, but the node's driver may be the wrong one."""
    node = make.host(make.gpu())
    known = replace(node, driver=replace(node.driver, user_mode="550.163.01"))
    for host, driver, doubtful in [(node, "host", True), (known, "host", False), (node, "exact", False)]:
        own = make.umd(driver, None if driver == "host" else "550.163.01")
        selection = select(host, make.catalog(make.variant(driver=own)))
        kinds = [warning.kind for warning in selection.warnings]
        assert kinds == ["driver-host"] * doubtful
        (candidate,) = selection.candidates
        assert candidate.warnings == selection.warnings
        document: dict[str, Any] = selection.to_json()
        conforms(document)
        (listed,) = document["candidates"]
        assert [one["kind"] for one in listed.get("warnings", ())] == kinds
    assert select(node, make.catalog(make.cpu_variant()), allow_cpu=True).warnings == ()
    assert explain(node, make.catalog(make.cpu_variant())).warnings == ()  # nothing is chosen


def test_hosts_of_one_kind_share_the_choice_of_gpus(make):
    """The second host is answered without deciding again, and gets its own GPUs."""
    v100 = {"compute": "7.0", "name": "Tesla V100"}
    selector = Selector(make.catalog(make.variant()))
    for name in ("GPU-one", "GPU-other"):
        host = make.host(make.gpu(0, **v100), make.gpu(1, uuid=name))
        assert selector.select(host, gpus=1).gpus == (name,)


def test_refusals_name_the_failing_rules_of_variants_that_do_not_fit(make):
    catalog = make.catalog(make.variant("t:b"), make.variant("t:c", cubins=("90",)), make.cpu_variant("t:a"))
    decision = explain(make.host(make.gpu(0)), catalog).decision
    found = {variant.reference: [result.rule for result in failing] for variant, failing in decision.refusals}
    assert found == {"t:c": ["device-code"], "t:a": ["device-code"]}
