"""The effects of a driver upgrade."""

from __future__ import annotations

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.selection.fleet.coverage import compute_coverage
from imagematrix.selection.fleet.upgrade import Change, parse_upgrades

V100 = {"compute": "7.0", "name": "Tesla V100", "pci_device_id": "1db6", "brand": "tesla"}


@pytest.fixture
def catalog(make):
    return make.catalog(
        make.variant("t:v1-old"),
        make.variant("t:v1-new", driver=make.NEW),
        make.variant("t:v1-old-70", cubins=("70",)),
        make.variant("t:v1-old-80", cubins=("80",)),
        make.variant("t:v1-new-90", cubins=("90",), driver=make.NEW),
        make.cpu_variant("t:v1-cpu"),
    )


@pytest.fixture
def fleet(make):
    return {
        "l40s": make.host(make.gpu(0)),
        "l40s-too": make.host(make.gpu(0, uuid="GPU-5"), flags=("sse2",)),
        "v100": make.host(make.gpu(0, **V100)),
        "h100": make.host(make.gpu(0, compute="9.0", name="NVIDIA H100", pci_device_id="2330")),
        "k80": make.host(make.gpu(0, compute="3.7", name="Tesla K80", pci_device_id="102d")),
        "bare": make.host(driver=None),
        "other": make.host(make.gpu(0), driver="550.163.01"),
    }


def one(fleet, catalog, old, new, **options):
    (result,) = compute_coverage(fleet, catalog, drivers={old: new}, **options).upgrades
    return result


def test_hosts_are_lost_changed_gained_or_unchanged(make, fleet, catalog, conforms):
    conforms(compute_coverage(fleet, catalog, drivers={make.OLD: make.NEW}).to_json())
    result = one(fleet, catalog, make.OLD, make.NEW)
    (loss,) = result.lost
    assert (loss.old, loss.hosts) == ("t:v1-old-70", ("v100",))
    assert loss.miss.fix == "build a variant with driver 580.95.05"
    assert result.changed == (Change(old="t:v1-old", new="t:v1-new", hosts=("l40s", "l40s-too")),)
    assert result.gained == (Change(old=None, new="t:v1-new-90", hosts=("h100",)),)
    assert (result.hosts, result.unchanged) == (5, 1)
    assert not compute_coverage({"v100": fleet["v100"]}, catalog, drivers={make.OLD: make.NEW}).complete


def test_several_upgrades_each_apply_to_the_current_driver(make, fleet, catalog):
    result = compute_coverage(
        fleet, catalog, drivers={make.OLD: "550.163.01", "550.163.01": make.NEW}
    ).upgrades
    assert [(upgrade.old, upgrade.hosts) for upgrade in result] == [(make.OLD, 5), ("550.163.01", 1)]
    assert [len(loss.hosts) for loss in result[0].lost] == [2, 1]
    assert result[1].gained == (Change(old=None, new="t:v1-new", hosts=("other",)),)


def test_unknown_driver_is_rejected(fleet, catalog, make):
    with pytest.raises(UsageError, match=r"no host has driver 535\.261\.3$") as raised:
        one(fleet, catalog, "535.261.3", make.NEW)
    assert raised.value.remedy == "did you mean '535.261.03'?"
    with pytest.raises(UsageError, match="no host has driver") as raised:
        one(fleet, catalog, "1.2", make.NEW)
    assert raised.value.remedy == "the fleet has 535.261.03, 550.163.01"
    with pytest.raises(UsageError, match="no host has driver") as raised:
        one({"bare": fleet["bare"]}, catalog, "1.2", make.NEW)
    assert raised.value.remedy == "the fleet has no driver"


@pytest.mark.parametrize("gpus", [None, "1"])
def test_gpu_dropped_by_the_new_driver_is_a_loss(make, gpus):
    host = make.variant("t:v1-host", cubins=("70",), driver=None)
    fleet = {
        "v100": make.host(make.gpu(0, **V100)),
        "no-name": make.host(make.gpu(0, **(V100 | {"name": None}))),
    }
    losses = one(fleet, make.catalog(host), make.OLD, "595.45", gpus=gpus).lost
    assert [loss.hosts for loss in losses] == [("no-name",), ("v100",)]
    for loss, label in zip(losses, ("GPU 0", "GPU 0 (Tesla V100)"), strict=True):
        (rule,) = loss.miss.rules
        assert rule.rule == "driver-gpu"
        assert rule.why == f"driver 595.45 does not support {label}: branch 580 is the last that does"
        assert (
            loss.miss.fix == rule.fix == ("use a driver of branch 580 or older, but not older than 525.60.13")
        )


def test_host_that_does_not_pass_a_dropped_gpu_is_unchanged(make, catalog):
    fleet = {"v100": make.host(make.gpu(0, **V100))}
    assert one(fleet, catalog, make.OLD, "595.45", gpus="none").unchanged == 1


def test_gpu_unsupported_by_the_old_driver_is_unchanged(make):
    host = make.variant("t:v1-host", cubins=("70",), driver=None)
    fleet = {"v100": make.host(make.gpu(0, **V100), driver="590.1")}
    assert one(fleet, make.catalog(host), "590.1", "595.45").unchanged == 1


def test_unknown_gpus_are_not_assumed_dropped(make, catalog):
    fleet = {
        "unknown": make.host(make.gpu(0, pci_device_id=None)),
        "new": make.host(make.gpu(0, pci_device_id="0000", name="other")),
    }
    assert [change.hosts for change in one(fleet, catalog, make.OLD, make.NEW).changed] == [
        ("new", "unknown")
    ]


def test_driver_pairs_are_parsed():
    assert parse_upgrades([]) == {}
    assert parse_upgrades(["1.2=3.4", "5.6.7=1.2", "1.2=3.4"]) == {"1.2": "3.4", "5.6.7": "1.2"}


@pytest.mark.parametrize(
    "text", ["", "1.2", "1.2=", "=1.2", "1.2=x", "1=2", "1.2=3.4=5.6", "1.2==3.4", "1.2=3.4 "]
)
def test_invalid_driver_pair_is_rejected(text):
    with pytest.raises(UsageError, match="invalid driver version") as raised:
        parse_upgrades([text])
    assert "OLD=NEW" in raised.value.remedy


def test_contradictory_driver_pairs_are_rejected():
    with pytest.raises(UsageError, match=r"two replacements: 3\.4 and 5\.6"):
        parse_upgrades(["1.2=3.4", "1.2=5.6"])


def test_library_validates_driver_versions(make, fleet, catalog):
    with pytest.raises(UsageError, match="invalid driver version 'next'"):
        one(fleet, catalog, make.OLD, "next")


@pytest.mark.parametrize("new", ["5800.95.05", "850.95.05", "58.95.05", "580.9.5", "9999.1"])
def test_a_typo_in_the_new_driver_is_rejected(make, fleet, catalog, new):
    with pytest.raises(UsageError, match=f"{new} cannot follow driver {make.OLD}") as caught:
        one(fleet, catalog, make.OLD, new)
    assert "newest known branch" in caught.value.remedy


def test_a_driver_newer_than_all_tables_is_possible(make, fleet, catalog):
    assert one(fleet, catalog, make.OLD, "700.10").new == "700.10"


def test_an_upgrade_replaces_the_user_mode_driver_too(make):
    host = make.host(make.gpu(0), driver="535.261.03")
    host = replace(host, driver=replace(host.driver, user_mode="535.261.03"))
    catalog = make.catalog(make.variant("t:v1-x", driver=None))
    assert one({"a": host}, catalog, "535.261.03", "550.163.01").unchanged == 1
