"""What a cold start costs: an image for one kind of GPU beside one with the code for all of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import building
from conftest import LIBRARIES, Engine, Registry
from gpu_node import GpuNode, profiles
from samples import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["FAT", "MATCHED", "WHEEL", "Pulled", "pulled"]

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
STARTED = ("sh", "-c", "train --steps 2 2>&1")


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
    (folder / "node").mkdir()
    node = GpuNode(folder / "node", NODE, profiles())
    subprocess.run([ROOT / "ci" / "bases", "archives"], check=True)
    engine = Engine("containerd", node)
    with ExitStack() as stack:
        stack.callback(engine.remove)
        engine.start()
        engine.seed()
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        names = {name: f"{registry.address}/bench/{name}" for name in (MATCHED, FAT)}
        for name, place in ((MATCHED, folder / "trimmed"), (FAT, wheels)):
            (wheel,) = place.glob("*.whl")
            _published(engine, _project(folder / name, names[name], wheel, node.libcuda))
        sizes = {name: _size(engine, f"{image}:v1") for name, image in names.items()}
        taken: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for name in (MATCHED, FAT) if number % 2 == 0 else (FAT, MATCHED):
                taken[name].append(_first_line(engine, f"{names[name]}:v1"))
    return {name: Pulled(size=sizes[name], seconds=tuple(taken[name])) for name in names}


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


def _published(engine: Engine, project: Path) -> None:
    building.run(lambda: engine.imagematrix("build", "--push", "-f", project / "matrix.yaml"))
    building.run(lambda: engine.imagematrix("publish", *_images(project)))


def _images(project: Path) -> Iterator[str]:
    for name, image in json.loads((project / "matrix.yaml").read_text())["images"].items():
        yield f"{name}:{image['version']}"


def _size(engine: Engine, reference: str) -> int:
    done = engine.imagematrix("verify", "--json", reference)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(json.loads(done.stdout)["size"]["compressed"])


def _first_line(engine: Engine, reference: str) -> float:
    """Return the seconds from `imagematrix run` to the first line, on an engine that has nothing."""
    engine.remove_containers()
    names = engine.docker("images", "--quiet").stdout.split()
    if names:
        engine.docker("rmi", "--force", *dict.fromkeys(names))
    engine.docker("system", "prune", "--all", "--force")
    words = [
        *engine.inside,
        str(ROOT / ".venv/bin/imagematrix"),
        "run",
        "--rm",
        "--gpus",
        "1",
        reference,
        *STARTED,
    ]
    start = time.perf_counter()
    with subprocess.Popen(
        words, env=engine.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe; for the type checker
        line = process.stdout.readline()
        taken = time.perf_counter() - start
        _, said = process.communicate()
    if not line.startswith("train:") or process.returncode:
        raise SystemExit(f"{reference} said {line!r} and ended with {process.returncode}: {said[-2000:]}")
    return taken
