"""Check what warm images rely on: of a tool's caches, a second start needs nothing but what a layer keeps.

Each program starts twice. Before the second start, its caches are replaced by the layer that a warm-up would
have written of them. By the rules of a warm-up's proof, that start must neither compile nor miss.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from machine import FailedError, NotTriedError
from pytorch import find_pytorch

if TYPE_CHECKING:
    from collections.abc import Callable

    from machine import Done, Machine
    from pytorch import Torch
    from shared import Check

    from imagematrix.images.warm.layer import WarmLayer
    from imagematrix.launcher.warm_up.folder_states import FileState
    from imagematrix.launcher.warm_up.program_run import EndedRun

HERE = Path(__file__).parent
START_S = 100.0
MOST = 2 << 30  # bytes of caches
COMPILERS = ("cc", "gcc", "clang")  # of which Triton takes the first for its launchers


class Program(NamedTuple):
    """A program whose caches are those of the `tool`, with the `words` and variables that start it."""

    tool: str
    words: tuple[object, ...]
    environment: dict[str, str]


def finds_compiled_ptx(machine: Machine, show: Callable[[str], None]) -> str:
    """Check that the driver finds PTX that it has compiled, in a layer of its cache."""
    from imagematrix.hardware.vendors import cuda

    target = machine.target
    isa = next(release.ptx_isa for release in cuda.load_releases().values() if target in release.targets)
    environment = {
        "CUDA_VISIBLE_DEVICES": machine.gpu["uuid"],
        "CUDA_CACHE_DISABLE": "0",
        "LD_LIBRARY_PATH": machine.driver_folders,
    }
    words = (sys.executable, "-B", HERE / "compile_ptx.py", machine.libcuda, isa, target)
    return _start_twice(machine, show, Program("cuda", words, environment))


def finds_triton_kernels(machine: Machine, show: Callable[[str], None]) -> str:
    """Check that Triton finds a kernel that it has compiled, in a layer of its cache."""
    torch = _require_triton(machine)
    return _start_twice(machine, show, Program("triton", (torch.python, "-B", HERE / "triton_kernel.py"), {}))


def finds_inductor_graphs(machine: Machine, show: Callable[[str], None]) -> str:
    """Check that torch.compile finds graphs and kernels that it has compiled, in a layer of its caches."""
    torch = _require_triton(machine)
    return _start_twice(
        machine, show, Program("inductor", (torch.python, "-B", HERE / "compiled_model.py"), {})
    )


CHECKS: tuple[Check, ...] = (finds_compiled_ptx, finds_triton_kernels, finds_inductor_graphs)


def _require_triton(machine: Machine) -> Torch:
    """Return a PyTorch that compiles for the GPU; raise NotTriedError."""
    torch = machine.once(find_pytorch)
    if not torch.compute:
        raise NotTriedError(f"PyTorch {torch.version} (CUDA {torch.cuda}) finds no GPU")
    if not torch.has_triton:
        raise NotTriedError(f"the Python with PyTorch {torch.version} has no Triton")
    if not any(map(shutil.which, COMPILERS)):
        raise NotTriedError("this machine has no C compiler, which Triton needs for its launchers")
    return torch


def _start_twice(machine: Machine, show: Callable[[str], None], program: Program) -> str:
    """Start a program without caches, and with the layer of them; return what both starts took."""
    from imagematrix.common.text import format_count
    from imagematrix.images.warm.tools import ROOT, find_tools
    from imagematrix.launcher.warm_up.proof import SignReader, list_failures

    root = machine.work / program.tool
    caches = root / ROOT.lstrip("/")
    caches.mkdir(parents=True)
    cold, done = _start(machine, program, caches, {})
    if cold.why:
        raise NotTriedError(f"{program.tool} does not work here: {done.why}")
    layer = _replace_by_layer(caches, root)
    tools = find_tools(layer.tools)
    kept = f"{format_count(len(layer.paths), 'file')} of {', '.join(layer.tools)}"
    show(kept)
    if program.tool not in layer.tools:
        raise FailedError(f"{program.tool} has left nothing in its cache")
    before = _read_states(caches, root)
    signs = SignReader(tools)
    warm, done = _start(machine, program, caches, signs.variables)
    show(done.text)
    for line in f"{done.out}\n{done.err}".splitlines():
        signs.read_line(line)
    if failures := list_failures(warm, before, signs, tools, cold):
        raise FailedError("; ".join(failures))
    return f"{cold.seconds:.1f} s, then {warm.seconds:.1f} s with {kept}"


def _start(
    machine: Machine, program: Program, caches: Path, variables: dict[str, str]
) -> tuple[EndedRun, Done]:
    """Start a program with its caches in a folder; return what it did, as a warm-up tells it."""
    from imagematrix.images.warm.tools import list_folders, load_tools
    from imagematrix.launcher.warm_up.program_run import EndedRun, explain_code

    folders = {variable: str(caches / folder) for variable, folder in list_folders().items()}
    settings = {name: value for tool in load_tools() for name, value in tool.settings.items()}
    environment = {**folders, **settings, **program.environment, **variables}
    started = time.monotonic()
    done = machine.run(*program.words, limit=START_S, **environment)
    run = EndedRun(
        why=explain_code(done.code),
        seconds=time.monotonic() - started,
        states=_read_states(caches, machine.work),
        written=(),
        record=b"",  # no stubs are in the place of compilers here: what these compile is a new file
        output=(),
        variables=environment,
    )
    return run, done


def _replace_by_layer(caches: Path, root: Path) -> WarmLayer:
    """Replace the caches by what a layer has of them; raise FailedError if no layer may have them."""
    from imagematrix.errors import AuditError
    from imagematrix.images.oci.compression import Compression
    from imagematrix.images.warm.layer import write_layer
    from imagematrix.images.warm.warm_file import read_archive, select_files

    path = root / "layer.tar.gz"
    try:
        with (
            _pack(caches, root).open("rb") as stream,
            read_archive(stream, MOST) as files,
            path.open("wb") as to,
        ):
            layer = write_layer(select_files(files), to, Compression(type="gzip", level=1))
    except AuditError as error:
        raise FailedError(str(error)) from error
    shutil.rmtree(caches)
    caches.mkdir()
    with tarfile.open(path) as archive:
        archive.extractall(root)  # noqa: S202 - it was written above
    return layer


def _read_states(caches: Path, work: Path) -> dict[str, FileState]:
    """Return the states of the files in the caches, by their paths in an image."""
    from imagematrix.images.warm.tools import ROOT
    from imagematrix.launcher.warm_up.folder_states import read_states

    with _pack(caches, work).open("rb") as stream:
        return read_states(stream, ROOT)


def _pack(caches: Path, work: Path) -> Path:
    """Write the tar of the caches into a folder, as an engine sends them; return its path."""
    path = work / "caches.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(caches, caches.name)
    return path
