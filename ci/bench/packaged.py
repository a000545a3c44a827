"""Compare images with packaged frameworks: for one kind of GPU, and for all GPUs that they support."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import pulling
import serving
from measure import Row, duration, megabytes
from pulling import DRIVER, FAT, MATCHED, SAID
from samples import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Engine, Registry
    from measure import Extent, Pace

PROGRAMS = ROOT / "ci/bench/programs"
ONE_LAYER = "one-layer"
NVIDIA_TOO = "nvidia-too"
LIMITS = {ONE_LAYER: 0.45, FAT: 0.4}  # times the cold start of the other image of PyTorch
INSTEAD = {ONE_LAYER: "NVIDIA's libraries in one layer, gzip", FAT: "for all GPUs, gzip"}
ALSO = {NVIDIA_TOO: "with NVIDIA's libraries trimmed, too"}
NETWORK, RATE = "1gbit", 125e6  # of `tc`, and its bytes in a second
TRIM = re.compile(r"\{\{ debian\.trim\(.*\n|compute=compute, ")
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

    `write` puts a project for an image into a folder, MATCHED, one of the `rivals`, or one of the `weighed`,
    which only have a size; it returns options of its build.
    """

    name: str
    node: str
    compute: str
    write: Callable[[Path, str, str], tuple[str, ...]]
    rivals: tuple[str, ...] = (FAT,)
    weighed: tuple[str, ...] = ()
    loads: str = "pass"

    @property
    def command(self) -> tuple[str, ...]:
        """What its containers run."""
        return ("python3", "-c", f"{self.loads}; print({SAID!r}, flush=True)")


def pytorch(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield sizes and cold starts of PyTorch's starter, of its earlier template, and without trimming.

    The images of the other two have gzip layers, as other builders write them. The starter that also trims
    NVIDIA's libraries has a size only.
    """
    write = partial(_starter, "pytorch")
    node, compute = pulling.NODE, pulling.COMPUTE
    rivals, weighed = (ONE_LAYER, FAT), () if extent.smallest else (NVIDIA_TOO,)
    framework = Framework(
        name="pytorch", node=node, compute=compute, write=write, rivals=rivals, weighed=weighed
    )
    with _published(folder, framework) as (engine, registry, images):
        yield from _sizes(engine, framework, images)
        started = {kind: images[kind] for kind in (MATCHED, *rivals)}
        taken = pulling.cold_starts(engine, started, framework.command, extent.pulls)
        for rival in rivals:
            yield _cold(taken, rival, LIMITS[rival])
        with pulling.limited(engine, NETWORK):
            taken = pulling.cold_starts(engine, started, framework.command, extent.pulls)
        size = _size(engine, images[MATCHED], compute)
        for rival in rivals:
            told = f"the network needs {duration(size / RATE)}"
            yield replace(_cold(taken, rival), what=f"the same at {NETWORK[0]} Gbit/s", bar=told)
        host = folder / "host.json"
        host.write_text(engine.imagematrix("probe", "--json").stdout)
        selected = engine.imagematrix("select", f"{images[MATCHED]}:v1", "--host", host).stdout.strip()
        with serving.started(engine.inside, registry.address, host) as resolver:
            through = f"{images[MATCHED]}:v1".replace(registry.address, resolver.address)
            yield serving.resolved_pull(engine, "`docker pull` of it", (through, selected), extent.pulls)


def tensorflow(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield sizes and cold starts of TensorFlow's starter, and without trimming."""
    write = partial(_starter, "tensorflow")
    yield from _rows(
        folder,
        extent.pulls,
        Framework(name="tensorflow", node=pulling.NODE, compute=pulling.COMPUTE, write=write),
    )


def prebuilt(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
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
    yield from _rows(folder, extent.pulls, framework)


def _rows(folder: Path, rounds: int, framework: Framework) -> Iterator[Row]:
    with _published(folder, framework) as (engine, _, images):
        yield from _sizes(engine, framework, images)
        taken = pulling.cold_starts(engine, images, framework.command, rounds)
        for rival in framework.rivals:
            yield _cold(taken, rival)


@contextmanager
def _published(folder: Path, framework: Framework) -> Iterator[tuple[Engine, Registry, dict[str, str]]]:
    """Build and publish all images; yield the engine, its registry, and the images by kind."""
    with pulling.simulated_node(folder, framework.node) as (engine, registry):
        kinds = (MATCHED, *framework.rivals, *framework.weighed)
        images = {kind: f"{registry.address}/bench/{framework.name}-{kind}" for kind in kinds}
        for kind, image in images.items():
            options = framework.write(folder / kind, image, kind)
            pulling.published(engine, folder / kind, f"{image}:v1", *options)
            pulling.emptied(engine)  # the cache of one build has tens of gigabytes
            engine.seed()
        yield engine, registry, images


def _sizes(engine: Engine, framework: Framework, images: dict[str, str]) -> Iterator[Row]:
    ours = _size(engine, images[MATCHED], framework.compute)
    for rival in framework.rivals:
        theirs = _size(engine, images[rival], framework.compute)
        yield _smaller(f"{framework.name} for {framework.compute}: to pull", ours, INSTEAD[rival], theirs)
    for kind in framework.weighed:
        size = _size(engine, images[kind], framework.compute)
        yield _smaller(f"the same, {ALSO[kind]}", size, "without", ours)
    sizes = pulling.weighed(engine, f"{images[MATCHED]}:v1")
    if len(sizes["variants"]) > 1:
        yield Row(
            what=f"all {len(sizes['variants'])} variants in a registry, shared layers counted once",
            ours=megabytes(sizes["total"]),
        )


def _smaller(what: str, ours: int, instead: str, theirs: int) -> Row:
    ratio = f"{ours / theirs:.2f} x"
    return Row(what=what, ours=megabytes(ours), ratio=ratio, instead=f"{instead}: {megabytes(theirs)}")


def _size(engine: Engine, image: str, compute: str) -> int:
    """Return the compressed bytes of the layers of the variant for a compute capability."""
    sm = f"-sm{compute.replace('.', '')}-"
    variants = pulling.weighed(engine, f"{image}:v1")["variants"]
    return int(next(one["size"] for one in variants if sm in one["reference"]))


def _cold(taken: dict[str, list[float]], rival: str, limit: float | None = None) -> Row:
    ours, theirs = median(taken[MATCHED]), median(taken[rival])
    return Row(
        what="`imagematrix run` to the first line, cold",
        ours=duration(ours),
        ratio=f"{ours / theirs:.2f} x",
        instead=f"{INSTEAD[rival]}: {duration(theirs)}",
        bar=f"{limit} x" if limit else "",
        met=ours <= limit * theirs if limit else None,
    )


def _starter(template: str, project: Path, image: str, kind: str) -> tuple[str, ...]:
    """Write a starter with another name for its image; rivals have their own template, and gzip layers."""
    options = pulling.starter(template, project, {template: image})
    matrix, dockerfile = project / "matrix.yaml", project / "templates" / template / "Dockerfile.j2"
    if kind == NVIDIA_TOO:
        matrix.write_text(_uncommented(matrix.read_text(), "trim_nvidia"))
        return ("--only", f"compute={pulling.COMPUTE}", *options)
    if kind == MATCHED:
        return options
    described, earlier = matrix.read_text(), PROGRAMS / f"{template}-{ONE_LAYER}.j2"
    text = dockerfile.read_text()
    if earlier.exists():  # it copies the lock from the context
        described = described.replace("    version:", f"    context: templates/{template}\n    version:", 1)
        text = earlier.read_text()
    matrix.write_text(f"{described}\ncompression: gzip\n")
    dockerfile.write_text(_untrimmed(text) if kind == FAT else text)
    return ("--only", f"compute={pulling.COMPUTE}", *options)


def _uncommented(matrix: str, key: str) -> str:
    """Return a starter's matrix with a line that is a comment in it."""
    text, count = re.subn(rf"# {key}: (.*?) +#.*", rf"{key}: \1", matrix)
    if not count:
        raise SystemExit(f"the starter has no comment with {key}")
    return text


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
