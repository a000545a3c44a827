from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.hardware.vendors import cuda, versions

RELEASES = st.sampled_from(sorted(cuda.load_releases(), key=versions.make_sort_key))
DRIVERS = st.tuples(st.integers(340, 640), st.integers(0, 200), st.integers(0, 99)).map(
    lambda parts: f"{parts[0]}.{parts[1]}.{parts[2]:02}"
)


@pytest.mark.parametrize(
    ("driver", "release"),
    [
        ("340.29", None),
        ("366.99", None),
        ("367.48", "8.0"),
        ("375.26", "8.0"),
        ("384.59", "8.0"),
        ("384.81", "9.0"),
        ("390.12", "9.0"),
        ("390.46", "9.1"),
        ("440.31", "10.1"),
        ("440.33", "10.2"),
        ("450.36.06", "10.2"),
        ("450.51.05", "11.0"),
        ("525.60.11", "11.8"),
        ("525.60.13", "12.0"),
        ("535.274.02", "12.2"),
        ("549.99.99", "12.3"),
        ("550.54.14", "12.4"),
        ("565.57.01", "12.7"),
        ("570.26", "12.8"),
        ("579.99", "12.9"),
        ("580.65.05", "12.9"),
        ("580.65.06", "13.0"),
        ("589.1", "13.0"),
        ("590.44.01", "13.1"),
        ("615.31", "13.4"),
        ("999.10.2", "13.4"),
    ],
)
def test_driver_supports_the_cuda_release_of_its_branch(driver, release):
    assert cuda.get_newest_cuda(driver) == release


@pytest.mark.parametrize(
    ("release", "driver", "runs"),
    [
        # 12.x: its own driver, a newer one, or the floor of the family
        ("12.4", "525.60.13", True),
        ("12.4", "525.60.12", False),
        ("12.9", "525.60.13", True),
        ("12.9", "525.60.12", False),
        ("12.0", "525.60.13", True),
        ("12.0", "525.60.12", False),
        # 11.x: the driver of 11.0 is older than the floor of its family
        ("11.0", "450.51.05", True),
        ("11.0", "450.36.06", False),
        ("11.1", "450.51.05", False),
        ("11.1", "450.80.01", False),
        ("11.1", "450.80.02", True),
        ("11.8", "450.80.02", True),
        ("11.8", "450.80.01", False),
        # 13.x: no driver is listed for its releases, only for the family
        ("13.0", "580.65.06", True),
        ("13.0", "580.65.05", False),  # of its own branch, and older than what is listed
        ("13.1", "580.65.06", True),
        ("13.1", "580.65.05", False),
        ("13.5", "580.65.06", True),
        ("13.5", "580.65.05", False),
        # before 11 there is no floor
        ("8.0", "367.48", True),
        ("8.0", "366.99", False),
        ("10.0", "410.48", True),
        ("10.1", "410.48", False),
        ("10.2", "440.31", False),
        ("10.2", "440.33", True),
        ("9.0", "384.59", False),
        ("9.0", "384.81", True),
        # a release of drivers without a toolkit
        ("12.7", "525.60.13", True),
        ("12.7", "525.60.12", False),
        # releases that are not in the table
        ("10.9", "440.33", False),
        ("10.9", "450.51.05", True),
        ("14.0", "615.31", False),
        ("7.5", "340.29", False),
        ("7.5", "367.48", True),
    ],
)
def test_driver_runs_release(release, driver, runs):
    assert cuda.can_run_cuda(release, driver) is runs


@given(RELEASES, DRIVERS, DRIVERS)
def test_newer_driver_runs_no_fewer_releases(release, one, other):
    older, newer = sorted((one, other), key=versions.make_sort_key)
    assert cuda.can_run_cuda(release, newer) or not cuda.can_run_cuda(release, older)


@given(RELEASES)
def test_lowest_driver_runs_its_release(release):
    lowest = cuda.get_lowest_driver(release)
    assert lowest is not None
    assert cuda.can_run_cuda(release, lowest)


@pytest.mark.parametrize(
    ("release", "driver"),
    [
        ("10.2", "440.33"),
        ("11.0", "450.51.05"),
        ("11.8", "450.80.02"),
        ("12.0", "525.60.13"),
        ("12.4", "525.60.13"),
        ("12.7", "525.60.13"),
        ("13.5", "580.65.06"),
        ("14.0", None),
        ("7.5", None),
    ],
)
def test_lowest_driver(release, driver):
    assert cuda.get_lowest_driver(release) == driver


@pytest.mark.parametrize(
    ("driver", "isa"),
    [
        ("340.29", None),
        ("375.26", "5.0"),
        ("418.39", "6.4"),
        ("510.47.03", "7.6"),
        ("515.43.04", "7.7"),
        ("535.274.02", "8.2"),
        ("550.54.14", "8.4"),
        ("560.35.05", "8.5"),
        ("565.57.01", "8.6"),
        ("525.60.11", "7.8"),
        ("570.26", "8.7"),
        ("580.65.06", "9.0"),
        ("615.31", "9.4"),
    ],
)
def test_ptx_isa_of_a_driver(driver, isa):
    assert cuda.get_newest_ptx_isa(driver) == isa


def test_release_has_all_facts():
    release = cuda.get_release("12.4")
    assert release.name == "12.4"
    assert release.toolkit_driver == "550.54.14"
    assert release.floor == "525.60.13"
    assert release.branch == 550
    assert "90a" in release.targets
    assert "100" not in release.targets
    assert release.ptx_isa == "8.4"
    assert (release.max_gcc, release.max_clang) == (13, 17)


def test_unknown_facts_are_none():
    assert cuda.get_release("12.10") is None
    assert (cuda.get_release("12.7").toolkit_driver, cuda.get_release("12.7").targets) == (None, frozenset())
    assert cuda.get_release("13.5").branch is None
    assert cuda.get_release("13.0").toolkit_driver is None
    assert cuda.get_release("10.2").floor is None
    assert cuda.get_release("9.0").max_clang is None


def test_releases_are_ordered_and_immutable():
    names = list(cuda.load_releases())
    assert names == sorted(names, key=versions.make_sort_key)
    with pytest.raises(TypeError):
        cuda.load_releases()["15.0"] = cuda.get_release("12.4")  # type: ignore[index]  # which is the point


def test_later_releases_have_later_branches_and_newer_ptx():
    branches = [release.branch for release in cuda.load_releases().values() if release.branch]
    assert branches == sorted(set(branches))
    isas = [versions.make_sort_key(release.ptx_isa) for release in cuda.load_releases().values()]
    assert isas == sorted(isas)
