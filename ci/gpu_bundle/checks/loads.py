"""Check the rule `device-code`: the driver has to load the code for which it holds, and no other."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import FailedError
from shared import IMAGE, device, saved

if TYPE_CHECKING:
    from collections.abc import Callable

    from machine import Machine
    from shared import Check

HERE = Path(__file__).parent
LOAD_S = 120.0
RULE = "device-code"
# PTX needs no compiler. The driver compiles it only up to its own ISA version.
PTX = """\
.version {isa}
.target sm_{target}
.address_size 64
.visible .entry nothing() {{ ret; }}
"""


def loads_what_fits(machine: Machine, show: Callable[[str], None]) -> str:
    """Check that the driver loads the code that `explain` says fits this GPU, and no other."""
    folder = machine.work / "code"
    folder.mkdir()
    variants = {**_cubins(machine, folder), **_ptx(folder)}
    fits = _fits(machine, variants)
    answers = _answers(machine, folder)
    for kind in ("cubin", "ptx"):
        for answer in sorted(set(answers.values())):
            names = [name for name, code in answers.items() if name.endswith(kind) and code == answer]
            show(f"{kind}, {answer}: {' '.join(name.removesuffix(f'.{kind}') for name in names) or 'none'}")
    wrong = [name for name, answer in answers.items() if fits[name] != (answer == 0)]
    if wrong:
        words = ", ".join(f"{name} ({answers[name]}, fits: {fits[name]})" for name in wrong[:5])
        raise FailedError(f"{len(wrong)} of {len(answers)}: {words}")
    counts = Counter(answers.values())
    refused = ", ".join(f"{counts[answer]} with {answer}" for answer in sorted(counts) if answer)
    return f"{counts[0]} loaded, and refused: {refused or 'none'}"


CHECKS: tuple[Check, ...] = (loads_what_fits,)


def _cubins(machine: Machine, folder: Path) -> dict[str, dict[str, Any]]:
    """Copy the bundle's empty kernels to a folder; return the device code of each file."""
    machine.lacks("kernels")
    found = {}
    for path in sorted((machine.bundle / "cubins").iterdir()):
        name = f"{path.name}.cubin"
        shutil.copy(path / "kernel.cubin", folder / name)
        found[name] = {"cubins": [path.name.removeprefix("sm_")]}
    return found


def _ptx(folder: Path) -> dict[str, dict[str, Any]]:
    """Write PTX for each target of each CUDA release to a folder; return the device code of each file."""
    from imagematrix.hardware.vendors import cuda

    found = {}
    for release in cuda.load_releases().values():
        for target in release.targets:
            name = f"{release.ptx_isa}-{target}.ptx"
            (folder / name).write_text(PTX.format(isa=release.ptx_isa, target=target))
            found[name] = {"ptx": [{"target": target, "isa": release.ptx_isa}]}
    return found


def _fits(machine: Machine, variants: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return whether the rule holds for each of the files, as an image with nothing else."""
    driver = {"mode": "exact", "version": machine.driver}
    references = {f"{IMAGE}-{name}": name for name in variants}
    path = saved(
        machine,
        [
            {"reference": reference, "platform": machine.platform, "driver": driver, **variants[name]}
            for reference, name in references.items()
        ],
    )
    words = ("explain", IMAGE, "--gpus", device(machine), "--catalog", path, "--json")
    candidates = machine.imagematrix(*words).document["candidates"]
    fits = {}
    for candidate in candidates:
        (verdict,) = (rule["ok"] for rule in candidate["rules"] if rule["rule"] == RULE)
        fits[references[candidate["reference"]]] = verdict
    return fits


def _answers(machine: Machine, folder: Path) -> dict[str, int]:
    """Return what the driver answers to each file."""
    settings = {
        "CUDA_VISIBLE_DEVICES": machine.gpu["uuid"],
        "CUDA_CACHE_DISABLE": "1",  # an answer is not one of an earlier run
        "LD_LIBRARY_PATH": machine.driver_folders,
    }
    words = (sys.executable, "-B", HERE / "load_code.py", machine.libcuda, folder)
    answers: dict[str, int] = machine.run(*words, limit=LOAD_S, **settings).json()
    return answers
