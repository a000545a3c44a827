"""Compare pulls through `imagematrix resolver` with pulls from the registry."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import time
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING

import aiohttp
import building
from conftest import Engine, Registry
from measure import KIB, Row, duration, pairs
from pulling import docker_pull
from samples import IMAGEMATRIX, ROOT

from imagematrix.images.oci.manifest import MANIFESTS
from imagematrix.images.oci.registry import Registry as Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measure import Extent, Pace

PORT = 5097
HOST = ROOT / "tests" / "hosts" / "laptop.json"
PULL_BAR = 1.15  # times a pull from the registry
MEMORY_BAR = 16  # additional MiB while the large layer is transferred
PAYLOAD = 300_000_000  # bytes of the image that docker pulls, without its base
LARGE = 5_000_000_000  # bytes of a layer
CLIENTS = 200
ROUNDS = 3
PIECE = 1 << 20
LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"march": ["old", "new"]},
    "facts": {"march": {"old": {"flags": ["sse4_2"]}, "new": {"flags": ["sse4_2", "avx2"]}}},
}
TEMPLATE = "FROM debian:trixie\nCOPY payload /payload\nRUN echo {{ march }} > /march\n"


def rows(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the rows: `docker pull` in pairs, many pulls at once, the rate of blobs, and memory."""
    with contextlib.ExitStack() as stack:
        registry = Registry(SimpleNamespace(inside=[]), PORT)
        stack.callback(registry.remove)
        resolver = stack.enter_context(started([], registry.address, HOST))
        yield _at_once(folder, registry.address, resolver.address, extent)
        yield from _large(folder, registry.address, resolver, extent)
    yield _pulls(folder, extent)


class Resolver:
    """A running resolver."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None  # noqa: S101 - it is a pipe; for the type checker
        self.address = process.stderr.readline().split()[-1]
        self._status = Path(f"/proc/{process.pid}/status")
        self._peak = Path(f"/proc/{process.pid}/clear_refs")

    def memory(self) -> float:
        """Return its peak memory since the last call, in MiB."""
        lines = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        self._peak.write_text("5")  # proc(5): resets VmHWM
        return int(lines["VmHWM"].split()[0]) / KIB


@contextlib.contextmanager
def started(inside: list[str], upstream: str, host: Path) -> Iterator[Resolver]:
    """Start a resolver for a host in front of a registry, in the namespaces of an engine."""
    command = [*inside, str(IMAGEMATRIX), "resolver", "--upstream", upstream]
    command += ["--listen", "127.0.0.1:0", "--host", str(host)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Resolver(process)
        finally:
            process.terminate()


def _pulls(folder: Path, extent: Extent) -> Row:
    payload = extent.part(PAYLOAD)
    with building.new_engine() as engine, contextlib.ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        name = "bench/resolved"
        image = f"{registry.address}/{name}"
        for made in ("templates", "context"):
            (folder / made).mkdir()
        (folder / "templates" / "image.j2").write_text(TEMPLATE)
        (folder / "context" / "payload").write_bytes(os.urandom(payload))
        described = {image: {"version": "v1", "template": "image.j2", "context": "context"}}
        (folder / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))  # JSON is YAML
        building.run(lambda: engine.imagematrix("build", "--push", cwd=folder))
        building.run(lambda: engine.imagematrix("publish", f"{image}:v1"))
        selected = engine.imagematrix("select", f"{image}:v1", "--host", HOST).stdout.strip()
        resolver = stack.enter_context(started(engine.inside, registry.address, HOST))
        what = f"`docker pull` of an image of {payload / 1e6:.0f} MB and its base"
        return resolved_pull(engine, what, (f"{resolver.address}/{name}:v1", selected), extent.pairs)


def resolved_pull(engine: Engine, what: str, names: tuple[str, str], count: int) -> Row:
    """Return the row of pulls of an image through a resolver and from the registry, by these names."""
    through, direct = names
    taken = pairs(partial(docker_pull, engine, through), partial(docker_pull, engine, direct), count)
    return Row(
        what=what,
        ours=duration(taken[0]),
        ratio=f"{taken[0] / taken[1]:.2f} x direct",
        instead=f"from the registry: {duration(taken[1])}",
        bar=f"{PULL_BAR} x direct",
        met=taken[0] <= PULL_BAR * taken[1],
    )


def _at_once(folder: Path, direct: str, resolved: str, extent: Extent) -> Row:
    """Return the row of many clients that make an engine's requests, with a layer of 1 MiB."""
    clients = extent.part(CLIENTS)
    digest, size = _pushed(folder, direct, PIECE)
    tag = _image(folder, direct, digest, size)

    def all_of(address: str) -> float:
        return asyncio.run(_clients(address, tag, digest, clients))

    taken = pairs(lambda: all_of(resolved), lambda: all_of(direct), extent.times(ROUNDS))
    return Row(
        what=f"{clients} clients at once: tag, manifest, and a layer of 1 MiB",
        ours=duration(taken[0]),
        ratio=f"{taken[0] / taken[1]:.2f} x direct",
        instead=f"from the registry: {duration(taken[1])}",
    )


async def _clients(address: str, tag: str, digest: str, count: int) -> float:
    base = f"http://{address}/v2/bench/blobs"
    accept = {"Accept": ", ".join(MANIFESTS)}
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as session:

        async def pull() -> None:
            async with session.head(f"{base}/manifests/{tag}", headers=accept) as answer:
                image_digest = answer.headers["Docker-Content-Digest"]
            async with session.get(f"{base}/manifests/{image_digest}", headers=accept) as answer:
                await answer.read()
            async with session.get(f"{base}/blobs/{digest}") as answer:
                await answer.read()

        start = time.perf_counter()
        await asyncio.gather(*(pull() for _ in range(count)))
        return time.perf_counter() - start


def _large(folder: Path, direct: str, resolver: Resolver, extent: Extent) -> Iterator[Row]:
    """Yield the rate of a large layer, and the memory that the resolver takes for it."""
    digest, size = _pushed(folder, direct, extent.part(LARGE))
    resolver.memory()
    before = resolver.memory()
    peaks = []

    def read(address: str) -> float:
        taken = asyncio.run(_read(f"http://{address}/v2/bench/blobs/blobs/{digest}", size))
        if address == resolver.address:
            peaks.append(resolver.memory())
        return taken

    taken = pairs(lambda: read(resolver.address), lambda: read(direct), extent.times(ROUNDS))
    yield Row(
        what=f"a layer of {size / 1e9:.2g} GB, to one client",
        ours=f"{size / taken[0] / 1e6:.0f} MB/s",
        ratio=f"{taken[0] / taken[1]:.2f} x the time",
        instead=f"from the registry: {size / taken[1] / 1e6:.0f} MB/s",
    )
    more = median(peaks) - before
    yield Row(
        what="its memory while that passes, at most",
        ours=f"{max(peaks):.0f} MiB",
        ratio=f"{more:+.0f} MiB",
        instead=f"before: {before:.0f} MiB",
        bar=f"+{MEMORY_BAR} MiB",
        met=max(peaks) - before <= MEMORY_BAR,
    )


async def _read(url: str, size: int) -> float:
    received = 0
    start = time.perf_counter()
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url) as answer:
        async for piece in answer.content.iter_any():
            received += len(piece)
    if received != size:
        raise SystemExit(f"{url} sent {received} bytes, not {size}")
    return time.perf_counter() - start


def _pushed(folder: Path, address: str, size: int) -> tuple[str, int]:
    """Push a layer of zeros and return its digest and size."""
    path = folder / "layer"
    with path.open("wb") as file:
        file.truncate(size)
    with path.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        file.seek(0)
        with Client(f"{address}/bench/blobs") as client:
            client.push_blob(digest, file)
    path.unlink()
    return digest, size


def _image(folder: Path, address: str, layer: str, size: int) -> str:
    """Push an image of one layer and return its tag."""
    config = folder / "config.json"
    config.write_text(json.dumps({"os": "linux", "architecture": "amd64"}))
    digest = f"sha256:{hashlib.sha256(config.read_bytes()).hexdigest()}"
    kind = MANIFESTS[2]
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": {"mediaType": CONFIG, "digest": digest, "size": config.stat().st_size},
        "layers": [{"mediaType": LAYER, "digest": layer, "size": size}],
    }
    with Client(f"{address}/bench/blobs") as client:
        with config.open("rb") as file:
            client.push_blob(digest, file)
        client.push_manifest("v1", json.dumps(manifest).encode(), kind)
    return "v1"
