"""A process that pushes one cell of several versions, each at the same moment as another process.

`python pushing.py NAME MADE_OF OTHER FOLDER ROUNDS`: the cell is made of MADE_OF, and OTHER is what the other
process makes it of. FOLDER is where they wait for each other. Prints the exit code of each round.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

from imagematrix.audit.layers import Layers
from imagematrix.catalog import labels
from imagematrix.errors import ImagematrixError
from imagematrix.planning.backend import Made, Order, Sources
from imagematrix.stores.registry import Remote

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
    reference = f"{name}:{labels.tag(version, 'a', own[labels.INPUT])}"
    sources = Sources(context=layout, platform="linux/amd64")
    order = Order(reference=reference, dockerfile="", sources=sources, labels=own)
    return order, Made(digest=digest, layout=layout)


def main(name, made_of, other, folder, rounds):
    for number in range(int(rounds)):
        order, made = image(folder / made_of, name, f"v{number}", made_of)
        (folder / f"{made_of}-{number}").touch()
        while not (folder / f"{other}-{number}").exists():
            time.sleep(0.001)
        code = 0
        with Remote(None, Layers()) as remote:
            try:
                remote.store(order, made)
            except ImagematrixError as error:
                code = error.exit_code
        sys.stdout.write(f"{code}\n")


if __name__ == "__main__":
    name, made_of, other, folder, rounds = sys.argv[1:]
    main(name, made_of, other, Path(folder), rounds)
