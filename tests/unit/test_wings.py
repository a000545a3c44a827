"""The layout of the package: nine wings, each with a docstring that is its map."""

import ast
import re
from pathlib import Path

import pytest

UNIT = Path(__file__).parent
PACKAGE = UNIT.parents[1] / "imagematrix"
WINGS = (
    "audit",
    "build",
    "cli",
    "common",
    "hardware",
    "images",
    "integrations",
    "launcher",
    "selection",
)
BESIDE = ("__init__.py", "__main__.py", "errors.py", "py.typed", "schemas", "starter")
LINES = 10  # of a docstring that one sees at a glance


def opening(wing):
    """Return the syntax tree of a wing's `__init__.py`."""
    return ast.parse((PACKAGE / wing / "__init__.py").read_text())


def test_the_package_has_the_wings_and_little_beside_them():
    assert {path.name for path in PACKAGE.iterdir()} - {"__pycache__"} == {*WINGS, *BESIDE}


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_says_which_rooms_it_has(wing):
    text = ast.get_docstring(opening(wing))
    rooms = {path.parent.name for path in (PACKAGE / wing).glob("*/__init__.py")}
    assert set(re.findall(r"`([^`]+)`", text)) == rooms
    assert len(text.splitlines()) <= LINES


@pytest.mark.parametrize("wing", sorted({*WINGS} - {"cli"}))  # `cli` has the entry point
def test_a_wing_itself_has_no_code(wing):
    assert len(opening(wing).body) == 1


@pytest.mark.parametrize("wing", WINGS)
def test_tests_are_in_the_same_folders(wing):
    folders = {path.parent.relative_to(UNIT) for path in (UNIT / wing).rglob("test_*.py")}
    assert [folder for folder in sorted(folders) if not (PACKAGE / folder).is_dir()] == []
