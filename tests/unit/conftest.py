"""What the unit tests share: a small matrix to be spoilt, the shipped one with its catalog, the schemas."""

import json
import textwrap
from pathlib import Path

import jsonschema
import pytest

from imagematrix import documents
from imagematrix.build import labels
from imagematrix.build.plan import plan
from imagematrix.catalog.catalog import Catalog
from imagematrix.facts import marches
from imagematrix.matrix.load import load

ROOT = Path(__file__).parents[2]
GOOD = """\
schema: imagematrix.matrix/v1
images:
  training:
    version: v1
    template: training.j2
    context: .
axes:
  cuda: [none, "11.8", "12.4"]
  compute: ["7.0", "8.9"]
  driver: [535.261.03, 550.163.01]
  march: [x86-64-v3, znver4]
properties:
  cuda:
    none: {base: "debian:trixie", compiler: gcc-14}
    "11.8": {base: "debian:bookworm", compiler: gcc-12}
    "12.4": {base: "debian:trixie", compiler: gcc-14}
exclude:
  - {cuda: "11.8", driver: 550.163.01, why: they have the newer toolkit}
"""
TEMPLATE = """\
FROM {{ base }} AS compiler
RUN apt-get install g++
FROM compiler AS program
RUN cc {{ march_option }} main.c{% if cuda %} -DSM={{ sm }}{% endif %}

FROM {{ base }}
COPY --from=program /a.out /
"""


@pytest.fixture
def project(tmp_path):
    """A folder with the good matrix and its template; call it with (old, new) pairs to write a spoilt one."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "training.j2").write_text(TEMPLATE)
    path = tmp_path / "matrix.yaml"
    path.write_text(GOOD)

    def spoil(*changes, text=None, template=None):
        content = GOOD if text is None else textwrap.dedent(text)
        for old, new in changes:
            assert old in content
            content = content.replace(old, new)
        path.write_text(content)
        if template is not None:
            (tmp_path / "templates" / "training.j2").write_text(textwrap.dedent(template))
        return path

    return spoil


@pytest.fixture(scope="session")
def shipped():
    """The path of the shipped matrix."""
    return ROOT / "matrix.yaml"


@pytest.fixture(scope="session")
def shipped_catalog(shipped):
    """The catalog of all that the shipped matrix builds."""
    variants = []
    for item in plan(load(shipped), None).with_status("build"):
        flags = marches.required(item.cell.axes["march"], item.cell.properties["compiler"])
        variants.append(labels.variant(item.cell, flags, f"training:v1-{item.cell.id}-0123456789ab"))
    return Catalog(image="training", version="v1", variants=tuple(variants))


@pytest.fixture(scope="session")
def catalog_file(shipped_catalog, tmp_path_factory):
    """The same, saved."""
    path = tmp_path_factory.mktemp("catalog") / "training.json"
    path.write_text(documents.dump(shipped_catalog.to_json()))
    return path


@pytest.fixture(scope="session")
def profiles():
    """The saved hosts by name: their files."""
    return {path.stem: path for path in (ROOT / "tests" / "hosts").glob("*.json")}


@pytest.fixture(scope="session")
def conforms():
    """Call it with a document to hold it against the JSON Schema that its `schema` names."""

    def check(document):
        kind = document["schema"].removeprefix("imagematrix.").removesuffix("/v1")
        schema = json.loads((ROOT / "imagematrix" / "schemas" / f"{kind}.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(document)

    return check
