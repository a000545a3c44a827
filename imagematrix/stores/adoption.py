"""Verifying that an image in an engine is the variant in its name, before it is pushed.

Every image that is built on a variant inherits its labels, and `docker tag` gives any image any name. So one
label has the digest of the rest of the image's configuration, including its layers; if it matches, nothing
was built on the variant. The bytes of the layers are also audited, as after a build. This does not protect
against someone who forges the label; signatures do. Images from the classic image store or an older release
have no such label and are only audited.
"""

from __future__ import annotations

import json
import posixpath
import re
import tarfile

from imagematrix import documents
from imagematrix.audit.claims import broken, of_layers
from imagematrix.audit.layer import read_file
from imagematrix.catalog import labels
from imagematrix.errors import AuditError, UsageError
from imagematrix.scratch import scratch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any, BinaryIO

    from imagematrix.audit.layer import Layer
    from imagematrix.audit.layers import Layers

__all__ = ["examine"]

BLOB = re.compile(r"[0-9a-f]{64}", re.ASCII)
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,3}", re.ASCII)


def examine(reference: str, archive: BinaryIO, layers: Layers) -> None:
    """Raise AuditError if an image in an `archive` of `docker save` contradicts its labels.

    Layers that are in `layers` are not read again.
    """
    try:
        with scratch() as folder:
            links = _unpack(archive, folder)
            saved = documents.Fields({"images": documents.read(folder / "manifest.json")}, reference)
            (image,) = saved.objects("images")
            config = json.loads(_file(folder, image.text("Config")).read_bytes())
            files = [_file(folder, links.get(name, name)) for name in image.texts("Layers")]
            _examine(reference, config, [_layer(file, layers) for file in files])
    except (OSError, tarfile.TarError, ValueError, UsageError) as error:
        raise AuditError(f"{reference} cannot be read from the engine: {error}") from error


def _examine(reference: str, config: Mapping[str, Any], layers: Sequence[Layer]) -> None:
    own = (config.get("config") or {}).get("Labels") or {}
    if labels.inherited(config):
        raise AuditError(
            f"{reference} is not the variant of this name, but an image built on the variant",
            remedy=f"run `docker image rm {reference}` and build again",
        )
    promised = labels.read(own, reference=reference, digest=None, size=None)
    why = broken(of_layers(layers, promised), promised)
    if why:
        raise AuditError(f"{reference}: {why}")


def _layer(file: Path, layers: Layers) -> Layer:
    """Read a layer; its file may be named by its digest."""
    if BLOB.fullmatch(file.name) and file.parent.name == "sha256":
        return layers.read(f"sha256:{file.name}", lambda _: file.open("rb"))
    return read_file(file)


def _unpack(archive: BinaryIO, folder: Path) -> dict[str, str]:
    """Unpack the files of an archive, and return the targets of its links.

    If an image has a layer twice, Docker 24 and older write the second one as a link to the first.
    """
    links = {}
    with tarfile.open(fileobj=archive, mode="r|*") as tar:
        for member in tar:
            if member.issym():
                beside = posixpath.join(posixpath.dirname(member.name), member.linkname)
                links[member.name] = posixpath.normpath(beside)
            file = tar.extractfile(member) if member.isfile() and PLAIN.fullmatch(member.name) else None
            if file:
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as copy:
                    while piece := file.read(1 << 20):
                        copy.write(piece)
    return links


def _file(folder: Path, name: str) -> Path:
    if not PLAIN.fullmatch(name) or ".." in name:
        raise UsageError(f"{name[:80]!r} is not a valid file name in an archive")
    return folder / name
