"""What tests with a Slurm share: the program and images for nodes, a cluster as the guide says, steps."""

import contextlib
import gzip
import json
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from images import Parts, layout, tar
from pages import blocks
from publishing import labels_of, tag
from slurm_cluster import RELEASE, ROOT, SlurmCluster

GUIDE = ROOT / "docs/how-to/set-up-slurm.md"
# Profiles of hosts, and the variant of training:v1 for each.
PROFILES = {"n1": "genoa-h200", "n2": "skylake-v100"}
VARIANTS = {"znver4": ("90", "550.163.01", ["avx512f"]), "skylake": ("70", "535.261.03", ["avx2"])}
# What a small image has of Debian: the programs of the tests' scripts, and their libraries.
PROGRAMS = ("bash", "sh", "dash", "cat", "echo", "grep", "id", "ls", "sleep", "touch", "true", "tty", "xargs")
LIBRARIES = ("ld-linux-x86-64", "libc", "libcap", "libpcre2-8", "libselinux", "libtinfo")
SMALL = (
    *("bin", "lib", "lib64", "etc/debian_version", "usr/lib64/ld-linux-x86-64.so.2"),
    *(f"usr/bin/{name}" for name in PROGRAMS),
    *(f"usr/lib/x86_64-linux-gnu/{name}.so*" for name in LIBRARIES),
)
IMAGE = "--container=training:v1"
GPUS = "ls /dev | grep 'nvidia[0-9]' | xargs"


def program(folder):
    """Make the commands for a node as one file, and Slurm if it is not there; return the path."""
    subprocess.run([ROOT / "ci/slurm", RELEASE], check=True)
    path = folder / "imagematrix"
    subprocess.run([ROOT / ".venv/bin/python", ROOT / "ci/make_zipapp.py", path], check=True)
    return path


def small():
    """Return an archive with SMALL."""
    tree = ROOT / ".cache/slurm" / RELEASE
    files = (path.relative_to(tree) for pattern in SMALL for path in tree.glob(pattern))
    done = subprocess.run(["tar", "-C", tree, "-c", *files], check=True, stdout=subprocess.PIPE)
    return done.stdout


def variants(base, libraries=None):
    """Return an image for each of VARIANTS, with its tag: the files of an archive, and /etc/variant.

    `libraries` are the versions of those that it has.
    """
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
        layers = (base, tar(("etc/variant", f"{march}\n".encode())))
        quick = partial(gzip.compress, compresslevel=1, mtime=0)
        made.append((Parts(*layers, labels=own, env=["OWN=image"], packed=quick), tag(own)))
    return made


def written(images, folder):
    """Write images as an OCI layout with their tags; return its path."""
    names = [{"org.opencontainers.image.ref.name": name} for _, name in images]
    entries = [parts.entry(annotations=name) for (parts, _), name in zip(images, names, strict=True)]
    return layout(folder / "training", *(parts for parts, _ in images), entries=entries)


@contextlib.contextmanager
def cluster(nodes, program, image_layout):
    """A Slurm, set up as the guide for administrators says, with the nodes' variants in their store."""
    folder = Path(tempfile.mkdtemp(prefix="imagematrix-slurm-"))
    folder.chmod(0o755)
    files = {
        block.mark[1]: block.text
        for block in blocks(GUIDE.read_text())
        if block.mark and block.mark[0] == "file"
    }
    made = SlurmCluster(folder, nodes, program, files)
    try:
        made.enter()
        subprocess.run(["cp", "-a", image_layout, made.shared / "srv/layout"], check=True)
        (made.shared / "srv/hosts").mkdir()
        for name in nodes:
            said = made.imagematrix("slurm", "node-config", "--to", "/etc/slurm", "--shards", "2", node=name)
            made.lines[name] = said.stdout.strip()
            made.imagematrix("slurm", "node-config", "--save", node=name)
            words = ("pull", "training:v1", "--catalog", "oci:/srv/layout", "--to", "/srv/store")
            made.imagematrix(*words, node=name)
            made.run("install", "-d", "-m", "1777", "/srv/store/leases", node=name, user=False)
        made.start()
        yield made
    finally:
        made.remove()


def srun(cluster, *words, code=0, **how):
    """Run a step to its end; return its output, or its errors if it should fail."""
    done = cluster.run("srun", *words, **how)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


def refused(cluster, *words, code):
    """Run a step whose ranks are refused, within 10 s; return its errors.

    srun ends with the highest code: with that of a rank which was ended because another one was refused.
    """
    started = time.monotonic()
    done = cluster.run("srun", *words)
    assert time.monotonic() - started < 10
    assert done.returncode in (code, 128 + signal.SIGTERM), done.stderr
    assert f"Exited with exit code {code}\n" in done.stderr
    return done.stderr


def squashfuses(cluster):
    """Return the processes on the nodes that serve images of the store."""
    return [pid for pid, words in cluster.commands() if b"/squashfuse" in words[0]]
