"""Warnings about an image and its catalog entry: what does not contradict, but is seldom intended."""

from __future__ import annotations

from imagematrix.audit.binaries import driver_loading
from imagematrix.audit.binaries.host_code import NAMES
from imagematrix.audit.binaries.library_versions import LINKED as NCCL
from imagematrix.audit.contradictions import (
    get_machine,
    get_oldest_admitted_driver,
    group_by_path,
    list_known_flags,
)
from imagematrix.audit.images.libraries import RUNTIME
from imagematrix.audit.report import requires_level
from imagematrix.audit.runtime_requirements import REQUIRE, parse_requirements
from imagematrix.common.text import shorten_words
from imagematrix.hardware.vendors import cuda, marches, runtime, versions
from imagematrix.images.catalog.catalog import BYTES, CLAIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from imagematrix.audit.report import Audit, ExaminedFile
    from imagematrix.hardware.vendors.requirements import Expression
    from imagematrix.images.catalog.catalog import UserModeDriver, Variant

NO_GPUS = "none"  # value of the runtime's variable for the driver alone
SHOWN = 3  # files or functions that a sentence names


def warn_of_march(audited: Audit, variant: Variant) -> list[str]:
    """Return warnings that the march of an entry had no effect on the code, or that code may need more.

    There are none if the entry has no march. A march that is its architecture's baseline has no effect to
    show. Code that is proven to need more is a contradiction, not a warning. Code that probably needs more is
    none if the entry states its CPU flags as a claim.
    """
    _, arch = get_machine(variant.platform)
    if variant.march is None or arch not in marches.IGNORED:
        return []
    baseline = dict(marches.LEVELS)["x86-64-v1"] if arch == "x86_64" else frozenset()
    programs = list(audited.programs)
    return [
        *(_warn_of_no_effect(programs, variant.march) if variant.cpu_flags - baseline else ()),
        *_warn_of_code_above(programs, variant),
        *_warn_of_code_probably_above(audited, variant),
    ]


def _warn_of_no_effect(programs: list[ExaminedFile], march: str) -> Iterator[str]:
    # Functions named for CPUs do not count: they are compiled for these CPUs whatever the march.
    hosts = [examined.file.host for examined in programs]
    plain = all(host and host.whole and not (host.required or host.undecided_flags) for host in hosts)
    if programs and plain and not any(requires_level(examined.file) for examined in programs):
        paths = shorten_words([examined.path for examined in programs], SHOWN)
        remedy = "pass {{ cflags }} of the template to the compiler"
        yield f"-march={march} shows no effect: nothing in {paths} is beyond the baseline; {remedy}"


def _warn_of_code_above(programs: list[ExaminedFile], variant: Variant) -> Iterator[str]:
    known = list_known_flags(variant)
    for examined in programs:
        host = examined.file.host
        if host is None or set(host.signs) - {NAMES}:  # the file detects the CPU, so it may choose
            continue
        above = sorted(host.undecided_flags - host.probable - known)
        if above:
            names = shorten_words(
                sorted({name for flag in above for name in host.functions[flag].names}), SHOWN
            )
            where = f" in {names}" if names else ""
            yield (
                f"{examined.path} has code beyond -march={variant.march}{where}: {' '.join(above)}; "
                "nothing shows that it checks the CPU before using it"
            )


def _warn_of_code_probably_above(audited: Audit, variant: Variant) -> Iterator[str]:
    if ("cpu_flags", CLAIM) in variant.facts:
        return
    for path, flags in group_by_path(audited.probable_flags, list_known_flags(variant)):
        yield (
            f"most of {path} is compiled for CPUs with {' '.join(flags)}, beyond -march={variant.march}, "
            "so the image counts as one that needs them; if it asks for the CPU before it runs that code, "
            "state `cpu_code: claim` at the image in matrix.yaml"
        )


def _warn_of_unproven_flags(audited: Audit) -> Iterator[str]:
    """Yield a warning for each file of an image without labels that probably, or partly, needs CPU flags."""
    proven = audited.flags.keys()
    for path, flags in group_by_path(audited.probable_flags, frozenset()):
        yield (
            f"most of {path} is compiled for CPUs with {' '.join(flags)}, so the image counts as one that "
            "needs them; if it asks for the CPU before it runs that code, adopt the image "
            f"with --cpu-flags {','.join(sorted(proven)) or 'none'}"
        )
    for path, flags in group_by_path(audited.partial_flags, frozenset()):
        yield (
            f"much of {path} is compiled for CPUs with {' '.join(flags)}, but the image counts as "
            "one that runs without them: nothing proves that it asks for the CPU before it runs that code"
        )


def _warn_of_lacking_claim(audited: Audit, claimed: AbstractSet[str]) -> Iterator[str]:
    for path, flags in group_by_path(audited.flags, claimed):
        yield (
            f"{path} is proven to need {' '.join(flags)}, which the stated flags lack: a program that loads "
            "it ends with SIGILL on CPUs without them"
        )


def warn_of_runtime(audited: Audit, variant: Variant) -> Iterator[str]:
    """Yield a warning for each runtime that needs a newer driver than the labels require.

    A program fails with error 35 if the driver is older than the first driver for the runtime's major
    release: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html. It is not a
    contradiction, because the image's program may never load this runtime.
    """
    driver = variant.driver.version if variant.driver else None
    admitted = get_oldest_admitted_driver(variant)
    for library in audited.libraries:
        oldest = library.oldest_driver
        if library.name != RUNTIME or not oldest or not admitted:
            continue
        if versions.make_sort_key(admitted) < versions.make_sort_key(oldest):
            has = (
                f"the image has driver {driver}"
                if driver
                else f"CUDA {variant.cuda} admits driver {admitted}"
            )
            yield (
                f"{library.path} is the runtime of CUDA {library.version}, which needs driver {oldest} "
                f"or newer, and {has}"
            )


def warn_of_nvml(driver: UserModeDriver | None, versions: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    """Yield a warning if NCCL is in an image whose driver comes without NVML.

    NCCL loads libnvidia-ml when it starts, and ends with an error without it; see ncclNvmlEnsureInitialized
    in its src/misc/nvmlwrap.cc. It has to be that of the node's driver, which no image for several drivers
    can bring. `versions` are those of the libraries in the image.
    """
    if driver is None or driver.mode != "compat":
        return
    for version in [version for name, version in versions if name == NCCL]:
        library = f"NCCL {version}" if version else "NCCL"
        yield (
            f"{library} ends with an error where it finds no libnvidia-ml of the node's driver, and "
            "cuda-compat has none: use an exact variant, or let NVIDIA's runtime add the node's driver"
        )


def warn_of_requirements(audited: Audit, variant: Variant) -> Iterator[str]:
    """Yield a warning for each NVIDIA_REQUIRE_* that asks for a newer driver than the code.

    NVIDIA's runtime compares it where it adds the node's driver. An image with a driver of its own is started
    without that, so its requirements do not count.
    """
    oldest = None if variant.driver and variant.driver.version else _find_oldest_driver_of_code(variant)
    if oldest is None:
        return
    for name, expression in parse_requirements(audited.image.environment)[0].items():
        asked = _find_oldest_driver_asked(expression)
        if asked and versions.make_sort_key(asked) > versions.make_sort_key(oldest):
            yield (
                f"{name} asks for driver {asked} or newer, and the code runs from driver {oldest} on: where "
                f"NVIDIA's runtime adds the node's driver, it refuses the drivers between; state "
                f'ENV {name}="driver>={oldest}" in the Dockerfile'
            )


def _find_oldest_driver_of_code(variant: Variant) -> str | None:
    """Return the oldest driver with which some of the code runs, None if bytes and labels do not tell."""
    admitted = get_oldest_admitted_driver(variant)
    if admitted is None or dict(variant.facts).get("cuda", BYTES) != BYTES:
        return None
    needed = [admitted, *([cuda.COMPRESSED_FATBIN_DRIVER] if variant.compressed_fatbin else [])]
    for code in variant.code:
        if code.ptx and not code.cubins:  # the driver compiles it, which minor versions do not cover
            needed += cuda.list_drivers_that_compile(ptx.isa for ptx in code.ptx)[:1]
    return max(needed, key=versions.make_sort_key)


def _find_oldest_driver_asked(expression: Expression) -> str | None:
    """Return the oldest driver of the alternatives for any GPU; None if they ask for none."""
    firsts = cuda.list_first_drivers()
    asked = []
    for alternative in expression:
        if any(condition.name in ("arch", "brand") for condition in alternative):
            continue
        bounds = ["0.0"]
        for condition in alternative:
            if condition.compare in (">=", ">", "="):
                release = condition.name == "cuda"
                bounds.append(firsts.get(condition.value, "0.0") if release else condition.value)
        asked.append(max(bounds, key=versions.make_sort_key))
    return min(asked, key=versions.make_sort_key, default=None)


def warn_of_unlabelled(audited: Audit, cpu_flags: frozenset[str] | None = None) -> Iterator[str]:
    """Yield a warning for an image without labels whose CUDA release nothing but its newest files shows.

    Yield others for CPU flags; `cpu_flags` are those that it is claimed to need. Yield another for an image
    that counts as CPU-only and has a program with the name of libcuda. Many such programs work without a GPU,
    too: ffmpeg, UCX and hwloc load libcuda if there is one.
    """
    yield from (
        _warn_of_unproven_flags(audited) if cpu_flags is None else _warn_of_lacking_claim(audited, cpu_flags)
    )
    cudart = any(library.name == RUNTIME for library in audited.libraries)
    if audited.release:
        yield (
            f"nothing else shows the CUDA release that the image is for: of its files for several releases, "
            f"only those for the newest count, {audited.release}"
        )
    if any(True for _ in audited.coded_files) or audited.drivers or cudart or is_for_gpus(audited):
        return
    paths = [
        examined.path
        for examined in audited.files
        if examined.is_own and examined.file.names_cuda and not examined.file.packaged
    ]
    if paths:
        yield (
            f"{shorten_words(paths, 1)} may load libcuda when it runs, but the image has no device code, "
            "so it counts as an image for CPUs"
        )


def is_for_gpus(audited: Audit) -> bool:
    """Whether an image without device code is for GPUs.

    A program or a library needs libcuda or a compiler for device code by its dynamic section, a Python
    package that is only for CUDA loads one of them by its name, or the environment asks for GPUs. Files of
    NVIDIA's, and those of the distribution's packages, tell nothing about the image's own programs.
    """
    for examined in audited.files:
        if (
            examined.is_own
            and not examined.file.packaged
            and driver_loading.loads_driver(examined.file.needed)
        ):
            return True
        if examined.file.names_cuda and examined.package in audited.for_cuda and not examined.is_test:
            return True
    environment = audited.image.environment
    asks_for_gpus = runtime.requests_gpus(environment) and environment[runtime.VISIBLE] != NO_GPUS
    return asks_for_gpus or any(name.startswith(REQUIRE) for name in environment)
