"""Compare the verification of an image with reading it: decompressing its layers and running sha256sum."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from measure import Row, duration, processes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from measure import Extent, Pace

SMALLEST = "nvidia-cuda-runtime-cu12==12.9.79"
# Most have code for several architectures.
WHEELS = (
    "bitsandbytes==0.50.2",
    "nvidia-cuda-nvrtc-cu12==12.9.86",
    SMALLEST,
    "nvidia-cusparse-cu12==12.5.10.65",
    "nvidia-nccl-cu12==2.27.3",
)
# With these wheels, the layers have 5.8 GB.
LARGE = (
    "nvidia-cublas-cu12==12.9.1.4",
    "nvidia-cudnn-cu12==9.10.2.21",
    "nvidia-cufft-cu12==11.4.1.4",
    "nvidia-cusolver-cu12==11.7.5.82",
    "nvidia-cusparselt-cu12==0.7.1",
    "nvidia-nvshmem-cu12==3.3.20",
    "cupy-cuda12x==13.4.1",
    "onnxruntime-gpu==1.22.0",
    "tensorflow==2.19.0",
    "torch==2.8.0",
    "triton==3.4.0",
    "vllm==0.10.1",
)
TAGS = ("--python-version=3.11", "--only-binary=:all:")  # so that the wheels are the same everywhere
ROUNDS = 3
SHARE = 0.5  # minimum fraction of the rate of reading
MEMORY = 300  # MiB
KIB = 1024
PAUSE = 0.2  # seconds
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
READ = 'set -e; for layer in "$@"; do gzip -dc "$layer" | sha256sum; done'
FRESH = 'rm -rf "$XDG_CACHE_HOME"; exec "$@"'
# The command without the decoding of instructions, to which the limit does not apply.
READING = """
from imagematrix.audit.binaries.cpu.scanners import Scanners
from imagematrix.cli import main
Scanners.start_scan = lambda *_: lambda: None
main()
"""


def rows(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the rate and memory of `verify` on an image of real wheels, one layer each."""
    wheels = folder / "wheels"
    pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *TAGS, "--dest", str(wheels))
    wanted = (SMALLEST,) if extent.smallest else (*WHEELS, *LARGE) if extent.large else WHEELS
    subprocess.run([*pip, *wanted], check=True)
    layout = folder / "layout"
    unpacked = _layout(layout, sorted(wheels.glob("*.whl")))
    layers = sorted(
        path for path in (layout / "blobs" / "sha256").iterdir() if path.stat().st_size > KIB * KIB
    )
    size = sum(path.stat().st_size for path in layers)
    words = ("verify", "--json", str(layout))
    fresh = ("env", f"XDG_CACHE_HOME={folder / 'cache'}", "sh", "-c", FRESH, "sh", sys.executable)
    taken = processes(
        {
            "reading": (*fresh, "-c", READING, *words),
            "read": ("sh", "-c", READ, "sh", *map(str, layers)),
            "ours": (*fresh, "-m", "imagematrix", *words),
            "again": (*fresh[:2], sys.executable, "-m", "imagematrix", *words),
        },
        extent.times(ROUNDS),
        warm=0,
    )
    ours, reading, read = taken["ours"], taken["reading"], taken["read"]
    ratio = read.seconds / reading.seconds
    yield Row(
        what=f"verify layers of {size / 1e9:.1f} GB, {unpacked / 1e9:.1f} GB of real wheels: reading",
        ours=duration(reading.seconds),
        ratio=f"{ratio:.2f} x the rate",
        instead=f"gzip -dc | sha256sum: {duration(read.seconds)}",
        bar=f">= {SHARE} x",
        met=ratio >= SHARE,
    )
    yield Row(what="and decoding the instructions", ours=duration(ours.seconds - reading.seconds))
    memory = _memory((*fresh, "-m", "imagematrix", *words))
    yield Row(
        what="peak memory of both, with all processes",
        ours=f"{memory:.0f} MiB",
        bar=f"< {MEMORY} MiB",
        met=memory < MEMORY,
    )
    yield Row(what="both once more: the layers are in the cache", ours=duration(taken["again"].seconds))


def _memory(command: Sequence[str]) -> float:
    """Return the peak memory of a command and of the processes that it starts, in MiB.

    Pages that they share count once. It is looked at several times a second.
    """
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, sum(_proportional(pid) for pid in (process.pid, *_children(process.pid))))
            time.sleep(PAUSE)
    return peak / KIB


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, thread.read_text().split())


def _proportional(pid: int) -> int:
    """Return the proportional set size of a process in KiB, 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Pss":
                return int(value.split()[0])
    return 0


def _layout(folder: Path, wheels: list[Path]) -> int:
    """Write an OCI layout of an image with the wheels installed; return the size of its files in bytes."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layers, size = [], 0
    for wheel in wheels:
        layer = folder / "layer"
        with (
            zipfile.ZipFile(wheel) as archive,
            gzip.open(layer, "wb", compresslevel=1) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            for member in archive.infolist():
                info = tarfile.TarInfo(f"usr/lib/python3/dist-packages/{member.filename}")
                info.size = member.file_size
                size += member.file_size
                with archive.open(member) as file:
                    tar.addfile(info, file)
        layers.append(_kept(blobs, layer))
    config = {"architecture": "amd64", "os": "linux", "config": {}}
    manifest = {"schemaVersion": 2, "config": _written(blobs, config), "layers": layers}
    index = {"schemaVersion": 2, "manifests": [_written(blobs, manifest)]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return size


def _kept(blobs: Path, file: Path) -> dict[str, object]:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    size = file.stat().st_size
    file.rename(blobs / digest)
    return {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": size}


def _written(blobs: Path, document: object) -> dict[str, object]:
    raw = json.dumps(document).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    return {"digest": f"sha256:{digest}", "size": len(raw)}
