"""Images of a matrix that build on each other, in the engine and through a registry."""

import json

import pytest

MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {app}: {{version: v1, template: app.j2, development: {development}}}
  {base}: {{version: v1, template: base.j2, development: {development}}}
axes:
  os: [one, two]
"""
BASE = "FROM debian:trixie\nRUN test ! -e /fail && echo {{ os }} > /base\n"
APP = 'FROM {{ images["BASE"] }}\nRUN sed "s/^/app on /" /base > /app\nCMD ["cat", "/app"]\n'


@pytest.fixture
def stack(tmp_path):
    """Call it with a prefix of image names to get a folder with two images, one built on the other."""

    def write(prefix, *, development="false", base=BASE):
        (tmp_path / "templates").mkdir(exist_ok=True)
        names = {"app": f"{prefix}app", "base": f"{prefix}base"}
        (tmp_path / "matrix.yaml").write_text(MATRIX.format(**names, development=development))
        (tmp_path / "templates/base.j2").write_text(base)
        (tmp_path / "templates/app.j2").write_text(APP.replace("BASE", names["base"]))
        (tmp_path / ".dockerignore").write_text("*\n")
        return tmp_path

    return write


def cells(engine, command, folder, *options):
    result = engine.imagematrix(command, "--json", *options, cwd=folder)
    return {
        (cell["image"].rpartition("/")[2], cell["cell"]): cell for cell in json.loads(result.stdout)["cells"]
    }


def test_the_base_is_built_first_and_is_part_of_the_identity(engine, stack):
    folder = stack("stacked-", development="true")
    built = cells(engine, "build", folder, "--jobs", "4")
    assert {cell["status"] for cell in built.values()} == {"built"}
    ran = engine.docker("run", "--rm", built["stacked-app", "two"]["reference"])
    assert ran.stdout == "app on two\n"
    assert {cell["status"] for cell in cells(engine, "plan", folder).values()} == {"up-to-date"}

    stack("stacked-", development="true", base=f"{BASE}RUN echo more >> /base\n")
    again = cells(engine, "plan", folder)
    assert {cell["status"] for cell in again.values()} == {"build"}
    assert again["stacked-base", "one"]["changed"] == ["dockerfile"]
    assert "dockerfile" in again["stacked-app", "one"]["changed"]
    rebuilt = cells(engine, "build", folder)
    ran = engine.docker("run", "--rm", rebuilt["stacked-app", "one"]["reference"])
    assert ran.stdout == "app on one\napp on more\n"


def test_an_image_with_a_failed_base_is_skipped(engine, stack):
    folder = stack("lost-", base=BASE + "{% if os == 'one' %}\nRUN touch /fail; false\n{% endif %}\n")
    result = engine.imagematrix("build", "--json", cwd=folder)
    assert result.returncode == 6
    results = {(cell["image"], cell["cell"]): cell for cell in json.loads(result.stdout)["cells"]}
    assert results["lost-base", "one"]["status"] == "failed"
    assert results["lost-app", "one"]["status"] == "skipped"
    assert "lost-base:v1-one" in results["lost-app", "one"]["error"]
    assert results["lost-app", "two"]["status"] == "built"


@pytest.mark.long
def test_images_in_a_registry_need_not_be_in_the_engine(engine, stack, registry):
    folder = stack(f"{registry.address}/stacked/")
    first = cells(engine, "build", folder, "--push")
    assert {cell["status"] for cell in first.values()} == {"built"}
    # The bases exist already, and other images build on them.
    (folder / "templates/app.j2").write_text(
        (folder / "templates/app.j2").read_text() + "RUN echo new >> /app\n"
    )
    text = (folder / "matrix.yaml").read_text()
    (folder / "matrix.yaml").write_text(text.replace("app: {version: v1", "app: {version: v2"))
    second = cells(engine, "build", folder, "--push")
    assert {key: cell["status"] for key, cell in second.items()} == {
        ("app", "one"): "built",
        ("app", "two"): "built",
        ("base", "one"): "up-to-date",
        ("base", "two"): "up-to-date",
    }
    ran = engine.docker("run", "--rm", second["app", "two"]["reference"])
    assert ran.stdout == "app on two\nnew\n"
    listed = engine.docker("images", "--format", "{{.Repository}}").stdout
    assert f"{registry.address}/stacked/base" not in listed
