"""Programs to warm up, the versions whose warm-ups run them, and what is kept of that."""

import json
import shutil
from pathlib import Path

from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.tar import open_tar

SHIPPED = Path(__file__).parents[2]
ROOT = "/var/cache/warm"
# It compiles as the rows of the table of Triton and Numba say: with a compiler, and in its own process. It
# replaces a file of its cache, as Numba does, and fails where it may not.
PROGRAM = """\
set -e
cubin=$TRITON_CACHE_DIR/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA/kernel.cubin
code=$NUMBA_CACHE_DIR/app_0000000000000000000000000000000000000000/app.f-1.py313.1.nbc
other=${code%/*}/app.g-1.py313.1.nbc
say() { [ -z "$NUMBA_DEBUG_CACHE" ] || echo "[cache] data $1 '$code'"; }
compile() {
  sleep 1; mkdir -p ${code%/*}
  echo "code for $KEY" > $code.tmp.$$; chmod 600 $code.tmp.$$
  mv -fT $code.tmp.$$ $code
  say "saved to"
}
ptxas --version > /dev/null
[ -e $cubin ] || { mkdir -p ${cubin%/*}; ptxas kernel.ptx > $cubin; }
touch ${cubin%/*}/lock || true
if [ "$(cat $code)" = "code for $KEY" ]; then say "loaded from"; else compile; fi
"""
TEMPLATE = """\
FROM debian:trixie
{% import "macros.j2" as debian %}
RUN printf '#!/bin/sh\\necho "compiled $*"\\n' > /usr/bin/ptxas && chmod 755 /usr/bin/ptxas
{{ debian.warm_caches() }}
USER 1000
"""
# It compiles the number of CPUs in that it sees, and fails if that is not one.
INDUCTOR = f"$TORCHINDUCTOR_CACHE_DIR/ab/c{'a' * 51}.cpp"
COUNTING = f"""\
mkdir -p $TORCHINDUCTOR_CACHE_DIR/ab
echo "fx graph cache hit for key f"
[ -e {INDUCTOR} ] || nproc > {INDUCTOR}
[ "$(cat {INDUCTOR})" = 1 ]
"""
# The command, whose process has a quota of one CPU, and runs on any.
WITH_QUOTA = """\
from imagematrix.cli import main
from imagematrix.hardware.host import usable_cpus

usable_cpus.count_usable_cpus = lambda *_: 1
main()
"""


def publish_images(node, registry, folder):
    """Return the names of two published versions. The warm-up of each runs the program in its input."""
    (folder / "context").mkdir()
    (folder / "templates").mkdir()
    (folder / "templates/it.j2").write_text(TEMPLATE)
    shutil.copy(SHIPPED / "templates/macros.j2", folder / "templates")
    usual = {"command": ["sh", "/program/run"], "inputs": {"program": "/program"}}
    names = {name: f"{registry.address}/ml/{name}" for name in ("usual", "limited")}
    described = {
        name: {"version": "v1", "template": "it.j2", "context": "context", "warm_up": warm_up}
        for name, warm_up in zip(
            names.values(), (usual, {**usual, "timeout": "8s", "max_size": "20MB"}), strict=True
        )
    }
    matrix = {
        "schema": "imagematrix.matrix/v1",
        "images": described,
        "axes": {"march": ["any"]},
        "facts": {"march": {"any": {"flags": ["sse2"]}}},
    }
    (folder / "matrix.yaml").write_text(json.dumps(matrix))
    built = node.imagematrix("build", "--push", cwd=folder)
    assert built.returncode == 0, built.stderr
    for name in names.values():
        published = node.imagematrix("publish", f"{name}:v1")
        assert published.returncode == 0, published.stderr
    return {name: f"{image}:v1" for name, image in names.items()}


def read_layout(folder):
    """The label of a layout, and the entries of its layer by path."""
    (entry,) = json.loads((folder / "index.json").read_text())["manifests"]

    def blob(digest):
        return folder / "blobs/sha256" / digest.removeprefix("sha256:")

    manifest = json.loads(blob(entry["digest"]).read_text())
    config = json.loads(blob(manifest["config"]["digest"]).read_text())
    (layer,) = manifest["layers"]
    with blob(layer["digest"]).open("rb") as raw, open_tar(DecompressedStream(raw)) as archive:
        members = {f"/{member.name}": member for member in archive}
    return json.loads(config["config"]["Labels"]["io.imagematrix.warm"]), members
