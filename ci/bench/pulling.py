"""Measure cold starts of an image for one kind of GPU, and of an image with code for all GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import building
from conftest import LIBRARIES, Registry
from gpu_node import GpuNode, profiles
from samples import IMAGEMATRIX, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from conftest import Engine

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
BODY = "FROM {{ base }} AS body\n"  # of the shipped template, where users install their own software
SAID = "train:"  # the beginning of the first line of output
STARTED = ("sh", "-c", "train --steps 2 2>&1")
NETWORKS = {"100mbit": "1mb", "1gbit": "2mb", "10gbit": "16mb"}  # rates of tc, and the burst that each needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """An image: the compressed bytes of its layers, and the seconds to the first line in each round."""

    size: int
    seconds: tuple[float, ...]


def pulled(folder: Path, rounds: int, wheel: str = WHEEL) -> dict[str, Pulled]:
    """Return MATCHED and FAT: the shipped program with a wheel, trimmed to one GPU and unchanged."""
    wheels = folder / "wheels"
    pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *TAGS, "--dest", str(wheels))
    subprocess.run([*pip, wheel], check=True)
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
    with simulated_node(folder) as (engine, registry):
        names = {name: f"{registry.address}/bench/{name}" for name in (MATCHED, FAT)}
        for name, place in ((MATCHED, folder / "trimmed"), (FAT, wheels)):
            (file,) = place.glob("*.whl")
            project = _project(folder / name, names[name], file, engine.node.libcuda)
            published(engine, project, f"{names[name]}:v1")
        sizes = {name: int(weighed(engine, f"{image}:v1")["total"]) for name, image in names.items()}
        taken = cold_starts(engine, names, STARTED, rounds)
    return {name: Pulled(size=sizes[name], seconds=tuple(taken[name])) for name in names}


@contextmanager
def simulated_node(folder: Path, name: str = NODE) -> Iterator[tuple[Engine, Registry]]:
    """Start the engine of a simulated node with GPUs of a profile, and a registry."""
    (folder / "node").mkdir()
    node = GpuNode(folder / "node", name, profiles())
    with building.new_engine(node) as engine, ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        yield engine, registry


def cold_starts(
    engine: Engine, images: dict[str, str], command: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds to the first line for each image, measured in turn, in alternating order."""
    taken: dict[str, list[float]] = {name: [] for name in images}
    for number in range(rounds):
        for name in images if number % 2 == 0 else reversed(images):
            taken[name].append(_first_line(engine, f"{images[name]}:v1", command))
    return taken


@contextmanager
def limited(engine: Engine, network: str) -> Iterator[None]:
    """Limit the rate between an engine and a registry beside it to that of a network in NETWORKS."""
    rate = ("tbf", "rate", network, "burst", NETWORKS[network], "latency", "100ms")
    subprocess.run([*engine.inside, "tc", "qdisc", "add", "dev", "lo", "root", *rate], check=True)
    try:
        yield
    finally:
        subprocess.run([*engine.inside, "tc", "qdisc", "delete", "dev", "lo", "root"], check=True)


def docker_pull(engine: Engine, name: str) -> float:
    """Return the seconds of `docker pull` on an engine without any layer of the image."""
    emptied(engine)
    return building.run(lambda: engine.docker("pull", "--quiet", name, check=False))


def emptied(engine: Engine) -> None:
    """Remove all images, and what the engine keeps of builds."""
    names = engine.docker("images", "--quiet").stdout.split()
    if names:
        engine.docker("rmi", "--force", *dict.fromkeys(names))
    engine.docker("system", "prune", "--all", "--force")


def _project(folder: Path, image: str, wheel: Path, libcuda: Path) -> Path:
    """Write a matrix of one cell: the shipped template with the files of a wheel, and the node's libcuda."""
    shutil.copytree(ROOT / "templates", folder / "templates")
    context = folder / "templates" / "training"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(context / "wheel")
    shutil.copy(libcuda, context)
    (context / ".dockerignore").unlink()  # it excludes files that the shipped image does not need
    template = context / "Dockerfile.j2"
    text = template.read_text().replace(BODY, f"{BODY}COPY wheel/ /usr/local/lib/python3/dist-packages/\n")
    template.write_text(f"{text}COPY --link {libcuda.name} {LIBRARIES}/{libcuda.name}\n")
    described = {"version": "v1", "template": "training/Dockerfile.j2", "context": "templates/training"}
    (folder / "matrix.yaml").write_text(json.dumps({**CELL, "images": {image: described}}))  # JSON is YAML
    return folder


def starter(template: str, project: Path, names: dict[str, str], version: str = "v1") -> tuple[str, ...]:
    """Write a starter with other `names` for its images; return options of its build.

    If PIP_CERT is set, builds get these certificates.
    """
    subprocess.run([IMAGEMATRIX, "init", "--template", template, project], check=True, capture_output=True)
    matrix, dockerfile = project / "matrix.yaml", project / "templates" / template / "Dockerfile.j2"
    certificates = os.environ.get("PIP_CERT")
    secrets = "    secrets: [ca]\n" if certificates else ""
    text = matrix.read_text().replace("    version: v1", f"{secrets}    version: {version}")
    for old, new in names.items():
        text = text.replace(f"\n  {old}:", f"\n  {new}:", 1)  # an axis may have the same name
        dockerfile.write_text(dockerfile.read_text().replace(f'images["{old}"]', f'images["{new}"]'))
    matrix.write_text(text)
    return ("--secret", f"id=ca,src={certificates}") if certificates else ()


def published(engine: Engine, project: Path, version: str, *options: str) -> None:
    """Build a project, push its images and publish them."""
    building.run(lambda: engine.imagematrix("build", "--push", "-f", project / "matrix.yaml", *options))
    building.run(lambda: engine.imagematrix("publish", version))


def weighed(engine: Engine, reference: str) -> dict[str, Any]:
    """Return the Sizes document of a version in a registry."""
    done = engine.imagematrix("ls", "--size", "--json", reference, "--catalog", reference)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))


def _first_line(engine: Engine, reference: str, command: Sequence[str]) -> float:
    """Return the seconds from `imagematrix run` to the first line, on an engine without images.

    The first line is to begin with SAID.
    """
    engine.remove_containers()
    emptied(engine)
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
        raise SystemExit(f"{reference} printed {line!r} and exited with {process.returncode}: {said[-2000:]}")
    return taken
