"""Both sides of every boundary of the rule `driver-gpu`."""

from __future__ import annotations

import pytest

from imagematrix.selection.rules.driver_gpu import RULE
from imagematrix.selection.selector import select

V100 = {"compute": "7.0", "name": "Tesla V100", "pci_device_id": "1db5", "brand": "tesla"}


@pytest.mark.parametrize(
    ("mode", "kernel", "own", "ok"),
    [
        ("compat", "535.261.03", "580.95.05", True),
        ("compat", "535.261.03", "590.44.01", False),
        ("exact", "580.95.05", "580.95.05", True),
        ("exact", "590.44.01", "590.44.01", False),
        ("exact", "535.261.03", "590.44.01", False),
        ("host", "580.95.05", None, True),
        ("host", "590.44.01", None, False),
        ("host", None, None, False),
    ],
)
def test_user_mode_driver_must_support_every_gpu(judge, make, mode, kernel, own, ok):
    host = make.host(make.gpu(), make.gpu(1, **V100), driver=kernel)
    variant = make.variant(driver=make.umd(mode, own, (535, 580, 590)), cubins=("70",))
    result = judge("driver-gpu", host, variant)
    assert result.ok is ok
    assert result.have == (own or kernel)
    if not ok and kernel:
        assert result.need == "a driver of branch 580 or older"
        assert result.why == (
            "driver 590.44.01 does not support GPU 1 (Tesla V100): branch 580 is the last that does"
        )
        assert result.fix == "pass gpus='device=0'"


def test_newer_cuda_compat_without_support_for_the_gpu_is_not_selected(make):
    host = make.host(make.gpu(**V100), driver="535.261.03")
    compat = make.variant("t:compat", cubins=("70",), driver=make.umd("compat", "590.44.01"))
    plain = make.variant("t:host", cubins=("70",), cuda="12.2", driver=make.umd("host"))
    assert select(host, make.catalog(compat, plain)).selected == "t:host"


@pytest.mark.parametrize(
    ("facts", "driver", "ok"),
    [
        ({"pci_device_id": "102d", "compute": "3.7"}, "470.256.02", True),
        ({"pci_device_id": "102d", "compute": "3.7"}, "495.46", False),
        ({"pci_device_id": "0ff2", "compute": "3.0"}, "390.46", False),  # dropped before its chip
        # an unknown or missing id: the chips of the capability decide
        ({"pci_device_id": "ffff", "compute": "7.0"}, "580.95.05", True),
        ({"pci_device_id": "ffff", "compute": "7.0"}, "590.44.01", False),
        ({"pci_device_id": None, "compute": "5.2"}, "590.44.01", False),
        ({"pci_device_id": None, "compute": "7.2"}, "590.44.01", True),  # its driver comes with JetPack
        ({"pci_device_id": None, "compute": None}, "590.44.01", True),
    ],
)
def test_chip_is_derived_from_device_id_or_compute_capability(judge, make, facts, driver, ok):
    host = make.host(make.gpu(**facts), driver=driver)
    assert judge("driver-gpu", host, make.variant(driver=make.umd("exact", driver))).ok is ok


@pytest.mark.parametrize(
    ("kind", "compute", "ok"),
    [
        ("open", "6.0", False),
        ("open", "7.0", False),
        ("open", "7.5", True),
        ("open", "10.0", True),
        ("proprietary", "6.0", True),
        ("proprietary", "9.0", True),
        ("proprietary", "10.0", False),
        ("proprietary", "12.0", False),
        (None, "6.0", True),
        (None, "10.0", True),
        ("other", "10.0", True),
        ("open", None, True),
    ],
)
def test_kernel_module_kind_must_support_the_gpu(judge, make, kind, compute, ok):
    host = make.host(make.gpu(compute=compute), driver="570.124.06", kind=kind)
    result = judge("driver-gpu", host, make.variant(driver=make.umd("exact", "570.124.06")))
    assert result.ok is ok
    if not ok:
        other = "proprietary" if kind == "open" else "open"
        assert result.why == (
            f"the {kind} kernel modules of NVIDIA's driver do not drive GPU 0 (NVIDIA L40S)"
        )
        assert (result.have, result.fix) == (f"570.124.06 ({kind})", f"install the {other} kernel modules")


@pytest.mark.parametrize(("mode", "own"), [("exact", "580.95.05"), ("compat", "580.95.05")])
def test_fix_never_suggests_a_driver_without_support_for_the_gpu(judge, make, mode, own):
    host = make.host(make.gpu(**V100), driver="590.44.01")
    result = judge(f"driver-{mode}", host, make.variant(driver=make.umd(mode, own), cubins=("70",)))
    assert result.fix == ("load driver 580.95.05" if mode == "exact" else "use a driver of branch 550")


@pytest.mark.parametrize(
    ("compute", "driver", "ok"),
    [
        ("12.0", "565.57.01", False),
        ("12.0", "570.86.15", True),
        ("12.1", "570.86.15", False),
        ("12.1", "575.51.03", True),
        ("8.9", "470.256.02", False),
        ("8.9", "520.56.06", True),
        ("7.0", "384.81", True),
        ("6.0", "375.26", True),
        ("99.0", "550.163.01", False),  # newer than all that is known
        ("99.0", "999.1", True),
    ],
)
@pytest.mark.parametrize("mode", ["exact", "host"])
def test_driver_must_not_be_older_than_the_gpu(judge, make, mode, compute, driver, ok):
    host = make.host(make.gpu(compute=compute), driver=driver)
    umd = make.umd(mode, driver if mode == "exact" else None)
    result = judge("driver-gpu", host, make.variant(driver=umd))
    assert result.ok is ok


def test_driver_that_is_older_than_the_gpu_is_named(judge, make):
    host = make.host(
        make.gpu(), make.gpu(1, compute="12.0", name="NVIDIA GeForce RTX 5090"), driver="535.261.03"
    )
    result = judge("driver-gpu", host, make.variant(driver=make.umd("host")))
    assert (result.need, result.have) == ("a driver of branch 570 or newer", "535.261.03")
    assert result.why == (
        "driver 535.261.03 does not support GPU 1 (NVIDIA GeForce RTX 5090): "
        "branch 570 is the first that does"
    )
    assert result.fix


def test_newer_user_mode_driver_does_not_help_a_kernel_that_is_older_than_the_gpu(judge, make):
    host = make.host(make.gpu(compute="10.0"), driver="535.261.03")
    compat = make.variant(driver=make.umd("compat", "580.95.05"))
    assert not judge("driver-gpu", host, compat).ok
    newer = make.host(make.gpu(compute="10.0"), driver="570.124.06")
    assert judge("driver-gpu", newer, compat).ok
    older = make.variant(driver=make.umd("compat", "550.54.14"))
    assert not judge("driver-gpu", newer, older).ok


def test_drivers_of_a_branch_are_judged_once(make):
    needs = [RULE.need(make.variant(driver=make.umd("exact", own))) for own in ("550.54.14", "550.163.01")]
    assert needs[0] == needs[1] != RULE.need(make.variant(driver=make.umd("exact", "540.4.0")))


def test_drivers_of_tegra_have_other_branches(judge, make):
    host = make.host(make.gpu(compute="8.7"), driver="35.4.1")
    assert judge("driver-gpu", host, make.variant(driver=make.umd("host"))).ok
