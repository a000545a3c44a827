"""report, plan --shard and export, and the output of build in a CI system."""

import json
import re
import shutil

import pytest
import yaml

from imagematrix.errors import BuildError

CPU = ("--only", "cuda=none")
TWO_IMAGES = ("axes:", "  base:\n    version: v7\n    template: training.j2\naxes:")


@pytest.fixture
def saved(command, tmp_path):
    """Call it with the options of a build to get the file of its report."""

    def call(name, *options, **files):
        path = tmp_path / name
        path.write_text(command("build", "--json", *options, **files).out)
        return path

    return call


def test_report_of_missing_or_failed_cells_exits_with_6(backend, saved, cli):
    backend.errors["cpu-znver4"] = BuildError("no")
    part = saved("1.json", "--shard", "1/2", *CPU)
    result = cli("report", part)
    assert result.code == 6
    assert [line.split()[1:3] for line in result.out.splitlines()[2:]] == [
        ["cpu-x86-64-v3", "built"],
        ["cpu-znver4", "missing"],
    ]
    assert "no document has the outcome of: training:v1 cpu-znver4" in result.err
    assert "no document for the shards: 2/2" in result.err
    result = cli("report", "--json", part, saved("2.json", "--shard", "2/2", *CPU))
    assert result.code == 6
    assert [cell["status"] for cell in json.loads(result.out)["cells"]] == ["built", "failed"]
    assert "failed or stopped: training:v1 cpu-znver4" in result.err


def test_plan_of_a_shard(command, conforms, tmp_path):
    result = command("plan", "--shard", "2/4")
    assert result.code == 0
    assert result.out.count(" build ") == 3
    assert result.err == "3 build, 9 other-shard, 4 excluded, 2 infeasible\n"
    conforms(json.loads(command("plan", "--shard", "2/4", "--json").out))
    record = tmp_path / "last.json"
    record.write_text(command("build", "--json").out)
    document = json.loads(record.read_text())
    for cell in document["cells"]:
        if cell["status"] == "built":
            cell["seconds"] = 1000 if cell["cell"] == "cpu-znver4" else 1
    record.write_text(json.dumps(document))
    result = command("plan", "--shard", "1/4", "--durations", record, "--durations", record)
    assert re.search(r"^cpu-znver4 +up-to-date", result.out, re.MULTILINE)
    assert result.err.startswith("1 up-to-date, 11 other-shard")


@pytest.mark.parametrize("name", ["plan", "build"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--shard", "9/8"), "invalid shard: '9/8' write I/N"),
        (("--shard", "1/2", "--durations", "nowhere.json"), "nowhere.json: No such file"),
        (("--durations", "nowhere.json"), "needs --shard I/N"),
    ],
)
def test_invalid_shard_is_rejected_before_contacting_an_engine(command, backend, name, options, expected):
    result = command(name, *options)
    assert (result.code, result.out) == (2, "")
    assert expected in " ".join(result.err.split())
    assert not backend.calls


def test_progress_names_the_image_if_there_are_several(command, backend):
    backend.errors["cpu-znver4"] = BuildError("no")
    result = command("build", *CPU, "--jobs", "1", changes=[TWO_IMAGES])
    assert "building training:v1 cpu-x86-64-v3\n" in result.err
    assert re.search(r"\[4/4\] failed base:v7 cpu-znver4 ", result.err)
    assert "\ntraining:v1 cpu-znver4, base:v7 cpu-znver4 (log: " in result.err
    assert result.err.endswith("2 of 4 builds failed: training:v1 cpu-znver4, base:v7 cpu-znver4\n")


def test_only_existing_logs_are_named(command, tmp_path):
    log = tmp_path / ".imagematrix" / "logs" / "training" / "v1-cpu-znver4.log"
    log.parent.mkdir(parents=True)
    log.write_text("of an earlier build\n")
    unknown = ('none: {base: "debian:trixie", compiler: gcc-14}', 'none: {base: "debian:trixie"}')
    result = command("build", *CPU, "--json", changes=[unknown], template="FROM {{ base }}\n")
    assert result.code == 6
    assert "\ncpu-x86-64-v3, cpu-znver4\nimagematrix: the CPU flags of its march are unknown\n" in result.err
    assert [cell["log"] for cell in json.loads(result.out)["cells"]] == [None, None]
    assert not log.exists()


@pytest.mark.parametrize(("name", "expected"), [("no/j.xml", "No such file"), (".", "Is a directory")])
def test_unwritable_junit_path_fails_before_any_build(command, backend, tmp_path, name, expected):
    command("build", *CPU, "--junit", tmp_path / name).refuses(2, f"{tmp_path / name}: {expected}")
    assert not backend.calls


def test_failed_cell_is_a_github_error_with_a_folded_log(command, backend, tmp_path, monkeypatch):
    page = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    backend.errors["cpu-znver4"] = BuildError("::error::pwned", "ERROR: exit code: 1", remedy="mend it")
    result = command("build", *CPU)
    assert result.code == 6
    results = re.search(
        r"^::group::cpu-znver4: failed\nmaking cpu-znver4\n\ufffd:error::pwned\n"
        r"ERROR: exit code: 1\nmend it\n::endgroup::\n"
        r"::error title=cpu-znver4::ERROR: exit code: 1\nimagematrix: 1 of 2 builds failed",
        result.err,
        re.MULTILINE,
    )
    assert results
    assert page.read_text().startswith("### imagematrix: 1 failed, 1 built\n")
    row = r"^\| training:v1 \| cpu-znver4 \| failed \| \d+\.\d \|$"
    assert re.search(row, page.read_text(), re.MULTILINE)


def test_failed_cell_has_a_folded_log_in_gitlab(command, backend, monkeypatch):
    monkeypatch.setenv("GITLAB_CI", "true")
    backend.errors["cpu-znver4"] = BuildError("ERROR: exit code: 1")
    result = command("build", *CPU)
    assert (
        "[collapsed=true]\r\x1b[0Kcpu-znver4: failed\nmaking cpu-znver4\nERROR: exit code: 1\n" in result.err
    )
    assert "\x1b[0K\ncpu-znver4: ERROR: exit code: 1\n" in result.err


def test_github_export_has_a_job_per_cell(command):
    result = command("export", "github")
    assert (result.code, result.err, result.out.count("\n")) == (0, "", 1)
    matrix = json.loads(result.out)
    assert len(matrix["include"]) == 12
    assert matrix["include"][0] == {
        "name": "cpu-x86-64-v3",
        "only": "cuda=none,march=x86-64-v3",
        "shard": "1/1",
        "platforms": "linux/amd64",
    }
    for job in matrix["include"][::5]:
        planned = command("plan", "--only", job["only"], "--shard", job["shard"], "--json")
        cells = [cell["cell"] for cell in json.loads(planned.out)["cells"] if cell["status"] == "build"]
        assert cells == [job["name"]]


def test_gitlab_export_is_a_child_pipeline(command):
    pipeline = yaml.safe_load(command("export", "gitlab", *CPU).out)
    assert pipeline == {
        "build": {
            "extends": ".build",
            "parallel": {
                "matrix": [
                    {"ONLY": "cuda=none,march=x86-64-v3", "SHARD": "1/1"},
                    {"ONLY": "cuda=none,march=znver4", "SHARD": "1/1"},
                ]
            },
        }
    }


def test_bake_export_says_that_nothing_tests_the_images(command):
    """Jobs of CI systems run `build`, which does."""
    tests = ("version: v1", "version: v1\n    test: check me")
    result = command("export", "bake", *CPU, changes=[tests])
    assert (result.code, len(json.loads(result.out)["target"])) == (0, 2)
    said = "imagematrix: builds of other tools do not run the tests of training\n"
    assert result.err.startswith(f"{said}  run `imagematrix build --retest -f ")
    assert command("export", "bake", *CPU).err == ""
    assert command("export", "github", *CPU, changes=[tests]).err == ""


def test_bake_export_uses_locked_bases(command, backend):
    """By digest also while the tag has not moved: bake may run later."""
    command("lock")
    locked = backend.resolve("debian:trixie")
    for backend.salt in ("", "the tag has moved"):
        (target,) = json.loads(command("export", "bake", "--only", "cuda=none,march=znver4").out)[
            "target"
        ].values()
        assert target["dockerfile-inline"].startswith(f"FROM debian:trixie@{locked} AS compiler\n")


def test_export_writes_files_to_a_folder(command, tmp_path):
    for target, name in (
        ("github", "github.json"),
        ("gitlab", "gitlab.yml"),
        ("bake", "docker-bake.json"),
    ):
        result = command("export", target, "-o", tmp_path / "new" / "out")
        assert result == (0, "", f"wrote 1 file to {tmp_path / 'new' / 'out'}\n")
        assert (tmp_path / "new" / "out" / name).read_text() == command("export", target).out


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (("jenkins",), 2, "invalid export target: 'jenkins' one of github, gitlab, bake"),
        (("github", "--jobs", "257"), 2, "257 exceeds the limit of 256"),
        (("gitlab", "--jobs", "201"), 2, "201 exceeds the limit of 200"),
        (("github", "--jobs", "0"), 2, "Invalid value for '--jobs'"),
        (("bake", "--jobs", "2"), 2, "--jobs is for CI systems"),
        (("github", "--only", "cuda=11.8,driver=550.163.01"), 2, "no cell can be built"),
        (("bake", "--only", "cuda=11.8,driver=550.163.01"), 2, "nothing to export: no cell can be built"),
        (("github", "--only", "x"), 2, "invalid condition 'x'"),
    ],
)
def test_invalid_export_is_rejected(command, options, code, expected):
    result = command("export", *options)
    assert (result.code, result.out) == (code, "")
    assert expected in " ".join(result.err.replace("│", " ").split())


def test_export_to_an_unwritable_folder_is_rejected(command, tmp_path):
    (tmp_path / "file").touch()
    command("export", "github", "-o", tmp_path / "file").refuses(2, f"{tmp_path}/file: File exists")


def test_bake_export_refuses_a_changed_version(command):
    command("build", *CPU)
    command("export", "bake", *CPU, template="FROM {{ base }}\nRUN other\n").refuses(
        7, "a version would change in 2 cells"
    )


def test_bake_export_refuses_a_driver_from_a_folder(command, tmp_path, unpacked):
    shutil.copytree(unpacked, tmp_path / "new")
    command(
        *("export", "bake", "--only", "cuda=12.4,compute=8.9,march=znver4,driver=580.159.04"),
        changes=[
            ("550.163.01]", "580.159.04]"),
            ("550.163.01, why", "580.159.04, why"),
            ("properties:\n", "properties:\n  driver: {580.159.04: {driver_from: new}}\n"),
        ],
        template="FROM {{ base }} AS compiler\nCOPY --from=imagematrix-driver / /\n",
    ).refuses(2, "only `imagematrix build` can take a driver from a folder")


def test_export_splits_more_targets_than_a_file_may_have(command, tmp_path):
    values = ", ".join(f"v{number}" for number in range(300))
    text = f"""\
        schema: imagematrix.matrix/v1
        images:
          training: {{version: v1, template: training.j2, context: .}}
        axes:
          site: [{values}]
    """
    command("export", "bake", text=text, template="FROM debian:trixie\n").refuses(
        2, "cannot write 2 files to stdout", "-o DIR"
    )
    result = command("export", "bake", "-o", tmp_path / "out", text=text)
    assert result.code == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in files] == ["docker-bake-1.json", "docker-bake-2.json"]
    assert [len(json.loads(path.read_text())["target"]) for path in files] == [250, 50]
    matrix = json.loads(command("export", "github", text=text).out)
    assert [job["shard"] for job in matrix["include"]] == [f"{number}/256" for number in range(1, 257)]
