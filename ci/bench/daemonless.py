"""Measure starting a container without a daemon, beside an OCI runtime on a root that is mounted already."""

from __future__ import annotations

import json
import os
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import building
from measure import Row, duration, overhead, pairs
from samples import IMAGEMATRIX

from imagematrix.images.local_store.folder import ImageStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from measure import Extent, Pace

BAR = 0.060  # seconds more than the runtime (see measure.REFERENCE)
INSTEAD = "`runc run` on the mounted root"
IMAGE = "bench-run:v1"
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "images": {"bench-run": {"version": "v1", "template": "run.j2", "context": "context"}},
    "axes": {"cuda": ["none"]},
}
PROCESS = {"user": {"uid": 0, "gid": 0}, "args": ["true"], "env": ["PATH=/usr/bin:/bin"], "cwd": "/"}


def rows(folder: Path, pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of a container that does nothing, from a squashfs or a folder, or as a task."""
    for name in ("templates", "context"):
        (folder / name).mkdir()
    (folder / "templates" / "run.j2").write_text("FROM debian:trixie\n")
    (folder / "matrix.yaml").write_text(json.dumps(MATRIX))
    with building.new_engine() as engine:
        building.run(lambda: engine.imagematrix("build", cwd=folder))
        reference = engine.imagematrix("select", IMAGE).stdout.strip()
        archive = folder / "image.tar"
        subprocess.run(["docker", "save", "-o", archive, reference], env=engine.environment, check=True)
    for kind, options in (("squashfs", ()), ("folder", ("--unpacked",))):
        store = folder / kind
        pull = [IMAGEMATRIX, "pull", IMAGE, "--catalog", archive, "--to", store, "--gpus", "none", *options]
        subprocess.run(pull, check=True, capture_output=True)
        launch = [str(IMAGEMATRIX), "run", "--engine", "oci", "--store", str(store)]
        launch += ["--gpus", "none", IMAGE, "true"]
        (image,) = ImageStore(store).list_intact_images()
        with _Mounted(folder, image.root, squashed=kind == "squashfs") as bare:
            for command, ours in (("run --engine oci", launch), ("oci-task", _task(folder, store))):
                taken = pairs(partial(_wall, ours), partial(_wall, bare.command), extent.rounds)
                yield overhead(f"`{command}`, warm, from a {kind}", taken, INSTEAD, BAR, pace)
            if kind == "squashfs":
                yield Row(what="mount of the squashfs, in it", ours=duration(bare.mount_time))


def _task(folder: Path, store: Path) -> list[str]:
    """Return the command that Slurm runs for a task, with no variables but those in a file."""
    job = {
        "IMAGEMATRIX_STORE": store,
        "IMAGEMATRIX_ALLOW_CPU": "1",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
    }
    path = folder / f"{store.name}.environment"
    path.write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in job.items()))
    return ["env", "-i", str(IMAGEMATRIX), "oci-task", IMAGE, str(path), str(folder), "--", "true"]


class _Mounted:
    """A bundle with the files of an image, mounted as `run` does, in a mount namespace of its own."""

    def __init__(self, folder: Path, root: str, *, squashed: bool) -> None:
        self._bundle = folder / f"bundle-{squashed}"
        self._bundle.mkdir()
        self._root = root
        self._squashed = squashed
        self.mount_time = 0.0

    def __enter__(self) -> Self:
        root = self._root
        if self._squashed:
            root = str(self._bundle / "root")
            os.mkdir(root)  # noqa: PTH102 - as the other calls
            start = time.perf_counter()
            subprocess.run(["squashfuse_ll", self._root, root], check=True)
            self.mount_time = time.perf_counter() - start
        document: Mapping[str, object] = {
            "ociVersion": "1.0.2",
            "process": PROCESS,
            "root": {"path": root, "readonly": True},
            "mounts": [
                {"destination": path, "type": kind, "source": kind}
                for path, kind in (("/proc", "proc"), ("/dev", "tmpfs"))
            ],
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}]},
        }
        (self._bundle / "config.json").write_text(json.dumps(document))
        return self

    def __exit__(self, *_: object) -> None:
        if self._squashed:
            subprocess.run(["umount", self._bundle / "root"], check=True)

    @property
    def command(self) -> Sequence[str]:
        """The command that runs the bundle."""
        state = str(self._bundle / "state")
        runtime = ["runc", "--root", state, "run", "--bundle", str(self._bundle), f"bench-{os.getpid()}"]
        return ["unshare", "--user", "--map-root-user", "--mount", *runtime]


def _wall(words: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
