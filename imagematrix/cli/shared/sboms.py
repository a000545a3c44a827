"""Writing SBOMs of images to a file, to a folder or to stdout."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from imagematrix.cli.shared.output import print_info, print_json, report_write_errors
from imagematrix.common import files, json_documents
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.audit.report import Audit
    from imagematrix.audit.sbom.components import Component

STDOUT = Path("-")
SUFFIX = ".spdx.json"
EPOCH = "SOURCE_DATE_EPOCH"


def require_writable_sboms(path: Path | None, references: Sequence[str], *, json: bool) -> None:
    """Raise UsageError if the SBOMs of images cannot be written to `path`, before anything is read."""
    if path == STDOUT and json:
        raise UsageError("--sbom - and --json both write to stdout", remedy="give --sbom a file")
    if path is not None and len(references) > 1:
        _require_folder(path)


def write_sboms(path: Path, images: Sequence[tuple[Audit, Sequence[Component]]]) -> None:
    """Write the SBOM of one image to `path`, or those of several to files in it, named by digest."""
    from imagematrix.audit.sbom import spdx

    tool = f"imagematrix-{version('imagematrix')}"
    epoch = os.environ.get(EPOCH)
    documents = [
        (audit.image, spdx.make_document(audit, components, tool, spdx.get_creation_time(audit.image, epoch)))
        for audit, components in images
    ]
    if len(documents) == 1 and path == STDOUT:
        print_json(documents[0][1])
        return
    if len(documents) == 1 and not path.is_dir():
        with report_write_errors(path):
            files.write_output(path, json_documents.dump_json(documents[0][1]).encode())
        return
    _require_folder(path)
    with report_write_errors():
        path.mkdir(parents=True, exist_ok=True)
    for image, document in documents:
        file = path / f"{image.digest.replace(':', '-')}{SUFFIX}"
        with report_write_errors(file):
            files.write_output(file, json_documents.dump_json(document).encode())
        print_info(f"imagematrix: {image.reference}: {file}")


def _require_folder(path: Path) -> None:
    if path == STDOUT or (path.exists() and not path.is_dir()):
        place = "stdout" if path == STDOUT else f"the file {path}"
        raise UsageError(f"--sbom: several images cannot be written to {place}", remedy="name a folder")
