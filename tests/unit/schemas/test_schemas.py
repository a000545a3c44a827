"""The JSON Schemas are valid, and all documents conform to them."""

import json
from importlib.resources import files

import jsonschema
import pytest
import yaml

from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog.catalog import Catalog, Ptx, UserModeDriver, Variant
from imagematrix.selection.selector import explain

SCHEMAS = {path.name.removesuffix(".json"): path for path in (files("imagematrix") / "schemas").iterdir()}
DIGEST = f"sha256:{'0' * 64}"


def test_every_kind_of_document_has_a_schema():
    assert SCHEMAS.keys() >= {"build", "catalog", "host", "matrix", "plan", "selection"}


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_each_schema_is_valid_and_identified(kind):
    schema = json.loads(SCHEMAS[kind].read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"urn:imagematrix:{kind}:v1"
    assert schema["properties"]["schema"] == {"const": f"imagematrix.{kind}/v1"}
    assert schema["title"]
    assert schema["description"]


def test_hosts_and_selections_conform(profiles, shipped_catalog, conforms):
    for path in profiles.values():
        host = Host.load(path)
        conforms(host.to_json())
        for wanted in ("all", "none") if host.gpus else ("none",):
            conforms(explain(host, shipped_catalog, gpus=wanted).to_json())


@pytest.mark.parametrize(
    "driver",
    [
        UserModeDriver(mode="exact", version="550.163.01"),
        UserModeDriver(mode="compat", version="560.35.05", branches=(535, 550), brands=("tesla",)),
        UserModeDriver(mode="host"),
    ],
)
def test_catalogs_conform(shipped_catalog, conforms, driver):
    conforms(shipped_catalog.to_json())
    variant = Variant(
        reference="reg:5000/ml/training@sha256:0",
        digest=DIGEST,
        platform="linux/amd64",
        cuda="12.4",
        cubins=("89", "90a"),
        ptx=(Ptx(target="90", isa="8.4"),),
        driver=driver,
        size=1,
        axes=(("python", "3.13"),),
    )
    conforms(Catalog(image="training", version="v1", variants=(variant,), defaults=variant.axes).to_json())


def test_plans_conform(shipped, conforms):
    document = conforms(plan(load_matrix(shipped), PlanContext()).to_json())
    assert {cell["status"] for cell in document["cells"]} == {"build", "excluded", "infeasible"}


@pytest.mark.parametrize("loader", [yaml.SafeLoader, yaml.BaseLoader])
def test_shipped_matrix_conforms(shipped, conforms, loader):
    conforms(yaml.load(shipped.read_text(), loader))  # noqa: S506 - both are safe


@pytest.mark.parametrize(
    "change",
    [
        ("images:", "image:"),
        ("axes:", "axis:"),
        ("    version: v1", "    version: v1-2"),
        ("    version: v1", "    ver: v1"),
        ("  training:", "  Training:"),
        ("znver4]", "native]"),
        ('"7.0"', "sm_70"),
        ("550.163.01]", "next]"),
        ('"12.4"]', "12.4.1]"),
        ("- {cuda", "- {why: x}\n  - {CUDA"),
        ('base: "debian:trixie"', 'base: "a\\nRUN b"'),
        ("march: [x86-64-v3, znver4]", "march: []"),
        ("context: .", "context: .\n    defaults: {march: znver4}"),
        ("axes:", "compression: lz4\naxes:"),
        ("axes:", "compression: {level: 3}\naxes:"),
        ("axes:", "compression: {type: zstd, level: 20}\naxes:"),
        ("context: .", "context: .\n    compression: {type: gzip, level: 10}"),
        ("context: .", "context: .\n    compression: {type: gzip, level: '0'}"),
        ("context: .", "context: .\n    warm_up: {}"),
        ("context: .", "context: .\n    warm_up: {command: []}"),
        ("context: .", "context: .\n    warm_up: {command: a, gpu: 1}"),
        ("context: .", "context: .\n    warm_up: {command: a, gpus: 0}"),
        ("context: .", "context: .\n    warm_up: {command: a, timeout: 0m}"),
        ("context: .", "context: .\n    warm_up: {command: a, max_size: much}"),
        ("context: .", "context: .\n    warm_up: {command: a, network: host}"),
        ("context: .", "context: .\n    warm_up: {command: a, match: cpu}"),
        ("context: .", "context: .\n    warm_up: {command: a, environment: {Hf_Token: x}}"),
        ("context: .", "context: .\n    warm_up: {command: a, inputs: {model: models}}"),
    ],
)
def test_schema_rejects_what_validate_rejects(project, conforms, change):
    conforms(yaml.safe_load(project().read_text()))
    with pytest.raises(jsonschema.ValidationError):
        conforms(yaml.safe_load(project(change).read_text()))


@pytest.mark.parametrize("loader", [yaml.SafeLoader, yaml.BaseLoader])
@pytest.mark.parametrize(
    "compression", ["zstd", "{type: zstd, level: 19}", "{type: gzip}", "{type: gzip, level: 9}"]
)
def test_every_compression_conforms(project, conforms, loader, compression):
    path = project(("axes:", f"compression: {compression}\naxes:"))
    load_matrix(path)
    conforms(yaml.load(path.read_text(), loader))  # noqa: S506 - both are safe


@pytest.mark.parametrize("loader", [yaml.SafeLoader, yaml.BaseLoader])
def test_every_key_of_a_warm_up_conforms(project, conforms, loader):
    keys = "gpus: 2, timeout: 1h, network: engine, max_size: 1.5GiB, match: compute"
    variables = "{TOKENIZERS_PARALLELISM: false, OMP_NUM_THREADS: 4}"
    command = f"command: [serve, --port, 8000], environment: {variables}, inputs: {{model: /models/m}}"
    path = project(("context: .", f"context: .\n    warm_up: {{{command}, {keys}}}"))
    load_matrix(path)
    conforms(yaml.load(path.read_text(), loader))  # noqa: S506 - both are safe


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ("host", {"arch": "x86_64"}),
        ("catalog", {"image": "a", "version": "v1", "variants": [{}]}),
        ("selection", {"selected": "x"}),
        ("plan", {"cells": [{"status": "maybe"}]}),
        ("build", {"cells": {}}),
    ],
)
def test_invalid_documents_are_rejected(conforms, schema, document):
    with pytest.raises(jsonschema.ValidationError):
        conforms({"schema": f"imagematrix.{schema}/v1", **document})


def test_unknown_keys_are_allowed(profiles, conforms):
    host = json.loads(profiles["mig"].read_text())
    conforms(host | {"later": 1, "cpu": host["cpu"] | {"later": 1}})
