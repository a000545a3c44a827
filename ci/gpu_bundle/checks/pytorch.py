"""Check a copy of the machine's PyTorch, trimmed to the GPU: it must compute the same as the original."""

from __future__ import annotations

import math
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from machine import FailedError, NotTriedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from machine import Machine
    from shared import Check

OPERATORS = Path(__file__).parent / "operators.py"
PLACES = ("/opt/conda/bin/python3", "/usr/local/bin/python3", "/usr/bin/python3")
FIND = """\
import importlib.util, json, torch
gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
version, cuda = torch.__version__, torch.version.cuda
print(json.dumps({"folder": torch.__path__[0], "version": version, "cuda": cuda, "gpu": gpu,
                  "triton": importlib.util.find_spec("triton") is not None}))
"""
IMPORT_S, COPY_S, RUN_S = 60.0, 120.0, 120.0
FEWEST = 200  # operators that must have a result
TOLERANCE = 1e-3  # for operators whose results differ from run to run
ROOM = 1.1  # times the size of the copied files
CPU = "cpu"


class Torch(NamedTuple):
    """A PyTorch: the Python that has it, its folder, and the compute capability of the GPU that it uses.

    `has_triton` is for a Python that has Triton, too.
    """

    python: str
    folder: Path
    version: str
    cuda: str | None
    compute: str | None
    has_triton: bool


def computes_the_same(machine: Machine, show: Callable[[str], None]) -> str:
    """Check that this machine's PyTorch, copied and trimmed to its GPU, computes what it computed before."""
    torch = machine.once(find_pytorch)
    if not torch.compute:
        raise NotTriedError(f"PyTorch {torch.version} (CUDA {torch.cuda}) finds no GPU")
    return _compared(machine, show, torch, torch.compute, "cuda")


def on_the_cpu(compute: str) -> Check:
    """Return the same check for machines without a GPU, which computes on the CPU."""

    def check(machine: Machine, show: Callable[[str], None]) -> str:
        torch = machine.once(find_pytorch)
        return f"{_compared(machine, show, torch, compute, CPU)}; no device code ran: this was on the CPU"

    check.__doc__ = f"Check that this machine's PyTorch, copied and trimmed to {compute}, computes the same."
    return check


CHECKS: tuple[Check, ...] = (computes_the_same,)


def find_pytorch(machine: Machine) -> Torch:
    """Return the first PyTorch of the machine's Pythons; raise NotTriedError."""
    own = (os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    pythons = [sys.executable, *(f"{folder}/bin/python3" for folder in own if folder)]
    pythons += [*filter(None, map(shutil.which, ("python3", "python"))), *PLACES]
    for python in dict.fromkeys(pythons):
        if Path(python).exists():
            done = machine.run(python, "-c", FIND, limit=IMPORT_S)
            if done.code == 0:
                document = done.json()
                compute = ".".join(map(str, document["gpu"])) if document["gpu"] else None
                return Torch(
                    python,
                    Path(document["folder"]),
                    document["version"],
                    document["cuda"],
                    compute,
                    document["triton"],
                )
    raise NotTriedError("no Python of this machine has PyTorch")


def _compared(machine: Machine, show: Callable[[str], None], torch: Torch, compute: str, device: str) -> str:
    """Run the operators twice with the original, then with the trimmed copy; return a summary."""
    whole = _results(machine, torch, device)
    again = _results(machine, torch, device)
    copy = machine.work / "pytorch"
    try:
        removed = _trim(machine, show, torch, compute, copy)
        after = _results(machine, torch, device, PYTHONPATH=str(copy))
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    results = {name: result for name, result in whole.items() if "error" not in result}
    if len(results) < FEWEST:
        raise FailedError(f"only {len(results)} of {len(whole)} operators have a result on {device}")
    varying = _varying(machine, torch, device, [name for name in whole if whole[name] != after.get(name)])
    varying |= {name for name in whole if whole[name] != again.get(name)}
    different = [name for name in whole if not _alike(whole[name], after.get(name), varies=name in varying)]
    if different:
        for name in different:
            show(f"{name}: {whole[name]}, then {after.get(name)}")
        raise FailedError(f"{len(different)} of {len(whole)} operators: {', '.join(different[:5])}")
    exact = sum(whole[name] == after[name] for name in results)
    counts = (
        f"{len(results)} operators, {exact} bit by bit, {len(whole) - len(results)} are refused as before"
    )
    return f"PyTorch {torch.version} without {removed / 1e6:.0f} MB: {counts}"


def _varying(machine: Machine, torch: Torch, device: str, names: Sequence[str]) -> set[str]:
    """Return those of the operators that give different results in many runs of the original.

    Two runs may agree by chance: `sparse.mm` gave the same bytes twice on an H100, and then others.
    """
    if not names:
        return set()
    hashes = _run(machine, torch, device, *names)
    return {name for name in names if len(hashes[name]) > 1}


def _alike(whole: Mapping[str, Any], after: Mapping[str, Any] | None, *, varies: bool) -> bool:
    """Whether a result is unchanged; if it `varies` from run to run, only its magnitude has to match."""
    if after is None or not varies or "error" in whole or "error" in after:
        return whole == after
    return math.isclose(whole["size"], after["size"], rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _trim(machine: Machine, show: Callable[[str], None], torch: Torch, compute: str, folder: Path) -> int:
    """Write a trimmed copy of PyTorch to `folder`, for PYTHONPATH; return the number of bytes removed."""
    size = sum(path.stat().st_size for path in torch.folder.rglob("*") if path.is_file())
    if shutil.disk_usage(machine.work).free < ROOM * size:
        raise NotTriedError(f"not enough space for a copy of PyTorch, {size / 1e9:.1f} GB, in {machine.work}")
    words = ("trim", "--json", "--compute", compute, "--output", folder, torch.folder)
    report = machine.imagematrix(*words, limit=COPY_S).json()
    for file in report["files"]:
        name = Path(file["path"]).name
        show(f"{file['status']}: {name}: {file['removed']} of {file['size']} bytes")
    # PyTorch looks for NVIDIA's libraries beside itself.
    for other in torch.folder.parent.iterdir():
        if other.name.startswith(("nvidia", "torch-", "triton")):
            (folder / other.name).symlink_to(other)
    return int(report["removed"])


def _results(machine: Machine, torch: Torch, device: str, **environment: str) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = _run(machine, torch, device, **environment)
    return results


def _run(machine: Machine, torch: Torch, *words: str, **environment: str) -> Any:
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = machine.run(torch.python, "-B", OPERATORS, *words, limit=RUN_S, **deterministic, **environment)
    return done.json()
