"""One version for two architectures: each host gets an image of its own."""

from itertools import permutations

import pytest

from imagematrix.selection.fleet.coverage import compute_coverage
from imagematrix.selection.gang.gang import NothingFitsAll
from imagematrix.selection.gang.gang_selection import select_gang
from imagematrix.selection.selection import NothingFits, Selection
from imagematrix.selection.selector import select, select_many

HOPPER = {"compute": "9.0", "name": "NVIDIA H200"}


@pytest.fixture
def hosts(make):
    """Nodes of both architectures, with GPUs and without."""
    arm = {"arch": "aarch64", "vendor": "ARM"}
    return {
        "grace": make.host(make.gpu(**HOPPER), march="neoverse-v2", **arm),
        "graviton": make.host(driver=None, march="neoverse-n1", **arm),
        "genoa": make.host(make.gpu(**HOPPER)),
        "rome": make.host(driver=None, march="x86-64-v3"),
    }


@pytest.fixture
def variants(make):
    """Those of arm64 would win everywhere if the architecture did not decide."""
    arm = {"platform": "linux/arm64"}
    return (
        make.variant("t:gpu-arm", cuda="12.4", cubins=("90",), cpu_flags=make.flags("neoverse-v2"), **arm),
        make.variant("t:gpu-x86", cuda="11.8", cubins=("80",), ptx=(("80", "7.8"),)),
        make.cpu_variant("t:arm-n1", march="neoverse-n1", cpu_flags=make.flags("neoverse-n1"), **arm),
        make.cpu_variant("t:arm-plain", **arm),
        make.cpu_variant("t:x86"),
    )


CHOSEN = {"grace": "t:gpu-arm", "graviton": "t:arm-n1", "genoa": "t:gpu-x86", "rome": "t:x86"}


def test_each_host_gets_its_architecture_whatever_the_order(make, hosts, variants):
    for order in permutations(variants):
        chosen = select_many(hosts, make.catalog(*order))
        references = [one.variant.reference for one in chosen if isinstance(one, Selection)]
        assert dict(zip(hosts, references, strict=True)) == CHOSEN


def test_a_foreign_architecture_is_never_chosen(make, hosts, variants):
    foreign = {"linux/arm64": ("genoa", "rome"), "linux/amd64": ("grace", "graviton")}
    for platform, names in foreign.items():
        only = make.catalog(*(variant for variant in variants if variant.platform == platform))
        for name in names:
            with pytest.raises(NothingFits, match=f"the image is for {platform}"):
                select(hosts[name], only, allow_cpu=True)


@pytest.mark.parametrize("alike", [None, "cuda"])
def test_a_gang_of_two_architectures_is_refused_and_both_are_named(make, hosts, variants, alike):
    catalog = make.catalog(*variants)
    with pytest.raises(NothingFitsAll) as caught:
        select_gang(hosts, catalog, gpus="none", alike=alike)
    assert caught.value.remedy == (
        "2 hosts of aarch64 and 2 hosts of x86_64 have no platform in common: choose for each architecture "
        "by itself"
    )
    for pair in (("grace", "graviton"), ("genoa", "rome")):
        gang = select_gang({name: hosts[name] for name in pair}, catalog, gpus="none", alike=alike)
        assert {member.variant.platform for member in gang.members} == {
            "linux/arm64" if "grace" in pair else "linux/amd64"
        }


def test_coverage_counts_both_architectures(make, hosts, variants):
    document = compute_coverage(hosts, make.catalog(*variants)).to_json()
    assert (document["served"], document["unserved"]) == (4, [])
    assert document["unused"] == ["t:arm-plain"]
