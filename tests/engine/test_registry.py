"""Pushing, publishing, selecting and running with a real registry."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = {"cuda": ["none"], "march": ["x86-64-v2", "x86-64-v3"]}
HOST = ("--host", "tests/hosts/laptop.json")


@pytest.fixture
def image(registry, request):
    """An image name that is unique to the test."""
    return f"{registry.address}/ml/{request.node.name.replace('_', '-')}"


@pytest.fixture
def folder(project, image):
    return project(CPU, image=image)


def build(engine, folder, *options):
    return engine.imagematrix("build", "--push", *options, cwd=folder)


def images(engine):
    """Return the repositories of all images in the engine."""
    return engine.docker("images", "--format", "{{.Repository}}").stdout.splitlines()


def statuses(engine, folder, *options):
    result = engine.imagematrix("plan", "--json", *options, cwd=folder)
    return [cell["status"] for cell in json.loads(result.stdout)["cells"]]


def test_from_the_matrix_to_a_container_through_a_registry(engine, folder, registry, image):
    built = build(engine, folder)
    assert built.returncode == 0, built.stderr
    references = built.stdout.splitlines()
    assert len(references) == 2
    assert image not in images(engine), "pushed images are not loaded into the engine"
    assert (folder / "imagematrix.lock").is_file()

    before = registry.log.count('"GET ')
    assert statuses(engine, folder, "--push") == ["up-to-date"] * 2
    requests = registry.log.count('"GET ') - before
    assert requests == 2 + len(references), "the missing index, the tags, and each image once"
    again = build(engine, folder)
    assert (again.returncode, again.stdout) == (0, "")

    published = engine.imagematrix("publish", f"{image}:v1", "--alias", "stable")
    assert published.returncode == 0, published.stderr
    assert published.stdout.startswith(f"{image}:v1@sha256:")
    assert engine.imagematrix("publish", f"{image}:v1").stdout == published.stdout

    listed = json.loads(engine.imagematrix("ls", f"{image}:v1", "--json").stdout)
    assert sorted(variant["reference"] for variant in listed["variants"]) == sorted(references)
    assert all(variant["size"] > 20_000_000 for variant in listed["variants"])

    best = next(reference for reference in references if "x86-64-v3" in reference)
    registry.kill()
    registry.start()
    chosen = engine.imagematrix("select", f"{image}:v1", *HOST)
    assert chosen.stdout.strip() == best, chosen.stderr
    assert registry.log.count('"GET ') - registry.log.count(" 404 ") == 1, "one request gives the catalog"
    assert engine.imagematrix("select", f"{image}:stable", *HOST).stdout.strip() == best

    ran = engine.imagematrix("run", "--rm", f"{image}:v1", "train", "--steps", "1")
    assert ran.returncode == 0, ran.stderr
    digest = next(one["digest"] for one in listed["variants"] if one["reference"] == best)
    assert images(engine).count(image) == 1, "only the chosen variant is pulled, by its digest"
    engine.docker("rmi", f"{image}@{digest}")


@pytest.mark.long
def test_an_upgrade_costs_the_layers_that_differ(engine, folder, image):
    build(engine, folder)
    engine.imagematrix("publish", f"{image}:v1")
    matrix = folder / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace("version: v1", "version: v2"))
    template = folder / "templates/training/Dockerfile.j2"
    template.write_text(f"{template.read_text()}\nRUN echo v2 > /version\n")
    built = build(engine, folder)
    assert built.returncode == 0, built.stderr
    engine.imagematrix("publish", f"{image}:v2")

    def listed(old, *words):
        return engine.imagematrix("ls", f"{image}:v2", "--from", old, *words)

    document = json.loads(listed("v1", "--json").stdout)
    last = [document["layers"][row["layers"][-1]]["size"] for row in document["variants"]]
    assert [row["from"] for row in document["variants"]] == last
    assert json.loads(listed(f"{image}:v1", "--json").stdout) == document
    assert {row["from"] for row in json.loads(listed("v2", "--json").stdout)["variants"]} == {0}
    assert "from v1" in listed("v1").stdout
    assert listed("v9").returncode == 4


@pytest.mark.long
def test_a_new_version_pushes_no_layer_of_unchanged_cells(engine, folder, image, registry):
    built = build(engine, folder)
    assert built.returncode == 0, built.stderr
    engine.imagematrix("publish", f"{image}:v1")
    assert engine.imagematrix("bump", image, "--minor", cwd=folder).stdout == f"{image}:v1.1\n"
    planned = json.loads(engine.imagematrix("plan", "--push", "--json", cwd=folder).stdout)["cells"]
    assert [cell["from"] for cell in planned] == built.stdout.splitlines()
    before = registry.log.count('"POST ')
    done = build(engine, folder, "--json")
    assert done.returncode == 0, done.stderr
    assert [cell["status"] for cell in json.loads(done.stdout)["cells"]] == ["adopted"] * 2
    assert registry.log.count('"POST ') - before == 2, "a configuration for each image"
    published = engine.imagematrix("publish", f"{image}:v1.1")
    assert published.returncode == 0, published.stderr
    listed = json.loads(engine.imagematrix("ls", f"{image}:v1.1", "--from", "v1", "--json").stdout)
    assert [row["from"] for row in listed["variants"]] == [0, 0]
    ran = engine.imagematrix("run", "--rm", f"{image}:v1.1", "train", "--steps", "1")
    assert ran.returncode == 0, ran.stderr
    checked = engine.imagematrix("verify", *(cell["reference"] for cell in planned))
    assert checked.returncode == 0, checked.stderr


def test_a_plain_pull_gets_the_variant_with_the_fewest_requirements(engine, folder, image):
    build(engine, folder)
    published = json.loads(engine.imagematrix("publish", f"{image}:v1", "--json").stdout)
    (answer,) = published["plain_pull"]
    assert "-x86-64-v2-" in answer["reference"]
    assert "popcnt" in answer["needs"]
    engine.docker("pull", f"{image}:v1")
    label = '{{index .Config.Labels "io.imagematrix.cell"}}'
    assert engine.docker("inspect", "--format", label, f"{image}:v1").stdout == "cpu-x86-64-v2\n"
    assert engine.docker("run", "--rm", f"{image}:v1", "train", "--steps", "1").returncode == 0
    listed = json.loads(engine.imagematrix("ls", f"{image}:v1", "--json").stdout)["variants"]
    (other,) = (one["digest"] for one in listed if one["digest"] != answer["digest"])
    engine.docker("pull", f"{image}@{other}")
    assert engine.docker("inspect", "--format", label, f"{image}@{other}").stdout == "cpu-x86-64-v3\n"
    engine.docker("rmi", f"{image}:v1", f"{image}@{other}")


def test_tag_of_a_version_that_somebody_has_taken_is_refused(engine, folder, image):
    name = f"{image}:v1"
    engine.docker("tag", "debian:trixie", name)
    pushed = re.search(r"digest: (sha256:[0-9a-f]{64})", engine.docker("push", name).stdout)[1]
    engine.docker("rmi", name)
    for words in (["build", "--push"], ["plan", "--push"], ["publish", name, "-f", "matrix.yaml"]):
        refused = engine.imagematrix(*words, cwd=folder)
        assert refused.returncode == 7, refused
        assert f"{name} is {pushed}, not the index of the version" in refused.stderr
    engine.docker("pull", name)
    assert f"{image}@{pushed}" in engine.inspect(name)["RepoDigests"], "it is still there"
    engine.docker("rmi", name)


@pytest.mark.long
def test_variants_that_the_registry_lost_are_rebuilt(engine, folder, registry, image):
    build(engine, folder)
    engine.imagematrix("publish", f"{image}:v1")
    (lost, *_) = json.loads(engine.imagematrix("ls", f"{image}:v1", "--json").stdout)["variants"]
    repository = image.partition("/")[2]
    revision = f"{registry.folder}/data/docker/registry/v2/repositories/{repository}/_manifests/revisions"
    shutil.rmtree(f"{revision}/sha256/{lost['digest'].removeprefix('sha256:')}")
    assert statuses(engine, folder, "--push").count("up-to-date") == 1
    refused = engine.imagematrix("publish", f"{image}:v1")
    assert refused.returncode == 4
    assert lost["digest"] in refused.stderr
    rebuilt = build(engine, folder)
    assert rebuilt.stdout.splitlines() == [lost["reference"]], rebuilt.stderr
    assert statuses(engine, folder, "--push") == ["up-to-date"] * 2
    published = json.loads(engine.imagematrix("publish", f"{image}:v1", "--json").stdout)
    assert (published["variants"], published["new"]) == (2, 0)
    engine.docker("pull", f"{image}@{lost['digest']}")
    engine.docker("rmi", f"{image}@{lost['digest']}")


def pushed_at_once(engine, image, folder, rounds, *inputs):
    """Return the exit codes of clients that push a cell at the same moment, for each round."""
    script = [*engine.inside, sys.executable, ROOT / "tests/doubles/pushing.py"]
    command = [*script, image, folder, str(rounds), *inputs]
    done = subprocess.run(command, env=engine.environment, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def tagged(registry, image):
    """Return the tags in the storage of a registry."""
    repository = f"{registry.folder}/data/docker/registry/v2/repositories/{image.partition('/')[2]}"
    return list(Path(repository, "_manifests/tags").iterdir())


def test_of_two_concurrent_pushes_of_a_cell_at_least_one_is_refused(engine, registry, image, tmp_path):
    rounds = pushed_at_once(engine, image, tmp_path, 10, "one", "two")
    assert len(rounds) == 10
    assert {tuple(sorted(both)) for both in rounds} <= {("0", "7"), ("7", "7")}
    kept = Counter(path.name.partition("-")[0] for path in tagged(registry, image))
    for number, both in enumerate(rounds):
        # If both are refused, one puts its image back; rarely both do, and then one has to be chosen.
        assert kept[f"v{number}"] == 1 or (both == ["7", "7"] and kept[f"v{number}"] == 2), "one image stays"


@pytest.mark.long
def test_concurrent_pushes_of_the_same_image_all_succeed(engine, registry, image, tmp_path):
    rounds = pushed_at_once(engine, image, tmp_path, 30, *["same"] * 6)
    assert rounds == [["0"] * 6] * 30
    assert len(tagged(registry, image)) == 30


@pytest.mark.long
def test_images_of_the_engine_are_adopted(engine, folder):
    local = engine.imagematrix("build", cwd=folder)
    references = local.stdout.splitlines()
    assert statuses(engine, folder, "--push") == ["adopt"] * 2
    pushed = build(engine, folder)
    assert sorted(pushed.stdout.splitlines()) == sorted(references), pushed.stderr
    assert "adopted" in pushed.stderr
    assert statuses(engine, folder, "--push") == ["up-to-date"] * 2
    for reference in references:
        engine.docker("rmi", reference)


@pytest.mark.long
def test_publish_pushes_images_that_only_the_engine_has(engine, folder, image):
    references = engine.imagematrix("build", cwd=folder).stdout.splitlines()
    published = engine.imagematrix("publish", f"{image}:v1", "--json")
    assert published.returncode == 0, published.stderr
    assert json.loads(published.stdout)["new"] == 2
    for reference in references:
        engine.docker("rmi", reference)
    assert engine.imagematrix("select", f"{image}:v1", *HOST).stdout.strip() in references


def test_cells_can_be_added_to_a_version_but_not_replaced(engine, folder, image):
    build(engine, folder, "--only", "march=x86-64-v2")
    first = engine.imagematrix("publish", f"{image}:v1", "--json")
    assert json.loads(first.stdout)["variants"] == 1
    build(engine, folder)
    second = json.loads(engine.imagematrix("publish", f"{image}:v1", "--json").stdout)
    assert (second["variants"], second["new"]) == (2, 1)

    source = folder / "templates/training/train.cpp"
    source.write_text(f"{source.read_text()}// another program\n")
    refused = build(engine, folder)
    assert refused.returncode == 7
    assert "context changed" in refused.stderr
    assert statuses(engine, folder, "--push") == ["refused"] * 2


def test_logins_of_docker_are_used(engine, project, start_registry, tmp_path):
    registry = start_registry(5001, ("me", "secret"))
    image = f"{registry.address}/ml/training"
    folder = project({"cuda": ["none"], "march": ["x86-64-v2"]}, image=image)
    environment = engine.environment | {"DOCKER_CONFIG": str(tmp_path / "config")}
    refused = engine.imagematrix("build", "--push", cwd=folder, env=environment)
    assert refused.returncode == 8
    assert f"`docker login {registry.address}`" in refused.stderr
    login = [*engine.inside, "docker", "login", "-u", "me", "--password-stdin", registry.address]
    subprocess.run(login, input="secret", text=True, env=environment, check=True, capture_output=True)
    pushed = engine.imagematrix("build", "--push", cwd=folder, env=environment)
    assert pushed.returncode == 0, pushed.stderr
    published = engine.imagematrix("publish", f"{image}:v1", env=environment)
    assert published.returncode == 0, published.stderr
    ran = engine.imagematrix("run", "--rm", f"{image}:v1", "true", env=environment)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.long
def test_attestations_do_not_change_the_image(engine, folder, image):
    only = ("--only", "march=x86-64-v2")
    plain = json.loads(engine.imagematrix("build", "--json", *only, cwd=folder).stdout)["cells"][0]
    engine.docker("rmi", plain["reference"])
    attest = ("--attest", "type=provenance,mode=max")
    pushed = json.loads(build(engine, folder, "--json", *only, *attest).stdout)["cells"][0]
    assert (pushed["status"], pushed["digest"]) == ("built", plain["digest"])
    assert statuses(engine, folder, "--push", *only)[0] == "up-to-date"
    published = engine.imagematrix("publish", f"{image}:v1")
    assert published.returncode == 0, published.stderr
    inspect = [*engine.inside, "docker", "buildx", "imagetools", "inspect", f"{image}:v1", "--format"]
    result = subprocess.run(
        [*inspect, "{{json .Provenance}}"], env=engine.environment, check=True, capture_output=True, text=True
    )
    assert "SLSA" in result.stdout
    (variant,) = json.loads(engine.imagematrix("ls", f"{image}:v1", "--json").stdout)["variants"]
    assert variant["digest"] == plain["digest"]
    assert engine.imagematrix("build", *attest, cwd=folder).returncode == 2


@pytest.mark.long
def test_only_what_hosts_need_is_built_and_published(engine, project, image):
    folder = project({"cuda": ["none"], "march": ["x86-64-v2", "x86-64-v3", "x86-64-v4"]}, image=image)
    hosts = ("--for", ROOT / "tests" / "hosts" / "laptop.json")
    build(engine, folder, "--only", "march=x86-64-v2")
    early = engine.imagematrix("publish", f"{image}:v1", *hosts, cwd=folder)
    assert early.returncode == 3
    assert f"hosts need images that are not built:\n  {image}:v1-cpu-x86-64-v3\n" in early.stderr
    built = build(engine, folder, *hosts, "--json")
    assert built.returncode == 0, built.stderr
    found = {cell["cell"]: cell["status"] for cell in json.loads(built.stdout)["cells"]}
    assert found == {"cpu-x86-64-v2": "up-to-date", "cpu-x86-64-v3": "built", "cpu-x86-64-v4": "unneeded"}
    assert build(engine, folder, "--only", "march=x86-64-v4").returncode == 0
    published = engine.imagematrix("publish", f"{image}:v1", *hosts, "--json", cwd=folder)
    assert published.returncode == 0, published.stderr
    document = json.loads(published.stdout)
    assert document["variants"] == 2
    assert [tag.rpartition("-")[0] for tag in document["unneeded"]] == ["v1-cpu-x86-64-v4"]
    chosen = engine.imagematrix("select", f"{image}:v1", "--catalog", f"{image}:v1", *HOST)
    assert "-cpu-x86-64-v3-" in chosen.stdout
    assert engine.imagematrix("publish", f"{image}:v1", cwd=folder).returncode == 0  # the rest may follow
    kept = engine.imagematrix("publish", f"{image}:v1", *hosts, "--json", cwd=folder)
    assert json.loads(kept.stdout)["variants"] == 3
