"""Both sides of every boundary of the rule `driver-host`."""

from __future__ import annotations

import pytest

from imagematrix.common.record import replace


def node(make, kernel, own):
    """Return a host with a driver in the kernel, and one of its own in user mode."""
    host = make.host(make.gpu(), driver=kernel)
    return replace(host, driver=host.driver and replace(host.driver, user_mode=own))


@pytest.mark.parametrize(
    ("kernel", "own", "ok"),
    [
        ("550.163.01", "550.163.01", True),
        ("550.163.01", "550.144.03", False),
        ("580.65.06", "580.65.6", False),
        ("550.163.01", None, True),
        (None, None, True),
    ],
)
def test_the_nodes_two_drivers_must_be_identical(judge, make, kernel, own, ok):
    result = judge("driver-host", node(make, kernel, own), make.variant(driver=make.umd("host")))
    assert (result.ok, result.have) == (ok, own)
    if ok:
        assert result.fix is None
        assert ("unknown" in result.why) == (own is None)
    else:
        assert f"the host's user-mode driver is {own}, the kernel module is {kernel}" in result.why
        assert result.fix


def test_it_is_about_images_that_get_the_nodes_driver(judge, make):
    broken = node(make, "550.163.01", "550.144.03")
    assert not judge("driver-host", broken, make.variant(driver=None)).ok
    assert not judge("driver-host", broken, make.cpu_variant(cubins=("89",))).ok
    for variant in (make.variant(), make.variant(driver=make.umd("compat", "580.65.06")), make.cpu_variant()):
        assert judge("driver-host", broken, variant) is None


def test_the_nearest_driver_counts(make):
    from imagematrix.selection.rules.driver_host import RULE
    from imagematrix.selection.selection_target import Target

    near, far, unknown = (
        RULE.distance(Target(host=node(make, "550.163.01", own), gpus=()), make.variant(driver=None))
        for own in ("550.144.03", "535.261.03", "another version")  # the last is what labels tell
    )
    assert near < far < unknown


def test_the_shipped_host_with_two_drivers_is_refused(cli, make, profiles, tmp_path):
    from imagematrix.common import json_documents

    path = tmp_path / "t.json"
    catalog = make.catalog(make.variant("t:host", driver=make.umd("host")))
    path.write_text(json_documents.dump_json(catalog.to_json()))
    where = ["t:v1", "--catalog", str(path), "--host", str(profiles["driver-mismatch"])]
    result = cli("select", *where)
    assert result.code == 3
    assert "the host's user-mode driver is 550.144.03, the kernel module is 550.163.01" in result.err
    assert "driver-host" in cli("explain", *where).out
