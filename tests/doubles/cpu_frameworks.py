"""Frameworks that compile for the CPU when a program runs, each as a folder of packages with its program.

The program prints `result VALUE after SECONDS s`, the seconds from its start to its first result.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
PYTHON = "3.13"  # of debian:trixie
PLACE = "/opt/packages"  # of the folder in an image
ENVIRONMENT = {"PYTHONPATH": PLACE}
COMMAND = ("python3", f"{PLACE}/program.py")
# Functions of libraries that only work on a GPU: of CUDA, without its runtime.
UNUSED = re.compile(r" U ((?:cublas|cudnn|cufft|cuFile|cusparse|cusolver|nccl|nvrtc|nvshmem)\w*)")
SECONDS = re.compile(r"result \S+ after ([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The `packages` of a framework, and its `program`; `tool` is its name in the table of tools.

    `small` is the argument with which the program compiles less, if it takes one.

    Where `unused` names libraries, which nothing calls without a GPU, `packages` are all that is installed.
    """

    tool: str
    program: str
    packages: tuple[str, ...]
    small: str = ""
    unused: tuple[str, ...] = ()


FRAMEWORKS = {
    # The wheel for GPUs, the only one that the index has. On a CPU, it calls nothing of these libraries,
    # which have thousands of megabytes.
    "torch": Framework(
        tool="inductor",
        program="transformer.py",
        small="0",
        packages=(
            *("torch==2.15.0", "nvidia-cuda-runtime==13.2.86", "nvidia-cuda-cupti==13.2.86"),
            *("filelock", "typing-extensions", "setuptools", "sympy", "mpmath", "networkx", "jinja2"),
            *("markupsafe", "fsspec", "numpy"),
        ),
        unused=(
            *("libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcufft.so.12", "libcufile.so.0"),
            *("libcusparse.so.12", "libcusparseLt.so.0", "libnccl.so.2", "libnvrtc.so.13"),
            "libnvshmem_host.so.3",
        ),
    ),
    "numba": Framework(tool="numba", program="pricing.py", packages=("numba==0.68.1",)),
    "jax": Framework(tool="jax", program="network.py", small="2", packages=("jax==0.10.2", "jaxlib==0.10.2")),
}


def install(name: str, folder: Path) -> Path:
    """Install a framework and its program into a folder, which an image has at PLACE; return it."""
    framework = FRAMEWORKS[name]
    pip: list[str | Path] = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", folder]
    pip += ["--python-version", PYTHON, "--only-binary=:all:"]
    pip += ["--no-deps"] if framework.unused else []
    subprocess.run([*pip, *framework.packages], check=True)
    if framework.unused:
        _make_stubs(folder / "torch/lib", framework.unused)
    shutil.copy(PROGRAMS / framework.program, folder / "program.py")
    folder.chmod(0o755)
    return folder


def _make_stubs(folder: Path, libraries: tuple[str, ...]) -> None:
    """Make libraries whose functions end the program, for the names that PyTorch's own libraries need."""
    words: list[str | Path] = ["nm", "--dynamic", "--undefined-only", *folder.glob("libtorch*.so")]
    needed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    code = "".join(
        f"void {name}(void) {{ __builtin_trap(); }}\n" for name in sorted({*UNUSED.findall(needed)})
    )
    for library in libraries:
        gcc = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{library}"]
        subprocess.run([*gcc, "-o", folder / library], input=code, check=True, text=True)


def read_seconds(output: str) -> float:
    """Return the seconds that a program has printed."""
    found = SECONDS.search(output)
    assert found, output
    return float(found[1])
