"""Bodies for RunPod, by the schema of its API.

The schema is the part about pods of RunPod's OpenAPI document. Its `source` and `date` are in it.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import gpus
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.integrations.clouds import runpod

SCHEMA = json.loads((Path(__file__).parent / "runpod_openapi.json").read_text())
IMAGE = "registry.example.com/ml/training"


def publish(*variants):
    published = tuple(
        replace(variant, reference=f"{IMAGE}:v1-{number}", digest=f"sha256:{number:064d}")
        for number, variant in enumerate(variants)
    )
    return Catalog(image=IMAGE, version="v1", variants=published)


def make_bodies(*variants):
    """Return valid bodies by GPU type, and the needs that they are made of."""
    needs = runpod.find_runpod_needs(publish(*variants))
    bodies = runpod.make_bodies(needs)
    for body in bodies:
        jsonschema.Draft202012Validator(SCHEMA).validate(body)
        assert not {"minCudaVersion", "allowedCudaVersions"} <= body["gpu"].keys()  # as its handler says
    return {body["gpu"]["id"]: body for body in bodies}, needs


def test_the_schema_refuses_what_the_api_refuses():
    for body in ({"name": "t", "gpu": {"id": "NVIDIA L4"}}, {"name": "t", "image": "t", "cuda": "12.8"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(SCHEMA).validate(body)


def test_every_gpu_type_is_of_one_capability():
    table = json.loads(Path(runpod.__file__).with_name("runpod.json").read_text())
    for name in table["gpus"]:
        assert len({product.compute for product in gpus.find_products(name)}) == 1, name


def test_one_body_for_each_gpu_type_on_which_a_variant_fits(make):
    bodies, needs = make_bodies(
        make.variant(driver=make.umd("host"), cubins=("89",)),
        make.variant(driver=make.umd("host"), cubins=("90", "100"), cuda="12.8"),
        make.variant(driver=make.umd("exact", "550.163.01")),
        make.variant(driver=make.umd("compat", "560.35.05")),
        make.cpu_variant(),
    )
    assert bodies["NVIDIA L40S"] == {
        "name": "training-v1",
        "image": f"{IMAGE}@sha256:{0:064d}",
        "gpu": {"id": "NVIDIA L40S", "minCudaVersion": "12.0"},
    }
    assert bodies["NVIDIA B200"]["gpu"]["minCudaVersion"] == "12.8"
    assert bodies["NVIDIA B200"]["image"].endswith(f"{1:064d}")
    assert "NVIDIA A40" not in bodies
    reasons = [one.reason for one in needs.left_out]
    assert len(reasons) == 3
    assert "two user-mode drivers" in reasons[0]
    assert "more facts: driver" in reasons[1]
    assert reasons[2] == runpod.NO_GPU


def test_an_upper_bound_is_a_list_of_releases(make):
    bodies, _ = make_bodies(make.variant(driver=make.umd("host"), requires=("cuda>=12.8,cuda<13.0",)))
    assert bodies["NVIDIA L4"]["gpu"]["allowedCudaVersions"] == ["12.8", "12.9"]


def test_the_variant_on_the_most_machines_comes_first_then_the_one_that_needs_least_of_the_cpu(make):
    host = make.umd("host")
    old, new = make.variant(driver=host), make.variant(driver=host, cuda="13.0")
    bodies, _ = make_bodies(new, old)
    assert bodies["NVIDIA L4"]["image"].endswith("1")
    fast = make.variant(driver=host, cpu_flags=make.flags("x86-64-v4"))
    bodies, _ = make_bodies(fast, old)
    assert bodies["NVIDIA L4"]["image"].endswith("1")
    near = make.variant(driver=host, cubins=("86",))
    bodies, _ = make_bodies(near, old)
    assert bodies["NVIDIA L4"]["image"].endswith("1")


def test_variants_that_differ_in_an_own_axis_are_left_to_the_user(make):
    host = make.umd("host")
    variants = [make.variant(driver=host, axes=(("python", version),)) for version in ("3.12", "3.13")]
    needs = runpod.find_runpod_needs(publish(*variants))
    with pytest.raises(UsageError, match="python"):
        runpod.make_bodies(needs)


def test_a_variant_in_no_registry(make):
    catalog = Catalog(image="t", version="v1", variants=(make.variant(driver=make.umd("host")),))
    with pytest.raises(UsageError, match="is in no registry") as caught:
        runpod.make_bodies(runpod.find_runpod_needs(catalog))
    assert "publish" in caught.value.remedy


def test_reasons_are_told_once_where_nothing_is_left(cli, make, tmp_path):
    path = tmp_path / "training.json"
    path.write_text(json.dumps(publish(make.cpu_variant()).to_json()))
    result = cli("needs", f"{IMAGE}:v1", "--catalog", path, "--for", "runpod")
    assert (result.code, result.err.count("it is for CPUs only, and a body asks for a GPU")) == (3, 1)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_command(cli, conforms, make, tmp_path, form):
    path = tmp_path / "training.json"
    variants = (make.variant(driver=make.umd("host")), make.cpu_variant())
    path.write_text(json.dumps(publish(*variants).to_json()))
    result = cli("needs", f"{IMAGE}:v1", "--catalog", str(path), "--for", "runpod", *form)
    if form:
        bodies = conforms(json.loads(result.out))["bodies"]
    else:
        bodies = [json.loads(line) for line in result.out.splitlines()]
        assert "assumed: the node runs images for linux/amd64" in result.err
        assert "left out: " in result.err
    assert {body["gpu"]["id"] for body in bodies} == {
        "NVIDIA GeForce RTX 4090",
        *("NVIDIA L4", "NVIDIA L40", "NVIDIA L40S"),
        *(f"NVIDIA RTX {number} Ada Generation" for number in ("2000", "4000", "6000")),
    }


def test_nothing_for_the_system(cli, make, tmp_path):
    path = tmp_path / "training.json"
    path.write_text(json.dumps(publish(make.variant(driver=make.umd("compat", "560.35.05"))).to_json()))
    result = cli("needs", f"{IMAGE}:v1", "--catalog", str(path), "--for", "runpod")
    assert result.code == 3
    assert result.out == ""
    assert f"{IMAGE}:v1-0: a statement would need more facts: driver" in result.err
