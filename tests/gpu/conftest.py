"""What the tests on a GPU share. Without one they are skipped, and say so; with --gpu-required they fail."""

import csv
import hashlib
import io
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import rootfs

import imagematrix as im
from imagematrix.catalog import labels
from imagematrix.catalog.catalog import UserModeDriver, Variant
from imagematrix.facts import device_code, marches

ROOT = Path(__file__).parents[2]


class Image(NamedTuple):
    """An image for this machine's first GPU: as a file system, as what an engine builds, and described."""

    root: Path
    context: Path
    variant: Variant
    labels: dict[str, str]


def pytest_addoption(parser):
    parser.addoption("--gpu-required", action="store_true", help="fail where a GPU, or a tool, is missing")


@pytest.fixture(scope="session")
def lacking(request):
    """Call it with what this machine lacks: it skips the test, and fails it with --gpu-required."""
    required = request.config.getoption("--gpu-required", default=False)
    end = pytest.fail if required else pytest.skip
    return lambda what: end(f"this machine has no {what}")


@pytest.fixture(scope="session", autouse=True)
def _gpu(lacking):
    if not Path("/proc/driver/nvidia/version").exists():
        lacking("NVIDIA GPU: no /proc/driver/nvidia/version")


@pytest.fixture(scope="session")
def host():
    """This machine."""
    found = im.probe()
    assert found.gpus, found.warnings
    return found


@pytest.fixture(scope="session")
def smi(lacking):
    """Call it with a query of nvidia-smi, such as "gpu", and the names of fields; it returns the rows."""
    if not shutil.which("nvidia-smi"):
        lacking("nvidia-smi")

    def ask(query, *fields):
        words = ["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return list(csv.reader(io.StringIO(text), skipinitialspace=True))

    return ask


@pytest.fixture(scope="session")
def image(host, lacking, tmp_path_factory):
    """An image of the training program, made of this machine's own files."""
    work = tmp_path_factory.mktemp("image")
    compute = host.gpus[0].compute
    target = device_code.target(compute)
    try:
        release = rootfs.build(work / "root", host.driver.version, f"sm_{target}", work / "source")
    except rootfs.LackingError as error:
        lacking(error)
    archive = rootfs.archive(work / "root", work / "context")
    with archive.open("rb") as file:
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    cell = f"cuda{release}-sm{target}"
    variant = Variant(
        reference=f"gpu-check:{labels.tag('v1', cell, digest)}",
        digest=None,
        platform="linux/amd64" if host.arch == "x86_64" else "linux/arm64",
        cuda=release,
        cubins=(target,),
        driver=UserModeDriver(mode="exact", version=host.driver.version),
        march=rootfs.MARCH,
        cpu_flags=marches.required(rootfs.MARCH, "gcc-14"),
    )
    own = {
        labels.IMAGE: "gpu-check",
        labels.VERSION: "v1",
        labels.CELL: cell,
        labels.INPUT: digest,
        labels.VARIANT: labels.write(variant),
    }
    return Image(work / "root", work / "context", variant, own)


def has_engine():
    return bool(shutil.which("docker")) and _ends_well("docker", "version")


def runtime():
    """Return the runtime for bundles, or None."""
    found = next(filter(None, map(shutil.which, ("runc", "crun"))), None)
    return found if os.getuid() == 0 else None


@pytest.fixture(scope="session")
def engine(lacking):
    """An engine that answers; where none does, a runtime has to do."""
    if not has_engine():
        if not runtime():
            lacking("engine that answers, nor runc or crun and root to do without one")
        pytest.skip("no engine answers; the launch without one is tested")


@pytest.fixture(scope="session")
def oci(lacking):
    """The runtime for bundles; where there is none, an engine has to do."""
    found = runtime()
    if not found:
        if not has_engine():
            lacking("runc or crun, or no root, and no engine that answers")
        pytest.skip("neither runc nor crun with root; the launch with an engine is tested")
    return found


@pytest.fixture
def imagematrix():
    """Run our command line as a user does."""

    def run(*words):
        command = [ROOT / ".venv/bin/imagematrix", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def _ends_well(*words):
    return subprocess.run(words, capture_output=True, check=False).returncode == 0
