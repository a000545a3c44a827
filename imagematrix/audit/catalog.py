"""A catalog of audited images.

The entry of an image built by imagematrix comes from its labels, the entry of any other image from its bytes
and its publisher's claims. An image built on a variant of imagematrix inherits the variant's labels, so it
counts as another image.
"""

from __future__ import annotations

from imagematrix.audit import warnings
from imagematrix.audit.contradictions import describe_contradictions, read_claims
from imagematrix.audit.images.libraries import RUNTIME, list_runtimes
from imagematrix.audit.proven_facts import find_proven_facts
from imagematrix.audit.warnings import REQUIRE
from imagematrix.common.image_reference import shorten_name, split_version
from imagematrix.common.record import replace
from imagematrix.errors import AuditError, UsageError
from imagematrix.hardware.vendors import cuda, gpus, requirements, versions
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import (
    BYTES,
    CLAIM,
    PROBABLE,
    UNKNOWN,
    Catalog,
    Ptx,
    UserModeDriver,
    Variant,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from imagematrix.audit.images.image import AuditedImage
    from imagematrix.audit.report import Audit, DriverFile
    from imagematrix.hardware.vendors.requirements import Condition, Expression

OURS = (labels.IMAGE, labels.VERSION, labels.CELL, labels.INPUT)
JETPACK = f"{REQUIRE}JETPACK"  # for Tegra; NVIDIA's runtime ignores it elsewhere
DISABLED = "NVIDIA_DISABLE_REQUIRE"
CUDA_LABEL = "com.nvidia.cuda.version"
CUDA_VARIABLE = "CUDA_VERSION"
LOWER = (">=", ">", "=")  # comparisons that set a lower bound
MAIN = "libcuda"


def make_catalog(
    audits: Iterable[Audit],
    image: str,
    version: str,
    note: Callable[[str], object] = str,
    cpu_flags: frozenset[str] | None = None,
) -> Catalog:
    """Return the catalog `image`:`version` of audited images.

    `cpu_flags` are those that images without labels need, None if their files tell. `note` is called with a
    text for each claim that was ignored, and for each doubt. Raises AuditError if an image contradicts its
    labels or is for AMD's GPUs; UsageError if two images have the same reference, or if their labels disagree
    on the preferred order or the default axes.
    """
    variants: list[Variant] = []
    stated: list[labels.Terms] = []
    for audited in audits:
        variant = read_claims(audited)
        if variant and not _built_on_one(audited.image):
            variants.append(_labelled(audited, variant))
            stated.append(labels.read_terms(audited.image.labels, audited.image.reference))
            continue
        own, ignored = make_unlabelled_entry(audited, cpu_flags)
        for text in (*ignored, *warnings.warn_of_unlabelled(audited, cpu_flags)):
            note(f"{audited.image.reference}: {text}")
        variants.append(_on(own, variant) if variant else own)
    terms = labels.require_equal_terms(f"{image}:{version}", stated)
    adopted = Catalog(
        image=image, version=version, variants=tuple(variants), prefer=terms.prefer, defaults=terms.defaults
    )
    # Names in archives may be anything: reading the catalog back validates them.
    return Catalog.from_json(adopted.to_json(), f"{image}:{version}")


def _labelled(audited: Audit, variant: Variant) -> Variant:
    why = describe_contradictions(audited, variant)
    if why:
        raise AuditError(f"{audited.image.reference}: {why}")
    return replace(
        variant,
        reference=_reference(audited.image),
        digest=audited.image.digest,
        size=audited.image.size,
        facts=tuple(sorted({**dict(variant.facts), **dict(find_proven_facts(audited, variant))}.items())),
        libraries=audited.versions,
    )


def _on(own: Variant, base: Variant) -> Variant:
    """Return the entry of an image that was built on the variant `base`, and so also contains its code.

    The CPU requirements that the compiler reported for `base` still hold; all else may have changed.
    """
    return replace(
        own,
        march=base.march,
        vendor=base.vendor,
        cpu_flags=own.cpu_flags | base.cpu_flags,
        signed_returns=base.signed_returns,
        axes=base.axes,
        partial_flags=own.partial_flags - base.cpu_flags,
        facts=tuple(fact for fact in own.facts if fact[0] != "cpu_flags" or fact[1] == PROBABLE),
    )


def _reference(image: AuditedImage) -> str:
    """Return the name by which an engine finds an image, or its digest if it has no name."""
    own = image.labels
    if all(key in own for key in OURS) and not _built_on_one(image):
        return (
            f"{own[labels.IMAGE]}:{labels.make_tag(own[labels.VERSION], own[labels.CELL], own[labels.INPUT])}"
        )
    return next(iter(image.names), image.digest)


def _built_on_one(image: AuditedImage) -> bool:
    """Whether an image was built on a variant of imagematrix and inherits its labels.

    Variants in the classic image store have no content digest; there, only a different name shows it.
    """
    own = image.labels
    if labels.CONTENT in own or labels.IMAGE not in own or not image.names:
        return image.inherited
    return shorten_name(own[labels.IMAGE]) not in {
        shorten_name(split_version(name)[0]) for name in image.names
    }


def make_unlabelled_entry(
    audited: Audit, cpu_flags: frozenset[str] | None = None
) -> tuple[Variant, tuple[str, ...]]:
    """Return the entry of an image without labels, and the claims of its publisher that cannot be parsed.

    `cpu_flags` are those that it is claimed to need, None if none are claimed.
    Raises AuditError if the image is for AMD's GPUs. What the bytes prove overrides a claim about the same
    need. An image is for GPUs if it has device code, CUDA's runtime or a driver, if its publisher claims a
    CUDA release, or if something else shows that it is; see `doubts.for_gpus`. Its user-mode driver is the
    libcuda that the loader takes, or the host's if there is none.
    """
    image, reference = audited.image, _reference(audited.image)
    if audited.objects and not any(True for _ in audited.gpu_code):
        raise AuditError(f"{reference} is for AMD's GPUs: {', '.join(audited.objects)}")
    expressions, ignored = _expressions(image.environment)
    release, _ = _release(audited, expressions)
    facts = find_sources(audited) | ({} if cpu_flags is None else {"cpu_flags": CLAIM})
    needed = frozenset(audited.flags | audited.probable_flags) if cpu_flags is None else cpu_flags
    driver = _driver(audited) or (UserModeDriver(mode="host") if "driver" in facts else None)
    variant = Variant(
        reference=reference,
        digest=image.digest,
        platform=image.platform,
        cuda=release,
        cubins=audited.cubins,
        ptx=tuple(Ptx(target=target, isa=isa) for target, isa in audited.ptx),
        device_code=audited.device_code,
        compressed_fatbin=audited.compressed,
        driver=driver,
        cpu_flags=needed,
        partial_flags=frozenset(audited.partial_flags if cpu_flags is None else ()),
        size=image.size,
        facts=tuple(sorted(facts.items())),
        requires=tuple(map(requirements.format_requirement, filter(None, map(_settled, expressions)))),
        libraries=audited.versions,
    )
    return variant, ignored


def find_sources(audited: Audit) -> dict[str, str]:
    """Return the source of each need of an image without labels, one of `catalog.SOURCES`.

    An image for CPUs only has no CUDA release and no driver, and the bytes prove that it has no device code.
    """
    release, source = _release(audited, _expressions(audited.image.environment)[0])
    coded = any(True for _ in audited.gpu_code)
    runtime = any(library.name == RUNTIME for library in audited.libraries)
    facts = {"cpu_flags": find_cpu_source(audited, UNKNOWN), "cubins": BYTES}
    if release or _driver(audited) or coded or runtime or warnings.is_for_gpus(audited):
        facts |= {"cubins": audited.source if coded else UNKNOWN, "cuda": source, "driver": BYTES}
    return facts


def find_cpu_source(audited: Audit, undecided: str) -> str:
    """Return the source of the CPU flags that the files of an image need; `undecided` if they do not tell."""
    if audited.decided:
        return BYTES
    return PROBABLE if audited.probable_flags else undecided


def _expressions(environment: Mapping[str, str]) -> tuple[list[Expression], tuple[str, ...]]:
    """Return the requirements in an image's variables, and an error for each that cannot be parsed."""
    expressions: list[Expression] = []
    ignored: list[str] = []
    if environment.get(DISABLED, "").lower() == "true":
        return expressions, ()
    for name, value in sorted(environment.items()):
        if name.startswith(REQUIRE) and not name.startswith(JETPACK):
            try:
                expressions.append(requirements.parse_requirement(value))
            except UsageError as error:
                ignored.append(f"{name}: {error}")
    return expressions, tuple(ignored)


def _settled(expression: Expression) -> Expression:
    """Return an expression without its lower bounds on the CUDA release, which the entry states on its own.

    If an alternative has no other condition, the expression requires nothing more. Its other alternatives are
    for older drivers with the image's cuda-compat, which the audit reads from the bytes.
    """
    left = tuple(
        tuple(condition for condition in alternative if not _bounds(condition)) for alternative in expression
    )
    return left if all(left) else ()


def _bounds(condition: Condition) -> bool:
    return condition.name == "cuda" and condition.compare in LOWER


def _release(audited: Audit, expressions: Iterable[Expression]) -> tuple[str | None, str]:
    """Return the newest CUDA release that an image needs, and its source: bytes, claim or unknown.

    It is a claim if only the names of files for several releases show it.
    """
    proven = [*list_runtimes(audited.libraries), *_compiled(audited), *audited.toolkits]
    proven += [audited.release] if audited.release else []
    if proven:
        return _newest(proven), CLAIM if audited.release else BYTES
    claims = [*_claimed(audited, expressions)]
    return (_newest(claims), CLAIM) if claims else (None, UNKNOWN)


def _newest(releases: Iterable[str]) -> str:
    return max(releases, key=versions.make_sort_key)


def _compiled(audited: Audit) -> Iterator[str]:
    """Yield the releases that compiled the PTX of programs with a statically linked CUDA runtime.

    A toolkit writes PTX of its own ISA version. If several releases share an ISA version, the first counts.
    """
    for found in audited.coded:
        if found.file.static_cudart:
            for _, isa in found.file.code.ptx:
                yield from [name for name, row in cuda.load_releases().items() if row.ptx_isa == isa][:1]


def _claimed(audited: Audit, expressions: Iterable[Expression]) -> Iterator[str]:
    """Yield the CUDA releases that an image's publisher and the frameworks in it claim to need."""
    image = audited.image
    for expression in expressions:
        bounds = [_lower(alternative) for alternative in expression]
        lowest = min((bound for bound in bounds if bound), key=versions.make_sort_key, default=None)
        if lowest:
            yield lowest
    claims = [image.environment.get(CUDA_VARIABLE), image.labels.get(CUDA_LABEL)]
    for text in (*claims, *(framework.cuda for framework in audited.stacks)):
        release = ".".join((text or "").split(".")[:2])
        if versions.RELEASE.fullmatch(release):
            yield release


def _lower(alternative: Iterable[Condition]) -> str | None:
    """Return the lowest CUDA release that satisfies an alternative, or None if it sets no lower bound."""
    releases = [
        condition.value
        for condition in alternative
        if _bounds(condition) and versions.RELEASE.fullmatch(condition.value)
    ]
    return max(releases, key=versions.make_sort_key, default=None)


def _driver(audited: Audit) -> UserModeDriver | None:
    """Return the user-mode driver that the loader takes, or None if it takes none with a known version."""
    loaded = [library for library in audited.drivers if library.loaded and library.driver.name == MAIN]
    return next(filter(None, map(_user_mode, loaded)), None)


def _user_mode(file: DriverFile) -> UserModeDriver | None:
    own = file.driver
    if own.kind == "stub" or own.version is None:
        return None
    if own.kind == "compat":
        note = own.compat
        brands = [gpus.BRANDS[brand] for brand in (note.brands if note else ()) if brand in gpus.BRANDS]
        return UserModeDriver(
            mode="compat",
            version=own.version,
            branches=note.branches if note else (),
            brands=tuple(sorted(brands)),
        )
    return UserModeDriver(mode="exact", version=own.version)
