"""The pipelines in ci/pipelines: valid for their systems, with existing options only."""

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from typer.core import TyperGroup

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from imagematrix.cli.app import make_app

ROOT = Path(__file__).parents[3]
PIPELINES = sorted((ROOT / "ci" / "pipelines").iterdir())
COMMANDS = cast("TyperGroup", typer.main.get_command(make_app())).commands


class Loader(yaml.SafeLoader):
    """YAML with GitLab's !reference."""


def reference(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node)


Loader.add_constructor("!reference", reference)


def lines(path):
    """Yield the arguments of imagematrix commands in a file."""
    for line in path.read_text().splitlines():
        for command in re.findall(r"(?:^|[\s/(])imagematrix ([a-z].*)", line):
            # Anything after a redirection or a closing bracket belongs to the shell.
            words = shlex.split(re.split(r" > |\)\"?$| && | \| |  +#", command)[0].replace('"$@"', ""))
            yield words


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("github.yml", ["--builtin-schema", "vendor.github-workflows"]),
        ("gitlab.yml", ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
    ],
)
def test_pipelines_conform_to_their_schemas(name, options):
    command = [sys.executable, "-m", "check_jsonschema", *options, str(ROOT / "ci" / "pipelines" / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_gocd_fetches_existing_artifacts():
    whole = yaml.safe_load((ROOT / "ci" / "pipelines" / "images.gocd.yaml").read_text())
    (pipeline,) = whole["pipelines"].values()
    left: dict[tuple[str, str], set[str]] = {}
    for stage in pipeline["stages"]:
        ((name, body),) = stage.items()
        for job, work in body["jobs"].items():
            for task in work["tasks"]:
                if "fetch" in task:
                    fetched = task["fetch"]
                    assert fetched["source"] in left[fetched["stage"], fetched["job"]]
                    assert fetched["is_file"]
            left[name, job] = {one["build"]["source"] for one in work.get("artifacts", ()) if "build" in one}
    shards = [
        job["environment_variables"]["SHARD"] for job in pipeline["stages"][1]["build"]["jobs"].values()
    ]
    assert shards == [f"{number}/{len(shards)}" for number in range(1, len(shards) + 1)]


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.name)
def test_pipelines_go_from_plan_to_publish(path):
    yaml.load(path.read_text(), Loader)  # noqa: S506 - a safe loader
    order = [words[0] for words in lines(path) if words[0] != "export"]
    wanted = ["validate", "plan", "build", "report", "publish"]
    assert sorted(order, key=wanted.index) == wanted


@pytest.mark.parametrize(
    "path", [*PIPELINES, ROOT / "docs" / "how-to" / "build-in-ci.md"], ids=lambda path: path.name
)
def test_command_lines_use_existing_options(path):
    result = [words for words in lines(path) if not words[0].startswith("`")]
    assert result
    for name, *words in result:
        command = COMMANDS.get(name)
        assert command, f"there is no command {name}"
        command.make_context(name, [word for word in words if word != "…"])
