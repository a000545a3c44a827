"""What a cold start costs: an image for one kind of GPU beside one with the code for all of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import building
from conftest import LIBRARIES, Registry
from gpu_node import GpuNode, profiles
from measure import Row, duration
from samples import IMAGEMATRIX, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from conftest import Engine

__all__ = ["FAT", "MATCHED", "WHEEL", "Pulled", "official", "pulled"]

WHEEL = "torch==2.8.0"  # which has device code for seven kinds of GPUs
TAGS = ("--python-version=3.11", "--only-binary=:all:")
NODE, COMPUTE, DRIVER = "genoa-h200", "9.0", "550.163.01"
MATCHED, FAT = "matched", "fat"
PORT = 5098
CELL = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"cuda": ["12.4"], "driver": [DRIVER], "compute": [COMPUTE], "march": ["x86-64-v3"]},
    "properties": {
        "cuda": {"12.4": {"base": "debian:trixie", "compiler": "gcc-14", "nvrtc": "libnvrtc12"}},
        "driver": {DRIVER: {"driver_base": "debian:trixie"}},
    },
}
BODY = "FROM {{ base }} AS body\n"  # of the shipped template: where one's own is installed
SAID = "train:"  # by both of these, first
STARTED = ("sh", "-c", "train --steps 2 2>&1")
PYTHON = ("python3", "-c", "print('train:', flush=True)")
OFFICIAL = ("pytorch", "tensorflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """An image: the compressed bytes of its layers, and the seconds to the first line in each round."""

    size: int
    seconds: tuple[float, ...]


def pulled(folder: Path, rounds: int) -> dict[str, Pulled]:
    """Return MATCHED and FAT: the shipped program beside a wheel, trimmed to one GPU, and as it is."""
    wheels = folder / "wheels"
    pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *TAGS, "--dest", str(wheels))
    subprocess.run([*pip, WHEEL], check=True)
    trim = (
        sys.executable,
        "-m",
        "imagematrix",
        "trim",
        "--compute",
        COMPUTE,
        "--output",
        str(folder / "trimmed"),
    )
    subprocess.run([*trim, *map(str, wheels.glob("*.whl"))], check=True, stdout=subprocess.DEVNULL)
    with _node(folder) as (engine, registry):
        names = {name: f"{registry.address}/bench/{name}" for name in (MATCHED, FAT)}
        for name, place in ((MATCHED, folder / "trimmed"), (FAT, wheels)):
            (wheel,) = place.glob("*.whl")
            project = _project(folder / name, names[name], wheel, engine.node.libcuda)
            _published(engine, project, f"{names[name]}:v1")
        sizes = {name: int(_weighed(engine, f"{image}:v1")["total"]) for name, image in names.items()}
        taken = _cold_starts(engine, names, STARTED, rounds)
    return {name: Pulled(size=sizes[name], seconds=tuple(taken[name])) for name in names}


def official(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield bytes and cold starts of images with official wheels: for one kind of GPU, and for all.

    The images for all have the wheels as they are.
    """
    for template in OFFICIAL:
        (folder / template).mkdir()
        with _node(folder / template) as (engine, registry):
            images = {name: f"{registry.address}/bench/{template}-{name}" for name in (MATCHED, FAT)}
            for name, image in images.items():
                project = folder / template / name
                options = _starter(project, template, image, fat=name == FAT)
                only = ("--only", f"compute={COMPUTE}") if name == FAT else ()
                _published(engine, project, f"{image}:v1", *only, *options)
            weighed = {name: _weighed(engine, f"{image}:v1") for name, image in images.items()}
            taken = _cold_starts(engine, images, PYTHON, rounds)
        yield from _rows(template, weighed, {name: median(seconds) for name, seconds in taken.items()})


def _starter(project: Path, template: str, image: str, *, fat: bool) -> tuple[str, ...]:
    """Write the starter of a template with another name for its image; return options for its build."""
    subprocess.run([IMAGEMATRIX, "init", "--template", template, project], check=True, capture_output=True)
    matrix, dockerfile = project / "matrix.yaml", project / "templates" / template / "Dockerfile.j2"
    certificates = os.environ.get("PIP_CERT")
    secrets = "    secrets: [ca]\n" if certificates else ""
    matrix.write_text(matrix.read_text().replace(f"  {template}:\n", f"  {image}:\n{secrets}", 1))
    if fat:
        text, count = re.subn(r"\{\{ debian\.trim\(.*\n", "", dockerfile.read_text())
        if not count:
            raise SystemExit(f"{dockerfile} trims nothing")
        dockerfile.write_text(text)
    return ("--secret", f"id=ca,src={certificates}") if certificates else ()


def _weighed(engine: Engine, reference: str) -> dict[str, Any]:
    """Return the Sizes document of a version in a registry."""
    done = engine.imagematrix("ls", "--size", "--json", reference, "--catalog", reference)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))


def _rows(template: str, weighed: dict[str, dict[str, Any]], seconds: dict[str, float]) -> Iterator[Row]:
    matched = weighed[MATCHED]["variants"]
    sm = f"-sm{COMPUTE.replace('.', '')}-"
    ours = next(one["size"] for one in matched if sm in one["reference"])
    (theirs,) = (one["size"] for one in weighed[FAT]["variants"])
    yield Row(
        what=f"{template} for {COMPUTE}: to pull",
        ours=_megabytes(ours),
        ratio=f"{ours / theirs:.2f} x",
        instead=f"for all GPUs: {_megabytes(theirs)}",
    )
    yield Row(
        what="`imagematrix run` to the first line, cold",
        ours=duration(seconds[MATCHED]),
        ratio=f"{seconds[MATCHED] / seconds[FAT]:.2f} x",
        instead=f"for all GPUs: {duration(seconds[FAT])}",
    )
    total = weighed[MATCHED]["total"]
    yield Row(
        what=f"all {len(matched)} variants in a registry, shared layers counted once",
        ours=_megabytes(total),
        ratio=f"{total / theirs:.2f} x",
        instead=f"one image for all GPUs: {_megabytes(theirs)}",
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


@contextmanager
def _node(folder: Path) -> Iterator[tuple[Engine, Registry]]:
    """Start the engine of a simulated node with GPUs, and a registry beside it."""
    (folder / "node").mkdir()
    node = GpuNode(folder / "node", NODE, profiles())
    with building.new_engine(node) as engine, ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        yield engine, registry


def _cold_starts(
    engine: Engine, images: dict[str, str], command: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds to the first line for MATCHED and FAT, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in images}
    for number in range(rounds):
        for name in (MATCHED, FAT) if number % 2 == 0 else (FAT, MATCHED):
            taken[name].append(_first_line(engine, f"{images[name]}:v1", command))
    return taken


def _project(folder: Path, image: str, wheel: Path, libcuda: Path) -> Path:
    """Write a matrix of one cell: the shipped template with the files of a wheel, and the node's libcuda."""
    shutil.copytree(ROOT / "templates", folder / "templates")
    context = folder / "templates" / "training"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(context / "wheel")
    shutil.copy(libcuda, context)
    (context / ".dockerignore").unlink()  # it names what the shipped image takes
    template = context / "Dockerfile.j2"
    text = template.read_text().replace(BODY, f"{BODY}COPY wheel/ /usr/local/lib/python3/dist-packages/\n")
    template.write_text(f"{text}COPY --link {libcuda.name} {LIBRARIES}/{libcuda.name}\n")
    described = {"version": "v1", "template": "training/Dockerfile.j2", "context": "templates/training"}
    (folder / "matrix.yaml").write_text(json.dumps({**CELL, "images": {image: described}}))  # JSON is YAML
    return folder


def _published(engine: Engine, project: Path, version: str, *options: str) -> None:
    building.run(lambda: engine.imagematrix("build", "--push", "-f", project / "matrix.yaml", *options))
    building.run(lambda: engine.imagematrix("publish", version))


def _first_line(engine: Engine, reference: str, command: Sequence[str]) -> float:
    """Return the seconds from `imagematrix run` to the first line, on an engine that has nothing.

    The first line is to begin with SAID.
    """
    engine.remove_containers()
    names = engine.docker("images", "--quiet").stdout.split()
    if names:
        engine.docker("rmi", "--force", *dict.fromkeys(names))
    engine.docker("system", "prune", "--all", "--force")
    words = [*engine.inside, str(IMAGEMATRIX), "run", "--rm", "--gpus", "1", reference, *command]
    start = time.perf_counter()
    with subprocess.Popen(
        words, env=engine.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe; for the type checker
        line = process.stdout.readline()
        taken = time.perf_counter() - start
        _, said = process.communicate()
    if not line.startswith(SAID) or process.returncode:
        raise SystemExit(f"{reference} said {line!r} and ended with {process.returncode}: {said[-2000:]}")
    return taken
