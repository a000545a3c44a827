"""The audit held against an image's labels: promises that a file breaks, needs that nobody stated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from imagematrix.audit import promise
from imagematrix.audit.elf import AARCH64, X86_64
from imagematrix.catalog import labels
from imagematrix.errors import AuditError, UsageError
from imagematrix.facts import device_code, marches, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.report import Audit
    from imagematrix.catalog.catalog import Variant

__all__ = ["Contradiction", "claimed", "contradictions"]

# By the architecture of a platform: the machine in ELF headers, and what people call it.
MACHINES = {"amd64": (X86_64, "x86_64"), "arm64": (AARCH64, "aarch64")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A claim about a `fact` of the catalog entry, what was found instead, and the file that proves it.

    `path` is None where the proof is that there is no such file.
    """

    fact: str
    claimed: tuple[str, ...]
    found: tuple[str, ...]
    path: str | None

    def __str__(self) -> str:
        claim = f"the labels say {self.fact} {' '.join(self.claimed) or 'none'}"
        if self.path is None:
            return f"{claim}, but there is none"
        return f"{claim}, but {self.path} has {' '.join(self.found) or 'none'}"


def claimed(audit: Audit) -> Variant | None:
    """Return the catalog entry that an image's labels have; None where they have none; raise AuditError."""
    image = audit.image
    if labels.VARIANT not in image.labels:
        return None
    try:
        # An image may have a path for a name.
        return labels.read(image.labels, reference=image.digest, digest=image.digest, size=None)
    except UsageError as error:
        raise AuditError(f"{image.reference}: the labels are damaged: {error}") from error


def contradictions(audit: Audit, variant: Variant) -> list[Contradiction]:
    """Return what in an image contradicts the catalog entry `variant`; never that it has more than that."""
    return [
        *_platform(audit, variant),
        *_driver(audit, variant),
        *_code(audit, variant),
        *_cpu(audit, variant),
    ]


def _platform(audit: Audit, variant: Variant) -> Iterator[Contradiction]:
    # A base image of another platform is built on without a word where the engine has no other of its name.
    # Programs for other machines may well be among the rest: cross compilers, emulators.
    arch = variant.platform.split("/")[1]
    machine, _ = MACHINES.get(arch, (None, arch))
    known = dict(MACHINES.values())
    programs = [one for one in audit.files if one.file.machine in known and one.file.linked]
    counted = Counter(one.file.machine for one in programs)
    if machine is None or not counted or counted.most_common(1)[0][0] == machine:
        return
    example = next(one for one in programs if one.file.machine != machine)
    found = known[example.file.machine or 0]
    yield Contradiction(fact="platform", claimed=(variant.platform,), found=(found,), path=example.path)


def _driver(audit: Audit, variant: Variant) -> Iterator[Contradiction]:
    carried = variant.driver.version if variant.driver and variant.driver.mode != "host" else None
    wanted: tuple[str, ...] = (carried,) if carried else ()
    real = [one for one in audit.drivers if one.driver.kind != "stub"]
    main = [one for one in real if one.driver.name == "libcuda"]
    for one in real:
        own = one.driver.version or "of an unknown version"
        if (own,) != wanted:
            yield Contradiction(fact="driver", claimed=wanted, found=(own,), path=one.path)
    if wanted and not main:
        yield Contradiction(fact="driver", claimed=wanted, found=(), path=None)
    same = [one for one in main if (one.driver.version,) == wanted]
    for one in same[1:]:  # a second one, even of the same version, is another that may be loaded
        found = tuple(f"{wanted[0]} in {each.path}" for each in same)
        yield Contradiction(fact="driver", claimed=wanted, found=found, path=one.path)


def _code(audit: Audit, variant: Variant) -> Iterator[Contradiction]:
    for one in audit.files:
        if one.own and one.file.code.damaged and one.file.linked:
            yield Contradiction(fact="device code", claimed=("whole",), found=("damaged",), path=one.path)
    there = {device_code.capability(target) for one in audit.coded for target in one.file.code.cubins}
    for one in audit.coded:
        code = one.file.code
        if not code.cuda:
            continue
        # Code for an older GPU runs, too, but then one of the files is to have what the labels say.
        broken = [
            target
            for target in variant.cubins
            if promise.lacks(code, target) or device_code.capability(target) not in there
        ]
        if broken:
            found = tuple(sorted(code.cubins, key=_order))
            yield Contradiction(fact="cubins", claimed=tuple(broken), found=found, path=one.path)
        for claim in variant.ptx:
            held = dict(promise.ptx([code]))
            fitting = [isa for target, isa in held.items() if _reaches(target, claim.target)]
            if not any(versions.order(isa) <= versions.order(claim.isa) for isa in fitting):
                told = tuple(f"{target} ISA {isa}" for target, isa in sorted(code.ptx))
                wanted = (f"{claim.target} ISA {claim.isa}",)
                yield Contradiction(fact="ptx", claimed=wanted, found=told, path=one.path)


def _cpu(audit: Audit, variant: Variant) -> Iterator[Contradiction]:
    arch = MACHINES.get(variant.platform.split("/")[1], (None, ""))[1]
    if not variant.cpu_flags or arch not in marches.IGNORED:
        return
    beyond: dict[str, list[str]] = {}
    for flag, path in audit.flags.items():
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


def _order(target: str) -> tuple[tuple[int, ...], str]:
    return versions.order(device_code.capability(target)), target
