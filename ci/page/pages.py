"""Writes pages of fleets to look at: a small, a large and a hostile one.

.venv/bin/python ci/page/pages.py FOLDER
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.selection.fleet.coverage import Coverage, compute_coverage, with_limit
from imagematrix.selection.fleet.page import render_page
from imagematrix.selection.fleet.staleness import StalenessFinding
from imagematrix.selection.fleet.storage import Storage

ROOT = Path(__file__).parents[2]
DRIVERS = {"535.261.03": "12.2", "550.163.01": "12.4", "570.195.03": "12.8", "580.95.05": "13.0"}
GPUS = {
    "7.5": ("Tesla T4", "1eb8"),
    "8.0": ("NVIDIA A100-SXM4-80GB", "20b2"),
    "8.6": ("NVIDIA A10", "2236"),
    "8.9": ("NVIDIA L40S", "26b9"),
    "9.0": ("NVIDIA H100 80GB HBM3", "2330"),
    "10.0": ("NVIDIA B200", "2901"),
    "12.0": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "2bb5"),
}
MARCHES = (
    "haswell",
    "skylake-avx512",
    "cascadelake",
    "icelake-server",
    "sapphirerapids",
    "znver2",
    "znver3",
    "znver4",
    "znver5",
)
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> {{ 7 * 7 }} \u202egnp.exe \x1b[31m\0"


def main() -> None:
    """Write the pages into the folder in the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    saved = {path.stem: Host.load(path) for path in sorted((ROOT / "tests" / "hosts").glob("*.json"))}
    for name, hosts, catalog in (
        ("small", saved, _catalog("training", 40)),
        ("large", _fleet(2000), _catalog("registry.example.com/ml/training", 250)),
        ("hostile", {HOSTILE: _host("8.9", "znver4", "550.163.01", 1, HOSTILE)}, _catalog(f"t{HOSTILE}", 90)),
    ):
        report = with_limit(compute_coverage(hosts, catalog, drivers={"550.163.01": "580.95.05"}), 6)
        start = time.perf_counter()
        text = render_page(report, storage=_storage(catalog), aged=_aged(report))
        seconds = time.perf_counter() - start
        (folder / f"{name}.html").write_bytes(text.encode(errors="backslashreplace"))
        print(f"{name}: {len(text) / 1e6:.2f} MB in {seconds:.1f} s")


def _catalog(image: str, size: int) -> Catalog:
    variants = [
        Variant(
            reference=f"{image}:v1-cuda{cuda}-drv{driver}-sm{compute.replace('.', '')}-{march}-0123456789ab",
            digest=None,
            platform="linux/amd64",
            cuda=cuda,
            cubins=(compute.replace(".", ""),),
            driver=UserModeDriver(mode="exact", version=driver),
            march=march,
            cpu_flags=marches.get_required_flags(march, "gcc-14") or frozenset(),
        )
        for driver, cuda in DRIVERS.items()
        for compute in GPUS
        for march in MARCHES
    ]
    chance = random.Random(1)  # noqa: S311 - the same pages each time
    return Catalog(image=image, version="v1", variants=tuple(chance.sample(variants, size)))


def _fleet(size: int) -> dict[str, Host]:
    chance = random.Random(2)  # noqa: S311
    return {
        f"rack{number % 40:02}/node{number:04}": _host(
            chance.choice(list(GPUS)),
            chance.choice(MARCHES),
            chance.choice(list(DRIVERS)),
            chance.choice([1, 4, 8, 8]),
        )
        for number in range(size)
    }


def _host(compute: str, march: str, driver: str, count: int, name: str | None = None) -> Host:
    product, device = GPUS[compute]
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{index}",
            name=name or product,
            compute=compute,
            pci_device_id=device,
            brand="nvidia",
        )
        for index in range(count)
    )
    flags = marches.get_required_flags(march, "gcc-14") or frozenset()
    cpu = Cpu(vendor=None, model=name or f"a CPU of {march}", flags=flags, level="x86-64-v3")
    return Host(
        arch="x86_64", cpu=cpu, driver=Driver(version=driver, kind="open", source="example"), gpus=gpus
    )


def _storage(catalog: Catalog) -> Storage:
    """Return sizes in which variants share a base, a toolkit and a driver."""
    layers = {"base": 660_000_000}
    variants = {}
    for number, variant in enumerate(catalog.variants):
        driver = variant.driver.version if variant.driver else ""
        layers |= {f"cuda{variant.cuda}": 1_900_000_000, f"drv{driver}": 61_000_000}
        layers[variant.reference] = 90_000_000 + number * 1_000_000
        variants[variant.reference] = frozenset(
            {"base", f"cuda{variant.cuda}", f"drv{driver}", variant.reference}
        )
    return Storage(variants=variants, layers=layers, compressed=True)


def _aged(report: Coverage) -> list[StalenessFinding]:
    hosts = tuple(name for kind in report.kinds for name in kind.hosts)
    common = {"cells": 9, "images": (f"{report.image}:{report.version}",), "hosts": hosts}
    digests = f"sha256:{'0' * 64}", f"sha256:{'1' * 64}"
    return [
        StalenessFinding(
            kind="base",
            name="debian:trixie",
            used=digests[0],
            now=digests[1],
            why="its tag has another image",
            source="registry.example.com",
            date=None,
            **common,  # type: ignore[arg-type]
        ),
        StalenessFinding(
            kind="wheel",
            name="torch",
            used="2.8.0",
            now=None,
            why=f"the index answered {report.image}",
            source="https://pypi.org/simple",
            date="2026-11-26",
            **common,  # type: ignore[arg-type]
        ),
    ]


if __name__ == "__main__":
    main()
