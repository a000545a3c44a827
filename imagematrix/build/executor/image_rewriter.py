"""Clamped times in the layers of images in an OCI layout, each layer rewritten once, and labels after that.

BuildKit can do both (`rewrite-timestamp`, `--label`). But it compresses all layers again for each image: a
driver, or a gigabyte of packages, once for each cell that shares it. And it needs labels before the build,
when nobody knows the CPU flags of the code, and what an audit of the image will prove. So BuildKit exports
tars, which are compressed here once. The layers of a base stay byte for byte the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import tempfile
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from imagematrix.common.single_flight import SingleFlight
from imagematrix.common.temp_folder import make_full_disk_remedy
from imagematrix.errors import BuildError
from imagematrix.images.catalog.labels import CONTENT, drop_own, hash_content, select_annotations
from imagematrix.images.oci import deflate
from imagematrix.images.oci.compression import compress
from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.layout import require_blob
from imagematrix.images.oci.manifest import ATTESTED
from imagematrix.images.oci.mtimes import clamp_mtimes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping
    from typing import IO, Any

    from imagematrix.build.plan.protocols import BuiltImage
    from imagematrix.images.oci.compression import Compression

PARALLEL_LAYERS = 2  # layers that are compressed: each uses several threads, and at high levels a gigabyte


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenLayer:
    """A layer of an image: its digest, its size in a registry, and its `diff_id`, the digest of its tar.

    `exported` is the digest of the layer that BuildKit exported, before times were clamped.
    """

    exported: str
    digest: str
    size: int
    diff_id: str


class _BlobFolder:
    """The blobs in a folder (blobs/sha256 of a layout)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_path(self, digest: str) -> Path:
        return self._folder / digest.removeprefix("sha256:")

    def read(self, digest: str) -> bytes:
        return self.get_path(digest).read_bytes()

    def get_size(self, digest: str) -> int:
        return self.get_path(digest).stat().st_size

    def read_json(self, digest: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.read(digest))
        return document

    def put(self, raw: bytes) -> str:
        with self.open_new() as file:
            file.write(raw)
            return self.keep(file)

    def put_json(self, value: object) -> str:
        return self.put(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())

    def put_image(self, digest: str, manifest: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
        """Write a changed image; return the new digests of configuration and image, by the old ones."""
        old_config = manifest["config"]["digest"]
        new_config = self.put_json(config)
        manifest["config"] |= {"digest": new_config, "size": self.get_size(new_config)}
        return {old_config: new_config, digest: self.put_json(manifest)}

    def put_index(self, digest: str, new_digests: Mapping[str, str]) -> str:
        """Write the index of an image with attestations for a changed image, and return its new digest.

        `new_digests` are the new digests of the image and of its parts by the old ones, to which the
        attestations refer.
        """
        new_digests = dict(new_digests)
        index = self.read_json(digest)
        image = _find_attested_image(index)
        for entry in index["manifests"]:
            if entry["digest"] != image:
                manifest = self.read_json(entry["digest"])
                for blob in (*manifest["layers"], manifest["config"], entry):
                    raw = self.read(blob["digest"])
                    for old, new in new_digests.items():  # of the same length
                        raw = raw.replace(
                            old.removeprefix("sha256:").encode(), new.removeprefix("sha256:").encode()
                        )
                    new_digests[blob["digest"]] = self.put(raw)
                entry["annotations"][ATTESTED] = new_digests[image]
            entry["digest"] = new_digests[entry["digest"]]
            entry["size"] = self.get_size(entry["digest"])
        return self.put_json(index)

    @contextlib.contextmanager
    def open_new(self) -> Iterator[IO[bytes]]:
        """Yield a temporary file that `keep` renames; otherwise it is removed."""
        folder = self._folder.parent
        name = None
        try:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                name = Path(file.name)
                yield file
        except BaseException as error:
            if name:
                name.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise BuildError(
                    f"{folder}: {error.strerror}", remedy=make_full_disk_remedy(folder.parent)
                ) from error
            raise

    def keep(self, file: IO[bytes]) -> str:
        """Rename a written file to its digest, and return that."""
        file.seek(0)
        digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"  # type: ignore[arg-type]
        Path(file.name).rename(self.get_path(digest))
        return digest


class Rewriter:
    """Clamps the times in images whose blobs are in the folder `blobs` (blobs/sha256 of a layout).

    It writes the new blobs to the same folder. No time is after `latest`, in seconds since 1970. Thread-safe.
    """

    def __init__(self, blobs: Path, latest: int) -> None:
        self._blobs = _BlobFolder(blobs)
        self._latest = latest
        self._layers: SingleFlight[tuple[str, Compression], RewrittenLayer] = SingleFlight()
        self._free = threading.Semaphore(PARALLEL_LAYERS)

    def reuse_layer(self, layer: RewrittenLayer, compression: Compression) -> None:
        """Reuse a layer that an earlier build wrote, without reading its bytes."""
        self._layers((layer.exported, compression), lambda: layer)

    def rewrite_layer(self, exported: str, compression: Compression) -> RewrittenLayer:
        """Rewrite a layer; raise BuildError. Raises MissingBlobError if its bytes have been removed."""
        return self._layers((exported, compression), partial(self._write_layer, exported, compression))

    def rewrite_image(
        self, digest: str, base_digests: Container[str], compression: Compression
    ) -> tuple[str, str | None]:
        """Rewrite an image, or the one in an index with its attestations; raise BuildError.

        The layers `base_digests`, those of its base, are not changed; the others get this `compression`.
        Returns the new digests of the image and of the index, if there is one, whose attestations then refer
        to the new image. Raises MissingBlobError if a needed layer has been removed.
        """
        document = self._blobs.read_json(digest)
        image = _find_attested_image(document) if "manifests" in document else digest
        new_digests = self._write_image(image, base_digests, compression)
        attested = None if image == digest else self._blobs.put_index(digest, new_digests)
        return new_digests[image], attested

    def _write_image(
        self, digest: str, base_digests: Container[str], compression: Compression
    ) -> dict[str, str]:
        """Rewrite an image; return the new digests of its layers, its configuration and itself."""
        manifest = self._blobs.read_json(digest)
        config = self._blobs.read_json(manifest["config"]["digest"])
        new_digests = {}
        for position, layer in enumerate(manifest["layers"]):
            old = layer["digest"]
            if old not in base_digests:
                new = self.rewrite_layer(old, compression)
                new_digests[old] = new.digest
                kind = compression.media_type
                manifest["layers"][position] = {"mediaType": kind, "digest": new.digest, "size": new.size}
                config["rootfs"]["diff_ids"][position] = new.diff_id

        # The history of a base's layers stays, and then that of the steps that made layers. Releases of
        # BuildKit word some of the others differently, such as EXPOSE, and the image's digest would depend on
        # it. Their results are in the configuration.
        base_layers = sum(layer["digest"] in base_digests for layer in manifest["layers"])
        history, layers = [], 0
        for entry in config.get("history", ()):
            if layers < base_layers or not entry.get("empty_layer"):
                history.append(entry)
            layers += not entry.get("empty_layer")
        if "history" in config:
            config["history"] = history
        return new_digests | self._blobs.put_image(digest, manifest, config)

    def _write_layer(self, digest: str, compression: Compression) -> RewrittenLayer:
        tar_digest = hashlib.sha256()

        def content(source: IO[bytes]) -> Iterator[bytes]:
            for piece in clamp_mtimes(DecompressedStream(source), self._latest):
                tar_digest.update(piece)
                yield piece

        with (
            self._free,
            require_blob(self._blobs.get_path(digest)).open("rb") as source,
            self._blobs.open_new() as target,
        ):
            try:
                for piece in compress(content(source), compression, deflate.count_threads()):
                    target.write(piece)
            except (ValueError, EOFError) as error:
                raise BuildError(f"the layer {digest} cannot be read: {error}") from error
            size = target.tell()
            new_digest = self._blobs.keep(target)
        diff_id = f"sha256:{tar_digest.hexdigest()}"
        return RewrittenLayer(exported=digest, digest=new_digest, size=size, diff_id=diff_id)


def label_image(image: BuiltImage, new_labels: Mapping[str, str]) -> BuiltImage:
    """Return an image in a layout with the labels `new_labels`; raise BuildError.

    Some of them are also annotations of its manifest. Other labels of imagematrix, which it may have from a
    base or an earlier version, are dropped. Its layers stay, so this takes no second build. An image without
    a layout is returned unchanged: its build got the labels.
    """
    if image.layout is None:
        return image
    blobs = _BlobFolder((image.layout / "blobs" / "sha256").resolve())
    manifest = blobs.read_json(image.digest)
    config = blobs.read_json(manifest["config"]["digest"])
    inner = config.setdefault("config", {})
    inner["Labels"] = {**drop_own(inner.get("Labels") or {}), **new_labels}
    inner["Labels"][CONTENT] = hash_content(config)
    annotations = {**drop_own(manifest.get("annotations", {})), **select_annotations(new_labels)}
    if annotations:
        manifest["annotations"] = annotations
    new_digests = blobs.put_image(image.digest, manifest, config)
    attested = image.attested and blobs.put_index(image.attested, new_digests)
    return replace(image, digest=new_digests[image.digest], attested=attested)


def _find_attested_image(index: Mapping[str, Any]) -> str:
    """Return the digest of the image in an index that has its attestations, too."""
    (image,) = (
        entry["digest"] for entry in index["manifests"] if ATTESTED not in entry.get("annotations", {})
    )
    return str(image)
