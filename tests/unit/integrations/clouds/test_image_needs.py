"""What `imagematrix needs` prints, for people and for systems that know only some facts."""

from __future__ import annotations

import json

import pytest

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.images.catalog.catalog import Catalog

REGISTRY = "registry.example.com/ml/training"
ASKING = "cuda>=12.8 brand=tesla,driver>=535,driver<536"


@pytest.fixture
def write_catalog(tmp_path):
    """Call it with variants to write a catalog; the options that name it are returned."""

    def write(*variants):
        published = tuple(
            replace(variant, reference=f"{REGISTRY}:v1-{number}", digest=f"sha256:{number:064d}")
            for number, variant in enumerate(variants)
        )
        path = tmp_path / "training.json"
        path.write_text(
            json_documents.dump_json(Catalog(image=REGISTRY, version="v1", variants=published).to_json())
        )
        return f"{REGISTRY}:v1", "--catalog", str(path)

    return write


@pytest.fixture
def kinds(make):
    """A variant of each mode, and one for CPUs only."""
    return {
        "host": make.variant(driver=make.umd("host"), cubins=("89", "90"), cpu_flags=make.flags("x86-64-v3")),
        "exact": make.variant(driver=make.umd("exact", "580.65.06"), cubins=("90",)),
        "compat": make.variant(driver=make.umd("compat", "560.35.05"), cubins=("80",)),
        "cpu": make.cpu_variant(),
    }


def test_an_image_that_fits_with_any_driver_has_no_oldest_one(cli, conforms, write_catalog, make, kinds):
    unknown = make.variant(driver=make.umd("host"), cuda=None, cubins=(), facts=(("cubins", "unknown"),))
    for variants in ([unknown], [kinds["host"], unknown]):
        asked = write_catalog(*variants)
        assert conforms(json.loads(cli("needs", *asked, "--json").out))["least"]["driver"] is None
        assert "oldest driver" not in cli("needs", *asked).out.partition(" as a whole: ")[2]


def test_memory(cli, conforms, write_catalog, kinds):
    large = replace(kinds["host"], gpu_memory_mib=24_000)
    asked = write_catalog(large, replace(large, gpu_memory_mib=15_000))
    document = conforms(json.loads(cli("needs", *asked, "--json").out))
    needed = [one["needs"][0]["memory_mib"] for one in document["variants"]]
    assert (needed, document["least"]["memory_mib"]) == ([24_000, 15_000], 15_000)
    known = "arch,cpu-flags,cuda,gpu-compute,gpu-least-memory-mib"
    text = " ".join(cli("needs", *asked, "--knows", known).out.split())
    assert "with 24000 MiB or more" in text
    assert "with 15000 MiB or more" in text.partition(" as a whole: ")[2]
    assert "with 24000 MiB or more" in " ".join(cli("needs", *asked).out.split())
    refused = cli("needs", *asked, "--knows", "cuda,gpu-name")
    assert refused.code == 3
    assert "more facts: gpu-least-memory-mib" in refused.err


def test_all_facts(cli, conforms, write_catalog, kinds):
    result = cli("needs", *write_catalog(*kinds.values()), "--json")
    document = conforms(json.loads(result.out))
    host, exact, compat, cpu = document["variants"]
    assert [one["driver"] for one in document["variants"]] == ["host", "exact", "compat", None]
    first = host["needs"][0]
    assert first["driver"]["oldest"] == "525.60.13"
    assert first["driver"]["rules"] == ["driver-cuda"]
    assert first["computes"] == [{"first": "8.9", "last": "9.9"}]
    assert {"L4", "H100"} <= {*first["gpu_names"]}
    assert first["vendor"] == "nvidia"
    assert first["cpu"]["level"] == "x86-64-v3"
    assert exact["needs"][0]["driver"] == {"version": "580.65.06"}
    assert [way["driver"]["below"] for way in compat["needs"]] == ["536.0", "551.0"]
    assert compat["needs"][0]["data_centre"] is True
    assert cpu["needs"] == [{"gpus": False, "accelerators": False}]
    assert document["least"]["driver"] == {
        "version": "525.60.13",
        "reference": f"{REGISTRY}:v1-0",
        "rules": ["driver-cuda"],
    }
    assert document["least"]["computes"][0]["first"] == "8.0"
    assert document["least"]["cpu_level"] is None
    assert document["knows"] is None
    assert document["left_out"] == []


def test_the_text(cli, write_catalog, kinds):
    text = cli("needs", *write_catalog(*kinds.values())).out
    assert f"{REGISTRY}:v1-0: linux/amd64, driver mode host, CUDA 12.4" in text
    assert "needs driver 525.60.13 or newer (driver-cuda)" in text
    assert "needs driver 580.65.06; NVIDIA GPUs 9.0: " in text
    assert "needs driver 535.0 or newer (driver-compat), older than 536.0; NVIDIA GPUs 8.0, 8.6" in text
    assert "needs no GPU\n" in text
    assert "CPU x86-64-v3" in text
    facts = "driver,gpu-name,driver-user-mode-differs,gpu-state,accelerators"
    told = " ".join(cli("needs", *write_catalog(*kinds.values()), "--knows", facts).out.split())
    assert "GPU state ok or vgpu; another user-mode driver than the kernel modules: no" in told
    assert "needs no GPU; other accelerators: no" in told


def test_the_text_has_all_facts_of_a_variant_about_which_those_of_people_do_not_decide(
    cli, write_catalog, kinds
):
    brand = replace(kinds["host"], requires=("brand=geforce",))
    text = " ".join(cli("needs", *write_catalog(kinds["exact"], brand)).out.split())
    assert "needs driver 580.65.06; NVIDIA GPUs 9.0: " in text
    assert f"{REGISTRY}:v1-1: linux/amd64, driver mode host" in text
    assert "GPU brand geforce" in text
    assert "left out" not in text


def test_some_facts(cli, conforms, write_catalog, kinds):
    options = (*write_catalog(*kinds.values()), "--knows", "cuda, gpu-name", "--injects")
    document = conforms(json.loads(cli("needs", *options, "--json").out))
    assert document["knows"] == ["cuda", "gpu-name"]
    assert document["injects"] is True
    host, _ = document["variants"]
    (way,) = host["needs"]
    assert way["cuda"] == {"first": "12.0", "last": None}
    assert {"L4", "H100 PCIe"} <= {*way["gpu_names"]}
    assert "A100 PCIe 80GB" not in way["gpu_names"]
    assert {"arch", "cpu-flags", "driver-kind", "gpu-state"} <= {one["fact"] for one in host["assumptions"]}
    exact, compat = document["left_out"]
    assert "two user-mode drivers" in exact["reason"]
    assert compat["missing"] == [["driver"]]
    text = cli("needs", *options).out
    assert "needs a driver for CUDA 12.0 or newer; NVIDIA GPUs 8.9 to 9.0: " in text
    assert f"assumed for {REGISTRY}:v1-0: the CPUs have x86-64-v3" in text
    assert f"left out: {REGISTRY}:v1-1: it has driver 580.65.06 inside" in text


def test_code_that_is_unknown_admits_any_gpu(cli, conforms, write_catalog, make):
    variant = make.variant(driver=make.umd("host"), cubins=(), facts=(("cubins", "unknown"),))
    document = conforms(json.loads(cli("needs", *write_catalog(variant), "--json").out))
    assert any(way.get("unknown_compute") for way in document["variants"][0]["needs"])


def test_a_catalog_without_requirements_is_taken_at_its_word(cli, write_catalog, kinds):
    document = json.loads(cli("needs", *write_catalog(kinds["host"]), "--injects", "--json").out)
    assert [one["fact"] for one in document["variants"][0]["assumptions"]] == ["nvidia-require"]


def test_an_upper_bound_of_the_release(cli, write_catalog, make):
    variant = make.variant(driver=make.umd("host"), requires=("cuda>=12.4,cuda<13.0",))
    result = cli("needs", *write_catalog(variant), "--knows", "cuda,gpu-compute,cpu-level", "--json")
    (way,) = json.loads(result.out)["variants"][0]["needs"]
    assert way["cuda"] == {"first": "12.4", "last": "12.9"}
    assert way["computes"] == [{"first": "8.9", "last": "8.9"}]
    assert "cpu" not in way
    text = cli("needs", *write_catalog(variant), "--knows", "cuda,gpu-compute").out
    assert "a driver for CUDA 12.4 to 12.9; NVIDIA GPUs 8.9" in text


def test_requirements_as_written_decide_where_the_driver_is_injected(cli, write_catalog, kinds):
    asking = replace(kinds["host"], runtime_requires=(ASKING,))
    options = (*write_catalog(asking), "--knows", "cuda,gpu-name")
    injected = json.loads(cli("needs", *options, "--injects", "--json").out)["variants"][0]
    assert injected["needs"][0]["cuda"]["first"] == "12.8"
    assert injected["requires"] == {"expressions": [ASKING], "stricter": "image"}
    assert "NVIDIA_REQUIRE_* is stricter than its code: cuda>=12.8" in cli("needs", *options, "--injects").out
    own = json.loads(cli("needs", *options, "--json").out)["variants"][0]
    assert own["needs"][0]["cuda"]["first"] == "12.0"
    assert own["requires"] is None
    lenient = write_catalog(replace(kinds["host"], runtime_requires=("cuda>=11.0",)))
    document = json.loads(cli("needs", *lenient, "--injects", "--json").out)
    assert document["variants"][0]["requires"]["stricter"] == "code"
    assert "no stricter than its code" in cli("needs", *lenient, "--injects").out


def test_without_a_statement_the_exit_code_is_3(cli, conforms, write_catalog, kinds):
    options = (*write_catalog(kinds["host"], kinds["exact"]), "--knows", "gpu-name")
    result = cli("needs", *options)
    assert result.code == 3
    assert result.out == ""
    assert f"{REGISTRY}:v1-0: a statement would need more facts: cuda or driver" in result.err
    assert f"{REGISTRY}:v1-1: a statement would need more facts: driver" in result.err
    document = conforms(json.loads(cli("needs", *options, "--json").out))
    assert document["variants"] == []
    assert document["least"]["driver"] is None


def test_a_need_that_no_node_meets(cli, write_catalog, make):
    variant = make.variant(driver=make.umd("host"), cubins=("89",), requires=("arch>=9.0,arch<8.0",))
    result = cli("needs", *write_catalog(variant))
    assert result.code == 3
    assert "no node fits it" in result.err


def test_facts_that_do_not_tell_which_nodes_fit(cli, write_catalog, kinds):
    asked = write_catalog(replace(kinds["host"], requires=("brand=geforce",)))
    refused = cli("needs", *asked, "--knows", "cuda,gpu-name")
    assert refused.code == 3
    assert "a statement would need more facts: gpu-brand" in refused.err
    asked = write_catalog(replace(kinds["host"], requires=("brand=geforce",), gpu_memory_mib=24_000))
    refused = cli("needs", *asked, "--knows", "arch")
    assert refused.code == 3
    assert "no statement in these facts proves a node to fit" in refused.err


def test_what_cannot_be_expressed_is_left_out(cli, write_catalog, make):
    variant = make.cpu_variant(cpu_flags=frozenset(["made_up"]))
    result = cli("needs", *write_catalog(variant))
    assert result.code == 3
    assert "made_up" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--knows", "cuda,gpu-names"), "did you mean 'gpu-name'?"),
        (("--knows", ""), "invalid fact: ''"),
        (("--for", "runpods"), "did you mean 'runpod'?"),
        (("--for", "runpod", "--knows", "cuda"), "leave out --knows"),
        (("--for", "runpod", "--injects"), "leave out --injects"),
        (("--for", "runpod", "--allow-cpu"), "leave out --allow-cpu"),
        (("--where", "cuda=1"), "no value of the axis cuda matches 1"),
    ],
)
def test_wrong_input(cli, write_catalog, kinds, options, message):
    result = cli("needs", *write_catalog(kinds["host"]), *options)
    assert result.code == 2
    assert message in result.err
