"""The shipped matrices, for x86-64 and for arm64, and the starters: what holds for all their cells."""

import re
from pathlib import Path

import pytest

from imagematrix.build.dockerfile.dockerfile import list_run_platforms
from imagematrix.build.dockerfile.platforms import BUILDER, list_builder_bases
from imagematrix.build.matrix.axis_values import HOST_DRIVER
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.feasibility import find_equal_marches, find_infeasibility, find_march_flags
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.plan import PlanContext, PlanStatus
from imagematrix.build.plan.planner import plan
from imagematrix.hardware.vendors import gpus, versions

ROOT = Path(__file__).parents[3]
ARM = ROOT / "matrix.arm64.yaml"
STARTERS = sorted((ROOT / "imagematrix" / "starter").glob("*.yaml"))


def feasible(path):
    return [cell for cell in expand_matrix(load_matrix(path)).cells if not find_infeasibility(cell)]


@pytest.fixture(scope="module")
def arm_items():
    """The planned cells for arm64."""
    return plan(load_matrix(ARM), PlanContext()).with_status(PlanStatus.BUILD)


@pytest.mark.parametrize("name", ["matrix.yaml", "matrix.arm64.yaml", *(path.stem for path in STARTERS)])
def test_no_cell_pairs_a_gpu_with_a_driver_that_does_not_know_it(name, starters):
    cells = feasible(starters.get(name) or ROOT / name)
    paired = [cell for cell in cells if cell.driver not in (None, HOST_DRIVER)]
    for cell in paired:
        compute = cell.axes["compute"].rstrip("af")
        branch = versions.get_branch(cell.driver)
        last = gpus.get_last_branch(None, compute)
        assert gpus.get_first_branch(compute) <= branch, cell.id
        assert last is None or branch <= last, cell.id
    assert cells
    assert paired or name in ("cpu", "numba", "pytorch-arm64", "vllm-arm64")


def test_marches_of_a_matrix_need_different_flags():
    for path in (ROOT / "matrix.yaml", ARM):
        assert find_equal_marches(feasible(path)) == []


def test_march_stands_for_the_cores_whose_code_needs_the_same(arm_items):
    cell = next(item.cell for item in arm_items if item.cell.axes["march"] == "neoverse-v2")
    needs = {march: find_march_flags(cell, march) for march in ("neoverse-v2", "neoverse-n2", "cortex-x925")}
    assert len(set(needs.values())) == 1
    assert len(needs["neoverse-v2"]) == 20


def test_build_for_arm64_runs_only_programs_of_the_machine_that_builds(arm_items):
    assert {item.cell.platform for item in arm_items} == {"linux/arm64"}
    for item in arm_items:
        assert list_run_platforms(item.dockerfile, ["compiler"]) == {BUILDER}
        assert list_builder_bases(item.dockerfile) == item.bases == ("debian:trixie-slim",)
        assert "ld.so.cache" not in item.dockerfile


def test_program_for_arm64_is_compiled_for_its_core(arm_items):
    options = {
        item.cell.axes["march"]: set(re.findall(r"-m(?:cpu|arch)=\S+", item.dockerfile)) for item in arm_items
    }
    assert options == {
        "armv8-a": {"-march=armv8-a"},
        "neoverse-n1": {"-mcpu=neoverse-n1"},
        "neoverse-v2": {"-mcpu=neoverse-v2"},
    }


def test_drivers_for_arm64(arm_items):
    """Debian's driver knows no Blackwell, which gets that of its node."""
    drivers = {item.cell.axes["compute"]: item.cell.driver for item in arm_items if item.cell.cuda}
    assert drivers == {"9.0": "550.163.01", "10.0": "host", "10.3": "host", "12.1": "host"}
    for item in arm_items:
        assert ("libcuda1" in item.dockerfile) == (item.cell.driver == "550.163.01")
