"""Cells that cannot work, and the vendor's reason: no build is started for them."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.facts import cuda, device_code, marches, versions
from imagematrix.matrix.words import HOST_DRIVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.matrix.matrix import Cell

__all__ = ["Infeasible", "infeasible"]

ARCHES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """Why a cell cannot work: the rule's name and a sentence with the vendor's limit."""

    rule: str
    why: str


def infeasible(cell: Cell) -> Infeasible | None:
    """Return why `cell` cannot work, or None where nothing known speaks against it.

    What the tables don't know (a CUDA release newer than they are, a compiler of another family) is left to
    the build.
    """
    for rule in (_toolkit_target, _driver_cuda, _march_platform, _march_compiler):
        why = rule(cell)
        if why:
            return Infeasible(rule=rule.__name__.strip("_").replace("_", "-"), why=why)
    return None


def _toolkit_target(cell: Cell) -> str | None:
    compute = cell.axes.get("compute")
    release = cuda.release(cell.cuda) if cell.cuda else None
    if compute is None or release is None or device_code.target(compute) in release.targets:
        return None
    target = device_code.target(compute)
    able = [name for name, other in cuda.releases().items() if target in other.targets]
    able.sort(key=versions.order)
    which = f"{able[0]} to {able[-1]} can" if able else "no release can"
    return f"CUDA {release.name} cannot target compute capability {compute} (sm_{target}); {which}"


def _driver_cuda(cell: Cell) -> str | None:
    driver = cell.axes.get("driver")
    if driver is None or driver == HOST_DRIVER or cell.cuda is None or cuda.driver_runs(cell.cuda, driver):
        return None
    return f"driver {driver} is too old for CUDA {cell.cuda}, which needs {cuda.lowest_driver(cell.cuda)}"


def _march_platform(cell: Cell) -> str | None:
    march = cell.axes.get("march")
    if march is None or marches.arch(march) == ARCHES[cell.platform]:
        return None
    return f"march {march} is for {marches.arch(march)}, not for {cell.platform}"


def _march_compiler(cell: Cell) -> str | None:
    march, compiler = cell.axes.get("march"), cell.properties.get("compiler")
    known = marches.known(compiler) if compiler else None
    if march is None or known is None or march in known:
        return None
    able = [name for name in marches.compilers() if march in (marches.known(name) or ())]
    return f"{compiler} does not know -march={march}; {', '.join(able)} do"
