"""The audit as a JSON document of the schema imagematrix.audit/v1 (schemas/audit.json)."""

from __future__ import annotations

from imagematrix.audit.binaries.host_code import HostCode
from imagematrix.audit.catalog import find_cpu_source, find_sources
from imagematrix.hardware.vendors import versions
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import BYTES, CLAIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from imagematrix.audit.contradictions import Contradiction
    from imagematrix.audit.report import Audit, ExaminedFile

SCHEMA = "imagematrix.audit/v1"


def make_document(
    audit: Audit,
    contradictions: Sequence[Contradiction],
    audits: Sequence[Audit] = (),
    warnings: Sequence[str] = (),
    fat: int | None = None,
    packages: Sequence[Mapping[str, object]] = (),
) -> dict[str, object]:
    """Return the document of an audit, with the elements of its `packages`.

    `audits` are those of the images with which it may share layers; `fat` is the size of one image for all
    their GPUs.
    """
    image = audit.image
    return {
        "schema": SCHEMA,
        "reference": image.reference,
        "digest": image.digest,
        "platform": image.platform,
        **_describe_code(audit.cubins, audit.ptx),
        "device_code": [entry.to_json() for entry in audit.device_code],
        "compressed_fatbin": audit.compressed,
        "code_objects": list(audit.objects),
        "drivers": [
            {
                "path": library.path,
                "name": library.driver.name,
                "version": library.driver.version,
                "kind": library.driver.kind,
                "loaded": library.loaded,
            }
            for library in audit.drivers
        ],
        "libraries": [
            {
                "name": library.name,
                "version": library.version,
                "path": library.path,
                "static": library.static,
                "oldest_driver": library.oldest_driver,
            }
            for library in sorted(audit.libraries, key=lambda library: (library.name, library.path))
        ],
        "cpu": _describe_cpu_flags(audit),
        "python": [
            {
                "name": framework.name,
                "version": framework.version,
                "cuda": framework.cuda,
                "arch_list": list(framework.arch_list),
            }
            for framework in audit.stacks
        ],
        "facts": _list_fact_sources(audit),
        "files": [*_describe_files(audit.files)],
        "contradictions": [
            {
                "fact": contradiction.fact,
                "claimed": list(contradiction.claimed),
                "found": list(contradiction.actual),
                "path": contradiction.path,
            }
            for contradiction in contradictions
        ],
        "packages": list(packages),
        "warnings": list(warnings),
        "size": _measure_size(audit, audits, fat),
    }


def _describe_cpu_flags(audit: Audit) -> dict[str, object]:
    flags, probable = audit.flags, audit.probable_flags
    return {
        "requires": sorted(flags),
        "probable": sorted(probable),
        "contains": sorted(audit.contained_flags - flags.keys() - probable.keys()),
        "proof": dict(sorted((probable | flags).items())),
    }


def _list_fact_sources(audit: Audit) -> dict[str, str]:
    facts = {
        "cubins": audit.source if any(True for _ in audit.coded_files) else CLAIM,
        "cpu_flags": find_cpu_source(audit, CLAIM),
        "driver": BYTES,
        "cuda": CLAIM,
    }
    # What the bytes do not prove of an image without labels, its publisher may claim, or nobody.
    return facts if labels.VARIANT in audit.image.labels else facts | find_sources(audit)


def _describe_code(cubins: Sequence[str], ptx: Sequence[tuple[str, str]]) -> dict[str, object]:
    return {
        "cubins": list(cubins),
        "ptx": [{"target": target, "isa": isa} for target, isa in ptx],
    }


def _describe_files(files: Iterable[ExaminedFile]) -> Iterator[dict[str, object]]:
    """Yield the files in which there is something to tell: device code, needs of a CPU, or damage."""
    for examined in files:
        file, code, host = examined.file, examined.file.code, examined.file.host or HostCode()
        if not (code or file.isa or file.damaged or host.functions):
            continue
        ptx = sorted(code.ptx, key=lambda text: (text[0], versions.make_sort_key(text[1])))
        yield {
            "path": examined.path,
            "layer": examined.layer,
            **_describe_code(sorted(code.cubins), ptx),
            "code_objects": sorted(code.objects),
            "requires": [*([file.isa] if file.isa else []), *sorted(host.required)],
            "probable": sorted(host.probable),
            "contains": sorted(host.functions.keys() - host.required - host.probable),
            "dispatch": {"by": list(host.signs), "flags": sorted(host.chosen)} if host.signs else None,
            "functions": {
                flag: {"count": carriers.count, "names": list(carriers.names)}
                for flag, carriers in host.functions.items()
            },
            "damaged": file.damaged or code.damaged,
            **({"uncounted": examined.uncounted_reason} if examined.uncounted_reason else {}),
        }


def _measure_size(audit: Audit, audits: Sequence[Audit], fat: int | None) -> dict[str, int | None] | None:
    """Return the sizes of the layers in a registry, or None if they are not known."""
    sizes = audit.image.sizes
    if not sizes:
        return None
    elsewhere = {layer for audited in audits if audited is not audit for layer in audited.image.sizes}
    return {
        "compressed": sum(sizes.values()),
        "shared": sum(size for layer, size in sizes.items() if layer in elsewhere),
        "fat": fat,
    }


def estimate_fat_size(audits: Sequence[Audit]) -> int | None:
    """Return the estimated compressed bytes of one image with the device code of several images.

    To each image's size it adds the device code that the image lacks and another one has, with the largest
    size for each file and target; the result is the largest sum. Device code counts with its size in files,
    so the estimate is too high if layers compress it further. Code for several CPUs is not included. Returns
    None for a single image, or if an image has no device code or no known layer sizes.
    """
    # The sizes of the device code of each image, by file and target.
    codes = [
        {
            (examined.path, target): size
            for examined in audited.coded_files
            for target, size in examined.file.code.sizes
        }
        for audited in audits
    ]
    if len(audits) < 2 or not all(codes) or not all(audited.image.sizes for audited in audits):  # noqa: PLR2004
        return None
    largest: dict[tuple[str, str], int] = {}
    for code in codes:
        for key, size in code.items():
            largest[key] = max(size, largest.get(key, 0))
    total = sum(largest.values())
    return max(
        sum(audited.image.sizes.values()) + total - sum(code.values())
        for audited, code in zip(audits, codes, strict=True)
    )
