"""Simulated user-mode drivers: small libraries with the names, sonames and versions of NVIDIA's."""

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
