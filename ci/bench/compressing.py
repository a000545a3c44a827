"""Measure the levels of compression: building a layer, its size, and pulling it over three networks.

The layer has the content of NVIDIA's wheel of cuDNN. An engine with the containerd image store pulls it from
a registry in its network namespace, whose loopback device `tc` makes as fast as the network.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import time
import zipfile
from contextlib import ExitStack
from statistics import median
from typing import TYPE_CHECKING

import building
from conftest import Registry
from measure import Row, duration

from imagematrix import deflate
from imagematrix.compression import Compression, compressed
from imagematrix.oci.expanded import Expanded
from imagematrix.oci.manifest import IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Engine

__all__ = ["rows"]

WHEEL = "nvidia-cudnn-cu12==9.10.2.21"
KINDS = (("gzip", 6), *(("zstd", level) for level in (1, 3, 6, 9, 12, 15, 19)))
PORT = 5097
# The rates of tc with the burst that each needs, and the pulls at each rate.
NETWORKS = {"100mbit": ("1mb", 1), "1gbit": ("2mb", 3), "10gbit": ("16mb", 3)}
PIECE = 1 << 20
CONFIG = "application/vnd.oci.image.config.v1+json"


def rows(folder: Path) -> Iterator[Row]:
    """Yield for each level the time to compress the layer, its size, and the times to read and to pull it.

    The processor time of compressing depends least on other work on the machine.
    """
    layer = _layer(folder)
    whole = layer.stat().st_size
    with building.new_engine() as engine, ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        for kind, level in KINDS:
            compression = Compression(type=kind, level=level)
            blob = folder / "blob"
            start, used = time.perf_counter(), time.process_time()
            with blob.open("wb") as file:
                file.writelines(compressed(_pieces(layer), compression, deflate.threads()))
            taken, used = time.perf_counter() - start, time.process_time() - used
            name = _pushed(engine, registry, blob, layer, compression)
            pulls = [
                f"{network} {duration(median(_pull(engine, name, network) for _ in range(count)))}"
                for network, (_, count) in NETWORKS.items()
            ]
            yield Row(
                what=f"{compression}: {blob.stat().st_size / 1e6:.0f} of {whole / 1e6:.0f} MB",
                ours=f"{duration(taken)}, {duration(used)} of processor time",
                ratio=f"read {duration(_read(blob))}",
                instead=f"pull {', '.join(pulls)}",
            )


def _layer(folder: Path) -> Path:
    """Return a tar of the files in the wheel."""
    pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), WHEEL)
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    layer = folder / "layer.tar"
    with zipfile.ZipFile(wheel) as archive, tarfile.open(layer, "w") as tar:
        for entry in archive.infolist():
            info = tarfile.TarInfo(entry.filename)
            info.size = entry.file_size
            with archive.open(entry) as file:
                tar.addfile(info, file)
    wheel.unlink()
    return layer


def _pieces(layer: Path) -> Iterator[bytes]:
    with layer.open("rb") as file:
        yield from iter(lambda: file.read(PIECE), b"")


def _read(blob: Path) -> float:
    """Return the seconds in which this process decompresses a layer."""
    start = time.perf_counter()
    with blob.open("rb") as file:
        content = Expanded(file)
        while content.read(PIECE):
            pass
    return time.perf_counter() - start


def _pushed(engine: Engine, registry: Registry, blob: Path, layer: Path, compression: Compression) -> str:
    """Push an image with one layer by HTTP, as the tests' namespace sees the registry; return its name."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    described = blob.with_name("config")
    described.write_text(json.dumps(config))
    manifest = blob.with_name("manifest")
    manifest.write_text(
        json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": IMAGE,
                "config": _descriptor(described, CONFIG),
                "layers": [_descriptor(blob, compression.media_type)],
            }
        )
    )
    name = f"{registry.address}/bench/{compression.type}"
    push = (
        "import sys; from imagematrix.oci.registry import Registry\n"
        "name, tag, kind, manifest, *blobs = sys.argv[1:]\n"
        "with Registry(name) as registry:\n"
        "    for blob in blobs:\n"
        "        path, digest = blob.rsplit('=', 1)\n"
        "        with open(path, 'rb') as file: registry.push_blob(digest, file)\n"
        "    registry.push_manifest(tag, open(manifest, 'rb').read(), kind)\n"
    )
    tag = f"l{compression.level}"
    blobs = [f"{path}={_digest(path)}" for path in (described, blob)]
    command = [*engine.inside, sys.executable, "-c", push, name, tag, IMAGE, str(manifest), *blobs]
    subprocess.run(command, check=True)
    return f"{name}:{tag}"


def _pull(engine: Engine, name: str, network: str) -> float:
    """Return the seconds of `docker pull` on an engine without images, over a network of a speed."""
    images = engine.docker("images", "--quiet").stdout.split()
    if images:
        engine.docker("rmi", "--force", *dict.fromkeys(images))
    engine.docker("system", "prune", "--all", "--force")
    rate = ("rate", network, "burst", NETWORKS[network][0], "latency", "100ms")
    subprocess.run([*engine.inside, "tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *rate], check=True)
    return building.run(lambda: engine.docker("pull", "--quiet", name, check=False))


def _descriptor(path: Path, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(path), "size": path.stat().st_size}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
