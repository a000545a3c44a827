"""Defaults with several values: the first with a variant that fits is used, and a later one is not silent."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import allowed, gpu_variants, hosts

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.selection.gang.gang import NothingFitsAll
from imagematrix.selection.gang.gang_selection import select_gang
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selector import explain, select

ORDER = ("fp16", "int8", "int4")
NEEDS = {"fp16": 24576, "int8": 13000, "int4": 7000}


@pytest.fixture
def precisions(make):
    """A catalog with a variant for each precision."""
    variants = [
        make.variant(f"t:{name}", gpu_memory_mib=mib, axes=(("precision", name),))
        for name, mib in NEEDS.items()
    ]
    return ordered(make.catalog(*variants))


def ordered(catalog, order=ORDER):
    return replace(catalog, defaults=(("precision", order[0]),), default_order=(("precision", order),))


def node(make, *sizes):
    return make.host(*(make.gpu(index, memory_mib=size) for index, size in enumerate(sizes)))


@pytest.mark.parametrize(
    ("mib", "selected"), [(46068, "fp16"), (24576, "fp16"), (24575, "int8"), (13000, "int8"), (12999, "int4")]
)
def test_the_first_value_that_fits_is_selected(make, precisions, mib, selected):
    selection = select(node(make, mib), precisions)
    assert selection.selected == f"t:{selected}"
    if selected == "fp16":
        assert selection.warnings == ()
        return
    (warning,) = selection.warnings
    assert warning.kind == "default"
    assert warning.text == (
        f"precision {selected}: fp16 does not fit: "
        f"it needs 24576 MiB of GPU memory, and GPU 0 (NVIDIA L40S) has {mib} MiB"
    )


def test_nothing_fits_if_no_value_does(make, precisions):
    with pytest.raises(
        NothingFits, match="none of the 3 variants of t:v1 with precision fp16 or int4 or int8"
    ):
        select(node(make, 6999), precisions)


def test_explain_shows_the_values_that_were_passed_over(make, precisions, conforms):
    document = conforms(explain(node(make, 15360), precisions).to_json())
    assert [one["reference"] for one in document["candidates"]] == ["t:int8", "t:int4", "t:fp16"]
    assert [one["rank"] for one in document["candidates"]] == [1, 2, None]
    assert [len(one.get("warnings", ())) for one in document["candidates"]] == [1, 0, 0]


def test_a_question_for_a_value_gets_it_without_a_warning(make, precisions):
    for where in ("precision=int8", "precision!=fp16", {"precision": ["int4", "int8"]}):
        selection = select(node(make, 46068), precisions, where=where)
        assert (selection.selected, selection.warnings) == ("t:int8", ())
    with pytest.raises(NothingFits):
        select(node(make, 15360), precisions, where="precision=fp16")


def test_variants_of_the_chosen_value_that_differ_elsewhere_stay_open(make, precisions):
    variants = [
        replace(one, reference=f"{one.reference}-{python}", axes=(*one.axes, ("python", python)))
        for one in precisions.variants
        for python in ("3.12", "3.13")
    ]
    with pytest.raises(UsageError, match=r"differ in python \(3\.12, 3\.13\)"):
        select(node(make, 15360), replace(precisions, variants=tuple(variants)))


def test_a_value_without_any_variant_is_passed_over(make, precisions):
    some = replace(precisions, variants=precisions.variants[1:])
    selection = select(node(make, 46068), some)
    assert selection.selected == "t:int8"
    assert [one.text for one in selection.warnings] == ["precision int8: there is no variant with fp16"]


def test_of_two_axes_the_first_in_the_alphabet_varies_least(make):
    variants = [
        make.variant(f"t:{a}{b}", gpu_memory_mib=mib, axes=(("a", a), ("b", b)))
        for a, b, mib in (("1", "1", 30000), ("1", "2", 20000), ("2", "1", 10000), ("2", "2", 5000))
    ]
    catalog = replace(
        make.catalog(*variants),
        defaults=(("a", "1"), ("b", "1")),
        default_order=(("a", ("1", "2")), ("b", ("1", "2"))),
    )
    found = {mib: select(node(make, mib), catalog) for mib in (30000, 20000, 19999, 9999)}
    assert [one.selected for one in found.values()] == ["t:11", "t:12", "t:21", "t:22"]
    assert [one.warnings[0].text.partition(" does")[0] for one in [*found.values()][1:]] == [
        "b 2: 1",
        "a 2: 1",
        "a 2, b 2: 1, 1",
    ]


def test_the_gpus_of_a_count_are_those_that_the_first_value_fits(make, precisions):
    selection = select(node(make, 15360, 46068), precisions, gpus=1)
    assert (selection.selected, selection.gpus) == ("t:fp16", ("GPU-1",))
    selection = select(node(make, 15360, 46068), precisions, gpus=2)
    assert (selection.selected, selection.gpus) == ("t:int8", ("GPU-0", "GPU-1"))
    assert select(node(make, 15360, 46068, 15360), precisions, gpus=2).gpus == ("GPU-0", "GPU-1")


def test_a_named_variant_needs_no_order(make, precisions):
    assert select(node(make, 46068), precisions.named("t:int8")).selected == "t:int8"


def test_a_gang_takes_the_first_value_that_fits_all_its_hosts(make, precisions, conforms):
    large, small, least = node(make, 46068), node(make, 15360), node(make, 8000)
    gang = select_gang({"a": large, "b": large}, precisions)
    assert ([one.reference for one in gang.variants], gang.warnings) == (["t:fp16"], ())
    assert "warnings" not in gang.to_json()
    gang = select_gang({"a": large, "b": small}, precisions)
    assert [one.reference for one in gang.variants] == ["t:int8"]
    (warning,) = conforms(gang.to_json())["warnings"]
    assert warning["text"] == (
        "precision int8: fp16 does not fit: "
        "it needs 24576 MiB of GPU memory, and GPU 0 (NVIDIA L40S) has 15360 MiB"
    )
    gang = select_gang({"a": large, "b": small, "c": least}, precisions, alike="cuda")
    assert [one.reference for one in gang.variants] == ["t:int4"]
    with pytest.raises(NothingFitsAll):
        select_gang({"a": large, "b": node(make, 100)}, precisions)


def test_a_gang_whose_hosts_need_different_variants_of_the_first_value(make):
    variants = [
        make.variant(f"t:{name}-{cubin}", cubins=cubins, axes=(("precision", name),))
        for name, cubin, cubins in (
            ("fp16", "89", ("89",)),
            ("fp16", "90", ("90",)),
            ("int8", "x", ("89", "90")),
        )
    ]
    some = {"a": make.host(make.gpu()), "b": make.host(make.gpu(compute="9.0"))}
    gang = select_gang(some, ordered(make.catalog(*variants), ("fp16", "int8")))
    assert [one.reference for one in gang.variants] == ["t:int8-x"]
    assert [one.text for one in gang.warnings] == [
        "precision int8: no single variant with fp16 fits all hosts"
    ]
    alike = select_gang(some, ordered(make.catalog(*variants), ("fp16", "int8")), alike="cuda")
    assert [one.reference for one in alike.variants] == ["t:fp16-89", "t:fp16-90"]


def test_the_command_prints_the_warning(make, precisions, cli, tmp_path):
    catalog, host, other = tmp_path / "t.json", tmp_path / "host.json", tmp_path / "other.json"
    catalog.write_text(json.dumps(precisions.to_json()))
    host.write_text(json.dumps(node(make, 15360).to_json()))
    other.write_text(json.dumps(node(make, 46068).to_json()))
    text = "precision int8: fp16 does not fit: it needs 24576 MiB"
    for line in (["--host", host], ["--gang", host, "--gang", other]):
        result = cli("select", "t:v1", "--catalog", str(catalog), *map(str, line))
        assert result.out == "t:int8\n"
        assert text in result.err
    assert text in " ".join(
        cli("explain", "t:v1", "--catalog", str(catalog), "--host", str(host)).out.split()
    )


catalogs = st.builds(
    Catalog,
    image=st.just("t"),
    version=st.just("v1"),
    variants=st.lists(
        st.builds(
            lambda variant, value: replace(variant, axes=(("precision", value),)),
            gpu_variants,
            st.sampled_from(ORDER),
        ),
        max_size=8,
        unique_by=lambda variant: variant.reference,
    ).map(tuple),
)


@settings(max_examples=300)
@given(hosts, catalogs, allowed, st.sampled_from([None, 8000, 20000]))
def test_the_order_is_to_ask_for_one_value_after_the_other(host, catalog, allow_cpu, share):
    def ask(some, value=None):
        members = [one for one in some.variants if value in (None, dict(one.axes)["precision"])]
        some = replace(some, variants=tuple(members))
        return explain(host, some, allow_cpu=allow_cpu, vram_mib=share)

    answers = (ask(catalog, value) for value in ORDER)
    first = next((answer for answer in answers if answer.fits), None)
    answer = ask(ordered(catalog))
    assert answer.selected == (first.selected if first else None)
    assert pickle.loads(pickle.dumps(answer)) == answer  # noqa: S301 - it is ours
    if first:
        assert first.fits <= answer.fits
        later = dict(next(one for one in catalog.variants if one.reference in first.fits).axes)
        warned = [one.kind for one in answer.warnings if one.kind == "default"]
        assert bool(warned) is (answer.selected is not None and later["precision"] != "fp16")
    # A gang of one host is a selection.
    try:
        gang = select_gang([host], ordered(catalog), allow_cpu=allow_cpu)
    except (NothingFitsAll, UsageError):
        assert share is not None or answer.selected is None
    else:
        assert share is not None or [one.reference for one in gang.variants] == [answer.selected]


def test_an_older_selector_answers_with_the_first_value_or_not_at_all():
    """The answers were given by a release that knows neither memory nor an order of defaults."""
    golden = json.loads(Path(__file__).with_name("older_answers.json").read_text())
    catalog = Catalog.from_json(golden["catalog"])
    assert catalog.to_json() == golden["catalog"]  # it is as this release writes it
    assert catalog.default_order == (("precision", ORDER),)
    seen = set()
    for case in golden["cases"]:
        host = Host.from_json(case["host"])
        answer = explain(host, catalog)
        if answer.selected and not any(one.kind == "default" for one in answer.warnings):
            assert case["selected"] == answer.selected
            seen.add("first")
        else:
            assert case["selected"] in (None, *golden["first"])
            seen.add("later" if answer.selected else "nothing")
    assert seen == {"first", "later", "nothing"}
