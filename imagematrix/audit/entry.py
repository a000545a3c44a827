"""The catalog entry of an image without labels: what its bytes prove, and what its publisher claims."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.audit.runtime import RUNTIME
from imagematrix.catalog.catalog import BYTES, CLAIM, UNKNOWN, Ptx, UserModeDriver, Variant
from imagematrix.errors import AuditError, UsageError
from imagematrix.facts import cuda, gpus, requirements, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from imagematrix.audit.report import Audit, DriverFile
    from imagematrix.facts.requirements import Condition, Expression

__all__ = ["Entry", "entry"]

REQUIRE = "NVIDIA_REQUIRE_"
JETPACK = f"{REQUIRE}JETPACK"  # for Tegra; NVIDIA's runtime ignores it elsewhere
DISABLED = "NVIDIA_DISABLE_REQUIRE"
CUDA_LABEL = "com.nvidia.cuda.version"
CUDA_VARIABLE = "CUDA_VERSION"
LOWER = (">=", ">", "=")  # comparisons that set a lower bound
MAIN = "libcuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The entry of an image, and the claims of its publisher that cannot be parsed."""

    variant: Variant
    ignored: tuple[str, ...] = ()


def entry(audited: Audit, reference: str, digest: str) -> Entry:
    """Return the entry of an audited image under the `reference` by which an engine finds it.

    Raises AuditError if the image is for AMD's GPUs. What the bytes prove overrides a claim about the same
    need. An image is for GPUs if it has device code, CUDA's runtime or a driver, or if its publisher claims a
    CUDA release. Its user-mode driver is the libcuda that the loader takes, or the host's if there is none.
    """
    image = audited.image
    if audited.objects and not any(one.file.code.cuda for one in audited.coded):
        raise AuditError(f"{reference} is for AMD's GPUs: {', '.join(audited.objects)}")
    expressions, ignored = _expressions(image.environment)
    release, source = _release(audited, expressions)
    driver = _driver(audited)
    flags = frozenset(audited.flags)
    facts = {"cpu_flags": BYTES if audited.decided else UNKNOWN}
    coded = any(True for _ in audited.coded)
    if release or driver or coded or any(library.name == RUNTIME for library in audited.libraries):
        facts |= {"cubins": BYTES if coded else UNKNOWN, "cuda": source, "driver": BYTES}
        driver = driver or UserModeDriver(mode="host")
    else:
        facts["cubins"] = BYTES  # the bytes prove that there are none
    variant = Variant(
        reference=reference,
        digest=digest,
        platform=image.platform,
        cuda=release,
        cubins=audited.cubins,
        ptx=tuple(Ptx(target=target, isa=isa) for target, isa in audited.ptx),
        compressed_fatbin=audited.compressed,
        driver=driver,
        cpu_flags=flags,
        size=sum(image.sizes.values()) or None,
        facts=tuple(sorted(facts.items())),
        requires=tuple(map(requirements.text, filter(None, map(_settled, expressions)))),
    )
    return Entry(variant=variant, ignored=ignored)


def _expressions(environment: Mapping[str, str]) -> tuple[list[Expression], tuple[str, ...]]:
    """Return the requirements in an image's variables, and an error for each that cannot be parsed."""
    expressions: list[Expression] = []
    ignored: list[str] = []
    if environment.get(DISABLED, "").lower() == "true":
        return expressions, ()
    for name, value in sorted(environment.items()):
        if name.startswith(REQUIRE) and not name.startswith(JETPACK):
            try:
                expressions.append(requirements.parse(value))
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
    """Return the newest CUDA release that an image needs, and its source: bytes, claim or unknown."""
    proven = [*_runtimes(audited), *_compiled(audited)]
    if proven:
        return _newest(proven), BYTES
    claims = [*_claimed(audited, expressions)]
    return (_newest(claims), CLAIM) if claims else (None, UNKNOWN)


def _newest(releases: Iterable[str]) -> str:
    return max(releases, key=versions.order)


def _runtimes(audited: Audit) -> list[str]:
    """Return the releases of CUDA's runtime in an image, X.0 if only the major release X is known."""
    releases = []
    for library in audited.libraries:
        if library.name == RUNTIME and library.version:
            major, _, rest = library.version.partition(".")
            releases.append(f"{major}.{rest.partition('.')[0] or 0}")
    return [release for release in releases if versions.RELEASE.fullmatch(release)]


def _compiled(audited: Audit) -> Iterator[str]:
    """Yield the releases that compiled the PTX of programs with a statically linked CUDA runtime.

    A toolkit writes PTX of its own ISA version. If several releases share an ISA version, the first counts.
    """
    for one in audited.coded:
        if one.file.static_cudart:
            for _, isa in one.file.code.ptx:
                yield from [name for name, row in cuda.releases().items() if row.ptx_isa == isa][:1]


def _claimed(audited: Audit, expressions: Iterable[Expression]) -> Iterator[str]:
    """Yield the CUDA releases that an image's publisher and the frameworks in it claim to need."""
    image = audited.image
    for expression in expressions:
        bounds = [_lower(alternative) for alternative in expression]
        lowest = min((bound for bound in bounds if bound), key=versions.order, default=None)
        if lowest:
            yield lowest
    claims = [image.environment.get(CUDA_VARIABLE), image.labels.get(CUDA_LABEL)]
    for text in (*claims, *(one.cuda for one in audited.stacks)):
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
    return max(releases, key=versions.order, default=None)


def _driver(audited: Audit) -> UserModeDriver | None:
    """Return the user-mode driver that the loader takes, or None if it takes none with a known version."""
    loaded = [one for one in audited.drivers if one.loaded and one.driver.name == MAIN]
    return next(filter(None, map(_user_mode, loaded)), None)


def _user_mode(file: DriverFile) -> UserModeDriver | None:
    own = file.driver
    if own.kind == "stub" or own.version is None:
        return None
    if own.kind == "compat":
        note = own.compat
        brands = [gpus.BRANDS[number] for number in (note.brands if note else ()) if number in gpus.BRANDS]
        return UserModeDriver(
            mode="compat",
            version=own.version,
            branches=note.branches if note else (),
            brands=tuple(sorted(brands)),
        )
    return UserModeDriver(mode="exact", version=own.version)
