"""Both sides of every boundary of the rule `fatbin`."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("driver", "ok"),
    [
        ("550.54.14", True),
        ("550.54.13", False),
        ("550.54.15", True),
        ("550.54", False),
        ("545.23.08", False),
        ("555.42.02", True),
        (None, False),
    ],
)
def test_compressed_fatbin_requires_a_recent_driver(judge, make, driver, ok):
    result = judge(
        "fatbin",
        make.host(make.gpu(), driver=driver),
        make.variant(compressed_fatbin=True, driver=make.umd("host")),
    )
    assert result.ok is ok
    assert result.have == driver
    assert result.fix == (None if ok else "driver 550.54.14 or newer")


def test_compat_mode_judges_the_baked_driver(judge, make):
    node = make.host(make.gpu(), driver="535.54.03")
    assert judge(
        "fatbin", node, make.variant(compressed_fatbin=True, driver=make.umd("compat", "550.54.14"))
    ).ok
    assert not judge(
        "fatbin", node, make.variant(compressed_fatbin=True, driver=make.umd("compat", "550.54.13"))
    ).ok
