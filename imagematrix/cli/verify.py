"""`imagematrix verify`: the bytes of images, compared with their labels."""

from __future__ import annotations

from imagematrix.cli.auditing import Platform, References, audited
from imagematrix.cli.options import Json
from imagematrix.cli.output import counted, print_json, print_text
from imagematrix.errors import AuditError

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
    from imagematrix.audit import march, runtime
    from imagematrix.audit.claims import claimed, contradictions
    from imagematrix.audit.document import document
    from imagematrix.audit.fat import fat

    audits = audited(references, platform)
    judged: list[tuple[Audit, list[Contradiction], list[str]]] = []
    for one in audits:
        variant = claimed(one)
        broken = contradictions(one, variant) if variant else []
        warnings = [*march.doubts(one, variant), *runtime.doubts(one, variant)] if variant else []
        judged.append((one, broken, warnings))
    whole = fat(audits)
    if json:
        written = [document(one, broken, audits, warnings, whole) for one, broken, warnings in judged]
        print_json(written[0] if len(written) == 1 else written)
    else:
        print_text("\n\n".join([*(_text(*one) for one in judged), *_together(audits, whole)]))
    wrong = sum(1 for _, broken, _ in judged if broken)
    if wrong:
        raise AuditError(f"the bytes of {counted(wrong, 'image')} contradict the labels")


def _together(audits: Sequence[Audit], whole: int | None) -> Iterator[str]:
    """Yield the estimated size of a single image for all GPUs, and the sizes of the images."""
    from rich.filesize import decimal

    if whole is not None:
        sizes = sorted(sum(one.image.sizes.values()) for one in audits)
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
        *(("driver", line) for line in _drivers(audit)),
        *(("library", line) for line in _libraries(audit)),
        *(("python", line) for line in _stacks(audit)),
        *_cpu(audit),
        *(("damaged", one.path) for one in audit.files if one.file.damaged or one.file.code.damaged),
        *(("contradiction", str(one)) for one in broken),
        *(("warning", one) for one in warnings),
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


def _drivers(audit: Audit) -> Iterator[str]:
    for one in audit.drivers:
        loaded = ", which the dynamic loader uses" if one.loaded else ""
        yield f"{one.driver.name} {one.driver.version or ''} {one.driver.kind} {one.path}{loaded}"


def _libraries(audit: Audit) -> Iterator[str]:
    for one in audit.libraries:
        oldest = f", driver {one.oldest_driver} or newer" if one.oldest_driver else ""
        yield f"{one.name} {one.version or 'static' if one.static else one.version or '?'} {one.path}{oldest}"


def _cpu(audit: Audit) -> Iterator[tuple[str, str]]:
    needed = " ".join(sorted(audit.flags)) or "nothing beyond the baseline"
    yield "CPU needs", needed if audit.decided else f"{needed}, as far as known"
    if more := sorted(audit.contained - audit.flags.keys()):
        yield "CPU may use", " ".join(more)


def _stacks(audit: Audit) -> Iterator[str]:
    for one in audit.stacks:
        yield f"{one.name} {one.version}, CUDA {one.cuda or '?'}: {' '.join(one.arch_list) or 'no cubins'}"
