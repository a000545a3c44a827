"""Both sides of every boundary of the rule `driver-exact`."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("kernel", "baked", "ok"),
    [
        ("550.163.01", "550.163.01", True),
        ("580.65.06", "580.65.06", True),
        ("580.65.06", "580.65.6", False),
        ("580.65.6", "580.65.06", False),
        ("550.163.01", "550.163.1", False),
        ("570.124.04", "570.124.06", False),
        ("535.261.03", "550.163.01", False),
        ("550.163.01", "535.261.03", False),
        (None, "550.163.01", False),
        (None, None, False),
        ("550.163.01", None, False),
    ],
)
def test_driver_versions_must_be_identical(judge, make, kernel, baked, ok):
    result = judge(
        "driver-exact", make.host(make.gpu(), driver=kernel), make.variant(driver=make.umd("exact", baked))
    )
    assert result.ok is ok
    assert (result.need, result.have) == (baked or "", kernel)
    if not ok:
        if kernel:
            assert result.fix == f"build a variant with driver {kernel}"
        elif baked:
            assert result.fix == f"load driver {baked}"
        else:
            assert result.change is None


def test_host_without_a_driver_is_refused(judge, make):
    result = judge("driver-exact", make.host(make.gpu(), driver=None), make.variant())
    assert (result.ok, result.have) == (False, None)
    assert "no NVIDIA kernel module" in result.why
