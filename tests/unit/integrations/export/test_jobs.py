"""A matrix as jobs of a CI system: within its limit, and together all cells."""

import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.matrix import Cell, Image
from imagematrix.build.plan.plan import PlanContext, PlanStatus
from imagematrix.build.plan.planner import plan
from imagematrix.build.plan.shard import Shard, select_shard
from imagematrix.errors import UsageError
from imagematrix.integrations.export.github import LIMIT as GITHUB_LIMIT
from imagematrix.integrations.export.github import make_github_matrix
from imagematrix.integrations.export.gitlab import LIMIT as GITLAB_LIMIT
from imagematrix.integrations.export.gitlab import make_gitlab_pipeline
from imagematrix.integrations.export.jobs import split_jobs

TWO_IMAGES = ("axes:", "  base:\n    version: v7\n    template: training.j2\naxes:")
PLATFORMS = ("axes:", "axes:\n  platform: [linux/amd64, linux/arm64]")


def cells(count, tmp_path="."):
    image = Image(name="training", version="v1", template="t.j2", context=tmp_path)
    return [Cell(image=image, axes={"site": f"s{number}"}, properties={}) for number in range(count)]


def buildable(path, expression=None):
    planned = plan(load_matrix(path), PlanContext(), expression=expression)
    return [item.cell for item in planned.with_status(PlanStatus.BUILD)]


@given(st.integers(1, 600), st.none() | st.integers(1, 256), st.sampled_from([GITHUB_LIMIT, GITLAB_LIMIT]))
def test_jobs_respect_the_limit_and_none_is_idle(count, wanted, limit):
    if wanted and wanted > limit:
        return
    result = split_jobs(cells(count), limit, expression="", wanted=wanted)
    assert len(result) == min(count, wanted or limit, limit)
    assert len({job.name for job in result}) == len(result)
    assert len({(job.only, job.shard) for job in result}) == len(result)


@pytest.mark.parametrize("wanted", [None, 1, 5])
@pytest.mark.parametrize("changes", [[], [TWO_IMAGES], [PLATFORMS]])
def test_jobs_together_build_every_cell_once(project, wanted, changes):
    path = project(*changes, template="FROM {{ base }}\n")
    matrix = load_matrix(path)
    built = []
    for job in split_jobs(buildable(path), GITHUB_LIMIT, expression="", wanted=wanted):
        planned = select_shard(plan(matrix, PlanContext(), expression=job.only), job.shard, {})
        part = planned.with_status(PlanStatus.BUILD)
        assert {item.cell.platform for item in part} <= set(job.platforms)
        built += [(item.cell.image.name, item.cell.id) for item in part]
    assert len(set(built)) == len(built)
    assert set(built) == {(cell.image.name, cell.id) for cell in buildable(path)}


def test_shards_of_a_filtered_matrix_keep_the_filter(project):
    path = project()
    expression = "cuda>=12,march=znver*"
    result = split_jobs(buildable(path, expression), GITHUB_LIMIT, expression=expression, wanted=3)
    assert [job.only for job in result] == [expression] * 3
    assert [job.shard for job in result] == [Shard(number=number, count=3) for number in (1, 2, 3)]


@pytest.mark.parametrize("wanted", [None, 3])
@pytest.mark.parametrize("expression", ["image=base", "image=training,cuda=none", "image!=base", "image=*"])
def test_jobs_build_only_the_selected_images(project, wanted, expression):
    path = project(TWO_IMAGES, template="FROM {{ base }}\n")
    matrix = load_matrix(path)
    built = []
    for job in split_jobs(buildable(path, expression), GITHUB_LIMIT, expression=expression, wanted=wanted):
        part = select_shard(plan(matrix, PlanContext(), expression=job.only), job.shard, {})
        built += [(item.cell.image.name, item.cell.id) for item in part.with_status(PlanStatus.BUILD)]
    assert sorted(built) == sorted((cell.image.name, cell.id) for cell in buildable(path, expression))


def test_invalid_requests_are_rejected():
    with pytest.raises(UsageError, match="no cell can be built"):
        split_jobs([], GITHUB_LIMIT, expression="")
    with pytest.raises(UsageError, match="300 exceeds the limit of 256"):
        split_jobs(cells(3), GITHUB_LIMIT, expression="", wanted=300)


def test_github_matrix_is_one_line_of_json():
    text = make_github_matrix(split_jobs(cells(2), GITHUB_LIMIT, expression=""))
    assert text == (
        '{"include":[{"name":"s0","only":"site=s0","shard":"1/1","platforms":"linux/amd64"},'
        '{"name":"s1","only":"site=s1","shard":"1/1","platforms":"linux/amd64"}]}\n'
    )


@pytest.mark.parametrize("count", [2, 500])
def test_gitlab_pipeline_conforms_to_the_schema(tmp_path, count):
    text = make_gitlab_pipeline(split_jobs(cells(count), GITLAB_LIMIT, expression="site=s*"))
    assert len(yaml.safe_load(text)["build"]["parallel"]["matrix"]) == min(count, GITLAB_LIMIT)
    path = tmp_path / "cells.yml"
    path.write_text(text)
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.gitlab-ci", str(path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_github_matrix_conforms_to_the_schema(tmp_path):
    workflow = {
        "on": "push",
        "jobs": {
            "build": {
                "runs-on": "ubuntu-24.04",
                "strategy": {
                    "matrix": json.loads(
                        make_github_matrix(split_jobs(cells(500), GITHUB_LIMIT, expression=""))
                    )
                },
                "steps": [{"run": "true"}],
            }
        },
    }
    path = tmp_path / "workflow.yml"
    path.write_text(yaml.safe_dump(workflow))
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
