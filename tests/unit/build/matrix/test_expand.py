"""Expansion: GitHub's semantics, stable order, CPU-only cells once, and no rule without an effect."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import add_axis, add_include, add_option

from imagematrix.build.matrix.expand import (
    expand_matrix,
    find_plain_pull_cells,
    select_cells,
    select_platforms,
)
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.matrix import Exclude, Image, Include, Matrix
from imagematrix.build.matrix.problems import Mark, MatrixError
from imagematrix.errors import UsageError
from imagematrix.images.catalog.axis_conditions import ConditionError


@pytest.fixture
def expanded(project):
    """Call it with changes of the matrix to expand it."""
    return lambda *changes: expand_matrix(load_matrix(project(*changes)))


def test_cells_follow_file_order_and_cpu_cells_are_not_repeated(expanded):
    result = expanded()
    assert [cell.id for cell in result.cells] == [
        "cpu-x86-64-v3",
        "cpu-znver4",
        *[f"cuda11.8-sm{sm}-drv535.261.03-{march}" for sm in (70, 89) for march in ("x86-64-v3", "znver4")],
        *[
            f"cuda12.4-sm{sm}-drv{driver}-{march}"
            for sm in (70, 89)
            for driver in ("535.261.03", "550.163.01")
            for march in ("x86-64-v3", "znver4")
        ],
    ]
    assert len(result.excluded) == 4
    assert {item.rule.why for item in result.excluded} == {"they have the newer toolkit"}
    assert result.cells[-1].properties == {"base": "debian:trixie", "compiler": "gcc-14"}


def test_rule_without_effect_is_rejected(expanded):
    def add(rule):
        return expanded(("newer toolkit}\n", f"newer toolkit}}\n  - {rule}\n"))

    with pytest.raises(MatrixError, match=r":19:5: .*earlier rules drop all it matches"):
        add('{cuda: "11.8", driver: 550.163.01, why: twice}')
    with pytest.raises(MatrixError, match="matches no cell"):
        add('{cuda: none, compute: "7.0"}')


def test_include_sets_properties_or_adds_a_complete_cell(expanded):
    cells = expanded(add_include("{cuda: '12.4', extra: yes-please}")).cells
    assert {cell.properties.get("extra") for cell in cells if cell.cuda == "12.4"} == {"yes-please"}
    assert {cell.properties.get("extra") for cell in cells if cell.cuda != "12.4"} == {None}

    back = "{cuda: '11.8', compute: '8.9', driver: 550.163.01, march: znver4, extra: back}"
    cells = expanded(add_include(back)).cells
    assert cells[-1].id == "cuda11.8-sm89-drv550.163.01-znver4"
    assert cells[-1].properties["extra"] == "back"

    with pytest.raises(MatrixError, match="it lacks driver, march"):
        expanded(add_include("{cuda: '12.0', compute: '8.9'}"))


def test_only_narrows_all_cells(project):
    matrix = load_matrix(project())
    image = select_cells(expand_matrix(matrix), "cuda>=11,march=znver*,image=training", matrix)
    assert {(cell.cuda, cell.axes["march"]) for cell in image.cells} == {
        ("11.8", "znver4"),
        ("12.4", "znver4"),
    }
    assert len(image.excluded) == 2
    with pytest.raises(ConditionError, match="did you mean 'march'"):
        select_cells(expand_matrix(matrix), "marhc=znver4", matrix)
    with pytest.raises(ConditionError, match="it has x86-64-v3, znver4"):
        select_cells(expand_matrix(matrix), "march=zen4", matrix)


AXES = st.dictionaries(
    st.sampled_from(["cuda", "compute", "driver", "march", "other"]),
    st.lists(st.sampled_from(["none", "a", "b", "c"]), min_size=1, max_size=3, unique=True).map(tuple),
    min_size=1,
)


@st.composite
def matrices(draw, tmp="/nowhere"):
    axes = draw(AXES)
    partial = st.dictionaries(
        st.sampled_from(list(axes)), st.sampled_from(["none", "a", "b", "c"]), min_size=1
    )
    exclude = draw(st.lists(partial, max_size=2))
    image = Image(name="i", version="v", template="t", context=tmp)
    return Matrix(
        path=tmp,
        templates=tmp,
        images=(image,),
        axes=axes,
        properties={},
        exclude=tuple(
            Exclude(
                matches={axis: frozenset({value}) for axis, value in rule.items()}, why=None, mark=Mark(1, 1)
            )
            for rule in exclude
        ),
    )


@given(matrices())
def test_expansion_is_the_product_without_excluded_cells(matrix):
    """A brute-force model: every combination, collapsed, first occurrence kept, matching ones dropped."""
    model = []
    for values in itertools.product(*matrix.axes.values()):
        point = dict(zip(matrix.axes, values, strict=True))
        if point.get("cuda") == "none":
            point = {axis: value for axis, value in point.items() if axis not in ("compute", "driver")}
        if point not in model:
            model.append(point)
    dropped = [
        point
        for point in model
        if any(
            all(point.get(axis) in allowed for axis, allowed in rule.matches.items())
            for rule in matrix.exclude
        )
    ]
    try:
        expansion = expand_matrix(matrix)
    except MatrixError as error:
        assert "this exclude rule" in str(error)  # noqa: PT017 - some drawn rules drop nothing of their own
        return
    assert [cell.axes for cell in expansion.cells] == [point for point in model if point not in dropped]
    assert [item.cell.axes for item in expansion.excluded] == dropped


@given(matrices(), st.sampled_from(["a", "b", "z"]))
def test_include_changes_exactly_the_matching_cells(matrix, value):
    axis = next(iter(matrix.axes))
    plain = Matrix(path=Path(), templates=Path(), images=matrix.images, axes=matrix.axes, properties={})
    entry = Include(axes={axis: value}, properties={"p": "q"}, mark=Mark(1, 1))
    with_entry = Matrix(
        path=Path(), templates=Path(), images=matrix.images, axes=matrix.axes, properties={}, include=(entry,)
    )
    before = expand_matrix(plain).cells
    matched = [cell.axes.get(axis) == value for cell in before]
    if any(matched):
        after = expand_matrix(with_entry).cells
        assert [cell.axes for cell in after] == [cell.axes for cell in before]
        assert [cell.properties == {"p": "q"} for cell in after] == matched
    elif len(matrix.axes) == 1:
        assert expand_matrix(with_entry).cells[-1].axes == {axis: value}
    else:
        with pytest.raises(MatrixError, match="it lacks"):
            expand_matrix(with_entry)


def test_duplicate_cell_names_are_rejected(expanded):
    again = "{cuda: '12.4', compute: '9.0', driver: 550.163.01, march: znver4}"
    with pytest.raises(MatrixError, match=r"2 cells would have the name cuda12\.4-sm90-drv550"):
        expanded(add_include(again, again))
    with pytest.raises(MatrixError, match=r"cpu-a-b-c-x86-64-v3(.|\n)*remove the include"):
        expanded(add_axis("one: [a-b, a]\n  two: [c, b-c]"))


def test_values_that_are_equal_in_tags_are_rejected(project, expanded):
    matrix = load_matrix(project(add_axis("torch: [2.8.0+cu128, 2.8.0+cpu]")))
    (cell,) = select_cells(expand_matrix(matrix), "cuda=none,torch=2.8.0+cpu,march=znver4", matrix).cells
    assert (cell.id, cell.axes["torch"]) == ("cpu-2.8.0_cpu-znver4", "2.8.0+cpu")
    with pytest.raises(MatrixError, match=r"2 cells would have the name cpu-2\.8_cpu(.|\n)*'\+' is '_'"):
        expanded(add_axis("torch: [2.8+cpu, 2.8_cpu]"))


def test_only_accepts_values_added_by_include(project):
    matrix = load_matrix(project(add_include("{cuda: none, march: znver5}")))
    (cell,) = select_cells(expand_matrix(matrix), "march=znver5", matrix).cells
    assert cell.id == "cpu-znver5"


PLATFORMS = add_axis("platform: [linux/amd64, linux/arm64]")


def test_platforms_narrow_all_cells(expanded):
    both = expanded(PLATFORMS)
    arm = select_platforms(both, ["linux/arm64"])
    assert {cell.platform for cell in (*arm.cells, *(one.cell for one in arm.excluded))} == {"linux/arm64"}
    assert len(arm.cells) * 2 == len(both.cells)
    assert select_platforms(both, ["linux/amd64", "linux/arm64"]) == both
    with pytest.raises(UsageError, match="no cell for linux/arm64"):
        select_platforms(expanded(), ["linux/amd64", "linux/arm64"])


def test_cell_name_contains_the_platform_axis(expanded):
    cells = expanded(PLATFORMS).cells
    assert [(cell.id, cell.platform) for cell in cells[:3]] == [
        ("cpu-linux-amd64-x86-64-v3", "linux/amd64"),
        ("cpu-linux-amd64-znver4", "linux/amd64"),
        ("cpu-linux-arm64-x86-64-v3", "linux/arm64"),
    ]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            "march: znver4",
            r"plain_pull names 5 cells for linux/amd64: cpu-znver4, .*, …\n  add axes until",
        ),
        ("cuda: none", "plain_pull names 2 cells for linux/amd64: cpu-x86-64-v3, cpu-znver4\n"),
        ("cuda: none, compute: '8.9'", r"plain_pull names no cell for linux/amd64\n  name one for each"),
        ("", "plain_pull names 12 cells"),
    ],
)
def test_plain_pull_must_match_one_cell(stated, message, expanded):
    with pytest.raises(MatrixError, match=f":7:17: {message}"):
        expanded(add_option(f"plain_pull: {{{stated}}}"))


def test_plain_pull_matches_one_cell_per_platform(project, expanded):
    arm = ("[x86-64-v3, znver4]", "[x86-64-v3, znver4, armv8-a]")
    stated = add_option("plain_pull: {cuda: none, march: [x86-64-v3, armv8-a]}")
    matrix = load_matrix(project(PLATFORMS, arm, stated))
    result = find_plain_pull_cells(matrix, expand_matrix(matrix), matrix.images[0])
    assert result == {
        "linux/amd64": "cpu-linux-amd64-x86-64-v3",
        "linux/arm64": "cpu-linux-arm64-armv8-a",
    }
    with pytest.raises(MatrixError, match="plain_pull names no cell for linux/arm64"):
        expanded(PLATFORMS, arm, add_option("plain_pull: {cuda: none, march: [x86-64-v3]}"))
    matrix = load_matrix(project())
    assert find_plain_pull_cells(matrix, expand_matrix(matrix), matrix.images[0]) == {}
