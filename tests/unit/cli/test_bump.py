"""`imagematrix bump`: the images that changed get new versions, and the matrix stays as it is otherwise."""

import json
import re
from codecs import BOM_UTF8

import pytest

from imagematrix.build.stores import engine as local
from imagematrix.errors import EngineError
from imagematrix.images.catalog import labels

CPU = ("--only", "cuda=none")
CHANGED = "FROM {{ base }} AS compiler\nFROM {{ base }}\n"


def test_changed_image_gets_the_next_version(cli, matrix, project):
    before = matrix.read_text()
    assert cli("build", "-f", matrix, *CPU).code == 0
    said = cli("bump", "-f", matrix)
    assert (said.code, said.out) == (0, "")
    assert said.err == f"{matrix}: no version changes\n"
    project(template=CHANGED)
    assert cli("plan", "-f", matrix, *CPU).code == 7
    said = cli("bump", "-f", matrix)
    assert (said.code, said.out, said.err) == (0, "training:v2\n", "training: v1 -> v2\n")
    assert matrix.read_text() == before.replace("version: v1", "version: v2")
    assert cli("build", "-f", matrix, *CPU).code == 0
    assert cli("bump", "-f", matrix).err == f"{matrix}: no version changes\n"


def test_named_images_get_the_version_that_is_asked_for(cli, matrix):
    before = matrix.read_text()
    assert cli("bump", "-f", matrix, "training", "--minor").out == "training:v1.1\n"
    assert cli("bump", "-f", matrix, "training", "--to", "2025.09").out == "training:2025.09\n"
    assert matrix.read_text() == before.replace("version: v1", "version: 2025.09")


def test_a_byte_order_mark_stays(cli, matrix):
    before = matrix.read_bytes()
    matrix.write_bytes(BOM_UTF8 + before)
    assert cli("bump", "-f", matrix, "training").out == "training:v2\n"
    assert matrix.read_bytes() == BOM_UTF8 + before.replace(b"version: v1", b"version: v2")


def test_images_on_a_changed_image_change_too(cli, matrix, project, backend):
    """Otherwise the next build would be refused for them."""
    backend.local = True
    stacked = "FROM {{ images.training }}\n"
    change = ("axes:", "  child:\n    version: v4.1\n    template: child.j2\n    context: .\naxes:")
    assert matrix == project(change)
    (matrix.parent / "templates" / "child.j2").write_text(stacked)
    built = cli("build", "-f", matrix, *CPU)
    assert built.code == 0, built.err
    project(change, template=CHANGED)
    (matrix.parent / "templates" / "child.j2").write_text(stacked)
    said = cli("bump", "-f", matrix)
    assert (said.code, said.out) == (0, "training:v2\nchild:v4.2\n"), said.err
    assert cli("build", "-f", matrix, *CPU).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainin"], "has no image 'trainin'\n  did you mean 'training'?"),
        (["training", "--minor", "--to", "v3"], "--minor and --to exclude each other"),
        (["training", "--to", "a-b"], "'a-b' is not a version such as v1"),
        (["training", "--to", "v2 # x"], "is not a version such as v1"),
        (["training", "--to", ""], "version"),
    ],
)
def test_invalid_requests_change_nothing(cli, matrix, words, message):
    before = matrix.read_text()
    cli("bump", "-f", matrix, *words).refuses(2, message)
    assert matrix.read_text() == before


def test_version_without_a_number_needs_a_new_name(cli, project):
    path = project(("version: v1", "version: stable"))
    cli("bump", "-f", path, "training").refuses(
        2, "'stable' has no number to raise\n  name the new one with --to"
    )


def test_file_edited_meanwhile_is_not_overwritten(cli, matrix, monkeypatch):
    from imagematrix.build.matrix import bump

    with_versions = bump.replace_versions

    def edited(text, *words):
        matrix.write_text(f"# new\n{text}")
        return with_versions(text, *words)

    monkeypatch.setattr(bump, "replace_versions", edited)
    cli("bump", "-f", matrix, "training").refuses(2, "was changed meanwhile")
    assert matrix.read_text().startswith("# new\n")


def test_without_an_engine_nothing_can_be_compared(cli, matrix, monkeypatch):
    def gone():
        raise EngineError("the engine is gone")

    monkeypatch.setattr(local, "EngineStore", gone)
    assert cli("bump", "-f", matrix).code == 8
    assert cli("bump", "-f", matrix, "training").code == 0


def test_cells_with_the_same_inputs_are_taken_over(cli, matrix, backend, tar, conforms):
    """A new version costs what changed: the other images get its labels over the same layers."""
    backend.layers = [tar(("etc/motd", b"hello"))]
    assert cli("build", "-f", matrix, *CPU).code == 0
    first = dict(sorted(backend.kept.items()))  # cells are built in any order
    assert cli("bump", "-f", matrix, "training").code == 0
    document = conforms(json.loads(cli("plan", "-f", matrix, *CPU, "--json").out))
    assert {cell["status"] for cell in document["cells"]} == {"adopt"}
    assert [cell["from"] for cell in document["cells"]] == list(first)
    backend.calls.clear()
    built = cli("build", "-f", matrix, *CPU)
    assert built.code == 0, built.err
    assert not backend.called("make")
    assert built.out.splitlines() == [cell["reference"] for cell in document["cells"]]
    for old, new in zip(first, built.out.splitlines(), strict=True):
        assert backend.kept[new].layers == first[old].layers
        assert backend.kept[new].digest != first[old].digest
        own = backend.images[new]
        assert own[labels.VERSION] == "v2"
        assert labels.read_variant(own, reference=new, digest=None, size=None).reference == new
        raw = json.loads(backend.raw[new][1])["config"]["Labels"]
        assert raw[labels.VERSION] == "v2"
        assert raw["org.opencontainers.image.version"] == "v2"
    assert cli("plan", "-f", matrix, *CPU).out.count(" up-to-date ") == len(first)


def test_bake_export_has_the_cells_that_a_build_would_take_over(cli, matrix, backend, tar):
    """bake has no other way to an image of the new version than to build it, from its cache."""
    backend.layers = [tar(("etc/motd", b"hello"))]
    assert cli("build", "-f", matrix, *CPU).code == 0
    assert cli("bump", "-f", matrix, "training").code == 0
    targets = json.loads(cli("export", "bake", "-f", matrix, *CPU).out)["target"].values()
    built = cli("build", "-f", matrix, *CPU).out.splitlines()
    assert sorted(tag for target in targets for tag in target["tags"]) == sorted(built)
    assert {target["labels"][labels.VERSION] for target in targets} == {"v2"}


def test_the_remedy_of_a_refusal_lets_builds_replace_images(cli, matrix, project):
    assert cli("build", "-f", matrix, *CPU).code == 0
    project(template=CHANGED)
    refused = cli("build", "-f", matrix, *CPU)
    assert refused.code == 7
    (line,) = re.findall(r"write `(development: true)` below `version` in matrix.yaml", refused.err)
    matrix.write_text(
        re.sub(r"^( +)version: v1.*\n", rf"\g<0>\1{line}\n", matrix.read_text(), flags=re.MULTILINE)
    )
    assert cli("build", "-f", matrix, *CPU).code == 0
    cli("build", "-f", matrix, *CPU, "--push").fails(2, "is never pushed")


def test_changed_cells_are_built(cli, matrix, project, backend, tar):
    backend.layers = [tar(("etc/motd", b"hello"))]
    project(template=CHANGED)
    assert cli("build", "-f", matrix, *CPU).code == 0
    project(template=CHANGED + "{% if march == 'znver4' %}RUN true\n{% endif %}")
    assert cli("bump", "-f", matrix).out == "training:v2\n"
    statuses = [cell["status"] for cell in json.loads(cli("plan", "-f", matrix, *CPU, "--json").out)["cells"]]
    assert sorted(statuses) == ["adopt", "build"]


def test_verified_and_attested_images_are_built(cli, matrix, backend, tar):
    backend.layers = [tar(("etc/motd", b"hello"))]
    assert cli("build", "-f", matrix, *CPU).code == 0
    assert cli("bump", "-f", matrix, "training").code == 0
    backend.calls.clear()
    built = cli("build", "-f", matrix, *CPU, "--verify-reproducible")
    assert built.code == 0, built.err
    assert len(backend.called("make")) == 2 * len(built.out.splitlines())


def test_budget_holds_for_what_is_taken_over(cli, matrix, project, backend, tar):
    backend.layers = [tar(("etc/motd", bytes(3_000_000)))]
    assert cli("build", "-f", matrix, *CPU).code == 0
    project(("version: v1\n", "version: v2\n    budget: 1MB\n"))
    cli("build", "-f", matrix, *CPU).refuses(6, "budget")
