"""A build that trims device code in a stage without imagematrix."""

import json
import shutil
from pathlib import Path

import pytest

from imagematrix.build.trim.rules import Rules
from imagematrix.build.trim.trim import trim

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "unit" / "audit" / "data" / "zstd.fatbin"
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  trimmed: {version: v1, template: trim.j2, context: files, development: true}
axes:
  cuda: ["12.4"]
  compute: ["8.0", "9.0"]
"""
TEMPLATE = """\
{% import "macros.j2" as debian %}
FROM debian:trixie AS environment
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3
COPY code.fatbin /opt/
{{ debian.trim("/opt", compute) }}

FROM debian:trixie
COPY --from=environment /opt/ /opt/
"""


def test_a_build_and_the_trim_command_give_the_same_files(engine, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "templates").mkdir()
    shutil.copy(ROOT / "templates" / "macros.j2", tmp_path / "templates")
    shutil.copy(DATA, tmp_path / "files" / "code.fatbin")
    (tmp_path / "templates" / "trim.j2").write_text(TEMPLATE)
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    result = engine.imagematrix("build", "--json", cwd=tmp_path)
    cells = json.loads(result.stdout)["cells"]
    assert {cell["status"] for cell in cells} == {"built"}
    for cell in cells:
        (compute,) = (word for word in ("8.0", "9.0") if f"sm{word.replace('.', '')}" in cell["cell"])
        trim([tmp_path / "files"], Rules(computes=(compute,)), output=tmp_path / compute)
        wanted = (tmp_path / compute / "files" / "code.fatbin").read_bytes()
        engine.docker("create", "--name", f"trim-{compute}", cell["reference"], "true")
        engine.docker("cp", f"trim-{compute}:/opt/code.fatbin", tmp_path / f"{compute}.fatbin")
        assert (tmp_path / f"{compute}.fatbin").read_bytes() == wanted
    again = json.loads(engine.imagematrix("plan", "--json", cwd=tmp_path).stdout)["cells"]
    assert {cell["status"] for cell in again} == {"up-to-date"}
    verified = engine.imagematrix("verify", *(cell["reference"] for cell in cells))
    assert verified.returncode == 0
