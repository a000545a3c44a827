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

EXAMPLE = "imagematrix verify registry.example.com/ml/app:latest"
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
    from imagematrix.audit import warnings as audit_warnings
    from imagematrix.audit.contradictions import find_contradictions, read_claims
    from imagematrix.audit.document import estimate_fat_size, make_document
    from imagematrix.audit.sbom.components import list_components, warn_of_unread
    from imagematrix.cli.shared import sboms

    sboms.require_writable_sboms(sbom, references, json=json)
    audits = audit_references(references, platform, sboms=sbom is not None)
    judged: list[_JudgedAudit] = []
    for audit in audits:
        variant = read_claims(audit)
        contradictions = find_contradictions(audit, variant) if variant else []
        components, problems = list_components(audit)
        warnings = list(audit_warnings.warn_of_unlabelled(audit))
        if variant:
            warnings = [
                *audit_warnings.warn_of_march(audit, variant),
                *audit_warnings.warn_of_runtime(audit, variant),
            ]
        needs = variant or _find_unlabelled_needs(audit)
        warnings += audit_warnings.warn_of_nvml(needs.driver if needs else None, audit.versions)
        if needs:
            warnings += audit_warnings.warn_of_requirements(audit, needs)
        warnings += [*warn_of_unread(audit.contents), *problems]
        judged.append(
            _JudgedAudit(
                audit=audit,
                needs=needs,
                contradictions=contradictions,
                warnings=warnings,
                components=components,
            )
        )
    if sbom is not None:
        sboms.write_sboms(sbom, [(image.audit, image.components) for image in judged])
    fat_size = estimate_fat_size(audits)
    if json:
        documents = [
            make_document(
                image.audit,
                image.contradictions,
                audits,
                image.warnings,
                fat_size,
                [component.to_json() for component in image.components],
            )
            for image in judged
        ]
        print_json(documents[0] if len(documents) == 1 else documents)
    elif sbom != sboms.STDOUT:
        parts = [
            *([f"{name:<13}  {text}" for name, text in _describe_image(image)] for image in judged),
            *([text] for text in _describe_combined_size(audits, fat_size)),
        ]
        print_text(*(line for number, part in enumerate(parts) for line in ([""] * bool(number) + part)))
    wrong = sum(1 for image in judged if image.contradictions)
    if wrong:
        raise AuditError(f"the bytes of {format_count(wrong, 'image')} contradict the labels")


def _find_unlabelled_needs(audit: Audit) -> Variant | None:
    """Return what `adopt` would write about an image; None if it is for other vendors' GPUs only."""
    from imagematrix.audit.catalog import make_unlabelled_entry

    is_foreign = audit.objects and not any(True for _ in audit.gpu_code)
    return None if is_foreign else make_unlabelled_entry(audit)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedAudit:
    """An audit with the judgements about it, and the packages in the image.

    `needs` are what a host is compared with, by labels or as `adopt` would write them; None if it would not.
    """

    audit: Audit
    needs: Variant | None
    contradictions: Sequence[Contradiction]
    warnings: Sequence[str]
    components: Sequence[Component]


def _describe_combined_size(audits: Sequence[Audit], fat_size: int | None) -> Iterator[str]:
    """Yield the estimated size of a single image for all GPUs, and the sizes of the images."""
    from rich.filesize import decimal

    if fat_size is not None:
        sizes = sorted(sum(audit.image.sizes.values()) for audit in audits)
        yield (
            f"one image with the device code of all {len(audits)} would have about {decimal(fat_size)} "
            f"compressed; these have {decimal(sizes[0])} to {decimal(sizes[-1])}"
        )


def _describe_image(judged: _JudgedAudit) -> Iterator[tuple[str, str]]:
    """Yield the rows of an image: names of facts, and their values."""
    audit = judged.audit
    yield "image", f"{audit.image.reference}"
    yield "digest", audit.image.digest
    yield "platform", audit.image.platform
    yield from _describe_device_code(audit)
    for driver in audit.drivers:
        loaded = ", which the dynamic loader uses" if driver.loaded else ""
        facts = driver.driver
        yield "driver", f"{facts.name} {facts.version or ''} {facts.kind} {driver.path}{loaded}"
    if judged.needs:
        yield from _describe_needs(judged.needs)
    yield from _describe_packages(audit, judged.components)
    needed = " ".join(sorted(audit.flags)) or "nothing beyond the baseline"
    yield "CPU needs", needed if audit.is_decided else f"{needed}, as far as known"
    if audit.probable_flags:
        yield "CPU probably", " ".join(sorted(audit.probable_flags))
    if more := sorted(audit.contained_flags - audit.flags.keys() - audit.probable_flags.keys()):
        yield "CPU may use", " ".join(more)
    for listed in audit.files:
        if listed.file.damaged or listed.file.code.damaged:
            yield "damaged", listed.path
    for contradiction in judged.contradictions:
        yield "contradiction", str(contradiction)
    for warning in judged.warnings:
        yield "warning", warning


def _describe_device_code(audit: Audit) -> Iterator[tuple[str, str]]:
    """Yield the targets of the device code, and the files that do not count for them, or not on all GPUs."""
    words = [f"sm_{target}" for target in audit.cubins]
    words += [f"PTX {target} (ISA {isa})" for target, isa in audit.ptx]
    words += list(audit.objects)
    files = sum(1 for _ in audit.coded_files)
    targets = f"{', '.join(words) or 'no target common to all'}; {format_count(files, 'file')}"
    yield "device code", targets if files else "none"

    names = {
        id(code): f"{code.name}{f' and {code.files - 1} more' if code.files > 1 else ''}"
        for code in audit.device_code
    }
    for code in audit.device_code:
        if code.optional:
            yield "optional", f"{names[id(code)]}: {', '.join(code.targets)}"
    paths: dict[str, list[str]] = {}  # by the reason why they do not count
    for listed in audit.files:
        if listed.uncounted_reason:
            paths.setdefault(listed.uncounted_reason, []).append(listed.path)
    for why, uncounted in paths.items():
        yield "not counted", f"{shorten_words(uncounted, SHOWN)}: {why}"
    for code in audit.device_code:
        if code.guard:
            line = f"{code.guard.path}:{code.guard.line}"
            unused = f"not used on {code.guard.words} by {line}"
            condition = unused if code.guard.unless else f"{line} cannot be evaluated"
            yield "guarded", f"{names[id(code)]}: {', '.join(code.targets)}; {condition}"


def _describe_needs(variant: Variant) -> Iterator[tuple[str, str]]:
    """Yield what a host needs that no file of the image has by itself."""
    if variant.cuda:
        claim = " (a claim)" if variant.source("cuda") == CLAIM else ""
        yield "CUDA", f"{variant.cuda}{claim}"
    if variant.driver and variant.driver.mode == HOST:
        yield "driver", "the host's"
    for requirement in variant.requires:
        yield "requires", f"{requirement} (a claim)"


def _describe_packages(audit: Audit, components: Sequence[Component]) -> Iterator[tuple[str, str]]:
    """Yield libraries, Python packages with device code, and the number of packages of each type."""
    for library in audit.libraries:
        oldest = f", driver {library.oldest_driver} or newer" if library.oldest_driver else ""
        version = library.version or ("static" if library.static else "?")
        yield "library", f"{library.name} {version} {library.path}{oldest}"
    for stack in audit.stacks:
        cubins = " ".join(stack.arch_list) or "no cubins"
        yield "python", f"{stack.name} {stack.version}, CUDA {stack.cuda or '?'}: {cubins}"
    # Libraries that have rows of their own have no type of packages.
    kinds = Counter(component.package.kind for component in components if component.package.kind != GENERIC)
    if kinds:
        yield "packages", ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
