"""Simulated user-mode drivers: small libraries with the names, sonames and versions of NVIDIA's."""

import json
import shutil
import struct
import subprocess

import pytest

VERSION = "580.159.04"
TEMPLATE = """\
FROM {{ base }} AS compiler
FROM {{ base }}
{% if driver_from is defined %}
COPY --from=imagematrix-driver / /
{% endif %}
"""
SONAMES = {
    "libcuda": "libcuda.so.1",
    "libnvidia-ml": "libnvidia-ml.so.1",
    "libnvidia-nvvm": "libnvidia-nvvm.so.4",
    "libnvidia-ptxjitcompiler": "libnvidia-ptxjitcompiler.so.1",
}


def library(folder, name, version, *options, soname=None, inside=None, file=None):
    """Compile a library of the driver into `folder`; `inside` is the version in its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f"nvidia-application-profiles-{inside or version}-rc" if name == "libcuda" else inside or version
    code = f'const char lead[] = "x", version[] = "{text}"; int cuInit(unsigned flags) {{ return 100; }}'
    target = folder / (file or f"{name}.so.{version}")
    soname = soname or SONAMES.get(name, target.name)
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}", "-o", target, "-x", "c", "-"]
    subprocess.run([*command, "-x", "none", *options], input=code, check=True, text=True)
    return target


def complete(folder, version):
    """Compile all libraries that a driver requires; return the folder."""
    for name in SONAMES:
        library(folder, name, version)
    return folder


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    """A folder with a complete driver 580.159.04; tests copy it to change it."""
    return complete(tmp_path_factory.mktemp("driver"), VERSION)


# Prints the libcuda that a program loads, and the CUDA release of it.
SHOW = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *libcuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!libcuda) return puts(dlerror()), 1;
    int (*version)(int *) = dlsym(libcuda, "cuDriverGetVersion"), release = 0;
    Dl_info found;
    if (version) version(&release);
    if (!dladdr(dlsym(libcuda, "cuInit"), &found)) return 2;
    printf("%s %d\\n", found.dli_fname, release);
    return 0;
}
"""
BRANCHES = (535, 550, 570, 580)  # for which the simulated cuda-compat is
TESLA, NVIDIA = 2, 14  # brands of NVML


def add_note(libcuda, branches=BRANCHES, brands=(TESLA, NVIDIA)):
    """Give a libcuda the note of cuda-compat, as NVIDIA writes it; return the library."""
    text = json.dumps({"Format": 1, "CUDA Version": "13.0", "Driver": branches, "Device": brands}).encode()
    note = libcuda.with_name("note")
    note.write_bytes(struct.pack("<III", 19, len(text), 1) + b"NVIDIA Corporation\0\0" + text)
    name = ".note.cuda.fwd_compatibility"
    # NVIDIA's hook finds the text by the alignment, which is set only in a section that is there.
    for words in (("--add-section", f"{name}={note}"), ("--set-section-alignment", f"{name}=4")):
        subprocess.run(["objcopy", *words, libcuda], check=True)
    note.unlink()
    return libcuda


def compat(folder, version, **note):
    """Compile the libraries of a cuda-compat; return the folder."""
    for name in SONAMES.keys() - {"libnvidia-ml"}:
        library(folder, name, version)
    add_note(folder / f"libcuda.so.{version}", **note)
    return folder


def package(libraries, target, compression="xz"):
    """Pack a cuda-compat as NVIDIA does, with a script that must not run; return the package."""
    tree = target.with_suffix(".tree")
    place = tree / "usr/local/cuda-13.0/compat"
    shutil.copytree(libraries, place, symlinks=True)
    (place / "libcuda.so.1").symlink_to(next(place.glob("libcuda.so.*.*")).name)
    (tree / "DEBIAN").mkdir()
    lines = (
        "Package: cuda-compat-13-0",
        f"Version: {VERSION}-1",
        "Architecture: amd64",
        "Maintainer: a <a@b>",
    )
    (tree / "DEBIAN/control").write_text("".join(f"{line}\n" for line in (*lines, "Description: simulated")))
    script = tree / "DEBIAN/postinst"
    script.write_text("#!/bin/sh\ntouch /installed\n")
    script.chmod(0o755)
    words = ("dpkg-deb", f"-Z{compression}", "-z1", "--build", "--root-owner-group", tree, target)
    subprocess.run(words, check=True, capture_output=True)
    shutil.rmtree(tree)
    return target


def compile_show(target):
    """Compile the program that shows which libcuda is loaded; return its path."""
    command = ("gcc", "-x", "c", "-", "-o", target, "-ldl")
    subprocess.run(command, input=SHOW, check=True, text=True)
    return target


@pytest.fixture(scope="session")
def compat_folder(tmp_path_factory):
    """A folder with a cuda-compat 580.159.04; tests copy it to change it."""
    return compat(tmp_path_factory.mktemp("compat"), VERSION)
