"""Measure the levels of compression, and the number of layers: building them, their size, and pulling them.

The layers have the content of NVIDIA's wheel of cuDNN. An engine pulls them from a registry in its network
namespace, whose loopback device `tc` makes as fast as the network.
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
import pulling
from conftest import Registry
from measure import Row, duration

from imagematrix.images.oci import deflate
from imagematrix.images.oci.compression import DEFAULT_LEVELS, Compression, compress
from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.manifest import IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from conftest import Engine
    from measure import Extent, Pace

WHEEL, SMALLEST = "nvidia-cudnn-cu12==9.10.2.21", "nvidia-cuda-runtime-cu12==12.9.79"
KINDS = (("gzip", 6), *(("zstd", level) for level in (1, 3, 6, 9, 12, 15, 19)))
PORT = 5097
COUNTS = (1, 2, 4, 12, 40)
ROUNDS = 3
PULLS = {"100mbit": 1, "1gbit": 3, "10gbit": 3}  # at each rate
PIECE = 1 << 20
CONFIG = "application/vnd.oci.image.config.v1+json"


def levels(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield for each level the time to compress the layer, its size, and the times to read and to pull it.

    The processor time of compressing depends least on other work on the machine.
    """
    layer = _layer(folder, extent)
    whole = layer.stat().st_size
    rounds = {network: extent.times(count) for network, count in PULLS.items()}
    with building.new_engine() as engine, ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        for kind, level in KINDS[:2] if extent.smallest else KINDS:
            compression = Compression(type=kind, level=level)
            blob = folder / "blob"
            start, used = time.perf_counter(), time.process_time()
            compress_layer(layer, blob, compression)
            taken, used = time.perf_counter() - start, time.process_time() - used
            name = pushed(engine, registry, [(blob, layer)], compression, f"l{compression.level}")
            pulls = [
                f"{network} {duration(median(_pull(engine, name, network) for _ in range(count)))}"
                for network, count in rounds.items()
            ]
            yield Row(
                what=f"{compression}: {blob.stat().st_size / 1e6:.0f} of {whole / 1e6:.0f} MB",
                ours=f"{duration(taken)}, {duration(used)} of processor time",
                ratio=f"read {duration(_read(blob))}",
                instead=f"pull {', '.join(pulls)}",
            )


def layers(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the times to pull the same content in one layer and in several, by each image store.

    Each layer has an equal part of the content, as one file.
    """
    content = _layer(folder, extent)
    counts, rounds = COUNTS[:2] if extent.smallest else COUNTS, extent.times(ROUNDS)
    for store in ("containerd", "classic"):
        with building.new_engine(store=store) as engine, ExitStack() as stack:
            registry = Registry(engine, PORT)
            stack.callback(registry.remove)
            for kind in DEFAULT_LEVELS:
                compression = Compression(type=kind, level=DEFAULT_LEVELS[kind])
                taken = {}
                for count in counts:
                    parts = list(_parts(folder, content, count, compression))
                    name = pushed(engine, registry, parts, compression, f"n{count}")
                    taken[count] = median(pulling.docker_pull(engine, name) for _ in range(rounds))
                for count, seconds in taken.items():
                    yield Row(
                        what=f"{store} store, {compression}: {count} layers",
                        ours=duration(seconds),
                        ratio=f"{seconds / taken[COUNTS[0]]:.2f} x",
                        instead=f"one layer: {duration(taken[COUNTS[0]])}",
                    )


def _parts(folder: Path, content: Path, count: int, compression: Compression) -> Iterator[tuple[Path, Path]]:
    """Yield layers that share a content, each compressed and as it is."""
    size = -(-content.stat().st_size // count)
    with content.open("rb") as file:
        for number in range(count):
            plain, blob = folder / f"part{number}.tar", folder / f"part{number}"
            with tarfile.open(plain, "w") as tar:
                info = tarfile.TarInfo(f"part{number}")
                info.size = min(size, content.stat().st_size - number * size)
                tar.addfile(info, file)
            compress_layer(plain, blob, compression)
            yield blob, plain


def _layer(folder: Path, extent: Extent) -> Path:
    """Return a tar of the files in the wheel."""
    wanted = SMALLEST if extent.smallest else WHEEL
    pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), wanted)
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


def compress_layer(plain: Path, blob: Path, compression: Compression) -> None:
    """Write a layer compressed, by all processors, as a build does."""
    with plain.open("rb") as file, blob.open("wb") as target:
        pieces = iter(lambda: file.read(PIECE), b"")
        target.writelines(compress(pieces, compression, deflate.count_threads()))


def _read(blob: Path) -> float:
    """Return the seconds in which this process decompresses a layer."""
    start = time.perf_counter()
    with blob.open("rb") as file:
        content = DecompressedStream(file)
        while content.read(PIECE):
            pass
    return time.perf_counter() - start


def pushed(
    engine: Engine,
    registry: Registry,
    parts: Sequence[tuple[Path, Path]],
    compression: Compression,
    tag: str,
) -> str:
    """Push an image by HTTP, as the engine's namespace sees the registry; return its name.

    `parts` are its layers, each compressed and as it is.
    """
    config = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for _, layer in parts]},
    }
    described = parts[0][0].with_name("config")
    described.write_text(json.dumps(config))
    manifest = described.with_name("manifest")
    manifest.write_text(
        json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": IMAGE,
                "config": _descriptor(described, CONFIG),
                "layers": [_descriptor(blob, compression.media_type) for blob, _ in parts],
            }
        )
    )
    name = f"{registry.address}/bench/{compression.type}"
    push = (
        "import sys; from imagematrix.images.oci.registry import Registry\n"
        "name, tag, kind, manifest, *blobs = sys.argv[1:]\n"
        "with Registry(name) as registry:\n"
        "    for blob in blobs:\n"
        "        path, digest = blob.rsplit('=', 1)\n"
        "        with open(path, 'rb') as file: registry.push_blob(digest, file)\n"
        "    registry.push_manifest(tag, open(manifest, 'rb').read(), kind)\n"
    )
    blobs = [f"{path}={_digest(path)}" for path in (described, *(blob for blob, _ in parts))]
    command = [*engine.inside, sys.executable, "-c", push, name, tag, IMAGE, str(manifest), *blobs]
    subprocess.run(command, check=True)
    return f"{name}:{tag}"


def _pull(engine: Engine, name: str, network: str) -> float:
    """Return the seconds of `docker pull` on an engine without images, over a network of a speed."""
    with pulling.limited(engine, network):
        return pulling.docker_pull(engine, name)


def _descriptor(path: Path, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(path), "size": path.stat().st_size}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
