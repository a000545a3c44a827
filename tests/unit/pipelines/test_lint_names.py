"""The check of names: each rule finds a bad example, and what others prescribe is exempt."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINT = runpy.run_path(str(ROOT / "ci/lint_names.py"))
LONG = "def load_all() -> None:\n" + "    print()\n" * 61


@pytest.fixture
def find(tmp_path):
    """Return a function that returns the problems in modules, each a text by its path."""

    def find_in(**modules):
        for name, text in modules.items():
            path = tmp_path / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return [problem.what for problem in LINT["find_problems"](tmp_path)]

    return find_in


@pytest.mark.parametrize(
    ("module", "text", "problem"),
    [
        ("build.plan.needs", "", "a module called 'needs' does not say of what"),
        ("build.plan.given", "", "'given' is a name that this code has given up for a clearer one"),
        ("build.plan.fetching", "", "a module is a noun, unlike 'fetching'"),
        ("build.plan.a", "def held(): ...", "'held' does not say of what"),
        ("build.plan.a", "def _read(): ...", "'_read' does not say of what"),
        ("build.plan.a", "class A:\n    def index(self): ...", "'index' does not say of what"),
        ("build.plan.a", "def placed_cells(): ...", "'placed_cells' does not begin with a verb"),
        ("build.plan.a", "class A:\n    async def cells(self): ...", "'cells' does not begin with a verb"),
        ("build.plan.a", "def names_file() -> str: ...", "'names_file' does not begin with a verb"),
        ("build.plan.a", "def to(): ...", "'to' does not begin with a verb"),
        (
            "build.plan.a",
            "class A(Protocol):\n    def cells(self): ...\nclass B:\n    def cells(self): ...",
            "'cells' does not begin with a verb",
        ),
        ("build.plan.a", LONG, "load_all has 61 lines; 60 can be seen at once"),
        ("build.plan.a", "def load(a, b, c, d, e, f, g, *, h, i): ...", "load has 9 parameters of 8"),
    ],
)
def test_a_rule_finds_its_bad_example(find, module, text, problem):
    assert problem in find(**{module: text})


def test_two_modules_of_a_room_have_different_names(find):
    twins = {"build.plan.cells": "", "build.plan.inputs.cells": "", "build.stores.cells": ""}
    assert find(**twins) == ["build/plan/inputs/cells.py in the same room is called 'cells', too"]
    assert find(**{"build.a.server": "", "build.a.b.server": ""}) == find(**twins)


@pytest.mark.parametrize(
    "text",
    [
        "def load_cells(): ...",
        "def names_file() -> bool: ...",
        "def has_cells(): ...",
        "def is_due(): ...",
        "def to_json(): ...",
        "def _cells(): ...",
        "class _A:\n    def cells(self): ...",
        "class A:\n    @property\n    def cells(self): ...",
        "class A:\n    def readinto(self): ...",
        "def command(a, b, c, d, e, f, g, h, i): ...",
        "class A:\n    def load(self, a, b, c, d, e, f, g, h): ...",
        "def need(): ...\nRULE = Rule(need=need)",
        f'def load_all():\n    """{chr(10) * 99}"""\n    print()',
    ],
)
def test_other_names_are_right(find, text):
    assert find(**{"build.plan.a": text}) == []


def test_what_users_reach_keeps_its_name(find):
    package = {
        "__init__": '__all__ = ["A", "within"]',
        "selection.a": "class A(Base):\n    b: list[B]\n    def c(self) -> C: ...\n    def kept(self): ...",
        "selection.b": "class B:\n    def texts(self): ...\nclass C:\n    def texts(self): ...",
        "selection.c": "class Base:\n    def texts(self): ...\ndef within(): ...",
    }
    assert find(**package) == []
    assert find(**{"selection.d": "class D:\n    def texts(self): ..."}) == [
        "'texts' does not begin with a verb"
    ]


def test_commands_have_the_names_that_users_type(find):
    assert find(**{"cli.outdated": "def command(): ...", "cli.swarm.needs": ""}) == []
    assert find(**{"cli.shared.starting": ""}) != []
