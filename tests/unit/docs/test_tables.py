"""The tables on hand-written pages match the code."""

import json
import re

import pages
import pytest
from imagematrix_docs import expand

from imagematrix.doctor.checks import CHECKS

PACKAGE = pages.ROOT / "imagematrix"
SOURCES = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
MATRIX = json.loads((PACKAGE / "schemas/matrix.json").read_text())
PLAN = json.loads((PACKAGE / "schemas/plan.json").read_text())


def page(name):
    return expand((pages.ROOT / "docs" / name).read_text())


def first_column(text, heading):
    """Return the code words in the first column of the first table below a heading."""
    below = ("\n" + text).partition(f"\n{heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)[0].splitlines()[2:]
    return [name for row in table for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_every_variable_that_is_read_is_documented():
    read = set(re.findall(r'os\.environ(?:\.get\(|\[)"([A-Z_]+)"', SOURCES))
    assert read <= set(re.findall(r"`(_?[A-Za-z_]+)`", page("reference/environment.md")))


@pytest.mark.parametrize("heading", ["## Read by imagematrix", "## Set in containers"])
def test_every_documented_variable_is_in_the_code(heading):
    names = first_column(page("reference/environment.md"), heading)
    assert [name for name in names if f'"{name}"' not in SOURCES and f'"{name}=' not in SOURCES] == []


def test_every_label_is_documented():
    assert set(re.findall(r'"(io\.imagematrix\.[a-z]+)"', SOURCES)) == set(
        re.findall(r"`(io\.imagematrix\.[a-z]+)`", page("reference/labels.md"))
    )


def test_every_check_of_the_doctor_is_documented():
    assert first_column(page("how-to/diagnose-a-node.md"), "# Diagnose a node") == list(CHECKS)


def test_every_criterion_of_the_order_is_documented():
    assert first_column(page("reference/rules.md"), "## Order") == MATRIX["$defs"]["criterion"]["enum"]


def test_every_cell_status_is_documented():
    assert (
        first_column(page("reference/matrix.md"), "## The status of a cell")
        == (PLAN["$defs"]["cell"]["properties"]["status"]["enum"])
    )


def test_every_rule_of_infeasible_cells_is_documented():
    text = (PACKAGE / "matrix/feasibility.py").read_text()
    named = first_column(page("reference/matrix.md"), "## Infeasible cells")
    assert sorted(named) == sorted(
        name.strip("_").replace("_", "-")
        for name in re.findall(r"^def (_\w+)\(cell: Cell\) -> str", text, re.MULTILINE)
    )
