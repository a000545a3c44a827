"""`device-code`: all files with device code have some for every GPU passed, and none goes unused unasked.

A GPU without code ends with CUDA error 209, PTX that is too new with 222. Sources:
https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html,
https://docs.nvidia.com/cuda/parallel-thread-execution/.
"""

from __future__ import annotations

from functools import partial

from imagematrix.hardware.vendors import cuda, versions
from imagematrix.hardware.vendors.device_code import (
    can_compile_ptx,
    can_run_cubin,
    get_bounds,
    get_capability,
    make_sort_key,
    measure_distance,
)
from imagematrix.images.catalog.catalog import UNKNOWN
from imagematrix.selection import drivers
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.catalog.catalog import Code, FilePart, Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target

CUBIN, PTX = 0, 1
REST = "the others do not suffice: they are of libraries linked into it, or have only PTX"
LOOSE = ".cubin"  # the end of the name of a file that is a cubin
SHOWN = 4  # items that a sentence lists before "and N more"
USABLE = ("ok", "vgpu")  # the states of GPUs that containers can use
STATES = {
    "lost": "has fallen off the bus",
    "no-permission": "may not be opened by this user",
    "no-node": "has no device node",
    "no-module": "has no kernel module",
    "excluded": "is excluded from use by the driver",
    "vgpu-host": "is assigned to virtual machines",
    "failed": "could not be initialised by the driver, and NVML does not list it",
    "unconfirmed": "is confirmed neither by the driver nor by NVML",
    "mig-empty": "is in MIG mode and has no MIG device",
}


def need(variant: Variant) -> Hashable:
    """Return the device code, whether it is unknown, and the driver to load it."""
    stated = variant.device_code or (variant.cubins, variant.ptx)
    return variant.gpu, stated, _is_undecided(variant), drivers.get_deciding_user_mode_driver(variant)


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether all files with device code that are used on the GPUs passed have some for each of them.

    A CPU-only image fits a target without accelerators, or one whose user allows that they go unused.
    """
    if not variant.gpu:
        return target.allow_cpu or not (target.gpus or target.host.accelerators)
    # Without PTX, the driver plays no part, and `thresholds` does not name it.
    has_ptx = any(code.ptx for code in variant.code) if variant.device_code else bool(variant.ptx)
    driver = drivers.get_effective_driver(target, variant) if has_ptx else None
    return bool(target.gpus) and all(_is_served(variant, gpu, driver) for gpu in target.gpus)


def _is_undecided(variant: Variant) -> bool:
    """Whether the device code of an image is unknown: it may be compiled at run time."""
    stated = variant.device_code or variant.cubins or variant.ptx
    return not stated and variant.source("cubins") == UNKNOWN


def _is_served(variant: Variant, gpu: Gpu, driver: str | None) -> bool:
    """Whether there is code for a GPU, or the code is unknown and the GPU can be used."""
    return rate_code(variant, gpu, driver) is not None or (_is_undecided(variant) and gpu.usable)


def rate_code(variant: Variant, gpu: Gpu, driver: str | None) -> tuple[int, int] | None:
    """Return how well the variant's device code suits a GPU (less is better), or None if some has none.

    A cubin outranks PTX, and the nearest of several cubins decides. The files with the worst match count.
    """
    if not variant.device_code:  # the only entry is the variant's own
        return _rate_files(variant, gpu, driver)
    matches = [_rate_files(code, gpu, driver) for code in _select_deciding_code(variant, gpu)]
    return None if None in matches else max(filter(None, matches), default=None)


def _select_deciding_code(variant: Variant, gpu: Gpu) -> list[Code]:
    """Return the code of the files that have to run on a GPU."""
    return [code for code in variant.code if gpu.compute is None or code.decides(gpu.compute)]


def has_partial_code(variant: Variant, gpu: Gpu, driver: str | None) -> bool:
    """Whether some parts of a file that has to run have no code for a GPU."""
    return any(_count_parts_without_code(code, gpu, driver) for code in _select_deciding_code(variant, gpu))


def _count_parts_without_code(code: Code, gpu: Gpu, driver: str | None) -> int:
    """Return how many parts of a file have no code for a GPU."""
    return sum(part.count for part in code.parts if _rate_files(part, gpu, driver) is None)


def _rate_files(code: Code | FilePart | Variant, gpu: Gpu, driver: str | None) -> tuple[int, int] | None:
    """Return how well the code of some files suits a GPU, or None if none of it runs."""
    compute = gpu.compute
    if compute is None or not gpu.usable:
        return None
    distances = [measure_distance(cubin, compute) for cubin in code.cubins if can_run_cubin(cubin, compute)]
    if distances:
        return CUBIN, min(distances)
    for ptx in code.ptx:
        # Minor-version compatibility does not cover PTX: the driver's own release has to compile it.
        if (
            driver is not None
            and can_compile_ptx(ptx.target, compute)
            and _release_compiles(cuda.get_newest_cuda(driver), ptx.isa)
        ):
            return PTX, 0
    return None


def get_served_targets(variant: Variant) -> tuple[str, ...]:
    """Return the targets of the variant's cubins on whose own GPUs all of its code runs, in order."""

    def is_served(compute: str) -> bool:
        return all(
            any(can_run_cubin(cubin, compute) for cubin in code.cubins)
            or any(can_compile_ptx(ptx.target, compute) for ptx in code.ptx)
            for code in variant.code
            if code.decides(compute)
        )

    targets = {target for code in variant.code for target in code.cubins}
    return tuple(
        [target for target in sorted(targets, key=make_sort_key) if is_served(get_capability(target))]
    )


def thresholds(variant: Variant) -> Thresholds:
    """Return the bounds of the capabilities with code, and the first drivers that compile the PTX.

    An image without device code depends on whether there are GPUs and other accelerators.
    """
    if not variant.gpu:
        return {"accelerators": ()}
    targets = {target for code in variant.code for target in code.targets}
    computes = set().union(*(get_bounds(target) for target in targets))
    for code in variant.code:
        # The capabilities at which a package begins or ceases to use a file.
        for low, high in code.guard.unless if code.guard else ():
            computes.add(low)
            if high:
                computes.add("{}.{}".format(*divmod(int(high.replace(".", "")) + 1, 10)))  # 9.0 follows 8.9
    thresholds: dict[str, Iterable[str]] = {"gpus.state": USABLE, "gpus.compute": sorted(computes)}
    isas = {ptx.isa for code in variant.code for ptx in code.ptx}
    if isas and not drivers.get_deciding_user_mode_driver(variant):
        thresholds["driver.version"] = sorted(
            {bound for isa in isas for bound in cuda.find_verdict_bounds(partial(_release_compiles, isa=isa))}
        )
    return thresholds


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    wanted, have = _describe_code(variant) or "no GPU", _format_computes(target.gpus)
    if ok and target.gpus and wanted != "no GPU":
        return (
            wanted,
            have,
            f"there is device code for every GPU passed{_describe_unused_files(target, variant)}",
            None,
        )
    if ok:
        return wanted, have, "the image has no device code, and needs none", None
    if wanted == "no GPU":
        why = (
            f"the image has no device code and would leave accelerators unused: {_describe_idle_gpus(target)}"
        )
        return wanted, have, why, None
    if not target.gpus:
        idle = _describe_idle_gpus(target)
        suffix = f"; this host's accelerators cannot be passed: {idle}" if idle else ""
        why = f"the image needs a GPU, and none is passed{suffix}"
        return wanted, None, why, "run it on a node with a GPU, and pass one"
    driver = drivers.get_effective_driver(target, variant)
    lacking = _find_lacking_gpus(target, variant)
    why, advice = _explain_lack(variant, lacking, driver)
    return wanted, "; ".join(f"{gpu.label}: {gpu.compute or 'unknown'}" for gpu in lacking), why, advice


def distance(target: Target, variant: Variant) -> Distance:
    """Return how many GPUs lack device code, and the distance of the code for the worst match.

    The distance for a GPU is that of the code that is furthest off among all that has to run on it.
    """
    far: Distance = (drivers.FAR,)
    lacking = _find_lacking_gpus(target, variant)
    by_gpu: list[Distance] = []
    for gpu in lacking:
        by_file = []
        for code in _select_deciding_code(variant, gpu):
            capabilities = map(get_capability, code.targets)
            distances = (drivers.measure_version_distance(name, gpu.compute) for name in capabilities)
            by_file.append(min(distances, default=far))
        by_gpu.append(max(by_file, default=far))
    return len(lacking), *max(by_gpu, default=far)


def _find_lacking_gpus(target: Target, variant: Variant) -> list[Gpu]:
    driver = drivers.get_effective_driver(target, variant)
    return [gpu for gpu in target.gpus if not _is_served(variant, gpu, driver)]


def warn(target: Target, variant: Variant) -> Iterator[str]:
    """Yield which parts of files have no code for a GPU: only what is in them fails there."""
    driver = drivers.get_effective_driver(target, variant)
    for compute, gpu in {gpu.compute: gpu for gpu in target.gpus}.items():
        for code in _select_deciding_code(variant, gpu):
            if _count_parts_without_code(code, gpu, driver):
                yield f"{_describe_parts(code, gpu, driver)} no code for {compute}"


def _describe_parts(code: Code, gpu: Gpu, driver: str | None) -> str:
    """Return how many parts of a file lack something, up to the verb."""
    lacking, parts = _count_parts_without_code(code, gpu, driver), sum(part.count for part in code.parts)
    return f"{lacking} of {parts} parts of {code.name} {'has' if lacking == 1 else 'have'}"


def _describe_unused_files(target: Target, variant: Variant) -> str:
    """Return in words which files have no code for a GPU and are optional, or not used on it."""
    driver = drivers.get_effective_driver(target, variant)
    words = []
    for code in variant.device_code:
        lacking = [gpu for gpu in target.gpus if code.optional and not _rate_files(code, gpu, driver)]
        if lacking:
            text = _describe_compilable_ptx(code, lacking[0], driver) or "no code"
            words.append(f"; {_name_files([code])}, optional: for {_format_computes(lacking)} {text}")
        guard = code.guard
        spared = [gpu for gpu in target.gpus if guard and gpu.compute and guard.exempts(gpu.compute)]
        without = [gpu for gpu in spared if not _rate_files(code, gpu, driver)]
        if guard and without:
            where = f"by {guard.path}:{guard.line}"
            computes = _format_computes(without)
            words.append(f"; {_name_files([code])}, without code for {computes}, is not used there {where}")
    return "".join(words)


def _name_files(codes: Sequence[Code]) -> str:
    """Return the name of the first file of entries, and how many more there are."""
    if not codes or not codes[0].name:
        return "the image"
    more = sum(code.files for code in codes) - 1
    return f"{codes[0].name} and {more} more" if more else codes[0].name


def _release_compiles(release: str | None, isa: str) -> bool:
    """Whether the drivers of a CUDA release, the newest that they support, compile PTX of an ISA version."""
    newest = cuda.load_releases()[release].ptx_isa if release else None
    return newest is not None and versions.make_sort_key(isa) <= versions.make_sort_key(newest)


def _describe_code(variant: Variant) -> str:
    """Return the variant's device code in words, or nothing for a CPU-only variant."""
    from imagematrix.common.text import shorten_words

    entries = [
        ", ".join(
            [f"sm_{cubin}" for cubin in code.cubins]
            + [f"PTX {ptx.target} (ISA {ptx.isa})" for ptx in code.ptx]
        )
        for code in variant.code
    ]
    if len(entries) > 1:
        return shorten_words([f"one of {entry}" for entry in entries], SHOWN, " and ", "; and {} more")
    return "".join(entries) or ("device code" if variant.gpu else "")


def _format_computes(gpus: Iterable[Gpu]) -> str | None:
    return ", ".join(dict.fromkeys(gpu.compute or "unknown" for gpu in gpus)) or None


def _describe_idle_gpus(target: Target) -> str:
    """Return what an image without device code would leave unused, in words."""
    from imagematrix.common.text import shorten_words

    words = [gpu.label if gpu.usable else f"{gpu.label} (state {gpu.state})" for gpu in target.gpus]
    words += [accelerator.label for accelerator in target.host.accelerators]
    return shorten_words(words, SHOWN, "; ", "; and {} more")


def _explain_lack(variant: Variant, unserved: list[Gpu], driver: str | None) -> tuple[str, str]:
    """Return why none of the variant's code runs on the first of the GPUs, and advice."""
    gpu = unserved[0]
    if not gpu.usable:
        state = STATES.get(gpu.state, f"is in the state {gpu.state}")
        return f"{gpu.label} {state}", "see the warnings of `imagematrix probe`"
    if gpu.compute is None:
        return f"the compute capability of {gpu.label} is unknown", "probe the host with NVML"
    indices = [str(unserved_gpu.index) for unserved_gpu in unserved if unserved_gpu.compute == gpu.compute]
    only = f"{'GPU' if len(indices) == 1 else 'GPUs'} {drivers.join_words(indices)}"
    advice = f"build a variant for compute {gpu.compute}, and pass only {only}"
    lacking = [code for code in _select_deciding_code(variant, gpu) if _rate_files(code, gpu, driver) is None]
    without = [code for code in lacking if not _describe_compilable_ptx(code, gpu, driver)]
    unless = _suggest_options(variant, lacking, gpu, driver)
    if lacking and not without:
        text = _describe_compilable_ptx(lacking[0], gpu, driver)
        return f"for {gpu.label} {_name_files(lacking[:1])} has {text}{unless}", advice
    why = f"no device code in {_name_files(without)} runs on {gpu.label}, compute capability {gpu.compute}"
    # Parts of a file may have code for the GPU although the file as a whole has none: an entry is the code of
    # the project's own parts, or of PTX only what all parts have.
    more = ""
    if without and any(_rate_files(part, gpu, driver) for part in without[0].parts):
        more = f": {_describe_parts(without[0], gpu, driver)} none, and {REST}"
    return f"{why}{more}{unless}", advice


def _describe_compilable_ptx(code: Code, gpu: Gpu, driver: str | None) -> str | None:
    """Return which PTX a GPU would run with a newer driver, in words; None if there is none."""
    newest = cuda.get_newest_ptx_isa(driver) if driver else None
    limit = f"driver {driver} compiles up to {newest}" if newest else "the driver's limit is unknown"
    isas = [ptx.isa for ptx in code.ptx if gpu.compute and can_compile_ptx(ptx.target, gpu.compute)]
    return f"only PTX of ISA {isas[0]}, and {limit}" if isas else None


def _suggest_options(variant: Variant, lacking: list[Code], gpu: Gpu, driver: str | None) -> str:
    """Return the options for files without code for a GPU, if others of their packages have some."""
    if not lacking or not all(_is_partly_covered(variant, code, gpu, driver) for code in lacking):
        return ""
    from imagematrix.common.text import quote_word

    globs = dict.fromkeys(glob for code in lacking for glob in code.globs or (code.glob,))
    quoted = [glob.replace("'", "'\\''") for glob in globs]
    options = " ".join(f"--optional '{glob}'" for glob in quoted)
    unnamed = sum(code.files - 1 for code in lacking if not code.globs)
    listing = f"`imagematrix verify --json {quote_word(variant.reference)}`"
    more = f", and the same for {unnamed} more that {listing} lists" if unnamed else ""
    guards = "".join(_describe_guard(code, gpu) for code in lacking)
    unused = "if the image does not use this on such GPUs"
    return f"{guards}; {unused}, adopt the image with {options}{more}"


def _describe_guard(code: Code, gpu: Gpu) -> str:
    """Return in words what the package's own sources say about files that have no code for a GPU."""
    if code.guard is None:
        return ""
    where = f"{code.guard.path}:{code.guard.line}"
    if not code.guard.unless:
        return f"; {where} asks for the capability in a way that cannot be evaluated"
    return f"; by {where}, {_name_files([code])} is used on {gpu.compute}"


def _is_partly_covered(variant: Variant, code: Code, gpu: Gpu, driver: str | None) -> bool:
    """Whether other files of the same Python package have code for a GPU, so that these may be optional.

    A program loads a loose cubin by its name, and may be in another package: then any file counts.
    """
    package, slash, _ = code.name.partition("/")
    if not (slash and package):
        return False
    entries = variant.code
    if not code.name.endswith(LOOSE):
        entries = tuple(entry for entry in entries if entry.name.startswith(f"{package}/"))
    return any(_rate_files(entry, gpu, driver) is not None for entry in entries)


RULE = Rule(
    name="device-code",
    facts=("driver.version", "gpus.compute", "gpus.state", "accelerators"),
    parts=("cubins", "device_code", "ptx"),
    fact="cubins",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
    warn=warn,
)
