"""init, validate, plan, render and build, up to where an engine is needed."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import imagematrix
from imagematrix.cli.init import TEMPLATES

pytestmark = pytest.mark.usefixtures("no_engine")
ONE = "cuda=12.4,compute=9.0,driver=550.163.01,march=znver4"

LONG = f"{'x' * 245}.yaml"  # its lock file would have a name that is too long


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty folder that commands run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_init_validate_plan_and_render_work_together(cli, workdir, shipped, shipped_catalog):
    built = len(shipped_catalog.variants)
    result = cli("init")
    assert (result.code, result.out) == (0, "")
    assert "next: `imagematrix plan`" in result.err
    assert (workdir / "matrix.yaml").read_bytes() == shipped.read_bytes()
    assert (workdir / "templates" / "training" / ".dockerignore").is_file()

    result = cli("validate")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith(f"matrix.yaml: {built} cells to build, ")

    planned = cli("plan")
    assert planned.code == 0
    assert planned.out.splitlines()[0].split() == ["cell", "status", "why"]
    assert planned.out.count(" build ") == built
    assert f"\n{built} build, " in planned.err
    assert "cannot reach the Docker engine" in planned.err

    rendered = cli("render", "-o", "out")
    assert rendered == (0, "", f"wrote {built} Dockerfiles to out\n")
    name = "cuda12.4-drv550.163.01-sm90-znver4"
    assert (workdir / "out" / "training" / f"v1-{name}" / "Dockerfile").read_text() == cli(
        "render", "--only", ONE
    ).out


def test_init_accepts_a_folder_and_overwrites_nothing(cli, workdir):
    assert cli("init", "new/project").code == 0
    before = tree(workdir)
    (workdir / "other" / "templates").mkdir(parents=True)
    for folder, existing in (("new/project", "matrix.yaml"), ("other", "templates")):
        cli("init", folder).refuses(2, f"{folder}/{existing} already exists")
    assert tree(workdir) == before


@pytest.mark.parametrize("name", TEMPLATES)
def test_init_writes_the_requested_template(cli, workdir, name, starters):
    assert cli("init", "--template", name).code == 0
    assert (workdir / "matrix.yaml").read_bytes() == starters[name].read_bytes()
    written = {path.name for path in (workdir / "templates").iterdir()}
    macros = {"cuda_wheels.j2", "linker_cache.py", "macros.j2"}
    family = name.removesuffix("-arm64")
    assert written - macros == {"vllm": {"pytorch", "vllm"}}.get(family, {family})
    assert macros < written
    result = cli("validate")
    assert (result.code, result.out) == (0, "")


def test_init_rejects_an_unknown_template(cli, workdir):
    result = cli("init", "--template", "tensorfow")
    assert (result.code, result.out, tree(workdir)) == (2, "", {})
    assert "template 'tensorfow' not found\n  did you mean 'tensorflow'?" in result.err
    listed = "one of training, llama.cpp, pytorch, pytorch-arm64, pytorch-source, tensorflow, vllm"
    assert listed in cli("init", "--template", "x").err


@pytest.mark.usefixtures("workdir")
def test_next_command_of_init_works_where_it_is_pasted(cli):
    assert "next: `imagematrix plan`, " in cli("init").err
    assert "next: `cd 'new project'`, `imagematrix plan`, then " in cli("init", "new project").err
    assert "next: `cd ./-new`, `imagematrix plan`, then " in cli("init", "--", "-new").err


def test_cell_without_axes_has_the_name_of_its_image(cli, project):
    text = "schema: imagematrix.matrix/v1\nimages: {app: {version: v1, template: training.j2}}\naxes: {}\n"
    result = cli("plan", "-f", project(text=text, template="FROM scratch\n"))
    assert result.out.splitlines()[-1].split()[:2] == ["app:v1", "build"]


def test_init_below_a_file_is_refused(cli, workdir):
    (workdir / "file").touch()
    cli("init", "file/project").refuses(2, "Not a directory")


@pytest.mark.parametrize("command", ["validate", "plan", "render", "build"])
def test_invalid_matrix_stops_every_command_before_it_writes(cli, project, tmp_path, command):
    path = project(("znver4]", "znvr4]"))
    before = tree(tmp_path)
    result = cli(command, "-f", path)
    assert result.out == ""
    assert tree(tmp_path) == before
    if command != "build":  # which fails for lack of an engine first
        assert result.code == 2
        assert f"{path}:11:22: unknown -march=znvr4\n  did you mean 'znver4'?" in result.err


@pytest.fixture
def elsewhere(project, tmp_path):
    """A matrix whose context is in another folder, and that folder."""
    folder = tmp_path.with_name(f"{tmp_path.name}-context")
    folder.mkdir()
    return project(("context: .", f"context: {folder}")), folder


@pytest.mark.parametrize(
    "command", ["validate", "plan", "render", "build", "lock", "export bake", "export github"]
)
def test_context_elsewhere_is_refused(cli, elsewhere, command, engine):  # noqa: ARG001
    path, folder = elsewhere
    cli(*command.split(), "-f", path, "--allow-context", path.parent / "templates").refuses(
        2, f"the context {folder} is outside the matrix's folder"
    )


@pytest.mark.parametrize("command", ["validate", "plan", "render -o out", "export github"])
def test_context_elsewhere_is_allowed_by_name(cli, elsewhere, workdir, command, no_engine):  # noqa: ARG001
    path, folder = elsewhere
    allowed = ("--allow-context", workdir, "--allow-context", folder)
    assert cli(*command.split(), "-f", path, *allowed).code == 0


def test_init_in_an_inaccessible_folder_is_a_single_error(cli, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 300)
    result = cli("init", long)  # Python 3.14 and newer name the folder
    assert (result.code, result.out) == (2, "")
    assert result.err in {
        f"imagematrix: {path}: File name too long\n" for path in (long, long / "matrix.yaml")
    }

    def full(_source, target):
        raise shutil.Error([("a", f"{target}/a", "No space left on device"), ("b", "c", "d")])

    monkeypatch.setattr(shutil, "copytree", full)
    result = cli("init", tmp_path / "new")
    assert result == (2, "", f"imagematrix: {tmp_path}/new/templates/training/a: No space left on device\n")


def test_validate_rejects_cells_whose_flags_are_unknown(cli, project):
    """The flags of these marches are unknown without a compiler stage and a property."""
    path = project(template="FROM {{ base }}\nRUN cc {{ march_option }}\n")
    assert cli("validate", "-f", path).code == 0, "the table has the compiler of the property"
    changes = [(", compiler: gcc-14}", "}"), (", compiler: gcc-12}", "}")]
    result = cli("validate", "-f", project(*changes, template="FROM {{ base }}\nRUN cc {{ march_option }}\n"))
    assert result.code == 2
    expected = r"cpu-x86-64-v3 and \d+ other cells: the CPU flags of its march are unknown\n"
    assert re.match(f"imagematrix: {re.escape(str(path))}: {expected}", result.err)
    assert "unknown\n  name the template's stage that has the compiler 'compiler'" in result.err
    planned = cli("plan", "-f", path)
    assert planned.code == 2
    assert " failed " in planned.out
    assert "\n  name the template's stage" in planned.err
    path = project(*changes, template="FROM {{ base }} AS compiler\nRUN cc {{ march_option }}\n")
    assert cli("validate", "-f", path).code == 0, "the stage has the compiler"


def test_validate_reads_drivers_from_folders(cli, project, tmp_path, unpacked):
    shutil.copytree(unpacked, tmp_path / "new")
    changes = [
        ("550.163.01]", "580.159.04]"),
        ("550.163.01, why", "580.159.04, why"),
        ("properties:\n", "properties:\n  driver: {580.159.04: {driver_from: new}}\n"),
    ]
    copied = "{% if driver_from is defined %}COPY --from=imagematrix-driver / /\n{% endif %}"
    path = project(*changes, template=f"FROM {{{{ base }}}} AS compiler\n{copied}")
    assert cli("validate", "-f", path).code == 0
    (tmp_path / "new" / "libcuda.so.580.159.04").unlink()
    cli("validate", "-f", path).refuses(
        2,
        "cuda12.4-sm70-drv580.159.04-x86-64-v3 and 3 other cells: the driver 580.159.04 in ",
        "is not complete: it lacks libcuda.so.580.159.04",
    )


def test_cells_whose_files_are_missing_here_are_rendered_and_exported(cli, project, tmp_path):
    """Another machine may have them; otherwise the job of the cell fails and reports why."""
    (tmp_path / "new").mkdir()
    path = project(
        ("properties:\n", "properties:\n  driver: {550.163.01: {driver_from: new}}\n"),
        template="FROM {{ base }}\n"
        "{% if driver_from is defined %}COPY --from=imagematrix-driver / /\n{% endif %}",
    )
    statuses = [cell["status"] for cell in json.loads(cli("plan", "-f", path, "--json").out)["cells"]]
    there = statuses.count("build") + statuses.count("failed")
    assert statuses.count("failed") == 4
    assert (
        cli("render", "-f", path, "-o", tmp_path / "out").err
        == f"wrote {there} Dockerfiles to {tmp_path}/out\n"
    )
    exported = json.loads(cli("export", "github", "-f", path).out)["include"]
    assert len(exported) == len({job["only"] for job in exported}) == there


def test_validate_shows_missing_sources_at_their_places(cli, project, tmp_path):
    result = cli("validate", "-f", project(template="FROM {{ base }}\nCOPY templtes/ /\n"))
    assert result.code == 2
    assert result.err == (
        f"imagematrix: {tmp_path}/templates/training.j2:2:6: templtes/ is not in the context "
        "(in training:v1 cpu-x86-64-v3 and 11 other cells)\n"
        "    2 | COPY templtes/ /\n      |      ^\n  did you mean 'templates'?\n"
    )


def test_excluded_cells_are_summarized_by_rule(cli, shipped):
    words = ("plan", "-f", shipped, "--only", "cuda=11.8")
    cells = [cell for cell in json.loads(cli(*words, "--json").out)["cells"] if cell["status"] == "excluded"]
    lines = [line for line in cli(*words).out.splitlines() if " excluded " in line]
    assert len(lines) == len({cell["rule"] for cell in cells})
    assert sum(int(line.split()[0]) for line in lines) == len(cells)
    assert any(f"{cells[0]['rule']}: {cells[0]['why']}" in line for line in lines)


def test_plan_names_the_image_if_there_are_several(cli, project):
    path = project(("axes:", "  serving:\n    version: v1\n    template: training.j2\naxes:"))
    lines = cli("plan", "-f", path, "--only", "cuda=none,march=znver4").out.splitlines()[2:]
    assert [line.split()[:3] for line in lines] == [
        ["training:v1", "cpu-znver4", "build"],
        ["serving:v1", "cpu-znver4", "build"],
    ]


def test_plan_warns_of_flags_that_no_host_shows(cli, project):
    facts = "facts:\n  march:\n    znver9: {vendor: amd, flags: [avx2, avx10_2, avx12]}\naxes:"
    path = project(("axes:", facts), ("march: [", "march: [znver9, "), ("gcc-14", "gcc-99"))
    result = cli("plan", "-f", path)
    assert result.code == 0
    assert result.err.count("march znver9 needs CPU flags that are seen on no host: avx12\n") == 1


def test_empty_plan_is_reported(cli, project):
    result = cli("plan", "-f", project(("images:\n  training:", "images: {}\nimage:\n  x:")))
    assert result.code == 2
    path = project(text="schema: imagematrix.matrix/v1\nimages: {}\naxes: {cuda: [none]}\n")
    assert "no cells" in cli("plan", "-f", path).err


@pytest.mark.parametrize("command", ["plan", "render"])
@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("march=zen4", "no value of the axis march matches zen4: it has x86-64-v2, x86-64-v3"),
        ("marhc=znver4", "this matrix has no axis 'marhc': did you mean 'march'?"),
        ("znver4", "invalid condition 'znver4': expected a condition such as march=znver* or cuda>=12.4"),
        ("cuda>=new", "invalid version in a comparison: 'new'"),
    ],
)
def test_invalid_only_is_rejected(cli, shipped, command, only, expected):
    cli(command, "-f", shipped, "--only", only).refuses(2, f"imagematrix: --only: {expected}")


@pytest.mark.parametrize("only", ["cuda=12.4", "cuda=12.4,compute=10.0"])
def test_render_to_stdout_requires_a_single_cell(cli, shipped, only):
    cli("render", "-f", shipped, "--only", only).refuses(2, "Dockerfiles to stdout", "-o DIR")


def test_unwritable_output_folder_is_rejected(cli, shipped, tmp_path):
    (tmp_path / "out").touch()
    cli("render", "-f", shipped, "--only", ONE, "-o", tmp_path / "out").refuses(2, f"{tmp_path}/out/training")


def test_build_requires_an_engine(cli, shipped):
    cli("build", "-f", shipped).refuses(
        8, "cannot reach the Docker engine at unix:///nowhere/docker.sock", "systemctl start docker"
    )


def test_commands_without_the_build_side_say_so_in_a_zip(tmp_path):
    package = Path(imagematrix.__file__).parent
    with zipfile.ZipFile(tmp_path / "node.zip", "w") as archive:
        for path in package.rglob("*"):
            if path.suffix in {".py", ".json"}:
                archive.write(path, path.relative_to(package.parent))
    run = functools.partial(
        subprocess.run,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "node.zip")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    schema = run([sys.executable, "-m", "imagematrix", "schema", "host"])
    assert json.loads(schema.stdout)["$id"] == "urn:imagematrix:host:v1"
    init = run([sys.executable, "-m", "imagematrix", "init", "my"])
    assert init.returncode == 2
    assert init.stderr.startswith("imagematrix: this is the file for nodes, which has no templates\n")


def test_schema_prints_json_schemas(cli):
    assert {"matrix", "host", "catalog"} <= set(cli("schema").out.split())
    assert json.loads(cli("schema", "matrix").out)["$id"] == "urn:imagematrix:matrix:v1"
    cli("schema", "martix").refuses(2, "did you mean 'matrix'?")


def test_error_shows_the_line_with_a_caret(cli, project):
    path = project(("znver4]", "znvr4]"), ('"8.9"', '"8.7x"'))
    result = cli("validate", "-f", path)
    assert result.code == 2
    assert result.err.splitlines()[-2:] == [
        "   11 |   march: [x86-64-v3, znvr4]",
        "      |                      ^",
    ]
    assert '    9 |   compute: ["7.0", "8.7x"]\n      |                    ^\n' in result.err


@pytest.mark.parametrize(
    ("change", "excerpt"),
    [
        (("axes:", "axes: ["), "    9 |   compute: "),
        (
            ("- {cuda", "- {cuda: none, march: znver4, why: x}\n  - {march: znver4, cuda: none}\n  - {cuda"),
            "^",
        ),
        (("    version: v1", "    version: *x"), "    4 |     version: *x\n      |              ^"),
        (("images:", "images: \x1b[31m"), ""),
        (("march: [x86-64-v3, znver4]", f"march: [x86-64-v3, {'z' * 300}]"), "x86-64-v3, zzz"),
        (("march: [x86-64-v3, znver4]", f"march: [{'x86-64-v3, ' * 300}znvr4]"), ", znvr4]\n      |"),
    ],
)
def test_excerpts_are_short_and_safe(cli, project, change, excerpt):
    result = cli("validate", "-f", project(change))
    assert result.code == 2
    assert excerpt in result.err
    assert "\x1b" not in result.err
    assert all(len(line) < 120 for line in result.err.splitlines() if " | " in line)


@pytest.mark.parametrize(
    "name", ["", ".", "x" * 400, f"{'x' * 245}.yaml", "none/matrix.yaml", "file/matrix.yaml"]
)
@pytest.mark.parametrize(
    "command",
    ["validate", "plan", "render", "lock", "outdated", "bump", "export github", "publish a:v1"],
)
def test_a_name_that_no_matrix_can_have_is_an_error(cli, tmp_path, monkeypatch, project, command, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    project().rename(tmp_path / LONG)
    result = cli(*command.split(), "-f", name)
    works = name == LONG and command == "validate"  # which needs no lock
    assert result.code in ((0,) if works else (2, 8)), result
    assert "Traceback" not in result.err
