"""`imagematrix bump`: the images that changed get new versions, and the matrix stays as it is otherwise."""

import pytest

from imagematrix.builder import buildx
from imagematrix.errors import EngineError
from imagematrix.stores import engine as local

CPU = ("--only", "cuda=none")
CHANGED = "FROM {{ base }} AS compiler\nFROM {{ base }}\n"
TWO = "    context: .\n  other:\n    version: v7\n    template: Dockerfile.j2\n    context: .\n"


@pytest.fixture
def matrix(project, backend, monkeypatch):
    """The path of the valid matrix, whose CPU-only images can be built."""
    monkeypatch.setattr(buildx, "Buildx", lambda *_, **__: backend)
    monkeypatch.setattr(local, "EngineStore", lambda: backend)
    path = project()
    (path.parent / ".dockerignore").write_text("*\n")
    return path


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


def test_images_on_a_changed_image_change_too(cli, matrix, project, backend):
    """Otherwise the next build would be refused for them."""
    backend.local = True
    stacked = "FROM {{ images.training }}\n"
    change = ("axes:", "  child:\n    version: v4.1\n    template: child.j2\n    context: .\naxes:")
    files = {"child": stacked}
    assert matrix == project(change)
    (matrix.parent / "templates" / "child.j2").write_text(stacked)
    del files
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
    said = cli("bump", "-f", matrix, *words)
    assert said.code == 2
    assert message in said.err
    assert matrix.read_text() == before


def test_version_without_a_number_needs_a_new_name(cli, project):
    path = project(("version: v1", "version: stable"))
    said = cli("bump", "-f", path, "training")
    assert said.code == 2
    assert "'stable' has no number to raise\n  name the new one with --to" in said.err


def test_file_edited_meanwhile_is_not_overwritten(cli, matrix, monkeypatch):
    from imagematrix.matrix import bump

    with_versions = bump.with_versions

    def edited(text, *words):
        matrix.write_text(f"# new\n{text}")
        return with_versions(text, *words)

    monkeypatch.setattr(bump, "with_versions", edited)
    said = cli("bump", "-f", matrix, "training")
    assert said.code == 2
    assert "was changed meanwhile" in said.err
    assert matrix.read_text().startswith("# new\n")


def test_without_an_engine_nothing_can_be_compared(cli, matrix, monkeypatch):
    def gone():
        raise EngineError("the engine is gone")

    monkeypatch.setattr(local, "EngineStore", gone)
    assert cli("bump", "-f", matrix).code == 8
    assert cli("bump", "-f", matrix, "training").code == 0
