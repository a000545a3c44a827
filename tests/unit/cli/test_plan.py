"""`plan` with an engine: how cells would be built, and what it warns of."""

import json

import pytest
from matrices import add_axis

from imagematrix.build.executor import solver
from imagematrix.build.plan.execution import BuilderPlatforms
from imagematrix.build.stores import engine as local
from imagematrix.cli.shared.build_session import BuildSession
from imagematrix.errors import EngineError
from imagematrix.hardware.host.emulators import format_registration

CROSS = "FROM --platform=$BUILDPLATFORM {{ base }} AS compiler\nRUN cc\n\nFROM {{ base }}\n"
RUNS = "FROM {{ base }} AS compiler\nRUN cc\n\nFROM {{ base }}\n"
BOTH = (add_axis("platform: [linux/amd64, linux/arm64]"), ("[x86-64-v3, znver4]", "[x86-64-v3, armv8-a]"))
BUILDERS = {
    None: BuilderPlatforms(name="default", native="linux/amd64"),
    "arm": BuilderPlatforms(name="arm", native="linux/arm64"),
}


@pytest.fixture
def plan(cli, project, backend, monkeypatch, tmp_path):
    """Call it with a template and options to plan the CPU-only cells of two platforms."""
    monkeypatch.setattr(local, "EngineStore", lambda: backend)
    monkeypatch.setattr(BuildSession, "builder", backend)
    monkeypatch.setattr(solver, "read_builder_platforms", lambda name: [BUILDERS[name]])
    monkeypatch.chdir(tmp_path)

    def call(template, *options, command="plan", changes=BOTH):
        project(*changes, template=template)
        return cli(command, "--only", "cuda=none", *options)

    return call


def get_reasons(result):
    """Return the last column of the cells to build, by platform."""
    rows = [line.split() for line in result.out.splitlines() if " build" in line]
    return {row[0].removeprefix("cpu-")[:11]: " ".join(row[2:]) for row in rows}


def test_cross_builds_are_told(plan, conforms):
    result = plan(CROSS)
    assert result.code == 0
    assert get_reasons(result) == {"linux-amd64": "", "linux-arm64": "cross, on linux/amd64"}
    assert "cannot be built" not in result.err
    document = conforms(json.loads(plan(CROSS, "--json").out))
    executions = [cell["execution"] for cell in document["cells"] if cell["status"] == "build"]
    assert [one["kind"] for one in executions] == ["native", "cross"]


def test_of_several_builders_the_one_that_decides_is_named(plan, monkeypatch):
    monkeypatch.setitem(BUILDERS, "x86", BuilderPlatforms(name="x86", native="linux/amd64"))
    result = plan(CROSS, "--builder", "arm", "--builder", "x86")
    assert get_reasons(result) == {
        "linux-amd64": "cross, on arm (linux/arm64)",
        "linux-arm64": "cross, on x86 (linux/amd64)",
    }
    assert get_reasons(plan(CROSS, "--builder", "x86"))["linux-arm64"] == "cross, on linux/amd64"


def test_missing_emulator_is_told_and_named(plan):
    result = plan(RUNS)
    assert result.code == 0
    assert get_reasons(result)["linux-arm64"] == "emulated, on linux/amd64"
    assert (
        "1 cell cannot be built: its build runs programs for linux/arm64, and the builder default"
        in result.err
    )
    assert f"register an emulator: {format_registration('linux/arm64')}\n" in result.err


def test_builder_with_emulators_of_its_own_is_doubted(plan, monkeypatch):
    container = BuilderPlatforms(name="mine", native="linux/amd64", may_emulate_more=True)
    monkeypatch.setitem(BUILDERS, None, container)
    result = plan(RUNS)
    assert "cannot be built" not in result.err
    assert (
        "1 cell may fail: its build runs programs for linux/arm64, and nothing says that the builder mine can"
        in result.err
    )
    result = plan(RUNS, command="build")
    assert "1 cell may fail" in result.err
    assert "no emulator" not in result.err


def test_builder_of_the_platform_needs_none(plan):
    result = plan(RUNS, "--builder", "arm", "--platform", "linux/arm64")
    assert get_reasons(result) == {"linux-arm64": ""}
    assert "cannot be built" not in result.err


def test_engine_without_buildx_plans_nevertheless(plan, monkeypatch):
    def fail(_):
        raise EngineError("docker buildx does not work: it is absent")

    monkeypatch.setattr(solver, "read_builder_platforms", fail)
    result = plan(CROSS)
    assert result.code == 0
    assert get_reasons(result) == {"linux-amd64": "", "linux-arm64": ""}
    assert "how the images would be built is not known" in result.err


def test_base_of_one_platform_fails_cross_builds(plan, backend):
    backend.single.add("debian:trixie")
    result = plan(CROSS)
    assert result.code == 2
    assert "the base image debian:trixie is for one platform" in result.out
    assert "name an index of images for all platforms" in result.err


def test_marches_with_equal_needs_are_warned_of(plan):
    arm = (
        add_axis("platform: [linux/arm64]"),
        ("[x86-64-v3, znver4]", "[neoverse-v2, neoverse-n2, neoverse-n1]"),
    )
    result = plan(CROSS, changes=arm)
    assert result.code == 0
    assert "the marches neoverse-v2 and neoverse-n2 needs the same CPU flags" in result.err
    assert "keep neoverse-v2 only" in result.err
