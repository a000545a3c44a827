"""The audit as a JSON document of the schema imagematrix.audit/v1 (schemas/audit.json)."""

from __future__ import annotations

from imagematrix.audit.host_code import HostCode
from imagematrix.facts import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.audit.claims import Contradiction
    from imagematrix.audit.device_code import DeviceCode
    from imagematrix.audit.objects import File
    from imagematrix.audit.report import Audit, Found

__all__ = ["SCHEMA", "document"]

SCHEMA = "imagematrix.audit/v1"


def document(
    audit: Audit,
    contradictions: Sequence[Contradiction],
    others: Sequence[Audit] = (),
    warnings: Sequence[str] = (),
    fat: int | None = None,
) -> dict[str, object]:
    """Return the document of an audit.

    `others` are the images with which it may share layers; `fat` is the size of one image for all their GPUs.
    """
    image = audit.image
    flags = audit.flags
    has_device_code = any(True for _ in audit.coded)
    return {
        "schema": SCHEMA,
        "reference": image.reference,
        "digest": image.digest,
        "platform": image.platform,
        **_code(audit.cubins, audit.ptx),
        "compressed_fatbin": audit.compressed,
        "code_objects": list(audit.objects),
        "drivers": [
            {
                "path": one.path,
                "name": one.driver.name,
                "version": one.driver.version,
                "kind": one.driver.kind,
                "loaded": one.loaded,
            }
            for one in audit.drivers
        ],
        "libraries": [
            {
                "name": one.name,
                "version": one.version,
                "path": one.path,
                "static": one.static,
                "oldest_driver": one.oldest_driver,
            }
            for one in sorted(audit.libraries, key=lambda one: (one.name, one.path))
        ],
        "cpu": {
            "requires": sorted(flags),
            "contains": sorted(audit.contained - flags.keys()),
            "proof": dict(sorted(flags.items())),
        },
        "python": [
            {"name": one.name, "version": one.version, "cuda": one.cuda, "arch_list": list(one.arch_list)}
            for one in audit.stacks
        ],
        "facts": {
            "cubins": "bytes" if has_device_code else "claim",
            "cpu_flags": "bytes" if audit.decided else "claim",
            "driver": "bytes",
            "cuda": "claim",
        },
        "files": [_file(one) for one in audit.files if _has_content(one)],
        "contradictions": [
            {"fact": one.fact, "claimed": list(one.claimed), "found": list(one.found), "path": one.path}
            for one in contradictions
        ],
        "warnings": list(warnings),
        "size": _size(audit, others, fat),
    }


def _code(cubins: Sequence[str], ptx: Sequence[tuple[str, str]]) -> dict[str, object]:
    return {
        "cubins": list(cubins),
        "ptx": [{"target": target, "isa": isa} for target, isa in ptx],
    }


def _has_content(one: Found) -> bool:
    host = one.file.host
    return bool(one.file.code or one.file.isa or one.file.damaged or (host and host.functions))


def _file(one: Found) -> dict[str, object]:
    code: DeviceCode = one.file.code
    return {
        "path": one.path,
        "layer": one.layer,
        **_code(sorted(code.cubins), sorted(code.ptx, key=lambda ptx: (ptx[0], versions.order(ptx[1])))),
        "code_objects": sorted(code.objects),
        **_host(one.file),
        "damaged": one.file.damaged or code.damaged,
    }


def _host(file: File) -> dict[str, object]:
    host = file.host or HostCode()
    return {
        "requires": [*([file.isa] if file.isa else []), *sorted(host.required)],
        "contains": sorted(host.functions.keys() - host.required),
        "dispatch": {"by": list(host.signs), "flags": sorted(host.chosen)} if host.signs else None,
        "functions": {
            flag: {"count": one.count, "names": list(one.names)} for flag, one in host.functions.items()
        },
    }


def _size(audit: Audit, others: Sequence[Audit], fat: int | None) -> dict[str, int | None] | None:
    """Return the sizes of the layers in a registry, or None if they are not known."""
    sizes = audit.image.sizes
    if not sizes:
        return None
    elsewhere = {layer for one in others if one is not audit for layer in one.image.sizes}
    return {
        "compressed": sum(sizes.values()),
        "shared": sum(size for layer, size in sizes.items() if layer in elsewhere),
        "fat": fat,
    }
