"""Measure the number of reviews that `imagematrix kubernetes webhook` answers per second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
import time
from statistics import median
from typing import TYPE_CHECKING

import samples
from measure import Row
from samples import IMAGEMATRIX, ROOT

from imagematrix.hardware.host.host import Host
from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.nodes.labels import make_labels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from measure import Extent, Pace

BAR = 1_000  # reviews per second
SECONDS = 5.0
ROUNDS = 5
CONNECTIONS = 8
NODES = ("genoa-h200", "milan-a10", "rome-a100", "icelake-l40s", "laptop")
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE",
        "namespace": "default",
        "name": "train",
        "object": {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "train"},
            "spec": {
                "nodeSelector": {"imagematrix.io/gpu-name.0": "NVIDIA-H200"},
                "containers": [{"name": "train", "image": "training:v1", "args": ["--epochs", "3"]}],
            },
        },
    },
}


def rows(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the row: reviews of a pod for one of five classes of nodes and 1,000 variants."""
    with _webhook(folder) as port:
        rate = median(asyncio.run(_rate(port)) for _ in range(extent.times(ROUNDS)))
    yield Row(
        what=f"reviews of pods per second, {CONNECTIONS} connections with TLS",
        ours=f"{rate:,.0f}",
        bar=f"{BAR:,}",
        met=rate >= BAR,
    )


@contextlib.contextmanager
def _webhook(folder: Path) -> Iterator[int]:
    """Start a webhook and yield its port when it has its nodes and images."""
    tls = certificates.make_certificate(["localhost"])
    for name, pem in (("tls.crt", tls.chain), ("tls.key", tls.key)):
        (folder / name).write_bytes(pem)
    nodes = [_node(name, Host.load(ROOT / f"tests/hosts/{name}.json")) for name in NODES]
    (folder / "nodes.json").write_text(json.dumps({"kind": "List", "items": nodes}))
    command = [IMAGEMATRIX, "kubernetes", "webhook", "--listen", "127.0.0.1:0"]
    command += ["--catalog", samples.catalog(folder), "--nodes", folder / "nodes.json"]
    command += ["--tls-cert", folder / "tls.crt", "--tls-key", folder / "tls.key"]
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None  # noqa: S101 - it is a pipe; for the type checker
        try:
            port = int(process.stderr.readline().rpartition(":")[2])
            process.stderr.readline()  # it has the nodes
            yield port
        finally:
            process.kill()


def _node(name: str, host: Host) -> dict[str, object]:
    labels = {"kubernetes.io/arch": "amd64", **make_labels(host)}
    status = {"nodeInfo": {"architecture": "amd64"}, "capacity": {}}
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


async def _rate(port: int) -> float:
    """Return the number of reviews per second that were answered, each with a patch."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    body = json.dumps(REVIEW).encode()
    head = f"POST /mutate HTTP/1.1\r\nHost: webhook\r\nContent-Length: {len(body)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + body
    start = time.perf_counter()

    async def ask() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        answered = 0
        while time.perf_counter() < start + SECONDS:
            writer.write(request)
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(headers.partition(b"content-length: ")[2].split(b"\r\n")[0])
            answer = json.loads(await reader.readexactly(size))
            if "patch" not in answer["response"]:
                raise SystemExit(f"a review was answered with {answer}")
            answered += 1
        writer.close()
        return answered

    answered = await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))
    return sum(answered) / (time.perf_counter() - start)
