"""What images of starters cost: for one kind of GPU, and for all that their makers support."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from measure import Row, duration
from pulling import FAT, MATCHED, SAID, cold_starts, published, simulated_node, weighed
from samples import IMAGEMATRIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["compiled", "official"]

TRIM = re.compile(r"\{\{ debian\.trim\(.*\n")
ARCHITECTURES = " -D CMAKE_CUDA_ARCHITECTURES={{ cudaarchs }}"
STRIP = "    strip build/bin/llama-server\n"
SERVER = '{{ debian.trim("/src/build/bin/llama-server", compute) }}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A starter, the simulated node that its images start on, and the cell for this node.

    `matched` and `fat` make of its template one for the GPU of a cell, and one for all GPUs. `cells` selects
    those that are built for one GPU each. `run` are the words around the image that have it say SAID.
    """

    template: str
    node: str
    compute: str
    fat: Callable[[str], str]
    run: Callable[[str], tuple[str, ...]]
    matched: Callable[[str], str] = str
    cells: tuple[str, ...] = ()


def official(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield bytes and cold starts of images with official wheels; that for all GPUs has them as they are."""
    for template in ("pytorch", "tensorflow"):
        yield from _rows(folder, rounds, _wheel(template))


def compiled(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield bytes and cold starts of llama.cpp, compiled for the GPUs that it is compiled for by default.

    That takes two hours on two processors. For one GPU the same program is trimmed.
    """
    yield from _rows(folder, rounds, _llama())


def _wheel(template: str) -> Recipe:
    said = f"print({SAID!r}, flush=True)"
    return Recipe(
        template=template,
        node="genoa-h200",
        compute="9.0",
        fat=lambda text: _changed(text, TRIM.sub("", text)),
        run=lambda image: (image, "python3", "-c", said),
    )


def _llama() -> Recipe:
    return Recipe(
        template="llama.cpp",
        node="icelake-l40s",
        compute="8.9",
        cells=("cuda=12.4", "compute=8.9", "march=x86-64-v3"),
        fat=_for_all,
        matched=lambda text: _changed(text, _for_all(text).replace(STRIP, f"{STRIP}{SERVER}\n")),
        run=lambda image: (
            *("--entrypoint", "sh", image),
            *("-c", f"llama-server --list-devices > /dev/null && echo {SAID}"),
        ),
    )


def _for_all(text: str) -> str:
    """Return the template of llama.cpp without the GPUs to compile for, which leaves them to llama.cpp."""
    return _changed(text, text.replace(ARCHITECTURES, ""))


def _changed(before: str, after: str) -> str:
    """Return `after`; the template may have changed since this was written."""
    if before == after:
        raise SystemExit("the template has nothing to replace")
    return after


def _rows(folder: Path, rounds: int, recipe: Recipe) -> Iterator[Row]:
    (folder / recipe.template).mkdir()
    with simulated_node(folder / recipe.template, recipe.node) as (engine, registry):
        images = {name: f"{registry.address}/bench/{recipe.template}-{name}" for name in (FAT, MATCHED)}
        for name, image in images.items():
            project = folder / recipe.template / name
            options = _starter(project, recipe, image, recipe.fat if name == FAT else recipe.matched)
            cells = recipe.cells or ((f"compute={recipe.compute}",) if name == FAT else ())
            only = ("--only", ",".join(cells)) if cells else ()
            published(engine, project, f"{image}:v1", *only, *options)
        sizes = {name: weighed(engine, f"{image}:v1") for name, image in images.items()}
        taken = cold_starts(engine, images, recipe.run, rounds)
    sm = f"-sm{recipe.compute.replace('.', '')}-"
    matched = sizes[MATCHED]["variants"]
    ours = next(one["size"] for one in matched if sm in one["reference"])
    (theirs,) = (one["size"] for one in sizes[FAT]["variants"])
    yield Row(
        what=f"{recipe.template} for {recipe.compute}: to pull",
        ours=_megabytes(ours),
        ratio=f"{ours / theirs:.2f} x",
        instead=f"for all GPUs: {_megabytes(theirs)}",
    )
    seconds = {name: median(each) for name, each in taken.items()}
    yield Row(
        what="`imagematrix run` to the first line, cold",
        ours=duration(seconds[MATCHED]),
        ratio=f"{seconds[MATCHED] / seconds[FAT]:.2f} x",
        instead=f"for all GPUs: {duration(seconds[FAT])}",
    )
    if len(matched) > 1:
        total = sizes[MATCHED]["total"]
        yield Row(
            what=f"all {len(matched)} variants in a registry, shared layers counted once",
            ours=_megabytes(total),
            ratio=f"{total / theirs:.2f} x",
            instead=f"one image for all GPUs: {_megabytes(theirs)}",
        )


def _starter(project: Path, recipe: Recipe, image: str, changed: Callable[[str], str]) -> tuple[str, ...]:
    """Write a starter with another image name and a changed template; return the options for builds."""
    template = recipe.template
    subprocess.run([IMAGEMATRIX, "init", "--template", template, project], check=True, capture_output=True)
    matrix, dockerfile = project / "matrix.yaml", project / "templates" / template / "Dockerfile.j2"
    certificates = os.environ.get("PIP_CERT")
    secrets = "    secrets: [ca]\n" if certificates else ""
    matrix.write_text(matrix.read_text().replace(f"  {template}:\n", f"  {image}:\n{secrets}", 1))
    dockerfile.write_text(changed(dockerfile.read_text()))
    return ("--secret", f"id=ca,src={certificates}") if certificates else ()


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
