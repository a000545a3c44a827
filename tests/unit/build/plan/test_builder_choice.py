"""How the build of a cell would run, on which builder, and what is missing."""

from dataclasses import replace

import pytest
from matrices import add_axis

from imagematrix.build.plan.builder_choice import fail_missing, with_executions
from imagematrix.build.plan.execution import BuilderPlatforms, Execution, ExecutionKind
from imagematrix.build.plan.plan import PlanStatus
from imagematrix.errors import BuildError
from imagematrix.hardware.host.emulators import format_registration

X86 = BuilderPlatforms(name="default", native="linux/amd64", emulated=frozenset({"linux/386"}))
EMULATING = BuilderPlatforms(name="big", native="linux/amd64", emulated=frozenset({"linux/arm64"}))
ARM = BuilderPlatforms(name="arm", native="linux/arm64")
PLATFORMS = add_axis("platform: [linux/amd64, linux/arm64]")
CROSS = """\
FROM --platform=$BUILDPLATFORM {{ base }} AS compiler
RUN apt-get install gcc

FROM {{ base }}
COPY --from=compiler /x /x
"""
RUNS = "FROM {{ base }} AS compiler\nRUN apt-get install gcc\n\nFROM {{ base }}\n"


@pytest.fixture
def executions(planned):
    """Call it with a template and builders to get the executions of the cells, by platform."""

    def call(template, *builders):
        change = "march: [x86-64-v3, znver4]", "march: [x86-64-v3, armv8-a]"
        plan = with_executions(planned(PLATFORMS, change, template=template, only="cuda=none"), builders)
        items = plan.with_status(PlanStatus.BUILD)
        return {item.cell.platform: item.execution for item in items}

    return call


def test_kinds(executions):
    assert executions(CROSS, X86) == {
        "linux/amd64": Execution(kind=ExecutionKind.NATIVE, builder="default", native="linux/amd64"),
        "linux/arm64": Execution(kind=ExecutionKind.CROSS, builder="default", native="linux/amd64"),
    }
    assert executions(CROSS, ARM) == {
        "linux/amd64": Execution(kind=ExecutionKind.CROSS, builder="arm", native="linux/arm64"),
        "linux/arm64": Execution(kind=ExecutionKind.NATIVE, builder="arm", native="linux/arm64"),
    }
    assert executions(RUNS, EMULATING)["linux/arm64"] == Execution(
        kind=ExecutionKind.EMULATED, builder="big", native="linux/amd64"
    )
    assert executions(RUNS, X86)["linux/arm64"] == Execution(
        kind=ExecutionKind.EMULATED, builder="default", native="linux/amd64", missing=("linux/arm64",)
    )


def test_identity_does_not_depend_on_the_builder(planned):
    """It follows from the text and from the digests of indexes."""
    change = "march: [x86-64-v3, znver4]", "march: [x86-64-v3, armv8-a]"
    plan = planned(PLATFORMS, change, template=CROSS, only="cuda=none")
    named = [
        {
            item.cell.id: item.reference
            for item in with_executions(plan, [builder]).with_status(PlanStatus.BUILD)
        }
        for builder in (X86, ARM)
    ]
    assert named[0] == named[1]
    assert len({*named[0].values()}) == 2
    assert None not in named[0].values()


def test_stage_that_names_a_platform_runs_there(executions):
    named = RUNS.replace("FROM {{ base }} AS", "FROM --platform=linux/arm64 {{ base }} AS")
    result = executions(named, X86)
    assert result["linux/amd64"].missing == result["linux/arm64"].missing == ("linux/arm64",)


def test_builder_with_emulators_of_its_own_is_doubted(executions):
    """It lists only those of its kernel."""
    container = replace(X86, may_emulate_more=True)
    assert executions(RUNS, container)["linux/arm64"] == Execution(
        kind=ExecutionKind.EMULATED, builder="default", native="linux/amd64", doubtful=("linux/arm64",)
    )
    assert executions(RUNS, container)["linux/amd64"].doubtful == ()
    assert executions(RUNS, container, EMULATING)["linux/arm64"].builder == "default"


@pytest.mark.parametrize(
    ("variable", "kinds", "doubtful"),
    [
        ("$PLAT", ("native", "cross"), ()),
        ("$BUILDOS/$BUILDARCH", ("native", "cross"), ()),
        ("${BUILDPLATFORM:-linux/arm64}", ("native", "cross"), ()),
        ("$TARGETOS/${TARGETARCH}", ("native", "emulated"), ()),
        ("$SECRET", ("native", "cross"), ("$SECRET",)),
    ],
)
def test_platform_by_a_variable(executions, variable, kinds, doubtful):
    stage = RUNS.replace("FROM {{ base }} AS", f"FROM --platform={variable} {{{{ base }}}} AS")
    result = executions(f"ARG PLAT=linux/amd64\nARG SECRET\n\n{stage}", EMULATING)
    assert tuple(one.kind for one in result.values()) == kinds
    assert {(one.missing, one.doubtful) for one in result.values()} == {((), doubtful)}


def test_machine_of_a_builder_that_suits_best(executions):
    machines = X86, replace(EMULATING, name="default"), replace(ARM, name="default")
    assert executions(RUNS, *machines)["linux/arm64"].native == "linux/arm64"
    emulated = executions(RUNS, *machines[:2])["linux/arm64"]
    assert (emulated.kind, emulated.missing) == (ExecutionKind.EMULATED, ())


def test_any_of_several_builders_may_get_a_cell(executions):
    result = executions(RUNS, ARM, EMULATING, X86)["linux/arm64"]
    assert (result.builder, result.missing) == ("default", ("linux/arm64",))
    assert executions(RUNS, ARM, EMULATING)["linux/arm64"].builder == "big"


def test_without_a_builder_nothing_is_said(executions):
    assert set(executions(RUNS).values()) == {None}


def test_cells_that_nothing_can_run_fail_before_any_build(planned, conforms):
    change = "march: [x86-64-v3, znver4]", "march: [x86-64-v3, armv8-a]"
    plan = with_executions(planned(PLATFORMS, change, template=RUNS, only="cuda=none"), [X86])
    conforms(plan.to_json())
    (failed,) = fail_missing(plan).with_status(PlanStatus.FAILED)
    assert failed.cell.platform == "linux/arm64"
    assert isinstance(failed.error, BuildError)
    assert failed.why == ("its build runs programs for linux/arm64, and the builder default has no emulator")
    assert failed.error.remedy.endswith(f"register an emulator: {format_registration('linux/arm64')}")
    (built,) = fail_missing(plan).with_status(PlanStatus.BUILD)
    assert built.cell.platform == "linux/amd64"
