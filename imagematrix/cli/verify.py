"""`imagematrix verify`: the bytes of images, compared with their labels."""

from __future__ import annotations

from imagematrix.cli.auditing import Platform, References, audited
from imagematrix.cli.options import Json
from imagematrix.cli.output import print_json, print_text
from imagematrix.errors import AuditError
from imagematrix.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.audit.claims import Contradiction
    from imagematrix.audit.report import Audit

__all__ = ["command"]


def command(
    references: References,
    platform: Platform = None,
    json: Json = False,
) -> None:
    """Audit the bytes of images; exit with 9 if they contradict the labels.

    Nothing is started. Images built by other tools are supported too.
    """
    from imagematrix.audit import doubts
    from imagematrix.audit.claims import claimed, contradictions
    from imagematrix.audit.document import document, fat

    audits = audited(references, platform)
    judged: list[tuple[Audit, list[Contradiction], list[str]]] = []
    for audit in audits:
        variant = claimed(audit)
        broken = contradictions(audit, variant) if variant else []
        warnings = list(doubts.of_unlabelled(audit))
        if variant:
            warnings = [*doubts.of_march(audit, variant), *doubts.of_runtime(audit, variant)]
        judged.append((audit, broken, warnings))
    whole = fat(audits)
    if json:
        written = [document(audit, broken, audits, warnings, whole) for audit, broken, warnings in judged]
        print_json(written[0] if len(written) == 1 else written)
    else:
        print_text("\n\n".join([*(_text(*row) for row in judged), *_together(audits, whole)]))
    wrong = sum(1 for _, broken, _ in judged if broken)
    if wrong:
        raise AuditError(f"the bytes of {counted(wrong, 'image')} contradict the labels")


def _together(audits: Sequence[Audit], whole: int | None) -> Iterator[str]:
    """Yield the estimated size of a single image for all GPUs, and the sizes of the images."""
    from rich.filesize import decimal

    if whole is not None:
        sizes = sorted(sum(audit.image.sizes.values()) for audit in audits)
        yield (
            f"one image with the device code of all {len(audits)} would have about {decimal(whole)} "
            f"compressed; these have {decimal(sizes[0])} to {decimal(sizes[-1])}"
        )


def _text(audit: Audit, broken: Sequence[Contradiction], warnings: Sequence[str]) -> str:
    image = audit.image
    rows = [
        ("image", f"{image.reference}"),
        ("digest", image.digest),
        ("platform", image.platform),
        ("device code", _code(audit)),
        *(("optional", line) for line in _optional(audit)),
        *(("driver", line) for line in _drivers(audit)),
        *(("library", line) for line in _libraries(audit)),
        *(("python", line) for line in _stacks(audit)),
        *_cpu(audit),
        *(("damaged", found.path) for found in audit.files if found.file.damaged or found.file.code.damaged),
        *(("contradiction", str(contradiction)) for contradiction in broken),
        *(("warning", warning) for warning in warnings),
    ]
    return "\n".join(f"{name:<13}  {line}" for name, line in rows)


def _code(audit: Audit) -> str:
    words = [f"sm_{target}" for target in audit.cubins]
    words += [f"PTX {target} (ISA {isa})" for target, isa in audit.ptx]
    words += list(audit.objects)
    files = sum(1 for _ in audit.coded)
    if not files:
        return "none"
    return f"{', '.join(words) or 'no target common to all'}; {counted(files, 'file')}"


def _optional(audit: Audit) -> Iterator[str]:
    for code in audit.device_code:
        if code.optional:
            more = f" and {code.files - 1} more" if code.files > 1 else ""
            yield f"{code.name}{more}: {', '.join(code.targets)}"


def _drivers(audit: Audit) -> Iterator[str]:
    for found in audit.drivers:
        loaded = ", which the dynamic loader uses" if found.loaded else ""
        yield f"{found.driver.name} {found.driver.version or ''} {found.driver.kind} {found.path}{loaded}"


def _libraries(audit: Audit) -> Iterator[str]:
    for library in audit.libraries:
        oldest = f", driver {library.oldest_driver} or newer" if library.oldest_driver else ""
        version = library.version or ("static" if library.static else "?")
        yield f"{library.name} {version} {library.path}{oldest}"


def _cpu(audit: Audit) -> Iterator[tuple[str, str]]:
    needed = " ".join(sorted(audit.flags)) or "nothing beyond the baseline"
    yield "CPU needs", needed if audit.decided else f"{needed}, as far as known"
    if more := sorted(audit.contained - audit.flags.keys()):
        yield "CPU may use", " ".join(more)


def _stacks(audit: Audit) -> Iterator[str]:
    for stack in audit.stacks:
        cubins = " ".join(stack.arch_list) or "no cubins"
        yield f"{stack.name} {stack.version}, CUDA {stack.cuda or '?'}: {cubins}"
