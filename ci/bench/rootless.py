"""Measure containers without a daemon beside `docker run`, and their programs beside each other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import building
import pulling
from conftest import Registry
from measure import Row, duration, megabytes
from samples import IMAGEMATRIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from conftest import Engine
    from measure import Extent, Pace

INSTEAD = "`docker run`"
PORT = 5097
FOLDERS = FILES = 100  # folders, and files in each
MADE = (
    f"for d in $(seq {FOLDERS}); do mkdir -p /tree/$d; "
    f"for f in $(seq {FILES}); do head -c 7500 /dev/urandom | base64 > /tree/$d/$f; done; done"
)
READ = ("sh", "-c", "cat /tree/*/* | wc -c")
NOTHING = ("true",)
WAIT = ("sleep", "6")
SETTLED_S = 3.0
NETWORK = "1gbit"  # of pulling.NETWORKS
PROGRAMS = {
    "runc": ("oci", {"IMAGEMATRIX_RUNTIME": "runc"}),
    "bwrap": ("oci", {"IMAGEMATRIX_RUNTIME": "bwrap"}),
    "ch-run": ("charliecloud", {}),
    "apptainer": ("apptainer", {}),
}
KINDS: Mapping[str, tuple[str, ...]] = {"squashfs": (), "folder": ("--unpacked",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to run the image: its `name`, the words before a command in it, and its own variables."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str]
    store: Path | None = None


def rows(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield cold starts, warm starts, the reading of many small files, and memory, of every way to run."""
    rounds = extent.pairs
    with building.new_engine() as engine, contextlib.ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        image = f"{registry.address}/bench/files"
        pulling.published(engine, _project(folder / "project", image), f"{image}:v1")
        docker = _Way(
            name=INSTEAD, words=("docker", "run", "--rm", _reference(engine, image)), environment={}
        )
        ways = [*_ways(folder, image), docker]
        for way in ways:  # each store is filled once, and the engine has the image
            _taken(engine, way, NOTHING)
        yield from _compared("a container that does nothing, warm", engine, ways, NOTHING, rounds)
        yield from _compared("10,000 files of 10 kB read, in memory", engine, ways, READ, rounds)
        yield from _compared("the same from the disk", engine, ways, READ, rounds, before=_forget)
        for way in ways:
            private, shared = _memory(engine, way)
            yield Row(
                what=f"memory, {way.name}", ours=megabytes(private), instead=f"shared: {megabytes(shared)}"
            )
        cold = [way for way in ways if way.name in ("runc, squashfs", "runc, folder", INSTEAD)]
        what = "from the registry to the end of a container that does nothing"
        yield from _compared(what, engine, cold, NOTHING, rounds, before=_emptied)
        with pulling.limited(engine, NETWORK):
            yield from _compared(f"{what}, {NETWORK}", engine, cold, NOTHING, rounds, before=_emptied)


def _project(folder: Path, image: str) -> Path:
    (folder / "templates").mkdir(parents=True)
    (folder / "templates" / "files.j2").write_text(f"FROM debian:trixie\nRUN {MADE}\n")
    matrix = {
        "schema": "imagematrix.matrix/v1",
        "images": {image: {"version": "v1", "template": "files.j2"}},
        "axes": {"cuda": ["none"]},
    }
    (folder / "matrix.yaml").write_text(json.dumps(matrix))
    return folder


def _reference(engine: Engine, image: str) -> str:
    return str(engine.imagematrix("select", f"{image}:v1", "--gpus", "none").stdout.strip())


def _ways(folder: Path, image: str) -> Iterator[_Way]:
    for program, (name, environment) in PROGRAMS.items():
        if shutil.which(program) is None:
            continue
        for kind, options in KINDS.items():
            store = folder / f"{program}-{kind}"
            words = (str(IMAGEMATRIX), "run", "--engine", name, "--store", str(store), "--gpus", "none")
            own = {**environment, "UNPACKED": " ".join(options)}
            yield _Way(name=f"{program}, {kind}", words=(*words, f"{image}:v1"), environment=own, store=store)


def _compared(
    what: str,
    engine: Engine,
    ways: Sequence[_Way],
    command: Sequence[str],
    rounds: int,
    before: object = None,
) -> Iterator[Row]:
    """Yield the median time of each way; they take turns. `before` each measurement, something is done."""
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            if callable(before):
                before(engine, way)
            taken[way.name].append(_taken(engine, way, command))
    medians = {name: median(seconds) for name, seconds in taken.items()}
    theirs = medians.pop(INSTEAD)
    for name, ours in medians.items():
        yield Row(
            what=f"{what}: {name}",
            ours=duration(ours),
            ratio=f"{ours / theirs:.2f} x",
            instead=f"{INSTEAD}: {duration(theirs)}",
        )


def _taken(engine: Engine, way: _Way, command: Sequence[str]) -> float:
    start = time.perf_counter()
    if way.store is not None and way.environment["UNPACKED"] and not way.store.exists():
        image, store = way.words[-1], str(way.store)
        pull = (str(IMAGEMATRIX), "pull", image, "--to", store, "--gpus", "none", "--unpacked")
        subprocess.run([*engine.inside, *pull], env=engine.environment, check=True, capture_output=True)
    subprocess.run(
        [*engine.inside, *way.words, *command],
        env={**engine.environment, **way.environment},
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def _forget(_: Engine, __: _Way) -> None:
    """Drop what the kernel keeps of files."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _emptied(engine: Engine, way: _Way) -> None:
    """Remove the image, and what the kernel keeps of files."""
    if way.store is None:
        pulling.emptied(engine)
    else:
        shutil.rmtree(way.store)
    _forget(engine, way)


def _memory(engine: Engine, way: _Way) -> tuple[int, int]:
    """Return the bytes of the processes of a container that waits: their own, and their part of shared ones.

    Of Docker, the shim and what it started count, and the client; the daemons do not.
    """
    before = _processes()
    with subprocess.Popen(
        [*engine.inside, *way.words, *WAIT],
        env={**engine.environment, **way.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        time.sleep(SETTLED_S)
        private = shared = 0
        for pid in _processes() - before:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    name, _, size = line.partition(":")
                    if name in ("Private_Clean", "Private_Dirty"):
                        private += int(size.split()[0]) << 10
                    elif name == "Pss":
                        shared += int(size.split()[0]) << 10
        process.wait()
    return private, shared - private


def _processes() -> set[str]:
    return {path.name for path in Path("/proc").iterdir() if path.name.isdigit()}
