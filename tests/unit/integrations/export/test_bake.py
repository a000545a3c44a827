"""Files for docker buildx bake: bake reads exactly the inputs of a build."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagematrix.build.plan.protocols import BuildRequest, BuildSources
from imagematrix.errors import UsageError
from imagematrix.images.catalog import labels
from imagematrix.integrations.export.bake import LIMIT, make_bake_files


def _buildx():
    if not shutil.which("docker"):
        return False
    return subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode == 0


needs_buildx = pytest.mark.skipif(
    not _buildx() and not os.environ.get("CI"), reason="docker buildx is not installed"
)


def order(dockerfile="FROM scratch\n", reference="reg:5000/ml/training:v1-cpu-0123", **labels):
    return BuildRequest(
        reference=reference,
        dockerfile=dockerfile,
        sources=BuildSources(context=Path("templates/training"), platform="linux/amd64"),
        labels=labels,
    )


def printed(folder, orders):
    """Return the targets as bake itself parses them, by name."""
    result: dict[str, object] = {}
    for name, text in make_bake_files(orders).items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        command = ["docker", "buildx", "bake", "--file", str(path), "--print"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
        result |= json.loads(done.stdout)["target"]
    return result


def test_target_matches_a_build():
    (text,) = make_bake_files([order(one="1")]).values()
    assert json.loads(text) == {
        "group": {"default": {"targets": ["reg_5000_ml_training_v1-cpu-0123"]}},
        "target": {
            "reg_5000_ml_training_v1-cpu-0123": {
                "context": "templates/training",
                "dockerfile-inline": "FROM scratch\n",
                "platforms": ["linux/amd64"],
                "tags": ["reg:5000/ml/training:v1-cpu-0123"],
                "labels": {"one": "1"},
                "annotations": [],
                "args": {"SOURCE_DATE_EPOCH": "0"},
                "attest": ["type=provenance,disabled=true"],
            }
        },
    }


def test_duplicate_target_names_are_rejected():
    with pytest.raises(UsageError, match="the same name for bake"):
        make_bake_files([order(reference=f"a{sign}b:v1") for sign in "/_"])


def test_base_in_the_matrix_refers_to_its_target():
    base = order(reference="base:v1")
    upon = order("FROM base:v1\n", reference="app:v1")
    sources = replace(upon.sources, images={"base:v1": "target:base_v1"})
    (text,) = make_bake_files([base, replace(upon, sources=sources)]).values()
    assert json.loads(text)["target"]["app_v1"]["contexts"] == {"base:v1": "target:base_v1"}


@given(st.integers(0, 3 * LIMIT + 1))
@settings(max_examples=20)
def test_targets_are_split_over_files(count):
    files = make_bake_files([order(reference=f"a:v{number}") for number in range(count)])
    parts = [json.loads(text) for text in files.values()]
    assert all(len(part["target"]) <= LIMIT for part in parts)
    assert all(part["group"]["default"]["targets"] == list(part["target"]) for part in parts)
    assert [target["tags"][0] for part in parts for target in part["target"].values()] == [
        f"a:v{number}" for number in range(count)
    ]


@needs_buildx
@given(st.lists(st.text(st.sampled_from("$%{}~\\\"'\n\ta é\u2028"), min_size=1), min_size=20, max_size=60))
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bake_reads_every_byte_unchanged(tmp_path, texts):
    texts += ["${X}", "$${X}", "$$${X}", "%{http_code}", "%%{x}", "\\${Y}", "${~ x ~}", "{{ x }}", "$%{{"]
    orders = [
        order(f"FROM scratch\nRUN <<E\n{text}\nE", f"a:v{n}", **{labels.CELL: text})
        for n, text in enumerate(texts)
    ]
    result = printed(tmp_path, orders)
    for number, text in enumerate(texts):
        target = result[f"a_v{number}"]
        assert target["dockerfile-inline"] == f"FROM scratch\nRUN <<E\n{text}\nE"
        assert target["labels"] == {labels.CELL: text}
        assert target["annotations"] == [f"{labels.CELL}={text}"]
        assert target["args"] == {"SOURCE_DATE_EPOCH": "0"}
        assert target["tags"] == [f"a:v{number}"]
        assert target["attest"] == ["type=provenance,disabled=true"]
