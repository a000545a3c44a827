"""`imagematrix verify`: the bytes of images, compared with their labels."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.audit.packages.installed_package import GENERIC
from imagematrix.cli.shared.audit_images import Platform, References, audit_references
from imagematrix.cli.shared.options import Json
from imagematrix.cli.shared.output import print_json, print_text
from imagematrix.common.text import format_count, shorten_words
from imagematrix.errors import AuditError
from imagematrix.images.catalog.catalog import CLAIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.audit.contradictions import Contradiction
    from imagematrix.audit.report import Audit
    from imagematrix.audit.sbom.components import Component
    from imagematrix.images.catalog.catalog import Variant

SHOWN = 3  # files that a line names
HOST = "host"  # the mode of a driver that is not in the image


def command(
    references: References,
    platform: Platform = None,
    sbom: Annotated[
        Path | None,
        typer.Option(
            "--sbom",
            metavar="PATH",
            help="Write what is inside as SPDX 2.3: to a file, - for stdout; of several images, to a folder.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Audit the bytes of images; exit with 9 if they contradict the labels.

    Nothing is started. Images built by other tools are supported too.
    """
    from imagematrix.audit import warnings as doubts
    from imagematrix.audit.catalog import make_unlabelled_entry
    from imagematrix.audit.contradictions import find_contradictions, read_claims
    from imagematrix.audit.document import estimate_fat_size, make_document
    from imagematrix.audit.sbom.components import list_components, warn_of_unread
    from imagematrix.cli.shared import sboms

    sboms.require_writable_sboms(sbom, references, json=json)
    audits = audit_references(references, platform, sboms=sbom is not None)
    judged: list[_JudgedAudit] = []
    for audit in audits:
        variant = read_claims(audit)
        broken = find_contradictions(audit, variant) if variant else []
        found, problems = list_components(audit)
        warnings = list(doubts.warn_of_unlabelled(audit))
        if variant:
            warnings = [*doubts.warn_of_march(audit, variant), *doubts.warn_of_runtime(audit, variant)]
        warnings += [*warn_of_unread(audit.contents), *problems]
        needs = variant or (None if _is_foreign(audit) else make_unlabelled_entry(audit)[0])
        judged.append(
            _JudgedAudit(audit=audit, needs=needs, broken=broken, warnings=warnings, components=found)
        )
    if sbom is not None:
        sboms.write_sboms(sbom, [(one.audit, one.components) for one in judged])
    whole = estimate_fat_size(audits)
    if json:
        written = [
            make_document(
                one.audit,
                one.broken,
                audits,
                one.warnings,
                whole,
                [component.to_json() for component in one.components],
            )
            for one in judged
        ]
        print_json(written[0] if len(written) == 1 else written)
    elif sbom != sboms.STDOUT:
        parts = [*map(_lines, judged), *([text] for text in _describe_combined_size(audits, whole))]
        print_text(*(line for number, part in enumerate(parts) for line in ([""] * bool(number) + part)))
    wrong = sum(1 for one in judged if one.broken)
    if wrong:
        raise AuditError(f"the bytes of {format_count(wrong, 'image')} contradict the labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedAudit:
    """An audit with the judgements about it, and the packages in the image.

    `needs` are what a host is compared with, by labels or as `adopt` would write them; None if it would not.
    """

    audit: Audit
    needs: Variant | None
    broken: Sequence[Contradiction]
    warnings: Sequence[str]
    components: Sequence[Component]


def _describe_combined_size(audits: Sequence[Audit], whole: int | None) -> Iterator[str]:
    """Yield the estimated size of a single image for all GPUs, and the sizes of the images."""
    from rich.filesize import decimal

    if whole is not None:
        sizes = sorted(sum(audit.image.sizes.values()) for audit in audits)
        yield (
            f"one image with the device code of all {len(audits)} would have about {decimal(whole)} "
            f"compressed; these have {decimal(sizes[0])} to {decimal(sizes[-1])}"
        )


def _lines(judged: _JudgedAudit) -> list[str]:
    audit = judged.audit
    image = audit.image
    rows = [
        ("image", f"{image.reference}"),
        ("digest", image.digest),
        ("platform", image.platform),
        ("device code", _code(audit)),
        *(("optional", line) for line in _optional(audit)),
        *(("not counted", line) for line in _list_uncounted(audit)),
        *(("guarded", line) for line in _list_guarded(audit)),
        *(("driver", line) for line in _drivers(audit)),
        *(_describe_needs(judged.needs) if judged.needs else ()),
        *(("library", line) for line in _libraries(audit)),
        *(("python", line) for line in _stacks(audit)),
        *(("packages", line) for line in _packages(judged.components)),
        *_cpu(audit),
        *(("damaged", found.path) for found in audit.files if found.file.damaged or found.file.code.damaged),
        *(("contradiction", str(contradiction)) for contradiction in judged.broken),
        *(("warning", warning) for warning in judged.warnings),
    ]
    return [f"{name:<13}  {line}" for name, line in rows]


def _is_foreign(audit: Audit) -> bool:
    """Whether an image is for GPUs of another vendor only."""
    return bool(audit.objects) and not any(True for _ in audit.gpu_code)


def _describe_needs(variant: Variant) -> Iterator[tuple[str, str]]:
    """Yield what a host needs that no file of the image has by itself."""
    if variant.cuda:
        claim = " (a claim)" if variant.source("cuda") == CLAIM else ""
        yield "CUDA", f"{variant.cuda}{claim}"
    if variant.driver and variant.driver.mode == HOST:
        yield "driver", "the host's"
    for requirement in variant.requires:
        yield "requires", f"{requirement} (a claim)"


def _code(audit: Audit) -> str:
    words = [f"sm_{target}" for target in audit.cubins]
    words += [f"PTX {target} (ISA {isa})" for target, isa in audit.ptx]
    words += list(audit.objects)
    files = sum(1 for _ in audit.coded_files)
    if not files:
        return "none"
    return f"{', '.join(words) or 'no target common to all'}; {format_count(files, 'file')}"


def _optional(audit: Audit) -> Iterator[str]:
    for code in audit.device_code:
        if code.optional:
            more = f" and {code.files - 1} more" if code.files > 1 else ""
            yield f"{code.name}{more}: {', '.join(code.targets)}"


def _list_uncounted(audit: Audit) -> Iterator[str]:
    """Yield the files whose device code counts for nothing, by the reason."""
    paths: dict[str, list[str]] = {}
    for found in audit.files:
        if found.uncounted_reason:
            paths.setdefault(found.uncounted_reason, []).append(found.path)
    for why, listed in paths.items():
        yield f"{shorten_words(listed, SHOWN)}: {why}"


def _list_guarded(audit: Audit) -> Iterator[str]:
    for code in audit.device_code:
        if code.guard:
            more = f" and {code.files - 1} more" if code.files > 1 else ""
            asked = f"{code.guard.path}:{code.guard.line}"
            unused = f"not used on {code.guard.words} by {asked}"
            told = unused if code.guard.unless else f"{asked} cannot be evaluated"
            yield f"{code.name}{more}: {', '.join(code.targets)}; {told}"


def _drivers(audit: Audit) -> Iterator[str]:
    for found in audit.drivers:
        loaded = ", which the dynamic loader uses" if found.loaded else ""
        yield f"{found.driver.name} {found.driver.version or ''} {found.driver.kind} {found.path}{loaded}"


def _libraries(audit: Audit) -> Iterator[str]:
    for library in audit.libraries:
        oldest = f", driver {library.oldest_driver} or newer" if library.oldest_driver else ""
        version = library.version or ("static" if library.static else "?")
        yield f"{library.name} {version} {library.path}{oldest}"


def _packages(components: Sequence[Component]) -> Iterator[str]:
    """Yield the number of packages of each type; the libraries that have rows of their own have none."""
    kinds = Counter(one.package.kind for one in components if one.package.kind != GENERIC)
    if kinds:
        yield ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


def _cpu(audit: Audit) -> Iterator[tuple[str, str]]:
    needed = " ".join(sorted(audit.flags)) or "nothing beyond the baseline"
    yield "CPU needs", needed if audit.is_decided else f"{needed}, as far as known"
    if audit.probable_flags:
        yield "CPU probably", " ".join(sorted(audit.probable_flags))
    if more := sorted(audit.contained_flags - audit.flags.keys() - audit.probable_flags.keys()):
        yield "CPU may use", " ".join(more)


def _stacks(audit: Audit) -> Iterator[str]:
    for stack in audit.stacks:
        cubins = " ".join(stack.arch_list) or "no cubins"
        yield f"{stack.name} {stack.version}, CUDA {stack.cuda or '?'}: {cubins}"
