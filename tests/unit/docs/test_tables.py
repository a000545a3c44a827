"""The tables on hand-written pages match the code."""

import json
import os
import re
import shlex
import subprocess

import pages
import pytest

from imagematrix.build.matrix.feasibility import RULES
from imagematrix.launcher.doctor.checks import CHECKS
from imagematrix.launcher.gpu_claims.metrics import METRICS

PACKAGE = pages.ROOT / "imagematrix"
SOURCES = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
MATRIX = json.loads((PACKAGE / "schemas/matrix.json").read_text())
PLAN = json.loads((PACKAGE / "schemas/plan.json").read_text())


def page(name):
    return (pages.ROOT / "docs" / name).read_text()


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


def test_metrics_are_shown_as_they_are_printed():
    shown = re.findall(r"^# HELP imagematrix_gpu_(\w+) (.*)$", page("how-to/share-gpus.md"), re.MULTILINE)
    assert shown
    assert dict(shown).items() <= METRICS.items()


def test_the_command_for_podman_keeps_quoted_words_together(tmp_path):
    """The words of a dry run are quoted for a shell, and may have blanks and line breaks."""
    words = ["run", "--env", "A=b  c", "--env", "B=1\n2 'x'", "training:v1", "sh", "-c", "echo $HOME; id"]
    (tmp_path / "printed").write_text(shlex.join(["docker", *words]))
    for name, text in (("imagematrix", f"cat {tmp_path}/printed"), ("podman", """printf '%s\\0' "$@" """)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (script,) = re.findall(r"```sh\n(.*--dry-run.*?)```", page("how-to/use-podman.md"), re.DOTALL)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DOCKER_HOST": "unix:///x", "HOME": "/h"}
    done = subprocess.run(["sh", "-euc", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == ["--url", "unix:///x", *words]


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
    assert sorted(first_column(page("reference/matrix.md"), "## Infeasible cells")) == sorted(RULES)


@pytest.mark.parametrize("folder", ["engine", "doubles"])
def test_the_guide_to_the_tests_names_every_file(folder):
    tests = pages.ROOT / "tests"
    names = {path.name for path in (tests / folder).iterdir() if path.is_file()}
    wanted = {name for name in names if folder == "doubles" or name.startswith("test_")}
    named = set(re.findall(r"`([\w./]+)`", (tests / "README.md").read_text()))
    assert wanted - named == set()


def test_paths_in_the_guide_to_the_tests_exist():
    tests = pages.ROOT / "tests"
    named = set(re.findall(r"`(?:[\w]+/)?(\w+\.(?:py|c|cpp))`", (tests / "README.md").read_text()))
    assert named <= {path.name for path in tests.rglob("*")}
