"""Warm images in commands: what `select` prints, what `explain` and `ls` say, who keeps to the variant."""

import json

import pytest

from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.probe import probe
from imagematrix.integrations.kubernetes.nodes.labels import make_labels

BASE, FITTING, OTHER = (f"sha256:{digit * 64}" for digit in "abc")
REGISTRY = "registry.example.com/ml"
VARIANT = "training:v1-cpu-0123456789ab"
HOST = {
    "schema": "imagematrix.host/v1",
    "arch": "x86_64",
    "cpu": {"vendor": "GenuineIntel", "model": "Xeon", "flags": ["lm", "avx2"], "level": None, "usable": 2},
    "driver": None,
    "gpus": [],
    "devices": [],
    "accelerators": [],
    "warnings": [],
}


def warm(digest, name, match, **more):
    return {"base": BASE, "reference": name, "digest": digest, "size": 5, "match": match, "schema": 1, **more}


def catalog_with(*warm_images):
    variant: dict[str, object] = {
        "reference": VARIANT,
        "digest": BASE,
        "platform": "linux/amd64",
        "cuda": None,
    }
    variant |= {"cubins": [], "ptx": [], "compressed_fatbin": False, "driver": None, "march": None}
    document = {"schema": "imagematrix.catalog/v1", "image": "training", "version": "v1"}
    other = {"reference": "training:v1-arm-0123456789ab", "digest": OTHER, "platform": "linux/arm64"}
    variants = [variant | {"cpu_flags": ["avx2"], "vendor": None, "size": 10}]
    variants.append(variants[0] | other)
    return document | {"variants": variants, **({"warm": warm_images} if warm_images else {})}


@pytest.fixture
def ask(cli, tmp_path, monkeypatch):
    """Call it with a command and options to ask about a catalog with these warm images, for HOST."""
    monkeypatch.setenv("COLUMNS", "200")
    host = tmp_path / "host.json"
    host.write_text(json.dumps(HOST))

    def call(command, *options, warm_images=WARM, host=host):
        file = tmp_path / "catalog.json"
        file.write_text(json.dumps(catalog_with(*warm_images)))
        hosted = ("--host", host) if command != "ls" and host else ()
        return cli(command, "training:v1", "--catalog", file, *hosted, *options)

    return call


WARM = (
    warm(OTHER, "training:v1-warm-a-0", {"cpu": {"vendor": "AuthenticAMD"}}),
    warm(FITTING, "training:v1-warm-a-1", {"cpus": 2}, inputs={"model": "/models/m"}),
)


def test_select_prints_the_warm_image_and_says_so(ask, conforms):
    answer = ask("select")
    assert answer.out == "training:v1-warm-a-1\n"
    assert answer.err == f"imagematrix: this is a warm image of {VARIANT}\n"
    document = conforms(json.loads(ask("select", "--json").out))
    assert (document["selected"], document["digest"], document["warm"]) == (VARIANT, BASE, FITTING)


@pytest.mark.parametrize("warm_images", [(), WARM[:1]])
def test_select_prints_the_variant_where_no_warm_image_fits(ask, warm_images):
    answer = ask("select", warm_images=warm_images)
    assert (answer.out, answer.err) == (f"{VARIANT}\n", "")


def test_the_option_and_the_site_keep_to_the_variant(ask, monkeypatch, tmp_path):
    assert ask("select", "--no-warm").out == f"{VARIANT}\n"
    assert "warm images" not in ask("explain", "--no-warm").out
    site = tmp_path / "site.toml"
    monkeypatch.setenv("IMAGEMATRIX_SITE", str(site))
    for text, printed in (("true", "training:v1-warm-a-1"), ("false", VARIANT)):
        site.write_text(f"warm = {text}\n")
        assert ask("select").out == f"{printed}\n"
    assert json.loads(ask("select", "--json").out)["warm"] is None
    site.write_text('warm = "false"\n')
    ask("select").refuses(2, f"{site}:1: warm: expected true or false, found a string")
    assert ask("select", warm_images=()).out == f"{VARIANT}\n", "without warm images, the file is not read"


def test_what_decides_for_others_keeps_to_the_variant(ask, tmp_path):
    assert ask("select", "--format", "classad").out == f'ImVariant_training = "{VARIANT}@{BASE}"\n'
    gang = ask("select", "--gang", tmp_path / "host.json", host=None)
    assert gang.out == f"{VARIANT}\n"


@pytest.mark.parametrize(
    "words",
    [
        ("kubernetes", "classes", "--json", "--image"),
        ("kubernetes", "render", "job"),
        ("kubernetes", "render", "prepull"),
        ("kubernetes", "render", "policy"),
    ],
)
def test_what_decides_for_classes_of_nodes_keeps_to_the_variant(cli, words, tmp_path):
    """A warm image is for the number of CPUs and the names that a class does not state."""
    labels = {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux", **make_labels(Host.from_json(HOST))}
    node = {"kind": "Node", "metadata": {"name": "n", "labels": labels}, "status": {}}
    nodes, catalog = tmp_path / "nodes.json", tmp_path / "catalog.json"
    nodes.write_text(json.dumps({"kind": "List", "items": [node]}))
    said = []
    for warm_images in ((), WARM):
        catalog.write_text(
            json.dumps(catalog_with(*warm_images)).replace('"training', f'"{REGISTRY}/training')
        )
        said.append(cli(*words, f"{REGISTRY}/training:v1", "--nodes", nodes, "--catalog", catalog).out)
    assert BASE in said[0]
    assert said[1] == said[0]


def test_explain_names_what_keeps_a_warm_image_away(ask):
    lines = ask("explain").out.splitlines()
    begin = lines.index("warm images of the selected variant")
    assert lines[begin + 1 : begin + 5] == [
        "       warm-a-0",
        "         cpu.vendor: it was made for AuthenticAMD, and this is GenuineIntel",
        "       warm-a-1 <- selected in its place",
        "         hits with /models/m",
    ]
    assert "warm" not in ask("explain", warm_images=()).out


def test_code_for_avx_512_is_not_for_a_cpu_without(ask):
    images = (warm(OTHER, "training:v1-warm-a-0", {"cpu": {"flags": ["avx2", "avx512f"]}}),)
    assert ask("select", warm_images=images).out == f"{VARIANT}\n"
    said = ask("explain", warm_images=images).out
    assert "cpu.flags: it was made for avx2, avx512f, and this is without avx512f" in said


def test_ls_has_a_column_only_where_there_are_warm_images(ask):
    heading, _, *rows = ask("ls").out.splitlines()
    assert heading.split()[-1] == "warm"
    assert [row.split("MB")[1].strip() for row in rows] == ["2, /models/m", "-"]
    assert "warm" not in ask("ls", warm_images=()).out


def test_this_machine_is_asked_how_many_cpus_it_lets_a_process_use(ask, tmp_path):
    usable = probe(nvml=False).cpu.usable or 0
    images = tuple(
        warm(OTHER, f"training:v1-warm-a-{number}", {"cpus": number}) for number in range(1, usable + 1)
    )
    answer = ask("select", "--gpus", "none", warm_images=images, host=None)
    assert answer.out == f"training:v1-warm-a-{usable}\n"
    old = tmp_path / "old.json"
    old.write_text(json.dumps(HOST | {"cpu": {"vendor": "GenuineIntel", "flags": ["lm", "avx2"]}}))
    assert ask("select", warm_images=images, host=old).out == f"{VARIANT}\n", "a saved host may be another"
