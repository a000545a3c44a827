"""The audit compared with an image's labels: broken promises, and needs that no label states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial

from imagematrix.audit.binaries.driver_file import describe_driver
from imagematrix.audit.binaries.elf import AARCH64, X86_64
from imagematrix.audit.images import device_code_entries
from imagematrix.audit.images.image import AuditedImage
from imagematrix.audit.report import audit_image
from imagematrix.common.groups import group_values
from imagematrix.errors import AuditError, UsageError
from imagematrix.hardware.vendors import cuda, device_code, marches, runtime, versions
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import CLAIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from imagematrix.audit.images.layer import Layer
    from imagematrix.audit.report import Audit, DriverFile
    from imagematrix.images.catalog.catalog import Code, UserModeDriver, Variant

# By the architecture of a platform: the machine number in ELF headers, and the name in the kernel.
MACHINES = {"amd64": (X86_64, "x86_64"), "arm64": (AARCH64, "aarch64")}
# By fact, the words of a message: what the labels promise, and the verb before what a file has instead.
WORDS = {
    "platform": ("programs for", "is for"),
    "driver": ("the user-mode driver", "has"),
    "cuda": ("a driver for CUDA", "has device code of"),
    "cubins": ("cubins for", "has"),
    "device_code": ("device code for", "has"),
    "ptx": ("PTX for", "has"),
    "device code": ("device code that is", "has some that is"),
    "cpu_flags": ("code for", "needs"),
    "libraries": ("the library", "has"),
}
COMPILED_LATER = (
    "state `device_code: claim` in matrix.yaml if programs compile their device code when they run"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A claim about a `fact` of the catalog entry, the values found instead, and the file that proves it.

    `path` is None if the proof is that no such file exists, or the image's configuration. `remedy` is what to
    do if the labels are right. `optional` is the glob that would state the file as optional; see
    `_make_finder_of_optional_globs`. `sentence` is the message where no words of WORDS make it.
    """

    fact: str
    claimed: tuple[str, ...]
    actual: tuple[str, ...]
    path: str | None
    remedy: str | None = None
    optional: str | None = None
    sentence: str | None = None

    def __str__(self) -> str:
        if self.sentence:
            return self.sentence
        noun, verb = WORDS[self.fact]
        promise = f"{noun} {' '.join(self.claimed)}" if self.claimed else f"no {noun.removeprefix('the ')}"
        where = self.path or (self.actual and "the image")
        proof = f"{where} {verb} {' '.join(self.actual) or 'none'}" if where else "there is none"
        return f"the labels promise {promise}, but {proof}"


def get_machine(platform: str) -> tuple[int | None, str]:
    """Return the machine of ELF headers and the kernel's name of it for a platform such as linux/amd64.

    They are None and "" for an unknown platform.
    """
    return MACHINES.get(platform.split("/")[1], (None, ""))


def get_oldest_admitted_driver(variant: Variant) -> str | None:
    """Return the oldest driver with which a selection admits an entry: the image's own, or CUDA's lowest."""
    if variant.driver and variant.driver.version:
        return variant.driver.version
    return cuda.get_lowest_driver(variant.cuda, variant.oldest_driver) if variant.cuda else None


def suggest_remedy(broken: Sequence[Contradiction]) -> str | None:
    """Return what to do about contradictions if the labels are right."""
    globs = [contradiction.optional for contradiction in broken]
    if any(globs) and None not in globs:
        quoted = ", ".join(f'"{glob}"' for glob in dict.fromkeys(globs) if glob)
        return (
            "if the image does not use this on such GPUs, state "
            f"`optional_device_code: [{quoted}]` at the image in matrix.yaml"
        )
    return next(filter(None, (contradiction.remedy for contradiction in broken)), None)


def read_claims(audited: Audit) -> Variant | None:
    """Return the catalog entry in an image's labels, or None if there is none; raise AuditError."""
    image = audited.image
    if labels.VARIANT not in image.labels:
        return None
    try:
        # The image's reference may be a path, which is not valid in a catalog.
        return labels.read_variant(image.labels, reference=image.digest, digest=image.digest, size=None)
    except UsageError as error:
        raise AuditError(f"{image.reference}: the labels are damaged: {error}") from error


def audit_layers(layers: Iterable[Layer], variant: Variant, optional: Sequence[str] = ()) -> Audit:
    """Return the audit of the image that `variant` describes, from its layers, the lowest first.

    `optional` are globs of files whose device code some GPUs do not use.
    """
    image = AuditedImage(
        reference=variant.reference,
        digest=variant.digest or "",
        platform=variant.platform,
        layers=tuple(layers),
    )
    return audit_image(image, optional)


def describe_contradictions(audited: Audit, variant: Variant) -> str:
    """Return a text about everything in an image that contradicts `variant`, "" if nothing does."""
    return "; ".join(map(str, find_contradictions(audited, variant)))


def find_contradictions(audited: Audit, variant: Variant) -> list[Contradiction]:
    """Return what in an image contradicts the catalog entry `variant`. Extra code is no contradiction."""
    return [
        *_compare_content(audited.image),
        *_compare_platform(audited, variant),
        *_compare_environment(audited, variant),
        *_compare_driver(audited, variant),
        *_find_unproven_code(audited, variant),
        *_compare_cubins_and_ptx(audited, variant),
        *_compare_device_code(audited, variant),
        *_compare_toolkits(audited, variant),
        *_compare_cpu_flags(audited, variant),
        *_compare_libraries(audited, variant),
    ]


def _compare_content(image: AuditedImage) -> Iterator[Contradiction]:
    """Yield the digest of its content if an image was built on a variant and has taken its name.

    Under another name it is an image of its own, which keeps what the labels promise.
    """
    has_its_name = any(labels.is_named(image.labels, name) for name in (image.reference, *image.names))
    if image.inherited and has_its_name:
        yield Contradiction(
            fact="content",
            claimed=(image.labels[labels.CONTENT],),
            actual=(),
            path=None,
            sentence="the image is not the variant of its name, but was built on the variant",
        )


def _compare_platform(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    # An engine that has a base image only for another platform builds on it without a warning. A few programs
    # for other machines are normal, such as cross compilers and emulators, so the majority decides; a tie
    # proves nothing.
    machine, _ = get_machine(variant.platform)
    architectures = dict(MACHINES.values())
    programs = [
        examined
        for examined in audited.files
        if examined.file.machine in architectures and examined.file.linked
    ]
    counts = Counter(examined.file.machine for examined in programs)
    if machine is None or counts[machine] == max(counts.values(), default=0):
        return
    example = next(examined for examined in programs if examined.file.machine != machine)
    actual = architectures[example.file.machine or 0]
    yield Contradiction(fact="platform", claimed=(variant.platform,), actual=(actual,), path=example.path)


def _compare_environment(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    """Yield the variable that makes NVIDIA's runtime add the node's GPUs and driver, if nothing needs them.

    Where no launch of ours sets it, such an image would get every GPU, and a second driver.
    """
    environment = audited.image.environment
    if runtime.requests_gpus(environment) and not (variant.driver and variant.driver.mode == "host"):
        variable = f"{runtime.VISIBLE}={environment[runtime.VISIBLE]}"
        yield Contradiction(
            fact="environment",
            claimed=(),
            actual=(variable,),
            path=None,
            sentence=f"the image needs nothing from NVIDIA's runtime, but asks it by {variable}",
        )


def _compare_driver(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    promised = variant.driver.version if variant.driver and variant.driver.mode != "host" else None
    claimed: tuple[str, ...] = (promised,) if promised else ()
    real = [library for library in audited.drivers if library.driver.kind != "stub"]
    main = [library for library in real if library.driver.name == "libcuda"]
    for library in real:
        version = library.driver.version or "of an unknown version"
        if (version,) != claimed:
            yield Contradiction(fact="driver", claimed=claimed, actual=(version,), path=library.path)
    if claimed and not main:
        yield Contradiction(fact="driver", claimed=claimed, actual=(), path=None)

    copies = [library for library in main if (library.driver.version,) == claimed]
    for library in copies[1:]:  # the loader might take a second copy, even one of the same version
        actual = tuple(f"{claimed[0]} in {copy.path}" for copy in copies)
        yield Contradiction(fact="driver", claimed=claimed, actual=actual, path=library.path)

    if variant.driver and variant.driver.mode == "compat":
        yield from _compare_compat(main, variant.driver)


def _compare_compat(libcudas: Sequence[DriverFile], promised: UserModeDriver) -> Iterator[Contradiction]:
    """Yield what is promised of cuda-compat and not in its note, and that the loader does not find it."""
    for library in libcudas:
        noted = describe_driver(library.driver)
        for word, claimed, actual in (
            ("branch", promised.branches, noted.branches),
            ("brand", promised.brands, noted.brands),
        ):
            if not {*claimed} <= {*actual}:
                yield Contradiction(
                    fact="driver",
                    claimed=tuple(f"for {word} {item}" for item in sorted({*claimed})),
                    actual=tuple(f"for {word} {item}" for item in sorted({*actual})),
                    path=library.path,
                )
    if libcudas and not any(library.loaded for library in libcudas):
        yield Contradiction(
            fact="driver",
            claimed=(f"{promised.version}, found by the dynamic loader",),
            actual=(),
            path=libcudas[0].path,
            sentence=f"the dynamic loader does not find {libcudas[0].path}",
            remedy="in the template, pass version=driver to linker_cache_stage, and copy the stage's cache",
        )


def _find_unproven_code(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    """Yield what is promised if no file shows any device code.

    Only an explicit claim allows it: that the image's programs compile their code when they run.
    """
    has_code = any(True for _ in audited.gpu_code)
    if has_code or not variant.gpu or dict(variant.facts).get("cubins") == CLAIM:
        return
    if variant.cubins or not variant.ptx:
        promised = variant.cubins or ("a GPU",)
        yield Contradiction(fact="cubins", claimed=promised, actual=(), path=None, remedy=COMPILED_LATER)
    if variant.ptx:
        promised = tuple(f"{ptx.target} ISA {ptx.isa}" for ptx in variant.ptx)
        yield Contradiction(fact="ptx", claimed=promised, actual=(), path=None, remedy=COMPILED_LATER)


def _compare_device_code(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    """Yield the files without code for GPUs that all entries of the exact device code serve."""
    find_optional_glob = _make_finder_of_optional_globs(
        audited, lambda code: not device_code_entries.find_lacking(code, variant.code)
    )
    for unit in audited.gpu_code if variant.device_code else ():
        entry = device_code_entries.make_entry(unit.name, unit.code, guard=unit.guard)
        computes = device_code_entries.find_lacking(entry, variant.code)
        if computes:
            texts = tuple(f"PTX {ptx.target} ISA {ptx.isa}" for ptx in entry.ptx)
            yield Contradiction(
                fact="device_code",
                claimed=computes,
                actual=entry.cubins + texts,
                path=unit.path,
                optional=find_optional_glob(entry),
            )


def _make_finder_of_optional_globs(
    audited: Audit, runs: Callable[[Code], bool]
) -> Callable[[Code], str | None]:
    """Return a function that finds the glob that states a file as optional.

    Some other file of its Python package has code that `runs`. The glob is None if none has, "" if the file's
    own code runs.
    """
    units = group_values((_get_package(unit.name), unit) for unit in audited.gpu_code)

    @cache  # many files of a package may contradict
    def has_running_code(package: str) -> bool:
        codes = (device_code_entries.make_entry(unit.name, unit.code) for unit in units[package])
        return package != "" and any(map(runs, codes))

    def find_glob(code: Code) -> str | None:
        if runs(code):
            return ""
        return code.glob if has_running_code(_get_package(code.name)) else None

    return find_glob


def _get_package(name: str) -> str:
    """Return the folder at the top of a name, "" for a file of no Python package."""
    package, slash, _ = name.partition("/")
    return package if slash else ""


def _compare_toolkits(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    """Yield the newest compiler of cubins if the labels admit a driver too old for its family of releases."""
    newest = max(audited.toolkits, key=versions.make_sort_key, default=None)
    oldest = newest and cuda.get_lowest_driver(newest)
    admitted = get_oldest_admitted_driver(variant)
    if (
        newest
        and oldest
        and variant.cuda
        and admitted
        and versions.make_sort_key(admitted) < versions.make_sort_key(oldest)
    ):
        actual = (f"CUDA {newest}", f"for driver {oldest} or newer")
        yield Contradiction(
            fact="cuda", claimed=(variant.cuda,), actual=actual, path=audited.toolkits[newest]
        )


def _compare_cubins_and_ptx(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    for found in audited.files:
        if found.is_own and found.file.code.damaged and found.file.linked:
            yield Contradiction(fact="device code", claimed=("whole",), actual=("damaged",), path=found.path)
    computes = {compute for target in variant.cubins for compute in device_code.expand_target(target)}
    driver = variant.driver.version if variant.driver else None
    runs = partial(
        device_code_entries.serves_all,
        computes=computes,
        newest=cuda.get_newest_ptx_isa(driver) if driver else None,
    )
    find_optional_glob = _make_finder_of_optional_globs(audited, runs)
    present = {device_code.get_capability(target) for unit in audited.gpu_code for target in unit.code.cubins}
    for unit in audited.gpu_code:
        code = unit.code
        # Code for an older GPU also runs, but at least one file must have code for the target in the labels.
        broken = [
            target
            for target in variant.cubins
            if device_code_entries.lacks_cubin(code, target, unit.guard)
            or device_code.get_capability(target) not in present
        ]
        if broken:
            actual = tuple(sorted(code.cubins, key=device_code.make_sort_key))
            entry = device_code_entries.make_entry(unit.name, code, guard=unit.guard)
            yield Contradiction(
                fact="cubins",
                claimed=tuple(broken),
                actual=actual,
                path=unit.path,
                remedy=_suggest_older_compute(broken, actual),
                optional=find_optional_glob(entry),
            )

        for promise in variant.ptx:
            compute = device_code.get_capability(promise.target)
            # PTX for a family or a feature set, 90a, runs only where it is promised as it is.
            isas = [
                isa
                for target, isa in device_code_entries.find_common_ptx([code])
                if target == promise.target
                or (target.isdigit() and device_code.can_compile_ptx(target, compute))
            ]
            if not any(versions.make_sort_key(isa) <= versions.make_sort_key(promise.isa) for isa in isas):
                texts = tuple(f"{target} ISA {isa}" for target, isa in sorted(code.ptx))
                claimed = (f"{promise.target} ISA {promise.isa}",)
                yield Contradiction(fact="ptx", claimed=claimed, actual=texts, path=unit.path)


def _suggest_older_compute(claimed: Iterable[str], actual: Iterable[str]) -> str | None:
    """Return the advice to claim the newest of the `actual` cubins that run on all GPUs of the `claimed`."""
    computes = [device_code.get_capability(target) for target in claimed]
    runs = [
        target for target in actual if all(device_code.can_run_cubin(target, compute) for compute in computes)
    ]
    if not runs:
        return None
    older = device_code.get_capability(max(runs, key=device_code.make_sort_key))
    return f"use compute {older} in the matrix: such an image runs on {', '.join(computes)}, too"


def _compare_cpu_flags(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    _, arch = get_machine(variant.platform)
    # A march that needs no flags, such as armv8-a, is a promise like any other.
    promises = variant.march is not None or variant.cpu_flags
    if not promises or arch not in marches.IGNORED:
        return
    claimed = (marches.get_level(variant.cpu_flags) or variant.march or "others",)
    for path, flags in group_by_path(audited.flags, list_known_flags(variant)):
        yield Contradiction(fact="cpu_flags", claimed=claimed, actual=tuple(flags), path=path)


def list_known_flags(variant: Variant) -> frozenset[str]:
    """Return the CPU flags that code of an entry may need: those that its hosts have, and those ignored.

    Those for signing are ignored only in the promise of an entry that does not sign: code that needs them
    ends with SIGILL on CPUs without.
    """
    _, arch = get_machine(variant.platform)
    signing = marches.SIGNING if variant.signed_returns else frozenset()
    return (variant.cpu_flags | marches.IGNORED.get(arch, frozenset())) - marches.SIGNING | signing


def group_by_path(flags: Mapping[str, str], known: AbstractSet[str]) -> list[tuple[str, list[str]]]:
    """Return the CPU flags that are not `known` by the path of the file that has them, both sorted."""
    return sorted(
        group_values((path, flag) for flag, path in sorted(flags.items()) if flag not in known).items()
    )


def _compare_libraries(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    """Yield each library of a known version that the image lacks, or has in another known version."""
    versions_by_name = dict(audited.versions)
    paths = {library.name: library.path for library in audited.libraries if library.stated}
    for name, promised in variant.libraries or ():
        version = versions_by_name.get(name)
        if promised and version != promised and (version or name not in versions_by_name):
            actual = (f"{name} {version}",) if version else ()
            yield Contradiction(
                fact="libraries", claimed=(f"{name} {promised}",), actual=actual, path=paths.get(name)
            )
