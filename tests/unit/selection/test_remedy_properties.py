"""A remedy, once followed, ends the refusal, or leads to one by rules that the first message named."""

from __future__ import annotations

import shlex
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import FLAGS, allowed, catalogs, hosts

from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import cuda, device_code, marches
from imagematrix.images.catalog.catalog import Catalog, Ptx, UserModeDriver, Variant
from imagematrix.selection.candidate import evaluate_rules
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import explain

# Nodes that work, with drivers old and new, and images that mostly need one or two other things.
DRIVERS = (
    "390.157",
    "418.39",
    "470.256.02",
    "525.60.13",
    "550.54.14",
    "550.163.01",
    "580.65.06",
    "590.44.01",
)
GPUS = {"3.7": "102d", "5.2": None, "7.0": "1db5", "8.0": None, "8.9": "26b9", "9.0": None, "10.0": None}
MARCHES = ("x86-64", "x86-64-v3", "znver4", "sapphirerapids")


def node(arch, march, driver, kind, computes):
    flags = FLAGS[march] if arch == "x86_64" else frozenset({"asimd"})
    return Host(
        arch=arch,
        cpu=Cpu(vendor=None, model=None, flags=flags, level=None),
        driver=Driver(version=driver, kind=kind, source="test", user_mode=driver),
        gpus=tuple(
            Gpu(index=index, compute=compute, pci_device_id=GPUS[compute], brand="nvidia", name="NVIDIA L40S")
            for index, compute in enumerate(computes)
        ),
    )


nodes = st.builds(
    node,
    st.sampled_from(["x86_64"] * 5 + ["aarch64"]),
    st.sampled_from(MARCHES),
    st.sampled_from(DRIVERS),
    st.sampled_from([None, "open", "proprietary"]),
    st.lists(st.sampled_from(sorted(GPUS)), min_size=1, max_size=2).flatmap(
        lambda some: st.sampled_from([some, some[:1], some[:1] * 3])
    ),
)
code = {
    "cuda": st.sampled_from(["10.2", "11.4", "11.8", "12.4", "12.9", "13.0"]),
    "cubins": st.sampled_from([("37",), ("52",), ("70",), ("80",), ("89",), ("90", "90a"), ("100",)]),
    "ptx": st.sampled_from([(), (), (Ptx(target="70", isa="8.4"),)]),
    "driver": st.one_of(
        st.just(UserModeDriver(mode="host")),
        st.sampled_from(DRIVERS).map(lambda version: UserModeDriver(mode="exact", version=version)),
        st.sampled_from(DRIVERS).map(
            lambda version: UserModeDriver(
                mode="compat", version=version, branches=(470, 525, 535, 550), brands=("nvidia",)
            )
        ),
    ),
    "compressed_fatbin": st.sampled_from([False, False, True]),
    "requires": st.sampled_from([()] * 4 + [("driver>=535",), ("cuda>=12.6",), ("arch<8.0",)]),
}
common = {
    "digest": st.none(),
    "platform": st.sampled_from(["linux/amd64"] * 5 + ["linux/arm64"]),
    "cpu_flags": st.sampled_from(MARCHES).map(FLAGS.__getitem__),
}
gpu_images = st.builds(Variant, reference=st.just("t:x"), **common, **code)
cpu_images = st.builds(Variant, reference=st.just("t:x"), **common)
images = st.lists(gpu_images | gpu_images | gpu_images | cpu_images, min_size=1, max_size=4).map(
    lambda some: Catalog(
        image="t",
        version="v1",
        variants=tuple(
            replace(one, reference=f"t:v1-{number}", march=f"m{number}") for number, one in enumerate(some)
        ),
    )
)


def refused(result):
    return {rule.rule for rule in result if not rule.ok}


def rebuilt(variant, axes):
    """Return the variant of the cell with these values."""
    facts: dict[str, Any] = {}
    if "platform" in axes:
        facts |= {"platform": axes["platform"], "cpu_flags": frozenset(), "signed_returns": False}
    if "march" in axes:
        facts |= {"cpu_flags": marches.get_required_flags(axes["march"], "gcc-14"), "signed_returns": False}
    if "compute" in axes:
        facts |= {"cubins": (device_code.make_target(axes["compute"]),), "ptx": (), "device_code": ()}
    if "cuda" in axes:
        facts |= {"cuda": axes["cuda"]}
    if "driver" in axes:
        own = axes["driver"] != "host"
        facts["driver"] = UserModeDriver(
            mode="exact" if own else "host", version=axes["driver"] if own else None
        )
    made = replace(variant, **facts)
    if "compute" in axes:  # no toolkit builds what its compiler does not target
        assert set(made.cubins) <= cuda.load_releases()[made.cuda].targets
    return made


def followed(change, host, catalog, variant, **question):
    """Return the question, the host and the catalog after a change."""
    assert len(change) == 1
    if "option" in change:
        words = shlex.split(change["option"])
        question |= {"allow_cpu": True} if words == ["--allow-cpu"] else {"gpus": words[1]}
    elif "driver" in change:
        version, kind = change["driver"]["version"], change["driver"]["kind"]
        old = host.driver or Driver(version="", kind=None, source="test")
        user_mode = old.user_mode and version
        host = replace(host, driver=replace(old, version=version, kind=kind, user_mode=user_mode))
    else:
        more = replace(rebuilt(variant, change["matrix"]), reference="t:more", march="more")
        catalog = replace(catalog, variants=(*catalog.variants, more))
    return host, catalog, question


def check(host, catalog, allow_cpu):
    selection = explain(host, catalog, allow_cpu=allow_cpu)
    miss = selection.miss
    if miss is None or not catalog.variants:
        return
    named = {rule.rule for rule in miss.rules}
    by_reference = {variant.reference: variant for variant in catalog.variants}
    if miss.change:
        host_, catalog_, question = followed(
            miss.change, host, catalog, by_reference[miss.nearest], allow_cpu=allow_cpu
        )
        after = explain(host_, catalog_, **question)
        if after.miss:
            left = {rule.rule for rule in after.miss.rules}
            assert left < named
            assert all(rule.why in miss.why for rule in miss.rules if rule.rule in left)
    for candidate in selection.candidates:
        named = {rule.rule for rule in candidate.failing}
        for rule in candidate.failing:
            assert rule.to_json()["change"] == rule.change
            if rule.change:
                host_, catalog_, question = followed(
                    rule.change, host, catalog, candidate.variant, allow_cpu=allow_cpu
                )
                variant = catalog_.variants[-1] if "matrix" in rule.change else candidate.variant
                gpus = explain(host_, catalog_, **question).chosen_gpus
                target = Target(host=host_, gpus=gpus, allow_cpu=question["allow_cpu"])
                assert refused(evaluate_rules(target, variant)) <= named - {rule.rule}
            elif (rule.fix or "").startswith("use t:"):
                other = by_reference[rule.fix.split()[1].rstrip(",")]
                target = Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu)
                assert refused(evaluate_rules(target, other)) < named


@given(hosts, catalogs, allowed)
def test_remedies_end_refusals(host, catalog, allow_cpu):
    check(host, catalog, allow_cpu)


@given(nodes, images, allowed)
@settings(max_examples=300)
def test_remedies_end_refusals_of_usual_images(host, catalog, allow_cpu):
    check(host, catalog, allow_cpu)
