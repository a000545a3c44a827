"""The file system of a small image: the training program, its kernel for one GPU, the driver's libcuda.

It has what the image of the shipped template has, and is made of this machine's own files, so that nothing is
fetched. The libcuda has to be of exactly the kernel module's version.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

TEMPLATE = Path(__file__).parents[2] / "templates/training"
# For any CPU of the architecture, like the files of the machine's distribution.
MARCH = {"x86_64": "x86-64", "aarch64": "armv8-a"}[platform.machine()]
DRIVER = ("libcuda.so", "libnvidia-ptxjitcompiler.so", "libnvidia-ml.so")
NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2")


class LackingError(Exception):
    """What this machine would need to make such an image."""


def build(root, driver, target, work):
    """Fill the folder `root` for the driver's version and "sm_90" or the like; return the CUDA release.

    `work` is a folder to compile in.
    """
    if not shutil.which("g++"):
        raise LackingError("g++")
    shutil.copytree(TEMPLATE, work)
    release = _kernel(work, target, _made(root / "usr/local/share/training"))
    program = _made(root / "usr/local/bin") / "train"
    (work / "isa.hpp").write_text(_run("sh", "isa.sh", MARCH, cwd=work))
    sources = ("train.cpp", "model.cpp", "gpu.cpp")
    _run(*_cxx("-fopenmp-simd", "-s"), f"-march={MARCH}", "-o", program, *sources, "-ldl", cwd=work)
    files = _driver_files(driver)
    libraries = _needed(program, *files)
    for path in libraries:
        shutil.copy(path, _made(root / path.parent.relative_to("/")))
    # Where the C library is, the dynamic linker looks without a cache.
    beside = next(root / path.parent.relative_to("/") for path in libraries if path.name == "libc.so.6")
    for path in files:
        shutil.copy(path, beside)
        (beside / f"{path.name.removesuffix(driver)}1").symlink_to(path.name)
    for name in ("dev", "proc", "sys", "tmp"):
        _made(root / name)
    return release


def archive(root, context):
    """Write the file system as an archive, in a folder that builds an image of it; return its path."""
    path = _made(context) / "root.tar"
    with tarfile.open(path, "w") as tar:
        for item in sorted(root.iterdir()):
            tar.add(item, item.name)
    (context / "Dockerfile").write_text(f'FROM scratch\nADD {path.name} /\nCMD ["train"]\n')
    return path


def _driver_files(version):
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LackingError(f"the driver's libcuda.so.1 ({error})") from error
    found = re.search(r"/\S*/libcuda\.so\.\S+", Path("/proc/self/maps").read_text())[0]
    files = [Path(found).with_name(f"{name}.{version}") for name in DRIVER]
    if not files[0].exists():
        raise LackingError(f"libcuda.so.{version}, which the kernel module is of; it has {found}")
    return [path for path in files if path.exists()]


def _kernel(work, target, folder):
    """Compile the kernel with nvcc, or else with NVRTC; return the release of CUDA."""
    nvcc = shutil.which("nvcc")
    if nvcc:
        release = re.search(r"release (\d+\.\d+)", _run(nvcc, "--version"))[1]
        _run(nvcc, "-cubin", f"-arch={target}", "-o", folder / "kernel.cubin", "kernel.cu", cwd=work)
        (folder / "kernel.txt").write_text(f"{release} {target}\n")
        return release
    release = _nvrtc_release()
    _run(*_cxx(), "-o", "compile_kernel", "compile_kernel.cpp", "-ldl", cwd=work)
    _run(work / "compile_kernel", "kernel.cu", target, release, folder, cwd=work)
    return release


def _nvrtc_release():
    for name in NVRTC:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"
    raise LackingError("nvcc, or NVRTC where LD_LIBRARY_PATH or the linker's cache finds it")


def _needed(*files):
    """Return the libraries that the files want, all of theirs too, and the dynamic linker."""
    text = "".join(_run("ldd", path) for path in files)
    return sorted({Path(path) for path in re.findall(r"(/\S+) \(0x", text)})


def _cxx(*options):
    return ["g++", "-std=c++17", "-O2", "-static-libstdc++", "-static-libgcc", *options]


def _run(*words, cwd=None):
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words[0]}: {done.stderr}"
    return done.stdout


def _made(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder
