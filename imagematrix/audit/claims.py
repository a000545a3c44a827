"""The audit compared with an image's labels: broken promises, and needs that no label states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from imagematrix.audit import promise
from imagematrix.audit.elf import AARCH64, X86_64
from imagematrix.audit.image import Image
from imagematrix.audit.report import audit
from imagematrix.catalog import labels
from imagematrix.errors import AuditError, UsageError
from imagematrix.facts import device_code, marches, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.layer import Layer
    from imagematrix.audit.report import Audit, DriverFile
    from imagematrix.catalog.catalog import Variant

__all__ = ["Contradiction", "broken", "claimed", "contradictions", "of_layers"]

# By the architecture of a platform: the machine number in ELF headers, and the name in the kernel.
MACHINES = {"amd64": (X86_64, "x86_64"), "arm64": (AARCH64, "aarch64")}
# By fact, the words of a message: what the labels promise, and the verb before what a file has instead.
NOUNS = {
    "platform": ("programs for", "is for"),
    "driver": ("user-mode driver", "has"),
    "cubins": ("cubins for", "has"),
    "ptx": ("PTX for", "has"),
    "device code": ("device code that is", "has some that is"),
    "cpu_flags": ("code for", "needs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A claim about a `fact` of the catalog entry, the values found instead, and the file that proves it.

    `path` is None if the proof is that no such file exists.
    """

    fact: str
    claimed: tuple[str, ...]
    found: tuple[str, ...]
    path: str | None

    def __str__(self) -> str:
        noun, verb = NOUNS[self.fact]
        article = "the " if self.fact == "driver" else ""
        claim = f"{article}{noun} {' '.join(self.claimed)}" if self.claimed else f"no {noun}"
        proof = f"{self.path} {verb} {' '.join(self.found) or 'none'}" if self.path else "there is none"
        return f"the labels promise {claim}, but {proof}"


def claimed(audited: Audit) -> Variant | None:
    """Return the catalog entry in an image's labels, or None if there is none; raise AuditError."""
    image = audited.image
    if labels.VARIANT not in image.labels:
        return None
    try:
        # The image's reference may be a path, which is not valid in a catalog.
        return labels.read(image.labels, reference=image.digest, digest=image.digest, size=None)
    except UsageError as error:
        raise AuditError(f"{image.reference}: the labels are damaged: {error}") from error


def of_layers(layers: Iterable[Layer], variant: Variant) -> Audit:
    """Return the audit of the image that `variant` describes, from its layers, the lowest first."""
    own = Image(
        reference=variant.reference,
        digest=variant.digest or "",
        platform=variant.platform,
        layers=tuple(layers),
    )
    return audit(own)


def broken(audited: Audit, variant: Variant) -> str:
    """Return a text about everything in an image that contradicts `variant`, "" if nothing does."""
    return "; ".join(map(str, contradictions(audited, variant)))


def contradictions(audited: Audit, variant: Variant) -> list[Contradiction]:
    """Return what in an image contradicts the catalog entry `variant`. Extra code is no contradiction."""
    return [
        *_platform(audited, variant),
        *_driver(audited, variant),
        *_code(audited, variant),
        *_cpu(audited, variant),
    ]


def _platform(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    # An engine that has a base image only for another platform builds on it without a warning. A few programs
    # for other machines are normal, such as cross compilers and emulators, so the majority decides.
    arch = variant.platform.split("/")[1]
    machine, _ = MACHINES.get(arch, (None, arch))
    architectures = dict(MACHINES.values())
    programs = [one for one in audited.files if one.file.machine in architectures and one.file.linked]
    counted = Counter(one.file.machine for one in programs)
    if machine is None or not counted or counted.most_common(1)[0][0] == machine:
        return
    example = next(one for one in programs if one.file.machine != machine)
    actual = architectures[example.file.machine or 0]
    yield Contradiction(fact="platform", claimed=(variant.platform,), found=(actual,), path=example.path)


def _driver(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    carried = variant.driver.version if variant.driver and variant.driver.mode != "host" else None
    wanted: tuple[str, ...] = (carried,) if carried else ()
    real = [one for one in audited.drivers if one.driver.kind != "stub"]
    main = [one for one in real if one.driver.name == "libcuda"]
    for one in real:
        own = one.driver.version or "of an unknown version"
        if (own,) != wanted:
            yield Contradiction(fact="driver", claimed=wanted, found=(own,), path=one.path)
    if wanted and not main:
        yield Contradiction(fact="driver", claimed=wanted, found=(), path=None)
    same = [one for one in main if (one.driver.version,) == wanted]
    for one in same[1:]:  # the loader might take a second copy, even one of the same version
        actual = tuple(f"{wanted[0]} in {each.path}" for each in same)
        yield Contradiction(fact="driver", claimed=wanted, found=actual, path=one.path)
    yield from _compat(main, variant)


def _compat(main: Iterable[DriverFile], variant: Variant) -> Iterator[Contradiction]:
    """Yield each libcuda of cuda-compat whose note does not list all the kernel branches that are claimed."""
    claim = frozenset(variant.driver.branches if variant.driver and variant.driver.mode == "compat" else ())
    for one in main:
        noted = one.driver.compat.branches if one.driver.compat else ()
        if not claim <= set(noted):
            yield Contradiction(fact="driver", claimed=_for(claim), found=_for(noted), path=one.path)


def _for(branches: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"for branch {branch}" for branch in sorted(branches))


def _code(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    for one in audited.files:
        if one.own and one.file.code.damaged and one.file.linked:
            yield Contradiction(fact="device code", claimed=("whole",), found=("damaged",), path=one.path)
    present = {device_code.capability(target) for one in audited.coded for target in one.file.code.cubins}
    for one in audited.coded:
        code = one.file.code
        if not code.cuda:
            continue
        # Code for an older GPU also runs, but at least one file must have code for the target in the labels.
        broken = [
            target
            for target in variant.cubins
            if promise.lacks(code, target) or device_code.capability(target) not in present
        ]
        if broken:
            actual = tuple(sorted(code.cubins, key=device_code.order))
            yield Contradiction(fact="cubins", claimed=tuple(broken), found=actual, path=one.path)
        for claim in variant.ptx:
            available = dict(promise.ptx([code]))
            fitting = [isa for target, isa in available.items() if _reaches(target, claim.target)]
            if not any(versions.order(isa) <= versions.order(claim.isa) for isa in fitting):
                actual_ptx = tuple(f"{target} ISA {isa}" for target, isa in sorted(code.ptx))
                wanted = (f"{claim.target} ISA {claim.isa}",)
                yield Contradiction(fact="ptx", claimed=wanted, found=actual_ptx, path=one.path)


def _cpu(audited: Audit, variant: Variant) -> Iterator[Contradiction]:
    arch = MACHINES.get(variant.platform.split("/")[1], (None, ""))[1]
    if not variant.cpu_flags or arch not in marches.IGNORED:
        return
    beyond: dict[str, list[str]] = {}
    for flag, path in audited.flags.items():
        if flag not in variant.cpu_flags | marches.IGNORED[arch]:
            beyond.setdefault(path, []).append(flag)
    for path, flags in sorted(beyond.items()):
        level = marches.level(variant.cpu_flags)
        yield Contradiction(
            fact="cpu_flags", claimed=(level or "others",), found=tuple(sorted(flags)), path=path
        )


def _reaches(own: str, target: str) -> bool:
    """Whether PTX for `own` runs wherever PTX for `target` does."""
    return own == target or (own.isdigit() and device_code.ptx_runs(own, device_code.capability(target)))
