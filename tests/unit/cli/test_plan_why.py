"""`plan --why`: the text about one cell, its document, and the cells that it cannot tell of."""

import json

import pytest

from imagematrix.build.plan.context import STATE
from imagematrix.build.plan.identity import Identity
from imagematrix.build.plan.lock import extend_lock, locate_lock
from imagematrix.build.stores import engine as local
from imagematrix.cli.shared.build_session import BuildSession
from imagematrix.common.text import strip_escapes
from imagematrix.errors import EngineError, sanitize_text
from imagematrix.images.catalog import labels

ID = "cuda12.4-sm89-drv550.163.01-znver4"
ONE = "cuda=12.4,compute=8.9,driver=550.163.01,march=znver4"
TWO = ("axes:", "  app: {version: v1, template: app.j2}\naxes:")
CHANGED = """\
training:v1 cuda12.4-sm89-drv550.163.01-znver4: refused
  base debian:trixie, context, dockerfile changed: new.c
  compared with training:v1-cuda12.4-sm89-drv550.163.01-znver4-…

axis or property   value           from
──────────────────────────────────────────────────────────────────────────
cuda               12.4            matrix.yaml:8, axes
compute            8.9             matrix.yaml:9, axes
driver             550.163.01      matrix.yaml:10, axes
march              znver4          matrix.yaml:11, axes
base               debian:trixie   matrix.yaml:16, properties of cuda 12.4
compiler           gcc-14          matrix.yaml:16, properties of cuda 12.4

input                state     value                          from
────────────────────────────────────────────────────────────────────────────────────────
schema               same      3
dockerfile           changed   f5a30f41ac88 -> 4d60eb37fabe   templates/training.j2
context              changed   748e672658c9 -> de0f2b2a5c35   .
platform             same      linux/amd64
epoch                same      0
compression          same      zstd -3                        matrix.yaml
compiler             same      gcc-14                         matrix.yaml
base debian:trixie   changed   73894be5ff9b -> 3d030a3202ab   the engine or its registry

lines of the Dockerfile
  -FROM debian:trixie AS compiler
  -RUN apt-get install g++
  -FROM compiler AS program
  -RUN cc -march=znver4 main.c -DSM=89
  -
  -COPY --from=program /a.out /

needs of a node
  platform: linux/amd64
  driver-exact: exact 550.163.01
  driver-gpu: exact 550.163.01
  driver-cuda: 12.4
  device-code: 89
  cpu: abm adx aes avx avx2 avx512_bf16
…
"""


@pytest.fixture
def why(cli, project, backend, monkeypatch, tmp_path):
    """Call it with the name of a cell, and changes to the matrix."""
    monkeypatch.setattr(local, "EngineStore", lambda: backend)
    monkeypatch.setattr(BuildSession, "builder", backend)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dockerignore").write_text("matrix.yaml\ntemplates\n")

    def call(name, *changes, options=(), **files):
        project(*changes, **files)
        return cli("plan", "--why", name, *options)

    return call


@pytest.fixture
def built(planned, carry_out, tmp_path):
    """Call it to build the image of the cell; returns its reference."""

    def call():
        plan = planned(only=ONE)
        carry_out(plan, logs=tmp_path / STATE / "logs")
        return plan.items[0].reference

    return call


def test_changed_cell_is_explained(why, built, backend, tmp_path):
    reference = built()
    (tmp_path / "new.c").touch()
    backend.salt = "newer"
    result = why(ID, template="FROM {{ base }}\n")
    shown = [line.rstrip() for line in result.out.replace(reference, f"{reference[:-12]}…").split("\n")]
    text = "\n".join(shown)
    assert text.partition(" avx512_bitalg")[0] == CHANGED.removesuffix("\n…\n")
    assert (result.code, result.err) == (7, "")


def test_cell_that_is_there_is_explained(why, built):
    reference = built()
    result = why(reference)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"training:v1 {ID}: up-to-date\n  the same inputs as {reference}\n\n")
    assert " changed " not in result.out
    assert "no image of this cell is known" in why("cuda=none,march=znver4").out


def test_image_of_a_real_store_is_compared(cli, project, engine, tmp_path, conforms):
    """Its labels are read as an engine lists them."""
    (tmp_path / ".dockerignore").write_text("*\n")
    file = project(template="FROM {{ base }}\n")
    extend_lock(locate_lock(file), {"debian:trixie": f"sha256:{1:064x}"})
    document = conforms(json.loads(cli("plan", "-f", file, "--why", ID, "--json").out))
    before = {component["name"]: component["value"] for component in document["inputs"]}
    before["base debian:trixie"] = f"sha256:{2:064x}"
    own = {
        labels.IMAGE: "training",
        labels.VERSION: "v1",
        labels.CELL: ID,
        labels.INPUT: Identity(components=before).digest,
        labels.INPUTS: json.dumps(before),
    }
    reference = f"training:{labels.make_tag('v1', ID, own[labels.INPUT])}"
    engine.add_image(own, RepoTags=[reference])
    result = cli("plan", "-f", file, "--why", reference, "--json")
    document = conforms(json.loads(result.out))
    assert (result.code, document["existing"], document["doubtful"]) == (7, reference, False)
    changed = [component for component in document["inputs"] if component["value"] != component["before"]]
    assert changed == [
        {
            "name": "base debian:trixie",
            "value": f"sha256:{1:064x}",
            "before": f"sha256:{2:064x}",
            "from": str(tmp_path / "imagematrix.lock"),
        }
    ]


@pytest.mark.usefixtures("no_engine")
def test_without_an_engine_values_are_explained(cli, project):
    result = cli("plan", "-f", project(), "--why", ID)
    assert result.code == 0
    assert "its inputs are unknown, because the digest of debian:trixie is\n" in result.out
    assert "\ninput " not in result.out
    assert "every feasible cell is shown as to build" in result.err


def test_document_conforms(why, built, conforms):
    reference = built()
    result = why(ONE, options=["--json"], template="FROM {{ base }}\n")
    document = conforms(json.loads(result.out))
    assert result.code == 7
    assert document["existing"] == reference
    assert document["cell"]["changed"] == ["dockerfile"]
    assert document["cell"]["status"] == "refused"


def test_cell_that_is_not_built_has_its_rule(why):
    result = why("cuda11.8-sm89-drv550.163.01-znver4")
    assert result.code == 0
    assert result.out.startswith(
        "training:v1 cuda11.8-sm89-drv550.163.01-znver4: excluded\n"
        "  matrix.yaml:18: they have the newer toolkit\n\n"
    )
    assert "\ninput " not in result.out
    result = why("cuda=12.4,driver=470.256.02,compute=8.9,march=znver4", ("[535.261.03,", "[470.256.02,"))
    assert "driver-cuda: driver 470.256.02 is too old for CUDA 12.4" in result.out


def test_way_of_a_build_is_told(why, backend, built, conforms):
    assert "\n  to be built for linux/amd64, in the engine's classic image store: " in why(ID).out
    backend.layers = []
    assert "\n  to be built for linux/amd64, in an OCI layout, " in why(ID).out
    document = conforms(json.loads(why(ID, options=["--json"]).out))
    assert document["method"] == {"layouts": True, "error": None}
    backend.layers = None
    built()
    assert "to be built" not in why(ID).out
    assert conforms(json.loads(why(ID, options=["--json"]).out))["method"] is None


def test_engine_that_cannot_build_is_told(why, monkeypatch):
    def fail(_):
        raise EngineError("the engine is Podman, which has no BuildKit for builds")

    monkeypatch.setattr(BuildSession, "builder", property(fail))
    result = why(ID)
    assert "\n  it cannot be built here: the engine is Podman, " in result.out


def test_many_changed_lines_are_counted(why, built):
    built()
    result = why(ID, template="FROM {{ base }}\n" + "RUN true\n" * 50)
    assert result.out.count("  +RUN true\n") == 34
    assert "  and 16 more\n" in result.out


def test_many_changed_files_are_listed(why, built, tmp_path):
    built()
    for number in range(30):
        (tmp_path / f"{number:02}.h").touch()
    result = why(ID)
    assert "context changed: 00.h, 01.h, 02.h, 03.h, 04.h, …" in result.out
    assert "changed files: 00.h, " in result.out
    assert "19.h and 10 more" in " ".join(result.out.split())


@pytest.mark.parametrize("options", [["--only", ONE], ["--platform", "linux/amd64"], ["--shard", "1/2"]])
def test_other_selections_are_refused(why, options):
    result = why(ID, options=options)
    assert (result.code, result.out) == (2, "")
    assert "--why names one cell" in result.err


def test_unknown_and_ambiguous_names_are_errors(why, backend):
    result = why("cuda12.4-sm89-drv550.163.01-znver5")
    assert (result.code, result.out) == (2, "")
    assert f"did you mean '{ID}'?" in result.err
    result = why("\x1b[31mx\n::error::x")
    assert (result.code, result.out) == (2, "")
    assert sanitize_text(result.err) == result.err
    assert "\n::error" not in result.err
    result = why("march=znver4")
    assert (result.code, result.out) == (2, "")
    assert "--why: 7 cells match 'march=znver4': cpu-znver4, " in result.err
    assert not backend.calls


def test_faulty_cells_do_not_concern_others(why, tmp_path, backend):
    (tmp_path / "templates" / "app.j2").write_text("FROM {{ nothing }}\n")
    assert why(f"v1-{ID}", TWO).code == 2  # of two images
    assert why(f"training:v1 {ID}", TWO).code == 0
    result = why(f"app:v1 {ID}", TWO)
    assert (result.code, result.out) == (2, "")
    assert "app.j2" in result.err
    (tmp_path / "templates" / "app.j2").write_text("FROM other:1\n")
    backend.missing = {"other:1"}
    result = why(f"app:v1 {ID}", TWO)
    assert result.code == 2
    assert result.out.startswith(f"app:v1 {ID}: failed\n  other:1 is nowhere\n")


def test_labels_of_others_are_shown_as_text(why, built, backend):
    reference = built()
    own = backend.images[reference]
    own[labels.INPUTS] = json.dumps({"[red]\x1b[31m": "[/]\n::error::\x07", "x" * 99_999: "y"})
    result = why(ID)
    assert "its labels do not list inputs with the digest that they state" in result.out
    assert sanitize_text(result.out) == result.out
    assert "\n::error" not in result.out
    assert "[red]" in result.out
    variant = json.loads(own[labels.VARIANT]) | {"cpu_flags": ["\x1b[31m[red]", "\n::error::", "x" * 9_999]}
    own[labels.VARIANT] = json.dumps(variant)
    result = why(ID)
    assert "  cpu: " in result.out
    assert sanitize_text(result.out) == result.out
    assert "\n::error" not in result.out
    assert max(map(len, result.out.split("\n"))) < 700


def test_narrow_terminals_get_folded_tables(why, built, backend, monkeypatch):
    built()
    backend.salt = "newer"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    result = why(ID)
    assert "\x1b[33mchanged\x1b[0m" in result.out
    tables = strip_escapes(result.out).split("\n\n", 1)[1].partition("needs")[0].split("\n")
    assert max(map(len, tables)) <= 70
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in why(ID).out
