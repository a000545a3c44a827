"""Own axes in a selection: `--where` narrows, then defaults decide, and open axes are an error."""

from __future__ import annotations

import ast
import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.selection.query import narrow_catalog, read_axis_values
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selector import explain, find_feasible_gpu_sets, select, select_many

PYTHONS = ("3.9", "3.13")


def build(make, python, **facts):
    """Return a CPU-only variant for one value of the axis python."""
    return make.cpu_variant(f"t:v1-cpu-{python}", axes=(("python", python),), **facts)


@pytest.fixture
def pythons(make):
    """A catalog of one image for each version of Python."""
    return make.catalog(*(build(make, python) for python in PYTHONS))


def refused(*question, **options):
    with pytest.raises(UsageError) as caught:
        select(*question, **options)
    assert caught.value.exit_code == 2
    return caught.value


def test_open_axis_is_never_decided_alphabetically(make, pythons):
    error = refused(make.host(), pythons)
    assert str(error) == "variants of t:v1 that fit this host differ in python (3.9, 3.13)"
    choose = "choose with {}; in matrix.yaml an image may set `defaults`"
    assert error.remedy == choose.format("where={'python': '3.13'}")
    assert error.shown == choose.format("--where python=3.13")
    selection = explain(make.host(), pythons)
    assert (selection.selected, selection.variant, selection.digest) == (None, None, None)
    assert selection.to_json()["open"] == {"python": ["3.9", "3.13"]}
    assert [candidate.rank for candidate in selection.candidates] == [1, 2]


def test_suggested_where_makes_selection_succeed(make, pythons):
    where = ast.literal_eval(re.search(r"where=({.*?})", refused(make.host(), pythons).remedy)[1])
    assert select(make.host(), pythons, where=where).selected == f"t:v1-cpu-{where['python']}"


@pytest.mark.parametrize(
    ("where", "selected"),
    [
        ({"python": "3.9"}, "3.9"),
        ({"python": "3.1*"}, "3.13"),
        ({"python": ">=3.10"}, "3.13"),
        ({"python": "!3.9"}, "3.13"),
        ({"python": ["3.9", "3.8"]}, "3.9"),
        ({"python": ["*", "!3.13"], "cuda": "none"}, "3.9"),
        ("python=3.9", "3.9"),
        (["python=3.9", "cuda=none"], "3.9"),
        (("python!=3.13",), "3.9"),
        ({"python": ("3.9",)}, "3.9"),
    ],
)
def test_where_accepts_the_syntax_of_only(make, pythons, where, selected):
    selection = select(make.host(), pythons, where=where)
    assert selection.selected == f"t:v1-cpu-{selected}"
    assert [candidate.reference for candidate in selection.candidates] == [selection.selected]
    assert "open" not in selection.to_json()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"pyton": "3.9"}, "t:v1 has no axis 'pyton': did you mean 'python'?"),
        ({"zone": "3.9"}, "t:v1 has no axis 'zone': the axes are python, platform, cuda"),
        ({"python": "3.12"}, "no value of the axis python matches 3.12: it has 3.9, 3.13"),
        ({"python": ">=x"}, "invalid version in a comparison: 'x'"),
    ],
)
def test_unknown_axis_or_value_lists_the_existing_ones(make, pythons, where, message):
    assert str(refused(make.host(), pythons, where=where)) == message
    with pytest.raises(UsageError):
        select_many([make.host()], pythons, where=where)


@pytest.mark.parametrize(
    ("where", "message", "remedy"),
    [
        ({"python": 3.13}, "3.13 as a value may have lost digits", "quote it: '3.13'"),
        ({"python": [3.9]}, "3.9 as a value may have lost digits", "quote it: '3.9'"),
        ({"python": None}, "None is not a value", "write conditions such as"),
        ({"python": True}, "True is not a value", "write conditions such as"),
        ({"python": []}, "an empty list is not a value", "write conditions such as"),
        ({("a", 3.0): "3"}, "3.0 as an axis", "quote it"),
        ({None: "3"}, "None is not an axis", "write conditions such as"),
        ([3.13], "3.13 as a condition", "quote it"),
        (3.13, "invalid conditions 3.13", "write conditions such as"),
        ({"python=3.13"}, "invalid conditions {'python=3.13'}", "write conditions such as"),
    ],
)
def test_conditions_of_another_form_are_rejected(make, pythons, where, message, remedy):
    error = refused(make.host(), pythons, where=where)
    assert str(error).startswith(message)
    assert error.remedy.startswith(remedy)


def test_whole_numbers_are_values(make):
    catalog = make.catalog(build(make, "3"), build(make, "2"))
    assert select(make.host(), catalog, where={"python": 3}).selected == "t:v1-cpu-3"
    assert select(make.host(), catalog, where={"python": [3]}).selected == "t:v1-cpu-3"


def test_defaults_decide_open_axes(make, pythons):
    catalog = replace(pythons, defaults=(("python", "3.13"),))
    assert select(make.host(), catalog).selected == "t:v1-cpu-3.13"
    assert select(make.host(), catalog, where={"python": "3.9"}).selected == "t:v1-cpu-3.9"
    assert select(make.host(), catalog, where={"python": "3.*"}).selected == "t:v1-cpu-3.13"
    assert select(make.host(), catalog, where={"python": "!3.13"}).selected == "t:v1-cpu-3.9"


def test_remedy_names_another_value_where_the_default_fits_nothing(make):
    catalog = replace(
        make.catalog(build(make, "3.9"), build(make, "3.13", cpu_flags=frozenset({"avx512f"}))),
        defaults=(("python", "3.13"),),
    )
    host = make.host(march="x86-64-v2")
    with pytest.raises(
        NothingFits, match=r"^t:v1-cpu-3\.13 does not fit this host: .*; t:v1-cpu-3\.9 fits"
    ) as caught:
        select(host, catalog)
    assert caught.value.remedy == "pass where={'python': '3.9'}"
    assert caught.value.shown == "pass --where python=3.9"
    assert select(host, catalog, where={"python": "3.9"}).selected == "t:v1-cpu-3.9"


def test_excluded_value_is_not_asked_for_again(make):
    """Words of an axis are one condition, in which the negation would win."""
    catalog = make.catalog(build(make, "3.9", cpu_flags=frozenset({"avx512f"})), build(make, "3.13"))
    for words in ("!3.13", ("3.9", "!3.13")):
        with pytest.raises(NothingFits, match=r"t:v1-cpu-3\.13 fits, but was not requested") as caught:
            select(make.host(march="x86-64-v2"), catalog, where={"python": words})
        assert caught.value.remedy == "select it by its reference: t:v1-cpu-3.13"


def test_combination_without_variants_is_reported(make, pythons):
    catalog = make.catalog(build(make, "3.9", march="a"), build(make, "3.13", march="b"))
    with pytest.raises(
        NothingFits, match=r"t:v1 has no variants with march a, python 3\.13; t:v1-cpu-3\.13 fits"
    ):
        select(make.host(), catalog, where={"python": "3.13", "march": "a"})
    with pytest.raises(NothingFits) as caught:
        select(make.host(), replace(pythons, defaults=(("python", "3.14"), ("cc", "gcc-14"))))
    assert caught.value.remedy == "select it by its reference: t:v1-cpu-3.13"


def test_where_filters_by_hardware_axes_too(make):
    exact = make.variant("t:exact", cubins=("89", "90a", "100"), march="znver4")
    host = make.variant("t:host", driver=make.umd("host"), axes=(("python", "3.9"),))
    catalog = make.catalog(exact, host, make.cpu_variant("t:cpu"))

    def left(**where):
        return [variant.reference for variant in narrow_catalog(catalog, where).variants]

    assert left(cuda="none") == ["t:cpu"]
    assert left(cuda=">=12") == ["t:exact", "t:host"]
    assert left(driver="550*") == ["t:exact"]
    assert left(driver="host") == ["t:host"]
    assert left(compute="9.0a") == left(compute="10.0") == left(march="znver*") == ["t:exact"]
    assert left(platform="linux/amd64") == ["t:exact", "t:host", "t:cpu"]
    assert read_axis_values(exact)["compute"] == ("8.9", "9.0a", "10.0")
    assert narrow_catalog(catalog, None) is catalog


def test_indistinguishable_images_are_named(make):
    old = [make.cpu_variant(f"t:v1-{number}", digest=None, size=number) for number in range(12)]
    host = make.host()
    error = refused(host, make.catalog(*old[:2]))
    assert str(error) == "variants of t:v1 cannot be told apart: t:v1-0, t:v1-1"
    assert error.remedy == "name one of them in place of t:v1, such as t:v1-0"
    assert str(refused(host, make.catalog(*old))).endswith("t:v1-4, t:v1-5 and 4 more")
    assert select(host, make.catalog(old[0])).selected == "t:v1-0"
    better = make.cpu_variant("t:v1-x", cpu_flags=frozenset({"avx2"}))
    assert select(host, make.catalog(*old, better)).selected == "t:v1-x"
    assert select(host, make.catalog(old[0], replace(old[1], march="raptorlake"))).selected == "t:v1-0"


def test_axis_missing_in_some_variants_is_open(make):
    catalog = make.catalog(make.cpu_variant("t:v1-0"), build(make, "3.9"))
    error = refused(make.host(), catalog)
    assert str(error) == "variants of t:v1 that fit this host differ in python (not set, 3.9)"
    assert error.remedy == "name one of them in place of t:v1, such as t:v1-0"


@pytest.mark.parametrize("axes", [(), (("python", "3.13"),)])
def test_a_variant_with_values_on_some_open_axes_is_chosen_by_name(make, axes):
    best = make.cpu_variant("t:v1-best", axes=axes, cpu_flags=frozenset({"avx2"}))
    other = make.cpu_variant("t:v1-other", axes=(("flavour", "small"), ("python", "3.12")))
    host = make.host()
    error = refused(host, make.catalog(best, other))
    assert error.remedy == "name one of them in place of t:v1, such as t:v1-best"
    assert select(host, make.catalog(best, other).known_as("t:v1-best")).selected == "t:v1-best"


def test_variants_that_do_not_fit_leave_no_axis_open(make, pythons):
    catalog = replace(
        pythons, variants=(pythons.variants[0], replace(pythons.variants[1], platform="linux/arm64"))
    )
    assert select(make.host(), catalog).selected == "t:v1-cpu-3.9"


def test_gpus_are_chosen_for_the_narrowed_catalog(make):
    new = make.variant("t:new", cubins=("90",), axes=(("python", "3.13"),))
    catalog = make.catalog(new, make.variant("t:old", axes=(("python", "3.9"),)))
    host = make.host(make.gpu(0), make.gpu(1, compute="9.0"))
    for python, index in (("3.9", 0), ("3.13", 1)):
        assert find_feasible_gpu_sets(host, catalog, Choice(gpus=host.gpus, count=1), {"python": python}) == (
            Choice(gpus=host.gpus[index : index + 1], count=1),
        )


def test_narrowed_selection_can_be_pickled(make, pythons):
    sent = pickle.dumps(select(make.host(), pythons, where={"python": "3.9"}))
    result = pickle.loads(sent)  # noqa: S301 - our own bytes
    assert result.selected == "t:v1-cpu-3.9"
    assert result.to_json() == select(make.host(), pythons, where={"python": "3.9"}).to_json()


def test_equal_questions_share_a_decision(make, pythons):
    one, two = (explain(make.host(), pythons, where={"python": "3.9"}) for _ in range(2))
    assert one.decision is two.decision
    assert one.decision is not explain(make.host(), pythons).decision


axes = st.fixed_dictionaries(
    {}, optional={"python": st.sampled_from(PYTHONS), "cc": st.sampled_from(["gcc-14", "clang-19"])}
).map(lambda own: tuple(sorted(own.items())))
common = {
    "reference": st.uuids().map(lambda uuid: f"t:{uuid}"),
    "digest": st.none(),
    "platform": st.sampled_from(["linux/amd64"] * 3 + ["linux/arm64"]),
    "cpu_flags": st.frozensets(st.sampled_from(["avx", "avx2"])),
    "axes": axes,
}
variants = st.one_of(
    st.builds(Variant, **common),
    st.builds(
        Variant,
        cuda=st.sampled_from(["12.0", "12.4"]),
        cubins=st.sampled_from([("80",), ("89",)]),
        driver=st.just(UserModeDriver(mode="host")),
        **common,
    ),
)
catalogs = st.builds(
    Catalog,
    image=st.just("t"),
    version=st.just("v1"),
    variants=st.lists(variants, max_size=8, unique_by=lambda variant: variant.reference).map(tuple),
    defaults=st.one_of(st.just(()), axes),
)
gpus = st.sampled_from(["8.0", "8.9"]).map(lambda compute: (Gpu(index=0, uuid="GPU-0", compute=compute),))
hosts = st.builds(
    Host,
    arch=st.just("x86_64"),
    cpu=st.builds(
        Cpu, vendor=st.none(), model=st.none(), flags=st.just(frozenset({"avx", "avx2"})), level=st.none()
    ),
    driver=st.just(Driver(version="550.163.01", kind=None, source="test")),
    gpus=st.one_of(st.just(()), gpus),
)
wheres = st.sampled_from([None, {"python": "3.13"}, {"python": "!3.13"}, {"cuda": ["none", ">=12.4"]}])


def outcome(host, catalog, where):
    try:
        return select(host, catalog, where=where).to_json()
    except ImagematrixError as error:
        return type(error), str(error), error.remedy


@given(hosts, catalogs, wheres, st.randoms())
def test_answer_does_not_depend_on_catalog_order(host, catalog, where, random):
    other = replace(catalog, variants=tuple(random.sample(catalog.variants, len(catalog.variants))))
    assert outcome(host, catalog, where) == outcome(host, other, where)


@given(hosts, catalogs)
def test_selection_is_ambiguous_iff_fitting_variants_differ_or_are_alike(host, catalog):
    selection = explain(host, catalog)
    fitting = [candidate.variant for candidate in selection.candidates if candidate.fits]
    stated = dict(catalog.defaults).items()
    assert all(stated <= dict(variant.axes).items() for variant in fitting)
    differ = len({variant.axes for variant in fitting}) > 1
    alike = [one for one in fitting if replace(one, reference="") == replace(fitting[0], reference="")]
    assert (selection.decision.ambiguity is not None) == (differ or len(alike) > 1)
    assert (selection.selected is not None) == (len(fitting) > 0 and not differ and len(alike) == 1)


@given(hosts, catalogs, wheres, variants)
def test_variant_for_other_hardware_changes_no_answer(host, catalog, where, more):
    foreign = replace(more, platform="linux/arm64")
    before = outcome(host, catalog, where)
    if isinstance(before, dict):
        after = outcome(host, replace(catalog, variants=(*catalog.variants, foreign)), where)
        assert after["selected"] == before["selected"]


@given(hosts, catalogs, wheres)
def test_suggested_axes_lead_to_a_fitting_variant(host, catalog, where):
    try:
        select(host, catalog, where=where)
    except NothingFits as error:
        if (error.remedy or "").startswith("pass where="):
            more = ast.literal_eval(error.remedy.removeprefix("pass where="))
            assert any(
                candidate.fits
                for candidate in explain(host, catalog, where={**(where or {}), **more}).candidates
            )
    except UsageError:
        pass
