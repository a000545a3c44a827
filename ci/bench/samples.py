"""Inputs of the benchmark: a catalog of 1,000 variants, 100,000 nodes, a matrix of 10,000 cells."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from imagematrix.common.json_documents import dump_json
from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Host
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog.catalog import Catalog, Ptx, UserModeDriver, Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.hardware.host.host import Gpu

ROOT = Path(__file__).parents[2]
IMAGEMATRIX = ROOT / ".venv" / "bin" / "imagematrix"
COMPILER = "gcc-14"
RELEASES = {"11.8": "7.8", "12.2": "8.2", "12.4": "8.4", "12.8": "8.7"}  # CUDA and its PTX ISA
# The first ones fit some of the saved nodes, also where a catalog has only a few variants.
DRIVERS = ("550.163.01", "535.261.03", "570.195.03", "580.95.05")
TARGETS = ("90", "52", "70", "80", "86", "89")
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
LEAST = "x86-64"
SIZE = 1_000
# With the axis `flavour`, 10,000 cells, of which the rule drops 200.
FEWEST = 50  # cells of the first three axes
AXES = {
    "cuda": ("11.8", "12.4"),
    "driver": ("535.261.03", "535.274.02", "550.163.01", "570.195.03", "580.95.05"),
    "compute": ("7.0", "7.5", "8.0", "8.6", "8.9"),
    "march": (
        *MARCHES,
        "nehalem",
        "westmere",
        "haswell",
        "skylake",
        "cascadelake",
        "alderlake",
        "znver1",
        "goldmont",
        "tremont",
        "bdver4",
    ),
}
PROPERTIES = {
    "cuda": {
        release: {"base": "debian:trixie", "compiler": COMPILER, "nvrtc": "libnvrtc12"}
        for release in AXES["cuda"]
    },
    "driver": {driver: {"driver_base": "debian:trixie"} for driver in AXES["driver"]},
}
EXCLUDE = {"cuda": "11.8", "driver": "580.95.05", "compute": "8.9", "why": "there are no such nodes"}


def catalog(folder: Path, size: int = SIZE) -> Path:
    """Write a catalog of `size` variants, of 1,000 all but 40 for GPUs, and return its file."""
    points = itertools.product(RELEASES, DRIVERS, TARGETS, MARCHES)
    variants = [_gpu(*point) for point in itertools.islice(points, size - 2)]
    of_gcc = (
        march for march in marches.list_known_names(COMPILER) or () if marches.get_arch(march) == "x86_64"
    )
    least_last = sorted(of_gcc, key=lambda march: (march == LEAST, march))  # every node can run it
    variants += [_cpu("linux/amd64", march) for march in least_last[len(variants) - size + 1 :]]
    variants.append(_cpu("linux/arm64", "armv8-a"))
    path = folder / "catalog.json"
    path.write_text(dump_json(Catalog(image="training", version="v1", variants=tuple(variants)).to_json()))
    return path


def axes(cells: int) -> dict[str, tuple[str, ...]]:
    """Return axes with so many cells, such as 100 or 10,000."""
    marches = AXES["march"][: cells // FEWEST]
    flavours = tuple(f"f{number}" for number in range(cells // FEWEST // len(marches)))
    return {**AXES, "march": marches, "flavour": flavours}


def matrix(folder: Path, cells: int) -> Path:
    """Write a matrix that uses the shipped template, and return its file."""
    shutil.copytree(ROOT / "templates", folder / "templates")
    path = folder / "matrix.yaml"
    image = {"version": "v1", "template": "training/Dockerfile.j2", "context": "templates/training"}
    document = {
        "schema": "imagematrix.matrix/v1",
        "images": {"training": image},
        "axes": axes(cells),
        "properties": PROPERTIES,
        "exclude": [EXCLUDE],
    }
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


def bake(folder: Path, cells: int) -> Path:
    """Write the same axes as a bake file, and return it."""
    values = axes(cells)
    lines = "".join(f"    {axis} = {json.dumps(some)}\n" for axis, some in values.items())
    arguments = "".join(f"    {axis.upper()} = {axis}\n" for axis in values)
    name = "-".join(f'${{replace({axis}, ".", "_")}}' for axis in values)
    tag = "-".join(f"${{{axis}}}" for axis in values)
    path = folder / "docker-bake.hcl"
    path.write_text(
        f"""target "default" {{
  name = "training-{name}"
  matrix = {{
{lines}  }}
  args = {{
{arguments}  }}
  tags = ["training:v1-{tag}"]
}}
"""
    )
    return path


def saved() -> dict[str, Path]:
    """Return the saved nodes of the tests, by name."""
    return {path.stem: path for path in sorted((ROOT / "tests" / "hosts").glob("*.json"))}


def models(count: int, names: Iterable[str] = ()) -> list[Host]:
    """Return nodes of `count` kinds of hardware: the saved nodes, each with a distinct CPU flag."""
    return [
        replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | {f"flag{number}"}))
        for number, host in zip(range(count), _saved(names), strict=False)
    ]


def fleet(size: int, kinds: int, names: Iterable[str] = ()) -> list[Host]:
    """Return `size` nodes of `kinds` kinds of hardware, each with distinct GPUs."""
    hosts = []
    for number, host in zip(range(size), itertools.cycle(models(kinds, names)), strict=False):
        gpus = tuple(replace(gpu, uuid=f"GPU-{number:08}-{gpu.index}") for gpu in host.gpus)
        hosts.append(replace(host, gpus=gpus))
    return hosts


def differing(size: int, names: Iterable[str] = ()) -> list[Host]:
    """Return `size` nodes of which no two have the same CPU flags, addresses and memory of GPUs.

    What a node lacks of the flags that tell the newest CPUs from x86-64-v3 is its number in binary.
    """
    flags = [
        marches.get_required_flags(march, COMPILER) or frozenset()
        for march in ("sapphirerapids", "x86-64-v3")
    ]
    newest = sorted(flags[0] - flags[1])
    nodes = []
    for number, host in zip(range(size), _saved(names), strict=False):
        lacking = {flag for place, flag in enumerate(newest) if number >> place & 1}
        own = host.cpu.flags - lacking | {f"flag{number}"}
        gpus = tuple(_of_node(gpu, number) for gpu in host.gpus)
        nodes.append(replace(host, cpu=replace(host.cpu, flags=own), gpus=gpus))
    return nodes


def hosts(folder: Path, nodes: Iterable[Host]) -> Path:
    """Write nodes, one on each line, and return their file."""
    path = folder / "hosts.ndjson"
    path.write_text("".join(f"{json.dumps(node.to_json())}\n" for node in nodes))
    return path


def _saved(names: Iterable[str]) -> Iterator[Host]:
    """Return the saved nodes of these names, or all, again and again."""
    hosts = [Host.load(path) for name, path in saved().items() if not names or name in names]
    return itertools.cycle(hosts)


def _of_node(gpu: Gpu, number: int) -> Gpu:
    return replace(
        gpu,
        uuid=f"GPU-{number:08}-{gpu.index:04}",
        minor=(gpu.index + number) % 250,
        pci_bus_id=f"{number:04x}:{gpu.index + 1:02x}:00.0",
        memory_mib=(gpu.memory_mib or 0) + number,
    )


def _gpu(release: str, driver: str, target: str, march: str) -> Variant:
    return replace(
        _cpu("linux/amd64", march),
        reference=f"training:v1-cuda{release}-drv{driver}-sm{target}-{march}-0123456789ab",
        cuda=release,
        cubins=(target,),
        ptx=(Ptx(target=target, isa=RELEASES[release]),),
        driver=UserModeDriver(mode="exact", version=driver),
    )


def _cpu(platform: str, march: str) -> Variant:
    return Variant(
        reference=f"training:v1-cpu-{march}-0123456789ab",
        digest=f"sha256:{0:064}",
        platform=platform,
        march=march,
        cpu_flags=marches.get_required_flags(march, COMPILER) or frozenset(),
        vendor=marches.get_vendor(march),
        size=681_574_400,
    )
