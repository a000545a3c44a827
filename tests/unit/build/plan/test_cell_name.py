"""The cell that `--why` names."""

import pytest

from imagematrix.build.matrix.expand import expand_matrix, select_cells
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.cell_name import find_cell, format_condition
from imagematrix.errors import UsageError

ID = "cuda12.4-sm89-drv550.163.01-znver4"
TWO = ("axes:", "  app: {version: v2, template: training.j2}\naxes:")


@pytest.mark.parametrize(
    "name",
    [
        ID,
        f"training:v1 {ID}",
        f"v1-{ID}",
        f"v1-{ID}-0123456789ab",
        f"training:v1-{ID}",
        f"training:v1-{ID}-0123456789ab",
        "cuda=12.4,compute=8.9,driver=550.163.01,march=znver4",
        "cuda>=12,compute>8,driver=550*,march!=x86-64-v3",
    ],
)
def test_cell_is_found_by_each_of_its_names(project, name):
    assert find_cell(load_matrix(project()), name).id == ID


def test_image_is_part_of_a_name_if_there_are_several(project):
    matrix = load_matrix(project(TWO))
    for name in (f"app:v2 {ID}", f"v2-{ID}", f"app:v2-{ID}-0123456789ab", f"image=app,{format_one(matrix)}"):
        cell = find_cell(matrix, name)
        assert (cell.image.name, cell.id) == ("app", ID)
    with pytest.raises(
        UsageError, match=f"--why: 2 cells match '{ID}': training:v1 {ID}, app:v2 {ID}"
    ) as error:
        find_cell(matrix, ID)
    assert "image=training" in error.value.remedy


def format_one(matrix):
    return format_condition(find_cell(matrix, f"v1-{ID}")).partition(",")[2]


def test_cell_without_axes_has_the_name_of_its_image(project):
    text = "schema: imagematrix.matrix/v1\nimages: {app: {version: v1, template: training.j2}}\naxes: {}\n"
    matrix = load_matrix(project(text=text))
    for name in ("app:v1", "app:v1--0123456789ab", "image=app"):
        assert find_cell(matrix, name).image.name == "app"
    with pytest.raises(UsageError, match="no cell matches ''"):
        find_cell(matrix, "")


def test_excluded_cell_is_found_by_its_name_or_if_no_other_matches(project):
    matrix = load_matrix(project())
    excluded = "cuda11.8-sm89-drv550.163.01-znver4"
    assert find_cell(matrix, excluded).id == excluded
    assert find_cell(matrix, "cuda=11.8,compute=8.9,driver=550.163.01,march=znver4").id == excluded
    assert "drv535" in find_cell(matrix, "cuda=11.8,compute=8.9,march=znver4").id


def test_value_like_a_digest_is_part_of_the_name(project):
    own = ("axes:", "axes:\n  site: [a, a-0123456789ab]")
    matrix = load_matrix(project(own))
    assert find_cell(matrix, f"a-{ID}").axes["site"] == "a"
    last = ("znver4]\n", "znver4]\n  site: [a, a-0123456789ab]\n")
    matrix = load_matrix(project(last))
    assert find_cell(matrix, f"{ID}-a-0123456789ab").axes["site"] == "a-0123456789ab"
    assert find_cell(matrix, f"v1-{ID}-a-ba9876543210").axes["site"] == "a"


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        ("cuda12.4-sm89-drv550.163.01-znver5", "no cell matches", f"did you mean '{ID}'?"),
        (f"training:v1-{ID[:-1]}", "no cell matches", f"did you mean '{ID}'?"),
        ("zzz", "no cell matches 'zzz'", "`imagematrix plan` shows the cells"),
        ("\x1b[31m\nx", r"no cell matches '\\x1b\[31m\\nx'", None),
        ("x" * 999, f"no cell matches '{'x' * 80}'", None),
        ("march=znver4", "7 cells match 'march=znver4': cpu-znver4, .*, 3 more", "name one of them"),
        ("march=znver5", "--why: no value of the axis march matches znver5", None),
        ("marhc=znver4", "--why: this matrix has no axis 'marhc': did you mean 'march'", None),
        ("cuda=none,compute=8.9", "no cell matches 'cuda=none,compute=8.9'", None),
        ("=", "--why: invalid condition '='", None),
    ],
)
def test_other_names_are_errors_with_the_nearest(project, name, message, remedy):
    with pytest.raises(UsageError, match=message) as error:
        find_cell(load_matrix(project()), name)
    assert remedy is None or remedy in error.value.remedy


def test_conditions_select_one_cell(starters):
    for path in starters.values():
        matrix = load_matrix(path)
        expansion = expand_matrix(matrix)
        for cell in expansion.cells[:: max(1, len(expansion.cells) // 10)]:
            assert select_cells(expansion, format_condition(cell), matrix).cells == (cell,)
