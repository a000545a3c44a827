"""Find cells that cannot work, with the vendor's reason. They are not built."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.hardware.vendors import cpuid, cuda, device_code, marches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from imagematrix.build.matrix.matrix import Cell

ANY_COMPILER = "gcc"  # all of its versions
ARCHES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """Why a cell cannot work: the rule's name and a sentence with the vendor's limit."""

    rule: str
    why: str


def find_infeasibility(cell: Cell) -> Infeasible | None:
    """Return why `cell` cannot work, or None if no known fact rules it out.

    Where neither the tables nor the facts of the matrix have an answer, such as for the targets of a newer
    CUDA release or a compiler of another family, the build decides.
    """
    for rule, explain in RULES.items():
        why = explain(cell)
        if why:
            return Infeasible(rule=rule, why=why)
    return None


def find_unseen_flags(cell: Cell) -> frozenset[str]:
    """Return the flags that the march of `cell` needs and that a probe sees on no host of today."""
    march = cell.axes.get("march")
    if march is None:
        return frozenset()
    needed = find_march_flags(cell, march) or frozenset()
    return needed - cpuid.list_visible_flags(cell.facts.get_arch(march))


def find_march_flags(cell: Cell, march: str) -> frozenset[str] | None:
    """Return the flags that code for the march of `cell` needs; None if only its build tells."""
    flags = cell.facts.get_flags(march)
    if flags is None:
        flags = marches.get_required_flags(march, cell.properties.get("compiler") or ANY_COMPILER)
    return flags


def find_equal_marches(cells: Iterable[Cell]) -> list[tuple[str, ...]]:
    """Return the marches, in order, whose images fit the same hosts and rank the same, by their needs.

    Only images of one compiler are compared.
    """
    groups: dict[Hashable, dict[str, None]] = {}
    for cell in cells:
        march = cell.axes.get("march")
        flags = find_march_flags(cell, march) if march else None
        if march and flags is not None:
            key = cell.platform, cell.properties.get("compiler"), flags, cell.facts.get_vendor(march)
            groups.setdefault(key, {})[march] = None
    return list(dict.fromkeys(tuple(names) for names in groups.values() if len(names) > 1))


def explain_toolkit_target(cell: Cell) -> str | None:
    """Return that no code for the cell's GPUs can be made with its CUDA release, or None."""
    compute = cell.axes.get("compute")
    targets = cell.facts.get_targets(cell.cuda) if cell.cuda else None
    if compute is None or not targets or device_code.make_target(compute) in targets:
        return None
    target = device_code.make_target(compute)
    releases = cell.facts.find_releases(target)
    span = " to ".join(dict.fromkeys((releases[0], releases[-1]))) if releases else "no release"
    return f"CUDA {cell.cuda} cannot target compute capability {compute} (sm_{target}); {span} can"


def explain_driver_cuda(cell: Cell) -> str | None:
    """Return that the driver in the image is too old for its CUDA release, or None."""
    driver = cell.driver_version
    if driver is None or cell.cuda is None:
        return None
    stated = cell.facts.get_oldest_driver(cell.cuda)
    if cuda.can_run_cuda(cell.cuda, driver, stated):
        return None
    lowest = cuda.get_lowest_driver(cell.cuda, stated)
    if lowest is None:  # the selector could not decide either, so no host would get the image
        return f"the driver that CUDA {cell.cuda} needs is unknown; state it under `facts` in matrix.yaml"
    kind = "cuda-compat" if cell.compat else "driver"
    return f"{kind} {driver} is too old for CUDA {cell.cuda}, which needs {lowest}"


def explain_march_platform(cell: Cell) -> str | None:
    """Return that the march is for another architecture than the platform's, or None."""
    march = cell.axes.get("march")
    if march is None or cell.facts.get_arch(march) == ARCHES[cell.platform]:
        return None
    return f"march {march} is for {cell.facts.get_arch(march)}, not for {cell.platform}"


def explain_march_compiler(cell: Cell) -> str | None:
    """Return that the compiler that the matrix states does not know the march, or None."""
    march, compiler = cell.axes.get("march"), cell.properties.get("compiler")
    supported = marches.list_known_names(compiler) if compiler else None
    if march is None or supported is None or march in supported:
        return None
    compilers = [name for name in marches.list_compilers() if march in (marches.list_known_names(name) or ())]
    which = f"{', '.join(compilers)} do" if compilers else "no compiler in the tables does"
    return f"{compiler} does not support -march={march}; {which}"


# Each returns why a cell cannot work, or None if it can as far as this rule knows.
RULES = {
    "toolkit-target": explain_toolkit_target,
    "driver-cuda": explain_driver_cuda,
    "march-platform": explain_march_platform,
    "march-compiler": explain_march_compiler,
}
