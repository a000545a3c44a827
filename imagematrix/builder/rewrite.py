"""Labels for images in an OCI layout, and clamped times in their layers, each layer rewritten once.

BuildKit can do both (`--label`, `rewrite-timestamp`). But it compresses all layers again for each image: a
driver, or a gigabyte of packages, once for each cell that shares it. And it needs labels before the build,
when their CPU flags are not known yet. So BuildKit exports tars, which are compressed here once. The layers
of a base stay byte for byte the same.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import tempfile
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from imagematrix import deflate
from imagematrix.catalog.index import ATTESTED
from imagematrix.catalog.labels import CONTENT, content
from imagematrix.errors import BuildError
from imagematrix.oci.clamp import clamped
from imagematrix.oci.expanded import GZIP, ZSTD
from imagematrix.oci.layout import solid
from imagematrix.once import Once
from imagematrix.scratch import room

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping
    from typing import IO, Any

    from imagematrix.planning.backend import Order

__all__ = ["Rewriter"]

TAR = "application/vnd.oci.image.layer.v1.tar"
LAYER = f"{TAR}+gzip"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    digest: str
    size: int
    diff_id: str  # the digest of the tar, uncompressed


class Rewriter:
    """Rewrites images whose blobs are in the folder `blobs` (blobs/sha256 of a layout) and writes them there.

    No time is after `latest`, in seconds since 1970. Thread-safe.
    """

    def __init__(self, blobs: Path, latest: int) -> None:
        self._blobs = blobs
        self._latest = latest
        self._layers: Once[str, _Layer] = Once()

    def image(self, digest: str, order: Order, kept: Container[str]) -> str:
        """Rewrite the image with `digest` and return the new digest; raise BuildError.

        It gets the labels and annotations of `order`. The layers `kept`, those of its base, are not changed.
        Raises HollowError if a needed layer has been removed.
        """
        return self._image(digest, order, kept)[digest]

    def index(self, digest: str, order: Order, kept: Container[str]) -> tuple[str, str]:
        """Rewrite an image with attestations; return the new digests and the index of both; raise BuildError.

        The attestations then refer to the new image.
        """
        index = self._json(digest)
        (image,) = (one["digest"] for one in index["manifests"] if ATTESTED not in one.get("annotations", {}))
        names = self._image(image, order, kept)
        for entry in index["manifests"]:
            if entry["digest"] != image:
                manifest = self._json(entry["digest"])
                for blob in (*manifest["layers"], manifest["config"], entry):
                    names[blob["digest"]] = self._put(_renamed(self._read(blob["digest"]), names))
                entry["annotations"][ATTESTED] = names[image]
            entry["digest"] = names[entry["digest"]]
            entry["size"] = self._size(entry["digest"])
        return names[image], self._put_json(index)

    def _image(self, digest: str, order: Order, kept: Container[str]) -> dict[str, str]:
        """Rewrite an image; return the new digests of its layers, its configuration and itself."""
        manifest = self._json(digest)
        config = self._json(manifest["config"]["digest"])
        names = {}
        for number, layer in enumerate(manifest["layers"]):
            old = layer["digest"]
            if old not in kept:
                made = self._layers(old, partial(self._rewritten, old))
                names[old] = made.digest
                manifest["layers"][number] = {"mediaType": LAYER, "digest": made.digest, "size": made.size}
                config["rootfs"]["diff_ids"][number] = made.diff_id
        inner = config.setdefault("config", {})
        inner["Labels"] = {**(inner.get("Labels") or {}), **order.labels}
        inner["Labels"][CONTENT] = content(config)
        if order.annotations:
            manifest["annotations"] = {**manifest.get("annotations", {}), **order.annotations}
        own = manifest["config"]
        names[own["digest"]] = self._put_json(config)
        own["digest"] = names[own["digest"]]
        own["size"] = self._size(own["digest"])
        return names | {digest: self._put_json(manifest)}

    def _rewritten(self, digest: str) -> _Layer:
        tar = hashlib.sha256()

        def content(source: IO[bytes]) -> Iterator[bytes]:
            for piece in clamped(_uncompressed(source), self._latest):
                tar.update(piece)
                yield piece

        with solid(self._path(digest)).open("rb") as source, self._new() as target:
            try:
                for piece in deflate.gzipped(content(source), deflate.threads()):
                    target.write(piece)
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise BuildError(f"the layer {digest} cannot be read: {error}") from error
            size = target.tell()
            return _Layer(digest=self._kept(target), size=size, diff_id=f"sha256:{tar.hexdigest()}")

    def _path(self, digest: str) -> Path:
        return self._blobs / digest.removeprefix("sha256:")

    def _read(self, digest: str) -> bytes:
        return self._path(digest).read_bytes()

    def _size(self, digest: str) -> int:
        return self._path(digest).stat().st_size

    def _json(self, digest: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self._read(digest))
        return document

    def _put(self, raw: bytes) -> str:
        with self._new() as file:
            file.write(raw)
            return self._kept(file)

    @contextlib.contextmanager
    def _new(self) -> Iterator[IO[bytes]]:
        """Yield a temporary file that `_kept` renames; otherwise it is removed."""
        folder = self._blobs.parent
        name = None
        try:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                name = Path(file.name)
                yield file
        except BaseException as error:
            if name:
                name.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise BuildError(f"{folder}: {error.strerror}", remedy=room(folder.parent)) from error
            raise

    def _kept(self, file: IO[bytes]) -> str:
        """Rename a written file to its digest, and return that."""
        file.seek(0)
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"  # type: ignore[arg-type]
        Path(file.name).rename(self._path(digest))
        return digest

    def _put_json(self, value: object) -> str:
        return self._put(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def _uncompressed(layer: IO[bytes]) -> IO[bytes] | gzip.GzipFile:
    head = layer.read(len(ZSTD))
    layer.seek(0)
    if head == ZSTD:
        raise BuildError("a layer is compressed with zstd, so its timestamps cannot be rewritten")
    return gzip.open(layer) if head.startswith(GZIP) else layer


def _renamed(raw: bytes, names: Mapping[str, str]) -> bytes:
    """Return JSON with digests replaced by others of the same length."""
    for old, new in names.items():
        raw = raw.replace(old.removeprefix("sha256:").encode(), new.removeprefix("sha256:").encode())
    return raw
