"""retire and prune as their users see them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from imagematrix.build.publish.publish import publish
from imagematrix.images.oci.manifest import INDEX


@pytest.fixture
def published(registry, add_variant, variant):
    """Three versions with a variant for CPUs each."""
    for version in ("v1", "v2", "v3"):
        add_variant("x", version=version, layer=version.encode() * 500_000, VARIANT=variant("x86-64-v2"))
        publish(registry, version)


@pytest.mark.usefixtures("published")
def test_retire_shows_what_it_removes(cli, image, repository, conforms):
    before = dict(repository.tags)
    code, shown, said = cli("retire", image, "--keep", "2")
    assert code == 0
    assert repository.tags == before
    tags = [tag for tag in before if tag.startswith("v1")]
    assert shown.splitlines()[-2:] == [f"{image}:{tag}@{before[tag]}" for tag in ("v1", max(tags))]
    assert [line.split() for line in shown.splitlines()[2:5]] == [
        ["v1", "remove"],
        ["v2", "keep", "newest", "2"],
        ["v3", "keep", "newest", "2"],
    ]
    assert (
        said == f"{image}: 2 manifests of 1 version would be removed, with 1.0 MB of layers and documents\n"
    )
    document = conforms(json.loads(cli("retire", image, "--keep", "2", "--json")[1]))
    assert document["dry_run"]
    assert document["size"] > 1_000_000

    code, again, said = cli("retire", image, "--keep", "2", "--yes")
    assert (code, again) == (0, shown)
    assert "removed 2 manifests of 1 version; the registry's garbage collection frees 1.0 MB" in said
    assert repository.tags == {tag: value for tag, value in before.items() if tag not in tags}
    assert cli("retire", image, "--keep", "2", "--yes")[2] == f"{image}: nothing to remove\n"


@pytest.mark.usefixtures("published")
def test_retire_with_json_and_yes_states_it(cli, image, repository, conforms):
    document = conforms(json.loads(cli("retire", image, "--protect", "v2", "--json", "--yes")[1]))
    assert not document["dry_run"]
    assert [one["status"] for one in document["versions"]] == ["retired", "kept", "retired"]
    assert sorted(tag for removal in document["removals"] for tag in removal["tags"] if "-" not in tag) == [
        "v1",
        "v3",
    ]
    assert {tag.partition("-")[0] for tag in repository.tags} == {"v2"}


@pytest.mark.usefixtures("published")
def test_retire_keeps_what_serves_hosts(cli, image, profiles):
    code, shown, said = cli(
        "retire", image, "--hosts", profiles["laptop"], "--hosts", profiles["grace-hopper"]
    )
    assert code == 0
    assert f"serves {str(profiles['laptop']).removesuffix('.json')}" in shown
    assert "no version serves 1 host" in said


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "no option says what to keep"),
        (("--yes",), 2, "no option says what to keep"),
        (("--keep", "0"), 2, "Invalid value for '--keep'"),
        (("--protect", "v33"), 4, "has no {image}:v33 to protect"),
        (("--hosts", "{arm}"), 2, "no version of {image} serves any of these hosts"),
        (("--hosts", "/nowhere"), 2, "/nowhere"),
        (("--hosts", "none.ndjson"), 2, "none.ndjson: no hosts found"),
        (("--hosts", "-"), 2, "stdin: no hosts found"),
    ],
)
@pytest.mark.usefixtures("no_hosts")
def test_wrong_use_of_retire_removes_nothing(cli, image, repository, profiles, words, code, message):
    before = dict(repository.tags)
    words = [word.format(arm=profiles["grace-hopper"]) for word in words]
    cli("retire", image, "--yes", *words).fails(code, message.format(image=image))
    assert repository.tags == before


@pytest.mark.parametrize("name", ["training", "{image}:v1", "{image}@sha256:00"])
def test_retire_needs_an_image_in_a_registry(cli, image, name):
    cli("retire", name.format(image=image), "--keep", "1").fails(
        2, "is not the name of an image in a registry"
    )


def test_retire_of_an_unknown_image(cli, image):
    cli("retire", image, "--keep", "1").fails(4, f"the registry has no version of {image}")


@pytest.mark.usefixtures("published")
def test_an_interrupted_retire_says_how_far_it_came(cli, server, image):
    server.fails("DELETE", "", after=1, times=9, status=403)
    retired = cli("retire", image, "--keep", "1", "--yes")
    retired.fails(8, "removed 1 of 4 manifests", "denies access")


@pytest.mark.usefixtures("published")
def test_a_registry_that_changed_is_told(cli, server, image, repository):
    raw = repository.manifests[repository.tags["v1"]][1]
    server.fails("GET", "tags", after=1, then=lambda: repository.put("latest", raw, INDEX))
    retired = cli("retire", image, "--keep", "1", "--yes")
    retired.fails(8, "changed meanwhile: nothing was removed")
    assert {"v1", "v2"} < repository.tags.keys()


@pytest.mark.usefixtures("published")
def test_nothing_is_removed_if_the_answer_cannot_be_written(image, repository):
    before = dict(repository.tags)
    command = [sys.executable, "-m", "imagematrix", "retire", image, "--keep", "1", "--yes"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert repository.tags == before


def test_prune_shows_what_it_removes(cli, node, conforms):
    node.add("a", "v1")
    node.add("a", "v2")
    name = next(iter(node.images.values()))["RepoTags"][0]
    code, shown, said = cli("prune", "--keep", "1")
    assert (code, said) == (0, "1 image would be removed\n")
    assert [line.split()[:4] for line in shown.splitlines() if line.startswith(name)] == [
        [name, "remove", "1", "MB"]
    ]
    assert len(node.images) == 2
    document = conforms(json.loads(cli("prune", "--keep", "1", "--json")[1]))
    assert [one["status"] for one in document["images"]] == ["removed", "kept"]
    assert cli("prune", "--keep", "1", "--yes")[1:] == (shown, "removed 1 image\n")
    assert cli("prune", "training", "--keep", "1", "--yes")[2] == "nothing to remove\n"


def test_prune_of_an_engine_without_variants(cli, node):
    assert cli("prune", "--newer", "1h") == (0, "", "nothing to remove\n")
    assert not node.images


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "no option says what to keep"),
        (("--newer", "-1h"), 2, "'-1h' is not an age"),
        (("--newer", "7"), 2, "'7' is not an age"),
        (("training:v1", "--keep", "1"), 2, "training:v1 has a version"),
        (("trainin", "--keep", "1"), 4, "the engine has no variant of trainin"),
        (("--keep", "x"), 2, "Invalid value for '--keep'"),
        (("--hosts", "none.ndjson"), 2, "none.ndjson: no hosts found"),
        (("--hosts", "-"), 2, "stdin: no hosts found"),
    ],
)
@pytest.mark.usefixtures("no_hosts")
def test_wrong_use_of_prune_removes_nothing(cli, node, words, code, message):
    node.add("a", "v1")
    node.add("a", "v2")
    cli("prune", "--yes", *words).fails(code, message)
    assert not node.removed


def test_prune_says_that_a_protected_version_is_not_there(cli, node):
    node.add("a", "v1")
    code, _, said = cli("prune", "--protect", "v9")
    assert code == 0
    assert "the engine has no image of version v9" in said


def test_an_interrupted_prune_says_how_far_it_came(cli, node):
    node.add("a", "v1")
    second = node.add("b", "v1")
    node.add("a", "v2")
    removing = node.api.remove_image

    def start_then_remove(name, **how):
        node.start("late", second)
        removing(name, **how)

    node.api.remove_image = start_then_remove
    cli("prune", "--keep", "1", "--yes").fails(8, "removed 1 of 2 images", "container is using")
