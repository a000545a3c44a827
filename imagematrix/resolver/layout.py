"""An OCI layout on this node's disk as the upstream of the resolver."""

from __future__ import annotations

import hashlib

from aiohttp import web

from imagematrix import documents
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.oci.layout import blob_file
from imagematrix.oci.registry import IMAGE, INDEX, Manifest
from imagematrix.reference import DIGEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["INDEX_FILE", "MARK", "NAME", "Layout", "content"]

MARK = "oci-layout"
INDEX_FILE = "index.json"
NAME = "org.opencontainers.image.ref.name"  # the annotation that names an image of a layout
LIMIT = 4 * 1024 * 1024  # bytes of a manifest, as for registries


class Layout:
    """The layout in `folder`. Its images are named IMAGE:TAG in index.json."""

    def __init__(self, folder: Path) -> None:
        if not (folder / MARK).is_file():
            raise UsageError(f"{folder} is not an OCI layout: {MARK} not found")
        self._folder = folder

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest; see Upstream."""
        digest = reference if DIGEST.fullmatch(reference) else self._names().get(f"{repository}:{reference}")
        raw = content(self._folder, digest) if digest else None
        if digest is None or raw is None:
            return None
        fields = documents.Fields(documents.parse(raw, digest), digest)
        # In a manifest or an index, OCI does not require a mediaType.
        media_type = fields.text_or_none("mediaType") or (INDEX if fields.present("manifests") else IMAGE)
        return Manifest(digest=digest, media_type=media_type, raw=raw)

    def content(self, repository: str, digest: str) -> bytes:
        """Return a small blob; see Source."""
        raw = content(self._folder, digest)
        if raw is None:
            raise UnknownImageError(f"{self._folder} has no {repository}@{digest}")
        return raw

    def tags(self, repository: str) -> list[str]:
        """Return the tags; see Upstream."""
        split = (name.rpartition(":") for name in self._names())
        return sorted(tag for image, _, tag in split if image == repository)

    async def blob(self, _request: web.Request, _repository: str, digest: str) -> web.StreamResponse:
        """Answer with a file; see Upstream."""
        path = blob_file(self._folder, digest)
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    def _names(self) -> dict[str, str]:
        """Return the digests of the layout's images by their names."""
        path = self._folder / INDEX_FILE
        fields = documents.Fields(documents.parse(_read(path), str(path)), str(path))
        return {
            name: one.text("digest")
            for one in fields.objects("manifests")
            if (name := one.named_texts("annotations").get(NAME)) and DIGEST.fullmatch(one.text("digest"))
        }


def content(folder: Path, digest: str) -> bytes | None:
    """Return a small blob of the layout `folder`, None if it has none; raise EngineError if it is damaged."""
    path = blob_file(folder, digest)
    if not path.is_file():
        return None
    raw = _read(path)
    if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
        raise EngineError(f"{path} is damaged: its content does not match its digest")
    return raw


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > LIMIT:
        raise EngineError(f"{path} is too large for a manifest: more than {LIMIT // 2**20} MiB")
    return raw
