"""A Slurm with two nodes that differ in processor, driver and GPUs, and an image with a variant for each."""

import gzip
import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Registry
from images import Parts, layout, tar
from pages import blocks
from publishing import labels_of, tag
from slurm_cluster import ROOT, SlurmCluster
from storing import push

PROFILES = {"n1": "genoa-h200", "n2": "skylake-v100"}
PORT = 5031
GUIDE = ROOT / "docs/how-to/set-up-slurm.md"
VARIANTS = {"znver4": ("90", "550.163.01", ["avx512f"]), "skylake": ("70", "535.261.03", ["avx2"])}


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The commands for a node as one file."""
    subprocess.run([ROOT / "ci/slurm"], check=True)
    path = tmp_path_factory.mktemp("program") / "imagematrix"
    subprocess.run([ROOT / ".venv/bin/python", ROOT / "ci/make_zipapp.py", path], check=True)
    return path


@pytest.fixture(scope="session")
def image_layout(program, tmp_path_factory):  # noqa: ARG001 - for what ci/slurm makes
    """An OCI layout with both variants of training:v1, each a Debian that can say which it is."""
    return _layout(_variants(".cache/bases/trixie.tar"), tmp_path_factory)


@pytest.fixture(scope="session")
def mpi_layout(program, tmp_path_factory):  # noqa: ARG001 - as above
    """An OCI layout with the same variants, which have Open MPI."""
    return _layout(_variants(".cache/slurm/mpi.tar", {"mpi": "5.0.7", "pmix": "5.0.7"}), tmp_path_factory)


@pytest.fixture(scope="session")
def published(cluster, tmp_path_factory):
    """The name of training:v1 in a registry that both nodes reach."""
    data = tmp_path_factory.mktemp("registry")
    filling = Registry(SimpleNamespace(inside=()), PORT, data=data)
    name = push(filling, *_variants(".cache/bases/trixie.tar"))
    filling.remove()
    serving = Registry(SimpleNamespace(inside=cluster.in_network), PORT, data=data)
    yield name
    serving.remove()


def _variants(base, libraries=None):
    """Return an image for each of VARIANTS, with its tag."""
    made = []
    for march, (compute, driver, flags) in VARIANTS.items():
        variant: dict[str, Any] = {
            "platform": "linux/amd64",
            "cuda": "12.2",
            "cubins": [compute],
            "libraries": libraries or {},
        }
        variant |= {"march": march, "cpu_flags": flags, "driver": {"mode": "exact", "version": driver}}
        own = labels_of(march, VARIANT=json.dumps(variant))
        layers = ((ROOT / base).read_bytes(), tar(("etc/variant", f"{march}\n".encode())))
        quick = partial(gzip.compress, compresslevel=1, mtime=0)
        made.append((Parts(*layers, labels=own, env=["OWN=image"], packed=quick), tag(own)))
    return made


def _layout(images, factory):
    """Write an OCI layout with images by their tags; return its path."""
    names = [{"org.opencontainers.image.ref.name": name} for _, name in images]
    entries = [parts.entry(annotations=name) for (parts, _), name in zip(images, names, strict=True)]
    return layout(factory.mktemp("layout") / "training", *(parts for parts, _ in images), entries=entries)


@pytest.fixture(scope="session")
def cluster(program, image_layout):
    """Slurm, set up as the guide for administrators says, with both variants in the store."""
    folder = Path(tempfile.mkdtemp(prefix="imagematrix-slurm-"))
    folder.chmod(0o755)
    files = {
        block.mark[1]: block.text
        for block in blocks(GUIDE.read_text())
        if block.mark and block.mark[0] == "file"
    }
    made = SlurmCluster(folder, PROFILES, program, files)
    try:
        made.enter()
        for name in PROFILES:
            said = made.imagematrix("slurm", "node-config", "--to", "/etc/slurm", "--shards", "2", node=name)
            made.lines[name] = said.stdout.strip()
            made.imagematrix("slurm", "node-config", "--save", node=name)
        made.start()
        subprocess.run(["cp", "-a", image_layout, made.shared / "srv/layout"], check=True)
        for name in PROFILES:
            words = ("pull", "training:v1", "--catalog", "oci:/srv/layout", "--to", "/srv/store")
            made.imagematrix(*words, node=name)
        yield made
    finally:
        made.remove()


@pytest.fixture(autouse=True)
def _idle(cluster):
    yield
    cluster.run("scancel", "--user=user,root", user=False)
    cluster.wait_until_idle()
