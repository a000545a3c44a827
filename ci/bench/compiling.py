"""Build real programs for several marches, and with code that they choose at run time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from samples import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

BASELINE = "x86-64-v2"
CHOOSES = "chosen at run time"  # a variant with code for several CPUs
OWN = ROOT / "ci" / "bench" / "programs"
TOOLS = ("cmake==4.4.4", "gguf==0.19.0", "ninja==1.13.2", "scipy-openblas64==0.3.34.481.3")
ZSTD, LLAMA = "zstandard==0.25.0", "llama-cpp-python==0.3.36"
FAST = ("-O3", "-Wall")
STEPS = "20000"  # of training by the shipped program: about a second
# OpenBLAS's names for its kernels, by march of Intel's processors.
KERNELS = {"x86-64-v2": "Nehalem", "x86-64-v3": "Haswell", "x86-64-v4": "SkylakeX"}
# llama.cpp's backends for servers' CPUs and for all CPUs, of which it takes the best. Sapphire Rapids is left
# out: GCC 12 drops most stores that its `_tile_loadconfig` reads, so AMX instructions end in SIGILL.
BACKENDS = ("x64", "haswell", "skylakex", "icelake", "zen4")
GGML = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_BACKEND_DL": "ON",
    "GGML_NATIVE": "OFF",
    "GGML_OPENMP": "OFF",
    "GGML_CCACHE": "OFF",
    "GGML_LLAMAFILE": "ON",
    "LLAMA_OPENSSL": "OFF",
    **{f"LLAMA_BUILD_{part}": "OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")},
}
# Without these options, it would enable AVX2 and other flags regardless of -march.
PLAIN = dict.fromkeys(("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"), "OFF")
# Only the backends do arithmetic.
LIBRARY = {"GGML_CPU": "OFF", "CMAKE_CXX_FLAGS_RELEASE": "-O1"}


class CrashedError(Exception):
    """A signal ended the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that prints a rate in `unit`; each variant (a march or CHOOSES) has its own command."""

    name: str
    unit: str
    variants: Mapping[str, Sequence[str]]
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def rate(self, variant: str, processor: int) -> float:
        """Run a variant on one processor and return its rate.

        Raises:
            CrashedError: A signal ended it, SIGILL for example.
        """
        words = ("taskset", "--cpu-list", str(processor), *self.variants[variant])
        environment = {**os.environ, **self.environments.get(variant, {})}
        done = subprocess.run(words, check=False, env=environment, capture_output=True, text=True)
        if done.returncode < 0:
            raise CrashedError(signal.Signals(-done.returncode).name)
        done.check_returncode()
        return float(done.stdout.split()[-1])


def programs(folder: Path, marches: Sequence[str]) -> Iterator[Program]:
    """Yield each program when it is built. `marches` must contain BASELINE."""
    tools = Tools(folder)
    yield shipped(folder, marches)
    yield from _dgemm(tools, folder, marches)
    yield from _zstd(tools, folder, marches)
    yield from _llama(tools, folder, marches)


class Tools:
    """A virtual environment with the build tools of the programs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.python = folder / "venv" / "bin" / "python"
        _run(self.python, "-m", "pip", "install", "-q", *TOOLS)
        bin_folder = self.python.parent
        self.environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}

    def installed(self, *packages: str) -> Path:
        """Install more packages; return the folder with all of them."""
        _run(self.python, "-m", "pip", "install", "-q", *packages)
        said = "import sysconfig; print(sysconfig.get_path('platlib'))"
        done = subprocess.run([self.python, "-c", said], check=True, capture_output=True, text=True)
        return Path(done.stdout.strip())

    def source(self, package: str) -> Path:
        """Return the folder with the source of a package."""
        name = package.partition("==")[0]
        archives = self._folder / "archives"
        pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", archives)
        _run(*pip, "--no-binary", name, package)
        (archive,) = archives.glob(f"{name.replace('-', '_')}-*.tar.gz")
        # tarfile of Debian 12's Python 3.11.2 has no filter for paths that lead out of the folder.
        _run("tar", "--extract", "--file", archive, "--directory", self._folder)
        return self._folder / archive.name.removesuffix(".tar.gz")

    def openblas(self) -> str:
        """Return the path of OpenBLAS."""
        said = "import scipy_openblas64 as it; print(it.get_lib_dir(), it.get_library(fullname=True))"
        done = subprocess.run([self.python, "-c", said], check=True, capture_output=True, text=True)
        return "/".join(done.stdout.split())

    def cmake(self, source: Path, build: Path, targets: Iterable[str], options: Mapping[str, str]) -> None:
        """Build targets of a project in the folder `build`."""
        words = [f"-D{name}={value}" for name, value in options.items()]
        _run("cmake", "-S", source, "-B", build, "-G", "Ninja", *words, environment=self.environment)
        _run("cmake", "--build", build, "--target", *targets, environment=self.environment)


def shipped(folder: Path, marches: Sequence[str]) -> Program:
    """Return the shipped program, built for each march."""
    source = ROOT / "templates" / "training"
    variants = {}
    for march in marches:
        built = folder / "training" / march
        shutil.copytree(source, built)
        header = subprocess.run(["sh", built / "isa.sh", march], check=True, capture_output=True).stdout
        (built / "isa.hpp").write_bytes(header)
        files = [built / name for name in ("train.cpp", "model.cpp", "gpu.cpp")]
        options = (f"-march={march}", "-mprefer-vector-width=512", "-fopenmp-simd")
        _run("g++", "-std=c++17", *FAST, *options, "-o", built / "train", *files)
        said = f"{built / 'train'} --steps {STEPS} | sed 's/.*\"samples_per_second\": \\([^,]*\\),.*/\\1/'"
        variants[march] = ("sh", "-c", said)
    return Program(name="the shipped program", unit="samples/s", variants=variants)


def _dgemm(tools: Tools, folder: Path, marches: Sequence[str]) -> Iterator[Program]:
    variants = {
        march: (_compiled(folder / march / "dgemm", march, OWN / "dgemm.c", "-ldl"),) for march in marches
    }
    yield Program(name="dgemm, three loops", unit="GFLOP/s", variants=variants)
    kernels = {march: kernel for march, kernel in KERNELS.items() if march in marches}
    plain = _compiled(folder / "dgemm", "x86-64", OWN / "dgemm.c", "-ldl")
    yield Program(
        name="dgemm of OpenBLAS",
        unit="GFLOP/s",
        variants=dict.fromkeys((*kernels, CHOOSES), (plain, tools.openblas())),
        environments={CHOOSES: {"OPENBLAS_NUM_THREADS": "1"}}
        | {
            march: {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": kernel}
            for march, kernel in kernels.items()
        },
    )


def _zstd(tools: Tools, folder: Path, marches: Sequence[str]) -> Iterator[Program]:
    source = tools.source(ZSTD) / "zstd"
    files = (OWN / "pack.c", source / "zstd.c", f"-I{source}")
    built = {
        march: _compiled(folder / march / "zstd", march, *files, "-DDYNAMIC_BMI2=0") for march in marches
    }
    built[CHOOSES] = _compiled(folder / "zstd", BASELINE, *files, "-DDYNAMIC_BMI2=1")
    for what in ("compress", "decompress"):
        variants = {variant: (path, what, str(source / "zstd.c")) for variant, path in built.items()}
        yield Program(name=f"zstd, {what}", unit="MB/s", variants=variants)


def _llama(tools: Tools, folder: Path, marches: Sequence[str]) -> Iterator[Program]:
    source = tools.source(LLAMA) / "vendor" / "llama.cpp"
    library, model = folder / "llama", str(folder / "model.gguf")
    _run(tools.python, OWN / "model.py", model)
    tools.cmake(source, library, ("llama",), GGML | LIBRARY)
    headers = (f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}")
    links = (f"-L{library / 'bin'}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{library / 'bin'}")
    tokens = _compiled(folder / "tokens", BASELINE, OWN / "tokens.c", *headers, *links)
    backends = {}
    for march in marches:
        backends[march] = folder / f"ggml-{march}"
        flags = {f"CMAKE_{language}_FLAGS": f"-march={march}" for language in ("C", "CXX")}
        plain = {f"GGML_{name}": value for name, value in PLAIN.items()}
        tools.cmake(source, backends[march], ("ggml-cpu",), GGML | plain | flags)
    backends[CHOOSES] = folder / "ggml-chooses"
    targets = [f"ggml-cpu-{name}" for name in BACKENDS]
    tools.cmake(source, backends[CHOOSES], targets, GGML | {"GGML_CPU_ALL_VARIANTS": "ON"})
    for what in ("prompt", "generation"):
        variants = {
            variant: (tokens, what, str(next(path.rglob("libggml-cpu*.so")).parent), model)
            for variant, path in backends.items()
        }
        yield Program(name=f"llama.cpp, {what}", unit="tokens/s", variants=variants)


def _compiled(target: Path, march: str, *words: Path | str) -> str:
    """Compile a program; its name must not contain a CPU, or an audit would take it for one of several."""
    target.parent.mkdir(exist_ok=True)
    _run("gcc", *FAST, f"-march={march}", "-o", target, *words)
    return str(target)


def _run(*words: Path | str, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(words, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} exited with {done.returncode}: {done.stderr[-3000:]}")
