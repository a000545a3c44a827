"""Warnings about an image and its catalog entry: what does not contradict, but is seldom intended."""

from __future__ import annotations

from imagematrix.audit.binaries import driver_loading
from imagematrix.audit.binaries.host_code import NAMES
from imagematrix.audit.contradictions import MACHINES
from imagematrix.audit.images.libraries import RUNTIME
from imagematrix.audit.report import requires_level
from imagematrix.common.text import shorten_words
from imagematrix.hardware.vendors import cuda, marches, runtime, versions
from imagematrix.images.catalog.catalog import CLAIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from imagematrix.audit.report import Audit, FoundFile
    from imagematrix.images.catalog.catalog import Variant

NO_GPUS = "none"  # value of the runtime's variable for the driver alone
REQUIRE = "NVIDIA_REQUIRE_"
SHOWN = 3  # files or functions that a sentence names


def warn_of_march(audited: Audit, variant: Variant) -> list[str]:
    """Return warnings that the march of an entry had no effect on the code, or that code may need more.

    There are none if the entry has no march, or a march that is its architecture's baseline. Code that is
    proven to need more is a contradiction, not a warning. Code that probably needs more is none if the entry
    states its CPU flags as a claim.
    """
    _, arch = MACHINES.get(variant.platform.split("/")[1], (None, ""))
    baseline = dict(marches.LEVELS)["x86-64-v1"] if arch == "x86_64" else frozenset()
    if variant.march is None or arch not in marches.IGNORED or not variant.cpu_flags - baseline:
        return []
    programs = list(audited.programs)
    return [
        *_without_effect(programs, variant.march),
        *_above(programs, variant, marches.IGNORED[arch]),
        *_probably_above(audited, variant, marches.IGNORED[arch]),
    ]


def _without_effect(programs: list[FoundFile], march: str) -> Iterator[str]:
    # Functions named for CPUs do not count: they are compiled for these CPUs whatever the march.
    hosts = [found.file.host for found in programs]
    plain = all(host and host.whole and not (host.required or host.undecided) for host in hosts)
    if programs and plain and not any(requires_level(found.file) for found in programs):
        paths = shorten_words([found.path for found in programs], SHOWN)
        remedy = "pass {{ cflags }} of the template to the compiler"
        yield f"-march={march} shows no effect: nothing in {paths} is beyond the baseline; {remedy}"


def _above(programs: list[FoundFile], variant: Variant, ignored: AbstractSet[str]) -> Iterator[str]:
    for found in programs:
        host = found.file.host
        if host is None or set(host.signs) - {NAMES}:  # the file detects the CPU, so it may choose
            continue
        above = sorted(host.undecided - host.probable - variant.cpu_flags - ignored)
        if above:
            names = shorten_words(
                sorted({name for flag in above for name in host.functions[flag].names}), SHOWN
            )
            where = f" in {names}" if names else ""
            yield (
                f"{found.path} has code beyond -march={variant.march}{where}: {' '.join(above)}; "
                "nothing shows that it checks the CPU before using it"
            )


def _probably_above(audited: Audit, variant: Variant, ignored: AbstractSet[str]) -> Iterator[str]:
    if ("cpu_flags", CLAIM) in variant.facts:
        return
    for path, flags in _by_path(audited.probable_flags, variant.cpu_flags | ignored):
        yield (
            f"most of {path} is compiled for CPUs with {' '.join(flags)}, beyond -march={variant.march}, "
            "so the image counts as one that needs them; if it asks for the CPU before it runs that code, "
            "state `cpu_code: claim` at the image in matrix.yaml"
        )


def _by_path(flags: Mapping[str, str], known: AbstractSet[str]) -> list[tuple[str, list[str]]]:
    """Return the flags that are not `known` by the path of the file that has them, both sorted."""
    found: dict[str, list[str]] = {}
    for flag, path in sorted(flags.items()):
        if flag not in known:
            found.setdefault(path, []).append(flag)
    return sorted(found.items())


def _of_cpu(audited: Audit) -> Iterator[str]:
    """Yield a warning for each file of an image without labels that probably, or partly, needs CPU flags."""
    proven = audited.flags.keys()
    for path, flags in _by_path(audited.probable_flags, frozenset()):
        yield (
            f"most of {path} is compiled for CPUs with {' '.join(flags)}, so the image counts as one that "
            "needs them; if it asks for the CPU before it runs that code, adopt the image "
            f"with --cpu-flags {','.join(sorted(proven)) or 'none'}"
        )
    for path, flags in _by_path(audited.partial_flags, frozenset()):
        yield (
            f"the larger part of {path} is compiled for CPUs with {' '.join(flags)}, but the image counts as "
            "one that runs without them: nothing proves that it asks for the CPU before it runs that code"
        )


def _of_claimed(audited: Audit, claimed: AbstractSet[str]) -> Iterator[str]:
    for path, flags in _by_path(audited.flags, claimed):
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
    own = variant.driver.version if variant.driver else None
    admitted = own or (variant.cuda and cuda.get_lowest_driver(variant.cuda, variant.oldest_driver))
    for library in audited.libraries:
        oldest = library.oldest_driver
        if library.name == RUNTIME and oldest and admitted and _older(admitted, oldest):
            has = f"the image has driver {own}" if own else f"CUDA {variant.cuda} admits driver {admitted}"
            yield (
                f"{library.path} is the runtime of CUDA {library.version}, which needs driver {oldest} "
                f"or newer, and {has}"
            )


def _older(driver: str, other: str) -> bool:
    return versions.make_sort_key(driver) < versions.make_sort_key(other)


def warn_of_unlabelled(audited: Audit, cpu_flags: frozenset[str] | None = None) -> Iterator[str]:
    """Yield a warning for an image without labels whose CUDA release nothing but its newest files shows.

    Yield others for CPU flags; `cpu_flags` are those that it is claimed to need. Yield another for an image
    that counts as CPU-only and has a program with the name of libcuda. Many such programs work without a GPU,
    too: ffmpeg, UCX and hwloc load libcuda if there is one.
    """
    yield from _of_cpu(audited) if cpu_flags is None else _of_claimed(audited, cpu_flags)
    cudart = any(library.name == RUNTIME for library in audited.libraries)
    if audited.release:
        yield (
            f"nothing else shows the CUDA release that the image is for: of its files for several releases, "
            f"only those for the newest count, {audited.release}"
        )
    if any(True for _ in audited.coded) or audited.drivers or cudart or is_for_gpus(audited):
        return
    paths = [
        found.path
        for found in audited.files
        if found.own and found.file.names_cuda and not found.file.packaged
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
    own = (found.file for found in audited.files if found.own and not found.file.packaged)
    return (
        any(driver_loading.loads_driver(file.needed) for file in own) or _compiles(audited) or _asks(audited)
    )


def _compiles(audited: Audit) -> bool:
    return any(
        found.file.names_cuda and found.package in audited.for_cuda and not found.test
        for found in audited.files
    )


def _asks(audited: Audit) -> bool:
    environment = audited.image.environment
    visible = runtime.requests_gpus(environment) and environment[runtime.VISIBLE] != NO_GPUS
    return visible or any(name.startswith(REQUIRE) for name in environment)
