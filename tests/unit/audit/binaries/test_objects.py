"""Files with malformed headers: damage is reported, and nothing is raised."""

import os
import random
import subprocess
from io import BytesIO
from pathlib import Path

import pytest
from images import tar

from imagematrix.audit.images import layer

DATA = Path(__file__).parents[1] / "data"
FUZZED = int(os.environ.get("IMAGEMATRIX_FUZZ", "10000")) // 10  # each takes longer than a header alone


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A library called libcuda with a fatbin, a note of cuda-compat, and code."""
    folder = tmp_path_factory.mktemp("library")
    path, note = folder / "it.so", folder / "note"
    (folder / "it.c").write_text("int it(int *a) { for (int i = 0; i < 99; i++) a[i] *= i; return a[9]; }\n")
    note.write_text('{"CUDA version": "12.9", "driver": [535]}')
    options = ["-O3", "-mavx2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, folder / "it.c", "-o", path], check=True)
    sections = {".nv_fatbin": DATA / "zstd.fatbin", ".note.cuda.fwd_compatibility": note}
    for name, file in sections.items():
        subprocess.run(["objcopy", "--add-section", f"{name}={file}", path], check=True)
    return path.read_bytes()


def read(raw):
    entry = layer.read_layer(BytesIO(tar(("usr/lib/it.so", raw))), "sha256:0").entries["/usr/lib/it.so"]
    assert isinstance(entry, layer.PlainFile)
    return entry.file


def test_library_is_read(library):
    result = read(library)
    assert result.code.cubins
    assert (result.driver.name, result.driver.compat.branches) == ("libcuda", (535,))


@pytest.mark.fuzz
def test_mutated_headers_never_crash(library):
    chance = random.Random(41)  # noqa: S311 - nothing is secret
    tables = int.from_bytes(library[40:48], "little")
    fatbin = library.index((DATA / "zstd.fatbin").read_bytes()[:16])
    parts = ((16, 64), (64, 1024), (tables, len(library)), (fatbin, fatbin + 256))
    damaged = 0
    for _ in range(FUZZED):
        spoilt = bytearray(library)
        for _ in range(chance.randint(1, 6)):
            place = chance.randrange(*chance.choice(parts))
            spoilt[place] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        result = read(bytes(spoilt))
        damaged += result is None or result.damaged
    assert 0 < damaged < FUZZED
