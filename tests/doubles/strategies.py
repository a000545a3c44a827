"""Hosts, variants and catalogs as hypothesis makes them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host, MigDevice
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog.catalog import CRITERIA, Catalog, Ptx, UserModeDriver, Variant

MARCHES = ("x86-64", "x86-64-v3", "x86-64-v4", "haswell", "znver2", "znver4", "sapphirerapids")
FLAGS = {march: marches.get_required_flags(march, "gcc-14") for march in MARCHES}
DRIVERS = ("525.60.13", "535.261.03", "540.4.0", "550.54.13", "550.163.01", "580.65.06")
SIGNS = (Accelerator(kind="wsl", where="/dev/dxg", why="it is behind it"),)
COMPUTES = ("7.0", "8.0", "8.6", "8.7", "8.9", "9.0")
TARGETS = ("70", "80", "86", "87", "89", "90", "90a")

drivers = st.one_of(
    st.builds(UserModeDriver, mode=st.just("exact"), version=st.sampled_from(DRIVERS)),
    st.builds(
        UserModeDriver,
        mode=st.just("compat"),
        version=st.sampled_from(DRIVERS),
        branches=st.sampled_from([(535,), (525, 535, 550)]),
        brands=st.just(("tesla", "nvidia")),
    ),
    st.just(UserModeDriver(mode="host")),
)
ptx = st.builds(Ptx, target=st.sampled_from(TARGETS), isa=st.sampled_from(["8.0", "8.4", "9.0"]))
platforms = st.sampled_from(["linux/amd64"] * 4 + ["linux/arm64"])
common = {
    "reference": st.uuids().map(lambda uuid: f"t:{uuid}"),
    "digest": st.none(),
    "platform": platforms,
    "cpu_flags": st.sampled_from(MARCHES).map(FLAGS.__getitem__),
    "vendor": st.sampled_from([None, "amd", "intel"]),
    "march": st.uuids().map(str),  # all variants of a matrix differ
}
MEMORY = (None, None, 7000, 15360, 40448)  # that a GPU has, or a variant needs
mig_devices = st.lists(st.sampled_from([9984, 20096, None]), max_size=2).map(
    lambda sizes: tuple(
        MigDevice(uuid=None, profile=None, gpu_instance=number, compute_instance=0, memory_mib=size)
        for number, size in enumerate(sizes)
    )
)
gpu_variants = st.builds(
    Variant,
    gpu_memory_mib=st.sampled_from(MEMORY),
    cuda=st.sampled_from(["11.8", "12.0", "12.4", "13.0"]),
    cubins=st.lists(st.sampled_from(TARGETS), max_size=3, unique=True).map(tuple),
    ptx=st.lists(ptx, max_size=2).map(tuple),
    compressed_fatbin=st.booleans(),
    driver=drivers,
    **common,
)
variants = st.one_of(gpu_variants, gpu_variants, st.builds(Variant, **common))
catalogs = st.builds(
    Catalog,
    image=st.just("t"),
    version=st.just("v1"),
    variants=st.lists(variants, max_size=12, unique_by=lambda variant: variant.reference).map(tuple),
    prefer=st.one_of(st.just(()), st.lists(st.sampled_from(CRITERIA), unique=True).map(tuple)),
)
facts: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "compute": st.sampled_from([*COMPUTES, None]),
        "brand": st.sampled_from(["nvidia", "tesla", "geforce", None]),
        "name": st.sampled_from(["NVIDIA L40S", None]),
        "pci_device_id": st.sampled_from(["26b9", "1db5", None]),
        "state": st.sampled_from(["ok"] * 6 + ["vgpu", "lost", "unconfirmed"]),
        "memory_mib": st.sampled_from([*MEMORY, 6999, 15359, 81559]),
        "mig": st.one_of(st.none(), st.none(), st.none(), mig_devices),
    }
)
gpus = st.one_of(
    st.lists(facts, max_size=3),
    st.tuples(facts, st.integers(1, 3)).map(lambda pair: [pair[0]] * pair[1]),
).map(lambda some: tuple(Gpu(index=index, uuid=f"GPU-{index}", **one) for index, one in enumerate(some)))
hosts = st.builds(
    Host,
    arch=st.sampled_from(["x86_64"] * 4 + ["aarch64"]),
    cpu=st.builds(
        Cpu,
        vendor=st.sampled_from(["GenuineIntel", "AuthenticAMD", None]),
        model=st.none(),
        flags=st.sampled_from([frozenset[str](), *FLAGS.values(), frozenset().union(*FLAGS.values())]),
        level=st.none(),
    ),
    driver=st.one_of(
        st.none(),
        st.builds(
            Driver,
            version=st.sampled_from(DRIVERS),
            kind=st.sampled_from([None, "open", "proprietary"]),
            source=st.just("test"),
            user_mode=st.sampled_from([None] * 12 + [*DRIVERS]),
        ),
    ),
    gpus=gpus,
    accelerators=st.sampled_from([(), (), SIGNS]),
)
allowed = st.booleans()
