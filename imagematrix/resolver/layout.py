"""An OCI layout on this node's disk as the resolver's upstream."""

from __future__ import annotations

import hashlib

from aiohttp import web

from imagematrix import documents
from imagematrix.errors import EngineError, UsageError
from imagematrix.oci.layout import blob_file
from imagematrix.oci.registry import INDEX, Manifest
from imagematrix.reference import DIGEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Layout"]

MARK = "oci-layout"
NAME = "org.opencontainers.image.ref.name"  # the annotation that names an image of a layout
LIMIT = 4 * 1024 * 1024  # bytes of a manifest, as of a registry's


class Layout:
    """The layout in `folder`. Its images are named IMAGE:TAG in index.json."""

    def __init__(self, folder: Path) -> None:
        if not (folder / MARK).is_file():
            raise UsageError(f"{folder} is not an OCI layout: {MARK} not found")
        self._folder = folder

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest; see Upstream."""
        digest = reference if DIGEST.fullmatch(reference) else self._names().get(f"{repository}:{reference}")
        path = self._path(digest) if digest else None
        if path is None:
            return None
        raw = _read(path)
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            raise EngineError(f"{path} is damaged: its content has another digest")
        media_type = documents.Fields(documents.parse(raw, str(path)), str(path)).text_or_none("mediaType")
        return Manifest(digest=digest, media_type=media_type or INDEX, raw=raw)

    def tags(self, repository: str) -> list[str]:
        """Return the tags; see Upstream."""
        split = (name.rpartition(":") for name in self._names())
        return sorted(tag for image, _, tag in split if image == repository)

    async def blob(self, _request: web.Request, _repository: str, digest: str) -> web.StreamResponse:
        """Answer with a file; see Upstream."""
        path = self._path(digest)
        if path is None:
            raise web.HTTPNotFound
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def close(self) -> None:
        """Nothing is open."""

    def _path(self, digest: str) -> Path | None:
        path = blob_file(self._folder, digest)
        return path if path.is_file() else None

    def _names(self) -> dict[str, str]:
        """Return the digests of the layout's images by their names."""
        path = self._folder / "index.json"
        fields = documents.Fields(documents.parse(_read(path), str(path)), str(path))
        return {
            name: one.text("digest")
            for one in fields.objects("manifests")
            if (name := one.named_texts("annotations").get(NAME)) and DIGEST.fullmatch(one.text("digest"))
        }


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > LIMIT:
        raise EngineError(f"{path} has more than {LIMIT // 2**20} MiB, which no manifest has")
    return raw
