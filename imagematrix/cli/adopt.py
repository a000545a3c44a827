"""`imagematrix adopt`: a catalog of unlabelled images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix import documents, files
from imagematrix.cli.auditing import Platform, References, audited
from imagematrix.cli.output import info, print_json, warn, writing
from imagematrix.errors import UsageError
from imagematrix.reference import DIGEST, TAG, split
from imagematrix.text import counted

__all__ = ["command"]


def command(
    references: References,
    name: Annotated[str, typer.Option("--as", metavar="NAME:VERSION", help="Give the catalog this name.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the catalog to FILE.")
    ] = None,
    optional: Annotated[
        list[str] | None,
        typer.Option(
            "--optional", metavar="GLOB", help="Files that may lack device code for a GPU; repeatable."
        ),
    ] = None,
    platform: Platform = None,
) -> None:
    """Write a catalog of unlabelled images; their needs are read from their bytes.

    Needs that bytes do not show come from claims such as NVIDIA_REQUIRE_CUDA. Other commands accept the
    catalog with --catalog FILE.
    """
    from imagematrix.audit import entries
    from imagematrix.audit.catalog import catalog

    image, version = split(name)
    if version is None or DIGEST.fullmatch(version) or not TAG.fullmatch(version):
        raise UsageError(f"invalid name {name!r}: expected a name and a version, such as torch:v1")
    audits = audited(references, platform, optional or ())
    unmatched = [glob for glob in optional or () if all(glob in audit.unmatched for audit in audits)]
    entries.require((), unmatched)
    for audit in audits:
        entries.require(audit.device_code, ())
    result = catalog(audits, image, version, warn)
    if output is None:
        print_json(result.to_json())
        return
    with writing(output):
        files.write(output, documents.dump(result.to_json()).encode())
    info(f"imagematrix: {counted(len(result.variants), 'image')} of {name} in {output}")
