"""`imagematrix adopt`: a catalog of unlabelled images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.audit_images import Platform, References, audit_references
from imagematrix.cli.shared.output import print_info, print_json, report_write_errors, warn
from imagematrix.common import files, json_documents
from imagematrix.common.image_reference import DIGEST, is_tag, split_version
from imagematrix.common.text import format_count
from imagematrix.errors import UsageError

NONE = "none"  # in place of a list of flags

EXAMPLE = "imagematrix adopt registry.example.com/torch:2.8 --as torch:v1 -o torch.json"


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
    cpu_flags: Annotated[
        str | None,
        typer.Option(
            "--cpu-flags",
            metavar="FLAG[,...]",
            help="The CPU flags that the images need, or none; overrules what their files tell.",
        ),
    ] = None,
    platform: Platform = None,
) -> None:
    """Write a catalog of images that other tools built; what they need is read from their bytes.

    Needs that bytes do not show come from claims such as NVIDIA_REQUIRE_CUDA. Other commands accept the
    catalog with --catalog FILE.
    """
    from imagematrix.audit.catalog import make_catalog
    from imagematrix.audit.images import device_code_entries
    from imagematrix.selection.decision import warn_of_equal_variants

    image, version = split_version(name)
    if version is None or DIGEST.fullmatch(version) or not is_tag(version):
        raise UsageError(f"invalid name {name!r}: expected a name and a version, such as torch:v1")
    flags = None if cpu_flags is None else _parse_flags(cpu_flags)
    audits = audit_references(references, platform, optional or ())
    unmatched = [glob for glob in optional or () if all(glob in audit.unmatched for audit in audits)]
    device_code_entries.require_matches((), unmatched)
    for audit in audits:
        device_code_entries.require_matches(audit.device_code, ())
    catalog = make_catalog(audits, image, version, warn, flags)
    for text, remedy in warn_of_equal_variants(catalog):
        warn(text, remedy)
    if output is None:
        print_json(catalog.to_json())
        return
    with report_write_errors(output):
        files.write_output(output, json_documents.dump_json(catalog.to_json()).encode())
    print_info(f"imagematrix: {format_count(len(catalog.variants), 'image')} of {name} in {output}")


def _parse_flags(text: str) -> frozenset[str]:
    """Return the flags in a list separated by commas, none of `none`; raise UsageError."""
    from imagematrix.common.suggestions import suggest_nearest
    from imagematrix.hardware.vendors import macros

    words = frozenset() if text == NONE else frozenset(word.strip() for word in text.split(","))
    names = sorted({flag for flags in macros.FLAGS.values() for flag in flags.values()})
    for word in sorted(words.difference(names)):
        remedy = suggest_nearest(word, names) or f"there are {', '.join(names)}"
        raise UsageError(f"--cpu-flags: {word!r} is no CPU flag that code may need", remedy=remedy)
    return words
