"""Clients that push one cell of a version at the same moment, for one version after another.

`python pushing.py NAME FOLDER ROUNDS INPUT...`: there is one client for each INPUT, from which it makes the
cell; clients with equal ones push the same image. Prints a line with their exit codes for each round.
"""

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from imagematrix.audit.images.layers import Layers
from imagematrix.build.plan.protocols import BuildRequest, BuildSources, BuiltImage
from imagematrix.build.stores.registry import RegistryStore
from imagematrix.errors import ImagematrixError
from imagematrix.images.catalog import labels

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"


def blob(layout, raw):
    """Put a blob into a layout and return its descriptor."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    return {"digest": f"sha256:{digest}", "size": len(raw)}


def image(layout, name, version, made_of):
    """Write an image without layers, and return its order and where it is."""
    own = {
        labels.VERSION: version,
        labels.CELL: "a",
        labels.INPUT: f"sha256:{hashlib.sha256(made_of.encode()).hexdigest()}",
        labels.VARIANT: json.dumps({"platform": "linux/amd64", "cpu_flags": []}),
    }
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Labels": own}})
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, **blob(layout, config.encode())},
        "layers": [],
        "annotations": own,
    }
    digest = blob(layout, json.dumps(manifest).encode())["digest"]
    reference = f"{name}:{labels.make_tag(version, 'a', own[labels.INPUT])}"
    sources = BuildSources(context=layout, platform="linux/amd64")
    order = BuildRequest(reference=reference, dockerfile="", sources=sources, labels=own)
    return order, BuiltImage(digest=digest, layout=layout)


def push(order, made):
    """Return the exit code of a build that pushes an image."""
    with RegistryStore(None, Layers()) as remote:
        try:
            remote.store(order, made)
        except ImagematrixError as error:
            return error.exit_code
    return 0


def main(name, folder, rounds, made_of):
    clients = [(folder / str(number), inputs) for number, inputs in enumerate(made_of)]
    with ThreadPoolExecutor(len(clients)) as pool:
        for number in range(int(rounds)):
            orders = [image(layout, name, f"v{number}", inputs) for layout, inputs in clients]
            codes = pool.map(push, *zip(*orders, strict=True))
            sys.stdout.write(" ".join(map(str, codes)) + "\n")


if __name__ == "__main__":
    name, folder, rounds, *made_of = sys.argv[1:]
    main(name, Path(folder), rounds, made_of)
