"""What is measured on: a catalog of 1,000 variants, a fleet of 100,000 nodes, a matrix of 10,000 cells."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from imagematrix.catalog.catalog import Catalog, Ptx, UserModeDriver, Variant
from imagematrix.documents import dump
from imagematrix.facts import device_code, marches
from imagematrix.probe.host import Host
from imagematrix.record import replace

ROOT = Path(__file__).parents[2]
COMPILER = "gcc-14"
RELEASES = {"11.8": "7.8", "12.2": "8.2", "12.4": "8.4", "12.8": "8.7"}  # CUDA and its PTX ISA
DRIVERS = ("535.261.03", "550.163.01", "570.195.03", "580.95.05")
TARGETS = ("52", "70", "80", "86", "89", "90")
MARCHES = (
    "x86-64-v2",
    "x86-64-v3",
    "x86-64-v4",
    "broadwell",
    "skylake-avx512",
    "icelake-server",
    "sapphirerapids",
    "znver2",
    "znver3",
    "znver4",
)
SIZE = 1_000
AXES = {
    "cuda": ("11.8", "12.4"),
    "driver": ("535.261.03", "535.274.02", "550.163.01", "570.195.03", "580.95.05"),
    "compute": ("7.0", "7.5", "8.0", "8.6", "8.9"),
    "march": (*MARCHES, *(f"x86-64-v3+{number}" for number in range(10))),
    "flavour": tuple(f"f{number}" for number in range(10)),
}


def catalog(folder: Path) -> Path:
    """Write a catalog of 1,000 variants, 961 of them with a driver and device code, and return its file."""
    variants = [
        _gpu(*point) for point in itertools.product(RELEASES, DRIVERS, TARGETS, MARCHES)
    ]
    known = sorted(marches.known(COMPILER) or ())
    x86 = [march for march in known if marches.arch(march) == "x86_64"]
    variants += [_cpu("linux/amd64", march) for march in x86[: SIZE - len(variants) - 1]]
    variants.append(_cpu("linux/arm64", "armv8-a"))
    path = folder / "catalog.json"
    path.write_text(dump(Catalog(image="training", version="v1", variants=tuple(variants)).to_json()))
    return path


def profiles() -> list[Host]:
    """Return the saved nodes that the tests have."""
    return [Host.load(path) for path in sorted((ROOT / "tests" / "hosts").glob("*.json"))]


def fleet(size: int, kinds: int) -> list[Host]:
    """Return `size` nodes of about `kinds` kinds of hardware, each with GPUs of its own."""
    saved = profiles()
    models = [
        replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | {f"unheard_of_{number}"}))
        for number in range(kinds // len(saved) + 1)
        for host in saved
    ][:kinds]
    hosts = []
    for number, host in zip(range(size), itertools.cycle(models)):  # noqa: B905 - cycle has no end
        gpus = tuple(replace(gpu, uuid=f"GPU-{number:08}-{gpu.index}") for gpu in host.gpus)
        hosts.append(replace(host, gpus=gpus))
    return hosts
