"""A catalog of audited images.

The entry of an image built by imagematrix comes from its labels, the entry of any other image from its bytes
and its publisher's claims. An image built on a variant of imagematrix inherits the variant's labels, so it
counts as another image.
"""

from __future__ import annotations

from imagematrix.audit import warnings
from imagematrix.audit.binaries.driver_file import describe_driver
from imagematrix.audit.contradictions import describe_contradictions, read_claims
from imagematrix.audit.images.libraries import RUNTIME, list_runtimes
from imagematrix.audit.proven_facts import find_proven_facts
from imagematrix.audit.runtime_requirements import CUDA_VERSION, list_runtime_requires, parse_requirements
from imagematrix.common.image_reference import shorten_name, split_version
from imagematrix.common.record import replace
from imagematrix.errors import AuditError, UsageError
from imagematrix.hardware.vendors import cuda, marches, requirements, versions
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
    from collections.abc import Callable, Iterable, Iterator

    from imagematrix.audit.images.image import AuditedImage
    from imagematrix.audit.report import Audit
    from imagematrix.hardware.vendors.requirements import Condition, Expression

OURS = (labels.IMAGE, labels.VERSION, labels.CELL, labels.INPUT)
CUDA_LABEL = "com.nvidia.cuda.version"
LOWER = (">=", ">", "=")  # comparisons that set a lower bound
MAIN = "libcuda"


def make_catalog(
    audits: Iterable[Audit],
    image: str,
    version: str,
    on_doubt: Callable[[str], object] = str,
    cpu_flags: frozenset[str] | None = None,
) -> Catalog:
    """Return the catalog `image`:`version` of audited images.

    `cpu_flags` are those that images without labels need, None if their files tell. `on_doubt` is called with
    a text for each claim that was ignored, and for each doubt. Raises AuditError if an image contradicts its
    labels or is for AMD's GPUs; UsageError if two images have the same reference, if their labels disagree on
    the preferred order or the default axes, or if one has the caches of a warm image, which are for certain
    hardware only.
    """
    variants: list[Variant] = []
    terms_of_variants: list[labels.Terms] = []
    for audited in audits:
        variant = read_claims(audited)
        if variant and not _is_built_on_variant(audited.image):
            variants.append(_make_labelled_entry(audited, variant))
            terms_of_variants.append(labels.read_terms(audited.image.labels, audited.image.reference))
            continue
        if labels.WARM in audited.image.labels:
            message = (
                f"{audited.image.reference} is a warm image or built on one: its caches are for some nodes"
            )
            raise UsageError(message, remedy="adopt the variant, or an image that is built on the variant")
        entry, ignored = make_unlabelled_entry(audited, cpu_flags)
        for text in (*ignored, *warnings.warn_of_unlabelled(audited, cpu_flags)):
            on_doubt(f"{audited.image.reference}: {text}")
        variants.append(_add_base(entry, variant) if variant else entry)
    terms = labels.require_equal_terms(f"{image}:{version}", terms_of_variants)
    adopted = Catalog(
        image=image,
        version=version,
        variants=tuple(variants),
        prefer=terms.prefer,
        defaults=terms.defaults,
        default_order=terms.default_order,
    )
    # Names in archives may be anything: reading the catalog back validates them.
    return Catalog.from_json(adopted.to_json(), f"{image}:{version}")


def _make_labelled_entry(audited: Audit, variant: Variant) -> Variant:
    contradictions = describe_contradictions(audited, variant)
    if contradictions:
        raise AuditError(f"{audited.image.reference}: {contradictions}")
    return replace(
        variant,
        reference=_name_image(audited.image),
        digest=audited.image.digest,
        size=audited.image.size,
        facts=tuple(sorted({**dict(variant.facts), **dict(find_proven_facts(audited, variant))}.items())),
        libraries=audited.versions,
        runtime_requires=list_runtime_requires(audited.image.environment),
    )


def _add_base(entry: Variant, base: Variant) -> Variant:
    """Return the entry of an image that was built on the variant `base`, and so also contains its code.

    The CPU requirements that the compiler reported for `base` still hold; all else may have changed.
    """
    return replace(
        entry,
        march=base.march,
        vendor=base.vendor,
        cpu_flags=entry.cpu_flags | base.cpu_flags,
        signed_returns=entry.signed_returns or base.signed_returns,
        axes=base.axes,
        partial_flags=entry.partial_flags - base.cpu_flags,
        facts=tuple(fact for fact in entry.facts if fact[0] != "cpu_flags" or fact[1] == PROBABLE),
    )


def _name_image(image: AuditedImage) -> str:
    """Return the name by which an engine finds an image, or its digest if it has no name."""
    if all(key in image.labels for key in OURS) and not _is_built_on_variant(image):
        name, version, cell, input_digest = (image.labels[key] for key in OURS)
        return f"{name}:{labels.make_tag(version, cell, input_digest)}"
    return next(iter(image.names), image.digest)


def _is_built_on_variant(image: AuditedImage) -> bool:
    """Whether an image was built on a variant of imagematrix and inherits its labels.

    Variants in the classic image store have no content digest; there, only a different name shows it.
    """
    if image.labels.get(labels.CONTENT) or labels.IMAGE not in image.labels or not image.names:
        return image.inherited
    return shorten_name(image.labels[labels.IMAGE]) not in {
        shorten_name(split_version(name)[0]) for name in image.names
    }


def make_unlabelled_entry(
    audited: Audit, cpu_flags: frozenset[str] | None = None
) -> tuple[Variant, tuple[str, ...]]:
    """Return the entry of an image without labels, and the claims of its publisher that cannot be parsed.

    `cpu_flags` are those that it is claimed to need, None if none are claimed.
    Raises AuditError if the image is for AMD's GPUs. What the bytes prove overrides a claim about the same
    need. An image is for GPUs if it has device code, CUDA's runtime or a driver, if its publisher claims a
    CUDA release, or if something else shows that it is; see `warnings.is_for_gpus`. Its user-mode driver is
    the libcuda that the loader takes, or the host's if there is none.
    """
    image, reference = audited.image, _name_image(audited.image)
    if audited.objects and not any(True for _ in audited.gpu_code):
        raise AuditError(f"{reference} is for AMD's GPUs: {', '.join(audited.objects)}")
    by_variable, ignored = parse_requirements(image.environment)
    expressions = [*by_variable.values()]
    release, _ = _find_release(audited, expressions)
    facts = find_sources(audited) | ({} if cpu_flags is None else {"cpu_flags": CLAIM})
    if cpu_flags is None:
        needed_flags = frozenset(audited.flags | audited.probable_flags)
        partial_flags = frozenset(audited.partial_flags)
    else:
        needed_flags, partial_flags = cpu_flags, frozenset()
    driver = _find_driver(audited) or (UserModeDriver(mode="host") if "driver" in facts else None)
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
        cpu_flags=needed_flags,
        signed_returns=not marches.SIGNING.isdisjoint(needed_flags),
        partial_flags=partial_flags,
        size=image.size,
        facts=tuple(sorted(facts.items())),
        requires=tuple(
            map(requirements.format_requirement, filter(None, map(_drop_cuda_bounds, expressions)))
        ),
        runtime_requires=list_runtime_requires(image.environment),
        libraries=audited.versions,
    )
    return variant, ignored


def find_sources(audited: Audit) -> dict[str, str]:
    """Return the source of each need of an image without labels, one of `catalog.SOURCES`.

    An image for CPUs only has no CUDA release and no driver, and the bytes prove that it has no device code.
    """
    release, source = _find_release(audited, parse_requirements(audited.image.environment)[0].values())
    has_code = any(True for _ in audited.gpu_code)
    has_runtime = any(library.name == RUNTIME for library in audited.libraries)
    facts = {"cpu_flags": find_cpu_source(audited, UNKNOWN), "cubins": BYTES}
    if release or _find_driver(audited) or has_code or has_runtime or warnings.is_for_gpus(audited):
        facts |= {"cubins": audited.source if has_code else UNKNOWN, "cuda": source, "driver": BYTES}
    return facts


def find_cpu_source(audited: Audit, undecided: str) -> str:
    """Return the source of the CPU flags that the files of an image need; `undecided` if they do not tell."""
    if audited.is_decided:
        return BYTES
    return PROBABLE if audited.probable_flags else undecided


def _drop_cuda_bounds(expression: Expression) -> Expression:
    """Return an expression without its lower bounds on the CUDA release, which the entry states on its own.

    If an alternative has no other condition, the expression requires nothing more. Its other alternatives are
    for older drivers with the image's cuda-compat, which the audit reads from the bytes.
    """
    remaining = tuple(
        tuple(condition for condition in alternative if not _is_cuda_bound(condition))
        for alternative in expression
    )
    return remaining if all(remaining) else ()


def _is_cuda_bound(condition: Condition) -> bool:
    return condition.name == "cuda" and condition.compare in LOWER


def _find_release(audited: Audit, expressions: Iterable[Expression]) -> tuple[str | None, str]:
    """Return the newest CUDA release that an image needs, and its source: bytes, claim or unknown.

    It is a claim if only the names of files for several releases show it.
    """
    proven = [*list_runtimes(audited.libraries), *audited.toolkits]
    for examined in audited.coded_files:
        # A toolkit links its runtime, and writes PTX of its own ISA version. If several releases share an ISA
        # version, the first counts.
        for _, isa in examined.file.code.ptx if examined.file.static_cudart else ():
            proven += [name for name, row in cuda.load_releases().items() if row.ptx_isa == isa][:1]
    proven += [audited.release] if audited.release else []
    if proven:
        return max(proven, key=versions.make_sort_key), CLAIM if audited.release else BYTES
    claimed = max(_list_claimed_releases(audited, expressions), key=versions.make_sort_key, default=None)
    return claimed, CLAIM if claimed else UNKNOWN


def _list_claimed_releases(audited: Audit, expressions: Iterable[Expression]) -> Iterator[str]:
    """Yield the CUDA releases that an image's publisher and the frameworks in it claim to need."""
    image = audited.image
    for expression in expressions:
        # An alternative needs the highest of its lower bounds, the expression any one of its alternatives.
        bounds = []
        for alternative in expression:
            releases = [
                condition.value
                for condition in alternative
                if _is_cuda_bound(condition) and versions.RELEASE.fullmatch(condition.value)
            ]
            if releases:
                bounds.append(max(releases, key=versions.make_sort_key))
        if bounds:
            yield min(bounds, key=versions.make_sort_key)

    claims = [image.environment.get(CUDA_VERSION), image.labels.get(CUDA_LABEL)]
    for text in (*claims, *(framework.cuda for framework in audited.stacks)):
        release = ".".join((text or "").split(".")[:2])
        if versions.RELEASE.fullmatch(release):
            yield release


def _find_driver(audited: Audit) -> UserModeDriver | None:
    """Return the user-mode driver that the loader takes, or None if it takes none with a known version."""
    for library in audited.drivers:
        driver = library.driver
        if not library.loaded or driver.name != MAIN or driver.kind == "stub" or driver.version is None:
            continue
        return describe_driver(driver)
    return None
