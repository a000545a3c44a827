"""Infeasible cells are reported with the vendor's limit; unknown combinations are left to the build."""

import pytest

from imagematrix.build.matrix.feasibility import (
    Infeasible,
    find_equal_marches,
    find_infeasibility,
    find_unseen_flags,
)
from imagematrix.build.matrix.matrix import Cell, Image
from imagematrix.build.matrix.matrix_facts import March, MatrixFacts


def cell(compiler=None, **axes):
    image = Image(name="i", version="v", template="t", context=None)
    return Cell(image=image, axes=axes, properties={"compiler": compiler} if compiler else {})


@pytest.mark.parametrize(
    ("impossible", "rule", "why"),
    [
        (
            cell(cuda="11.8", compute="10.0"),
            "toolkit-target",
            "CUDA 11.8 cannot target compute capability 10.0 (sm_100); 12.8 to ",
        ),
        (
            cell(cuda="13.0", compute="7.0"),
            "toolkit-target",
            "CUDA 13.0 cannot target compute capability 7.0 (sm_70); 9.0 to 12.9 can",
        ),
        (
            cell(cuda="11.8", compute="9.9"),
            "toolkit-target",
            "CUDA 11.8 cannot target compute capability 9.9 (sm_99); no release can",
        ),
        (
            cell(cuda="12.4", driver="470.256.02"),
            "driver-cuda",
            "driver 470.256.02 is too old for CUDA 12.4, which needs 525.60.13",
        ),
        (
            cell(cuda="12.4", driver="535.261.03", platform="linux/arm64", march="znver4"),
            "march-platform",
            "march znver4 is for x86_64, not for linux/arm64",
        ),
        (
            cell(cuda="none", march="neoverse-v2"),
            "march-platform",
            "march neoverse-v2 is for aarch64, not for linux/amd64",
        ),
        (
            cell("gcc-12", cuda="none", march="znver5"),
            "march-compiler",
            "gcc-12 does not support -march=znver5; ",
        ),
    ],
)
def test_impossible_cell_is_infeasible(impossible, rule, why):
    result = find_infeasibility(impossible)
    assert isinstance(result, Infeasible)
    assert result.rule == rule
    assert result.why.startswith(why)


@pytest.mark.parametrize(
    "possible",
    [
        cell(cuda="12.4", compute="9.0a", driver="550.163.01", march="znver4"),
        cell(cuda="12.4", compute="9.0", driver="525.60.13"),  # minor-version compatibility
        cell(cuda="12.4", compute="9.0", driver="host"),
        cell(cuda="none", march="x86-64-v2"),
        cell("gcc-14", cuda="none", march="znver5"),
        cell("gcc-99", cuda="none", march="znver5"),
        cell("nvhpc-24", cuda="none", march="znver5"),
        cell(cuda="99.0", compute="9.0"),
        cell(platform="linux/arm64", march="neoverse-v2"),
        cell(other="x"),
    ],
)
def test_possible_cell_is_feasible(possible):
    assert find_infeasibility(possible) is None


@pytest.mark.parametrize("compiler", [None, "gcc-16", "clang-99"])
@pytest.mark.parametrize("march", ["diamondrapids", "znver4", "armv9.2-a"])
def test_a_probe_sees_all_flags_of_the_tables(march, compiler):
    assert find_unseen_flags(cell(compiler, march=march)) == frozenset()
    assert find_unseen_flags(cell(compiler, cuda="none")) == frozenset()


def test_stated_flags_that_no_host_shows():
    stated = March(arch="x86_64", flags=frozenset({"avx2", "avx10_2", "avx12", "rdpid"}), vendor=None)
    image = Image(name="i", version="v", template="t", context=None)
    facts = MatrixFacts(march={"znver9": stated})
    assert find_unseen_flags(Cell(image=image, axes={"march": "znver9"}, properties={}, facts=facts)) == {
        "avx12"
    }


def marches(*names, compiler="gcc-14", platform="linux/arm64"):
    return [cell(compiler, platform=platform, march=name) for name in names]


def test_marches_between_which_only_names_would_choose():
    equal = marches("neoverse-n1", "neoverse-v2", "neoverse-n2", "neoverse-v2", "cortex-x925")
    assert find_equal_marches(equal) == [("neoverse-v2", "neoverse-n2", "cortex-x925")]
    assert find_equal_marches(marches("armv8-a", "xgene1")) == [("armv8-a", "xgene1")]  # which need no flags


@pytest.mark.parametrize(
    "cells",
    [
        marches("neoverse-n1", "neoverse-v2"),
        marches("neoverse-v2") + marches("neoverse-n2", compiler="clang-19"),
        # The vendor's own image is preferred.
        [cell("gcc-14", march="x86-64-v2"), cell("gcc-14", march="nehalem")],
        # Nothing is known of them.
        marches("unheard-of", "unknown"),
        [cell(cuda="none"), cell(cuda="12.4")],
    ],
)
def test_marches_that_differ(cells):
    assert find_equal_marches(cells) == []
