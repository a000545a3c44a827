"""Compare images with packaged frameworks: for one kind of GPU, and for all GPUs that they support."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import pulling
from measure import Row, duration
from pulling import DRIVER, FAT, MATCHED, SAID
from samples import IMAGEMATRIX, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["prebuilt", "wheels"]

WHEELS = ("pytorch", "tensorflow")  # starters
TRIM = re.compile(r"\{\{ debian\.trim\(.*\n")
# llama.cpp, and its library for CUDA 12, compiled for the GPUs of its default.
LLAMA = tuple(f"@node-llama-cpp/linux-x64-cuda{part}@3.22.1" for part in ("", "-ext"))
LLAMA_COMPUTE = "8.6"  # the library has compiled code for it, which GPUs with 8.9 run, too
PREBUILT = """\
{% import "macros.j2" as debian %}
FROM {{ base }} AS program
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3
COPY llama/ /opt/llama/
{{ debian.trim("/opt/llama", compute) }}

FROM {{ base }} AS body
RUN set -eu; \\
    {{ debian.update_with_non_free() }}; \\
    apt-get install -qy --no-install-recommends libcublas12 libcudart12 libgomp1 libstdc++6 python3; \\
    rm -rf /var/lib/apt/lists/*

{{ debian.driver_stage(driver_base, driver) }}

{{ debian.linker_cache_stage("body") }}

FROM body
COPY --link --from=program /opt/llama/ /opt/llama/
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
COPY --link --from=driver /driver/ /
"""
LOADS = (
    "import ctypes; [ctypes.CDLL(f'/opt/llama/lib{name}.so') for name in ('llama.cuda.v0.5.0', 'ggml-cuda')]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework, the simulated node that its images start on, and its GPUs; Python first runs `loads`.

    `write` puts a project for an image into a folder, MATCHED or FAT, and returns options of its build.
    """

    name: str
    node: str
    compute: str
    write: Callable[[Path, str, str], tuple[str, ...]]
    loads: str = "pass"


def wheels(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield sizes and cold starts of the starters with official wheels; those for all GPUs are untrimmed."""
    for name in WHEELS:
        (folder / name).mkdir()
        write = partial(_starter, name)
        framework = Framework(name=name, node=pulling.NODE, compute=pulling.COMPUTE, write=write)
        yield from _rows(folder / name, rounds, framework)


def prebuilt(folder: Path, rounds: int) -> Iterator[Row]:
    """Yield sizes and cold starts of llama.cpp as node-llama-cpp compiles it, trimmed and unchanged."""
    libraries = folder / "llama"
    libraries.mkdir()
    for package in LLAMA:  # the second has the library for CUDA 12
        npm = ("npm", "pack", "--silent", "--pack-destination", str(folder), package)
        (name,) = subprocess.run(npm, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        with tarfile.open(folder / name) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".so"):
                    member.name = member.name.rpartition("/")[2]
                    archive.extract(member, libraries)
    framework = Framework(
        name="llama.cpp",
        node="icelake-l40s",
        compute=LLAMA_COMPUTE,
        write=partial(_llama, libraries),
        loads=LOADS,
    )
    yield from _rows(folder, rounds, framework)


def _rows(folder: Path, rounds: int, framework: Framework) -> Iterator[Row]:
    command = ("python3", "-c", f"{framework.loads}; print({SAID!r}, flush=True)")
    with pulling.simulated_node(folder, framework.node) as (engine, registry):
        images = {name: f"{registry.address}/bench/{framework.name}-{name}" for name in (MATCHED, FAT)}
        for name, image in images.items():
            options = framework.write(folder / name, image, name)
            pulling.published(engine, folder / name, f"{image}:v1", *options)
        sizes = {name: pulling.weighed(engine, f"{image}:v1") for name, image in images.items()}
        taken = pulling.cold_starts(engine, images, command, rounds)
    sm = f"-sm{framework.compute.replace('.', '')}-"
    matched = sizes[MATCHED]["variants"]
    ours = next(one["size"] for one in matched if sm in one["reference"])
    (theirs,) = (one["size"] for one in sizes[FAT]["variants"])
    yield Row(
        what=f"{framework.name} for {framework.compute}: to pull",
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


def _starter(template: str, project: Path, image: str, kind: str) -> tuple[str, ...]:
    """Write a starter with another name for its image."""
    subprocess.run([IMAGEMATRIX, "init", "--template", template, project], check=True, capture_output=True)
    matrix, dockerfile = project / "matrix.yaml", project / "templates" / template / "Dockerfile.j2"
    certificates = os.environ.get("PIP_CERT")
    secrets = "    secrets: [ca]\n" if certificates else ""
    matrix.write_text(matrix.read_text().replace(f"  {template}:\n", f"  {image}:\n{secrets}", 1))
    options = ("--secret", f"id=ca,src={certificates}") if certificates else ()
    if kind == MATCHED:
        return options
    dockerfile.write_text(_untrimmed(dockerfile.read_text()))
    return ("--only", f"compute={pulling.COMPUTE}", *options)


def _llama(libraries: Path, project: Path, image: str, kind: str) -> tuple[str, ...]:
    """Write a project whose images have these libraries."""
    (project / "templates").mkdir(parents=True)
    shutil.copy(ROOT / "templates/macros.j2", project / "templates")
    shutil.copytree(libraries, project / "llama")
    (project / "templates/llama.j2").write_text(PREBUILT if kind == MATCHED else _untrimmed(PREBUILT))
    matrix = {
        "schema": "imagematrix.matrix/v1",
        "images": {image: {"version": "v1", "template": "llama.j2", "context": "."}},
        "axes": {"cuda": ["12.4"], "driver": [DRIVER], "compute": [LLAMA_COMPUTE]},
        "properties": {
            "cuda": {"12.4": {"base": "debian:trixie"}},
            "driver": {DRIVER: {"driver_base": "debian:trixie"}},
        },
    }
    (project / "matrix.yaml").write_text(json.dumps(matrix))  # JSON is YAML
    return ()


def _untrimmed(template: str) -> str:
    text, count = TRIM.subn("", template)
    if not count:
        raise SystemExit("the template trims nothing")
    return text


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
