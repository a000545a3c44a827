"""Measure pulls by containerd's transfer service: several layers unpacked at a time, or one after the other.

The image has PyTorch's wheel and some of NVIDIA's on a Debian, once in a layer for each and once in one for
all. A last layer deletes files and hides a folder, and every pull has to end with the same files. The rate
between containerd and the registry has no limit, or that of a network.
"""

from __future__ import annotations

import hashlib
import io
import os
import resource
import subprocess
import sys
import tarfile
import time
import zipfile
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import building
import compressing
import pulling
from conftest import Registry
from measure import Row, duration
from samples import ROOT

from imagematrix.images.oci.compression import DEFAULT_LEVELS, Compression

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from conftest import Engine
    from measure import Extent, Pace

WHEELS = (
    *("numpy==2.4.6", "scipy==1.17.1", "pandas==3.1.1", "pyarrow==26.0.1", "triton==3.4.0", "torch==2.8.0"),
    *("nvidia-cublas-cu12==12.8.4.1", "nvidia-cudnn-cu12==9.10.2.21", "nvidia-cusparse-cu12==12.5.8.93"),
)
SMALLEST = ("numpy==2.4.6", "tokenizers==0.23.3")
PLACE = "usr/lib/python3/dist-packages"
PORT, ROUNDS = 5096, 3
COMPRESSION = Compression(type="zstd", level=DEFAULT_LEVELS["zstd"])
SNAPSHOTTERS = ("overlayfs", "erofs")
NETWORKS = (None, "1gbit")  # of pulling.NETWORKS
EROFS_UTILS = ("erofs-utils", "libdeflate0", "liblz4-1", "liblzma5", "libxxhash0", "libzstd1")
LOADER = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"
WAIT_S = 30

CONFIG = """\
version = 3
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
[grpc]
address = "{folder}/containerd.sock"
[plugins.'io.containerd.transfer.v1.local']
max_concurrent_downloads = {how.downloads}
max_concurrent_unpacks = {how.unpacks}
[[plugins.'io.containerd.transfer.v1.local'.unpack_config]]
platform = "linux/amd64"
snapshotter = "{how.snapshotter}"
differ = "{how.differ}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """The settings of a containerd."""

    snapshotter: str
    downloads: int = 3
    unpacks: int = 1

    @property
    def differ(self) -> str:
        """What unpacks a layer for the snapshotter."""
        return "erofs" if self.snapshotter == "erofs" else "walking"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """A cold pull: its time, containerd's CPU time, and a digest of the names and modes of the files."""

    seconds: float
    cpu_time: float
    digest: str


def rows(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield cold pulls with the default settings, and with those that `imagematrix doctor` advises."""
    programs = _programs(folder)
    with building.new_engine() as engine, ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        images = _images(folder, engine, registry, SMALLEST if extent.smallest else WHEELS)
        yield from _compared(engine, programs, folder, images, extent.times(ROUNDS))


def _compared(
    engine: Engine, programs: Path, folder: Path, images: Mapping[str, str], rounds: int
) -> Iterator[Row]:
    """Yield the median pull of each image with each setting; they take turns."""
    processors = len(os.sched_getaffinity(0))
    for snapshotter in SNAPSHOTTERS:
        default = How(snapshotter=snapshotter)
        several = How(snapshotter=snapshotter, downloads=2 * processors, unpacks=processors)
        ways = [(kind, how) for kind in images for how in (default, several)]
        files = set()
        for network in NETWORKS:
            pulls: dict[tuple[str, How], list[Pull]] = {way: [] for way in ways}
            with nullcontext() if network is None else pulling.limited(engine, network):
                for number in range(rounds):
                    for kind, how in ways if number % 2 == 0 else reversed(ways):
                        pulls[kind, how].append(_pull(engine, programs, folder, images[kind], how))
            files |= {pull.digest for done in pulls.values() for pull in done}
            if len(files) != 1:
                raise SystemExit(f"{snapshotter}: pulls of the same image ended with different files")
            times = {way: median(pull.seconds for pull in done) for way, done in pulls.items()}
            first = times["a layer for each wheel", default]
            for (kind, how), seconds in times.items():
                settings = f"{how.downloads} downloads, {how.unpacks} unpacks at a time"
                cpu_time = median(pull.cpu_time for pull in pulls[kind, how])
                yield Row(
                    what=f"{snapshotter}, {network or 'no limit'}, {kind}, {settings}",
                    ours=f"{duration(seconds)}, {duration(cpu_time)} of CPU time",
                    ratio=f"{seconds / first:.2f} x",
                    instead=f"the default: {duration(first)}",
                )


def _programs(folder: Path) -> Path:
    """Return a folder with containerd and ctr, built from their modules, and Debian 13's mkfs.erofs."""
    programs = folder / "bin"
    subprocess.run([ROOT / "ci/modules/build", "containerd", programs], check=True)
    debian = folder / "debian"
    debian.mkdir()
    subprocess.run(["tar", "-xf", ROOT / ".cache/bases/trixie.tar", "-C", debian, "./usr/lib"], check=True)
    subprocess.run([ROOT / "ci/unpack", "trixie", debian, *EROFS_UTILS], check=True)
    mkfs = programs / "mkfs.erofs"
    libraries = debian / LOADER
    mkfs.write_text(
        f'#!/bin/sh\nexec {libraries} --library-path {libraries.parent} {debian}/usr/bin/mkfs.erofs "$@"\n'
    )
    mkfs.chmod(0o755)
    return programs


def _images(folder: Path, engine: Engine, registry: Registry, wheels: Sequence[str]) -> dict[str, str]:
    """Push both images, and return their names."""
    pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", *pulling.TAGS)
    subprocess.run([*pip, "--dest", folder / "wheels", *wheels], check=True)
    files = sorted((folder / "wheels").glob("*.whl"), key=lambda file: file.stat().st_size)
    base = _layer(folder, "base", _add_base)
    last = _layer(folder, "last", _add_whiteouts)
    each = [_layer(folder, file.stem, lambda tar, file=file: _add_wheels(tar, [file])) for file in files]  # type: ignore[misc]
    fat = _layer(folder, "fat", lambda tar: _add_wheels(tar, files))
    return {
        kind: compressing.pushed(engine, registry, [base, *parts, last], COMPRESSION, tag)
        for kind, parts, tag in (
            ("a layer for each wheel", each, "each"),
            ("one layer for all", [fat], "fat"),
        )
    }


def _layer(folder: Path, name: str, fill: Callable[[tarfile.TarFile], None]) -> tuple[Path, Path]:
    """Return a layer, compressed and as it is."""
    plain, blob = folder / f"{name}.tar", folder / name
    with tarfile.open(plain, "w") as tar:
        fill(tar)
    compressing.compress_layer(plain, blob, COMPRESSION)
    return blob, plain


def _add_base(tar: tarfile.TarFile) -> None:
    with tarfile.open(ROOT / ".cache/bases/trixie.tar") as base:
        for member in base:
            tar.addfile(member, base.extractfile(member) if member.isreg() else None)


def _add_wheels(tar: tarfile.TarFile, wheels: Sequence[Path]) -> None:
    known: set[str] = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                name = f"{PLACE}/{entry.filename}"
                if not entry.is_dir():
                    with archive.open(entry) as file:
                        _add_file(tar, known, name, file.read())


def _add_whiteouts(tar: tarfile.TarFile) -> None:
    """Delete a file and hide what a folder has: see the image specification of OCI, layer.md."""
    known: set[str] = set()
    for name in ("numpy/.wh.__init__.py", "numpy.libs/.wh..wh..opq", "numpy.libs/other"):
        _add_file(tar, known, f"{PLACE}/{name}", b"")


def _add_file(tar: tarfile.TarFile, known: set[str], name: str, content: bytes) -> None:
    """Add a file, and before it the folders above it that are not there yet."""
    for parent in reversed(Path(name).parents[:-1]):
        if str(parent) not in known:
            known.add(str(parent))
            info = tarfile.TarInfo(str(parent))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _pull(engine: Engine, programs: Path, folder: Path, name: str, how: How) -> Pull:
    begun = _cpu_time_of_ended()
    with _containerd(engine, programs, folder / "containerd", how) as ctr:
        words = ("images", "pull", "--plain-http", "--snapshotter", how.snapshotter, name)
        start = time.perf_counter()
        subprocess.run([*ctr, *words], check=True, capture_output=True)
        taken = time.perf_counter() - start
        root = folder / "root"
        root.mkdir(exist_ok=True)
        subprocess.run(
            [*ctr, "images", "mount", "--snapshotter", how.snapshotter, name, root],
            check=True,
            capture_output=True,
        )
        try:
            digest = _digest(root)
        finally:
            subprocess.run(["umount", root], check=True)
    return Pull(seconds=taken, cpu_time=_cpu_time_of_ended() - begun, digest=digest)


def _cpu_time_of_ended() -> float:
    """Return the CPU time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _digest(root: Path) -> str:
    digest = hashlib.sha256()
    for place, folders, files in os.walk(root):
        folders.sort()
        for name in sorted((*folders, *files)):
            path = Path(place, name)
            digest.update(f"{path.relative_to(root)} {path.lstat().st_mode}\n".encode())
    return digest.hexdigest()


@contextmanager
def _containerd(engine: Engine, programs: Path, folder: Path, how: How) -> Iterator[list[str]]:
    """Start a containerd without images in the network of the registry; yield the words that call its ctr."""
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(folder=folder, how=how))
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [*engine.inside, programs / "containerd", "--config", folder / "config.toml"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            socket = folder / "containerd.sock"
            deadline = time.monotonic() + WAIT_S
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit((folder / "log").read_text()[-2000:])
                time.sleep(0.05)
            yield [str(word) for word in (*engine.inside, programs / "ctr", "--address", socket)]
        finally:
            process.terminate()
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if (place := line.split()[1]).startswith(f"{folder}/"):
            subprocess.run(["umount", place], check=True)
    subprocess.run(["rm", "-rf", folder], check=True)
