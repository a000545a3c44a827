"""Both sides of every boundary of the rule `driver-compat`."""

from __future__ import annotations

import pytest

from imagematrix.selection import drivers
from imagematrix.selection.rules.driver_compat import RULE
from imagematrix.selection.selection_target import Target


@pytest.mark.parametrize(
    ("kernel", "compat", "branches", "ok"),
    [
        ("570.211.01", "575.57.08", (535, 550, 560, 565, 570, 575), True),
        ("535.54.03", "575.57.08", (535, 550, 560, 565, 570, 575), True),
        ("575.10.10", "575.57.08", (535, 550, 560, 565, 570, 575), True),  # an older patch of its own branch
        ("575.57.08", "575.57.08", (535, 550, 560, 565, 570, 575), False),  # equal is not newer
        ("575.57.8", "575.57.08", (535, 550, 560, 565, 570, 575), False),
        ("575.64.03", "575.57.08", (535, 550, 560, 565, 570, 575), False),
        ("590.44.01", "575.57.08", (535, 550, 560, 565, 570, 575), False),
        ("545.23.08", "575.57.08", (535, 550, 560, 565, 570, 575), False),  # a branch that is not listed
        ("535.54.03", "575.57.08", (), False),  # a note without branches, as on Jetson
        (None, "575.57.08", (535,), False),
    ],
)
def test_kernel_driver_branch_must_be_listed_and_older(judge, make, kernel, compat, branches, ok):
    result = judge(
        "driver-compat",
        make.host(make.gpu(), driver=kernel),
        make.variant(driver=make.umd("compat", compat, branches=branches)),
    )
    assert result.ok is ok
    assert result.have == kernel
    assert (result.fix is None) is ok


@pytest.mark.parametrize(
    ("brand", "name", "listed", "ok"),
    [
        ("tesla", "Tesla V100-SXM2-16GB", ("tesla", "nvidia"), True),
        ("nvidia", "NVIDIA H100 80GB HBM3", ("tesla", "nvidia"), True),
        ("geforce", "NVIDIA GeForce RTX 4090", ("tesla", "nvidia"), False),
        (
            "geforce",
            "NVIDIA GeForce RTX 4090",
            ("tesla", "nvidia", "geforce"),
            False,
        ),  # listed, still not supported
        ("nvidia", "NVIDIA GeForce RTX 4090", ("tesla", "nvidia"), False),  # the name gives it away
        ("tesla", "Tesla T4", ("nvidia",), False),
        (None, "NVIDIA H100 80GB HBM3", ("tesla", "nvidia"), False),
    ],
)
def test_gpu_brand_must_be_listed_and_supported(judge, make, brand, name, listed, ok):
    node = make.host(make.gpu(brand=brand, name=name), driver="535.54.03")
    result = judge("driver-compat", node, make.variant(driver=make.umd("compat", "575.57.08", brands=listed)))
    assert result.ok is ok
    assert ok or name in result.why


def test_every_gpu_must_be_supported(judge, make):
    node = make.host(
        make.gpu(), make.gpu(1, brand="geforce", name="NVIDIA GeForce RTX 4090"), driver="535.54.03"
    )
    compat = make.variant(driver=make.umd("compat", "575.57.08"))
    assert not judge("driver-compat", node, compat).ok
    assert judge("driver-compat", node, compat, gpus=node.gpus[:1]).ok


def test_reason_names_every_unsupported_gpu(judge, make):
    geforce = {"brand": "geforce", "name": None}
    node = make.host(
        make.gpu(0, **geforce), make.gpu(1, **geforce), make.gpu(2, **geforce), driver="535.54.03"
    )
    result = judge("driver-compat", node, make.variant(driver=make.umd("compat", "575.57.08")))
    assert "GPU 0, GPU 1 and GPU 2" in result.why


@pytest.mark.parametrize(("kernel", "distance"), [(None, drivers.FAR), ("570.211.01", 20)])
def test_gap_is_the_distance_to_the_nearest_branch(make, kernel, distance):
    host = make.host(make.gpu(), driver=kernel)
    variant = make.variant(driver=make.umd("compat", "575.57.08", branches=(535, 550)))
    target = Target(host=host, gpus=host.gpus, allow_cpu=False)
    assert RULE.distance(target, variant) == (distance, 0)
