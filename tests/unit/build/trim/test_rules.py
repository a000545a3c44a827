"""Which device code is kept, on both sides of every boundary."""

import pytest

from imagematrix.audit.binaries.fatbin import CUBIN, PTX, FatbinEntry
from imagematrix.build.trim.rules import Rules, parse_capabilities
from imagematrix.errors import UsageError

LTO = 8


def entries(*codes):
    """Return entries of words such as "80", "90a" and "ptx90"."""
    result = []
    for number, word in enumerate(codes):
        kind = PTX if word.startswith("ptx") else LTO if word.startswith("lto") else CUBIN
        target = word.removeprefix("ptx").removeprefix("lto")
        result.append(FatbinEntry(number * 64, 64, kind, target, "8.4", 0, whole=True))
    return result


def kept(computes, *codes, **options):
    verdict = Rules(computes=tuple(computes.split()), **options).judge(entries(*codes))
    return " ".join(codes[entry.offset // 64] for entry in verdict.kept), " ".join(sorted(verdict.served))


@pytest.mark.parametrize(
    ("compute", "codes", "staying"),
    [
        ("8.6", "70 80 86 89 90", "80 86"),
        ("8.9", "80 86 89 90 ptx90", "80 86 89"),
        ("9.0", "80 90 90a ptx90", "90 90a"),
        ("9.0", "80 ptx80", "ptx80"),
        ("9.0", "80 ptx80 ptx90 ptx90a ptx100", "ptx80 ptx90 ptx90a"),
        ("10.3", "100 100a 100f 103a", "100 100f 103a"),
        ("12.1", "120 120a 120f", "120 120f"),
        ("8.7", "80 86 87 ptx80", "87"),
        ("8.7", "80 86 ptx80", "ptx80"),
        ("8.6", "87 ptx87", "87 ptx87"),
        ("5.2", "50 60", "50"),
    ],
)
def test_code_for_the_gpu_is_kept(compute, codes, staying):
    served = "" if (compute, staying) == ("8.6", "87 ptx87") else compute
    assert kept(compute, *codes.split()) == (staying, served)


def test_ptx_is_kept_if_a_gpu_has_no_cubin():
    assert kept("8.0 9.0", "80", "90", "ptx80") == ("80 90", "8.0 9.0")
    assert kept("8.0 9.0", "80", "90a", "100", "ptx80") == ("80 90a", "8.0 9.0")
    assert kept("8.0 9.0", "80", "100", "ptx80", "ptx100") == ("80 ptx80", "8.0 9.0")


def test_code_for_only_one_gpu_is_kept():
    assert kept("7.5 9.0", "80", "90") == ("90", "9.0")


def test_keep_ptx_keeps_all_ptx():
    assert kept("9.0", "80", "90", "ptx50", "ptx120", keep_ptx=True) == ("90 ptx50 ptx120", "9.0")


def test_file_without_runnable_code_is_kept_unless_drop_dead():
    assert kept("9.0", "70", "ptx100") == ("70 ptx100", "")
    assert kept("9.0", "70", "ptx100", drop_dead=True) == ("", "")


def test_intermediate_code_is_always_kept():
    assert kept("9.0", "lto70", "70", "90") == ("lto70 90", "9.0")
    assert kept("9.0", "lto70", "70", drop_dead=True) == ("lto70", "")
    assert kept("9.0", "lto70") == ("lto70", "")


def test_matrix_targets_become_capabilities():
    assert parse_capabilities(["9.0a", "8.6"]) == ("8.6", "9.0")
    assert parse_capabilities(["10.0f"]) == ("10.0", "10.3")
    assert parse_capabilities(["12.0", "12.0a"]) == ("12.0",)


@pytest.mark.parametrize("word", ["90", "sm_90", "9.1", "9,0", "", "native"])
def test_invalid_capability_is_rejected(word):
    with pytest.raises(UsageError, match="invalid compute capability"):
        parse_capabilities([word])
