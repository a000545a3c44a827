"""`--for HOSTS` and `--at-most N` of plan, build, export, report and publish."""

from __future__ import annotations

import json

import pytest
from building import digest
from choosing import Make

from imagematrix.build.stores import engine as local
from imagematrix.common import json_documents
from imagematrix.errors import EngineError
from imagematrix.images.catalog import labels

AMX = "#define __AMX_TILE__ 1\n"  # a flag that no host of these tests has
TOO_MUCH = "#define __AVX2__ 1\n" + AMX
V3, ZEN = "cpu-x86-64-v3", "cpu-znver4"
GPU = "cuda12.4-sm89-drv550.163.01-znver4"
TOP = (
    "axes:",
    "  top:\n    version: v7\n    template: top.j2\n    context: .\n    prefer: [cpu-vendor]\naxes:",
)


@pytest.fixture
def fleet(tmp_path):
    """Call it with hosts by name to get the folder where they are saved."""

    def save(**hosts):
        folder = tmp_path / "fleet"
        folder.mkdir(exist_ok=True)
        for name, host in hosts.items():
            (folder / f"{name}.json").write_text(json_documents.dump_json(host.to_json()))
        return folder

    return save


@pytest.fixture
def saved(command, tmp_path):
    """Call it with the options of a command to get the file of its JSON."""

    def call(name, *options, **changes):
        path = tmp_path / name
        path.write_text(command(*options, "--json", **changes).out)
        return path

    return call


def gpu_host(**facts):
    return Make.host(Make.gpu(), march="znver4", **facts)


def cpu_host():
    return Make.host(driver=None, march="x86-64-v3")


def zen_host():
    return Make.host(driver=None, march="znver4")


def statuses(document):
    found: dict[str, list[str]] = {}
    for cell in document["cells"]:
        found.setdefault(cell["status"], []).append(cell["cell"])
    return found


def made(backend):
    return [words[1] for words in backend.calls if words[0] == "make"]


def test_plan_keeps_to_what_hosts_choose_and_the_default(command, fleet, conforms):
    folder = fleet(gpu=gpu_host())
    result = command("plan", "--for", folder, "--json")
    assert (result.code, result.err) == (0, "")
    document = conforms(json.loads(result.out))
    found = statuses(document)
    assert found["build"] == [V3, GPU]
    assert len(found["unneeded"]) == 10
    assert {cell["nearest_host"] for cell in document["cells"] if cell["status"] == "unneeded"} == {
        f"{folder}/gpu"
    }
    (image,) = document["for"]["images"]
    assert image["needed"] == [f"training:v1-{V3}", f"training:v1-{GPU}"]
    table = command("plan", "--for", folder)
    assert "10 cells" in table.out
    assert table.err == "2 build, 4 excluded, 2 infeasible, 10 unneeded\n"


def test_nearest_host_fails_the_fewest_rules(command, fleet):
    folder = fleet(b=gpu_host(), a=cpu_host())
    document = json.loads(command("plan", "--for", folder, "--json").out)
    nearest = {cell["cell"]: cell["nearest_host"] for cell in document["cells"]}
    assert nearest["cuda12.4-sm89-drv550.163.01-x86-64-v3"] == f"{folder}/b"
    assert nearest[ZEN] == f"{folder}/a"
    assert nearest[V3] is None


def test_only_selects_among_the_needed_cells(command, fleet):
    folder = fleet(gpu=gpu_host(), cpu=zen_host())
    result = command("plan", "--for", folder, "--only", "cuda=none", "--json")
    found = statuses(json.loads(result.out))
    assert found == {"build": [V3, ZEN]}
    assert result.code == 0


def test_unserved_hosts_exit_with_3_and_their_reasons(command, fleet, backend, conforms):
    folder = fleet(cpu=cpu_host(), old=gpu_host(driver="470.82.01"))
    for name in ("plan", "build"):
        result = command(name, "--for", folder)
        assert result.code == 3, name
        assert f"training:v1, {folder}/old (nearest: training:v1-cuda" in result.err
        assert "driver-exact: " in result.err
    assert made(backend) == [V3]
    document = conforms(json.loads(command("build", "--for", folder, "--json").out))
    (image,) = document["for"]["images"]
    assert [some["hosts"] for some in image["unserved"]] == [[f"{folder}/old"]]


def test_build_decides_again_by_what_images_contain(command, fleet, backend, conforms):
    backend.macros["-march=znver4"] = TOO_MUCH
    folder = fleet(gpu=gpu_host())
    result = command("build", "--for", folder, "--json", "--jobs", "1")
    assert result.code == 0
    assert "by what the images contain, hosts need more cells" in result.err
    found = statuses(conforms(json.loads(result.out)))
    assert found["built"] == [V3, "cuda12.4-sm89-drv550.163.01-x86-64-v3", GPU]
    assert sorted(made(backend)) == sorted(found["built"])  # each once
    assert len(found["unneeded"]) == 9
    again = command("build", "--for", folder)
    assert (again.code, len(made(backend))) == (0, 3)


def test_build_ends_after_a_failure(command, fleet, backend):
    backend.macros["-march=znver4"] = TOO_MUCH
    backend.errors[V3] = EngineError("gone")
    result = command("build", "--for", fleet(gpu=gpu_host()), "--jobs", "1")
    assert result.code == 8
    assert "need more cells" not in result.err


def test_verification_builds_each_cell_twice_only(command, fleet, backend):
    backend.macros["-march=znver4"] = TOO_MUCH
    backend.layers = []
    folder = fleet(gpu=gpu_host(), cpu=zen_host())
    result = command("build", "--for", folder, "--only", "cuda=none", "--verify-reproducible", "--jobs", "1")
    assert (result.code, made(backend)) == (0, [V3, V3, ZEN, ZEN])


def test_hosts_left_without_an_image_by_what_images_contain(command, fleet, backend):
    backend.macros |= {"-march=znver4": TOO_MUCH, "-march=x86-64-v3": TOO_MUCH}
    folder = fleet(zen=zen_host())
    command("build", "--for", folder).fails(3, f"training:v1, {folder}/zen", "the host's CPUs lack amx_tile")
    assert sorted(made(backend)) == [V3, ZEN]


def test_shards_build_what_the_claims_give(saved, fleet, cli, backend, conforms):
    backend.macros["-march=znver4"] = TOO_MUCH
    folder = fleet(gpu=gpu_host(), old=gpu_host(driver="470.82.01"))
    parts = [saved(f"{number}.json", "build", "--for", folder, "--shard", f"{number}/2") for number in (1, 2)]
    found = [statuses(conforms(json.loads(part.read_text()))) for part in parts]
    assert sorted(cell for one in found for cell in one["built"]) == [V3, GPU]
    assert [len(one["other-shard"]) for one in found] == [1, 1]
    assert cli("report", *parts).code == 0
    (folder / "old.json").unlink()
    cli("report", *parts, "--for", folder).fails(
        3, "hosts need images that are not built:\n  training:v1-cuda12.4-sm89-drv550.163.01-x86-64-v3"
    )
    parts.append(saved("3.json", "build", "--for", folder))
    plan = saved("plan.json", "plan", "--for", folder)
    result = cli("report", plan, *parts, "--for", folder, "--json")
    assert result.code == 0, result.err
    document = conforms(json.loads(result.out))
    assert len(statuses(document)["built"]) == 3
    assert document["for"]["images"][0]["needed"] == [
        f"training:v1-{V3}",
        "training:v1-cuda12.4-sm89-drv550.163.01-x86-64-v3",
    ]


def test_report_names_hosts_that_get_no_image(saved, fleet, cli):
    folder = fleet(cpu=cpu_host())
    part = saved("1.json", "build", "--for", folder)
    fleet(other=gpu_host(driver="470.82.01"))
    cli("report", part, "--for", folder).fails(3, f"training:v1, {folder}/other")


def test_report_needs_documents_that_know_the_candidates(saved, fleet, cli):
    part = saved("1.json", "build", "--only", "cuda=none")
    cli("report", part, "--for", fleet(cpu=cpu_host())).refuses(2, "no document says what hosts choose from")


def test_documents_for_other_hosts_contradict_each_other(saved, fleet, cli):
    part = saved("1.json", "build", "--for", fleet(cpu=cpu_host()))
    plan = saved("plan.json", "plan")
    cli("report", part, plan).refuses(6, "unneeded in")


def test_at_most_keeps_the_variants_that_serve_most(command, fleet, backend, conforms):
    folder = fleet(a=zen_host(), b=gpu_host(), c=gpu_host(), d=zen_host())
    result = command("plan", "--for", folder, "--at-most", "2", "--json")
    assert result.code == 0
    document = conforms(json.loads(result.out))
    assert statuses(document)["build"] == [V3, GPU]
    few = document["for"]["images"][0]["at_most"]
    assert few["exact"]
    assert few["loss"]["cpu_flags"] > 0
    command("build", "--for", folder, "--at-most", "1").fails(
        3, f"training:v1, {folder}/b, {folder}/c: it fits none of the variants that are kept"
    )
    assert made(backend) == [V3]


def test_images_below_a_needed_one_are_kept(command, fleet, project):
    template = "FROM {{ images['training'] }} AS compiler\nFROM compiler\n"
    (project().parent / "templates" / "top.j2").write_text(template)
    folder = fleet(gpu=gpu_host())  # an Intel CPU
    result = command("plan", "--for", folder, "--json", changes=[TOP])
    cells = json.loads(result.out)["cells"]
    found = {(cell["image"], cell["cell"]) for cell in cells if cell["status"] == "build"}
    generic = "cuda12.4-sm89-drv550.163.01-x86-64-v3"
    assert {cell for image, cell in found if image == "top"} == {V3, generic}
    assert {cell for image, cell in found if image == "training"} == {V3, generic, GPU}


def test_exported_jobs_are_those_of_needed_cells(command, fleet):
    folder = fleet(gpu=gpu_host())
    result = command("export", "github", "--for", folder)
    assert result.code == 0
    assert [job["name"] for job in json.loads(result.out)["include"]] == [V3, GPU]
    result = command("export", "bake", "--for", folder)
    assert len(json.loads(result.out)["target"]) == 2
    fleet(old=gpu_host(driver="470.82.01"))
    result = command("export", "github", "--for", folder)
    assert result.code == 3
    assert [job["name"] for job in json.loads(result.out)["include"]] == [V3, GPU]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--at-most", "2"], "--at-most needs the hosts to serve"),
        (["--for", "absent.json"], "absent.json: No such file"),
        (["--for", "{folder}", "--at-most", "0"], "greater than or equal to 1"),
        (["--for", "{folder}/empty"], "no *.json file found"),
        (["--for", "{folder}/broken.json"], "broken.json"),
    ],
)
def test_invalid_options_are_rejected(command, fleet, options, message):
    folder = fleet(gpu=gpu_host())
    (folder / "empty").mkdir()
    words = [option.format(folder=folder) for option in options]
    if "broken" in message:
        (folder / "broken.json").write_text("{")
    command("plan", *words).refuses(2, message)


@pytest.mark.usefixtures("no_hosts")
@pytest.mark.parametrize("source", ["-", "none.ndjson"])
@pytest.mark.parametrize("name", ["plan", "build", "report", "export"])
def test_a_list_of_no_hosts_is_refused(command, cli, backend, name, source):
    if name == "report":
        result = cli("report", "build.json", "--for", source)
    else:
        result = command(name, *["github"][: name == "export"], "--for", source)
    result.refuses(2, "no hosts found")
    assert not made(backend)


@pytest.fixture
def published(cli, project, image, repository, registry, fleet, monkeypatch):  # noqa: ARG001
    """Call it with cells to push and options of `publish`."""

    def gone():
        raise EngineError("cannot reach the Docker engine")

    monkeypatch.setattr(local, "EngineStore", gone)
    path = project(("  training:\n", f"  {image}:\n"))

    def call(*options, push=(), matrix=True):
        for cell, variant in push:
            own = {
                labels.IMAGE: image,
                labels.VERSION: "v1",
                labels.CELL: cell,
                labels.INPUT: digest(cell.encode()),
                labels.INPUTS: "{}",
                labels.VARIANT: json.dumps({"platform": "linux/amd64"} | variant),
            }
            repository.image(labels.make_tag("v1", cell, own[labels.INPUT]), own)
        source = ["-f", path] if matrix else []
        return cli("publish", f"{image}:v1", *options, *source)

    return call


ZNVER4 = {"cpu_flags": sorted(Make.flags("znver4")), "march": "znver4", "vendor": "amd"}
EXACT = {"cuda": "12.4", "cubins": ["89"], "driver": {"mode": "exact", "version": "550.163.01"}}
PUSHED = [(V3, {}), (ZEN, ZNVER4), (GPU, EXACT | ZNVER4)]


def test_publish_leaves_out_what_no_host_chooses(published, fleet, conforms):
    folder = fleet(gpu=gpu_host())
    result = published("--for", folder, "--json", push=PUSHED)
    assert result.code == 0, result.err
    document = conforms(json.loads(result.out))
    assert document["variants"] == 2
    (left,) = document["unneeded"]
    assert left.startswith(f"v1-{ZEN}-")
    assert f"{left} left out: no host would choose it" in result.err


@pytest.mark.usefixtures("no_hosts")
@pytest.mark.parametrize("source", ["-", "none.ndjson"])
def test_publish_refuses_a_list_of_no_hosts(published, repository, source):
    published("--for", source, push=PUSHED).refuses(2, "no hosts found")
    assert "v1" not in repository.tags


def test_published_variants_are_never_removed(published, fleet):
    assert published(push=PUSHED).code == 0
    result = published("--for", fleet(gpu=gpu_host()), "--json")
    document = json.loads(result.out)
    assert (document["variants"], document["new"], document["unneeded"]) == (3, 0, [])


def test_publish_refuses_if_a_needed_cell_is_missing(published, fleet, repository):
    folder = fleet(gpu=gpu_host(), zen=zen_host())
    published("--for", folder, push=[PUSHED[0], PUSHED[2]]).refuses(3, f"training:v1-{ZEN}\n")
    assert "v1" not in repository.tags


def test_publish_tells_of_hosts_without_an_image_afterwards(published, fleet, repository):
    folder = fleet(gpu=gpu_host(), old=gpu_host(driver="470.82.01"))
    published("--for", folder, push=PUSHED).fails(3, f"{folder}/old")
    assert "v1" in repository.tags


def test_publish_without_a_matrix_chooses_among_what_is_pushed(published, fleet, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path / "fleet" if (tmp_path / "fleet").exists() else tmp_path.parent)
    result = published("--for", fleet(zen=zen_host()), "--json", push=PUSHED[:2], matrix=False)
    assert json.loads(result.out)["variants"] == 2
