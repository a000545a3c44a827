"""An image in an OCI layout on disk (image-layout.md of the OCI image specification)."""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
import threading
from collections import Counter

from imagematrix.oci.parts import of_config
from imagematrix.reference import familiar, names_registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Any

    from imagematrix.oci.parts import Part

__all__ = ["Blobs", "HollowError", "Image", "Index", "blob_file", "solid"]

VERSION = b'{"imageLayoutVersion":"1.0.0"}'
PIECE = 1 << 20  # bytes to read at once


class Image:
    """The image with the manifest `digest` in the layout `folder`."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder = folder
        self.digest = digest
        self.raw = self.blob(digest).read_bytes()
        self._manifest: dict[str, Any] = json.loads(self.raw)

    @property
    def media_type(self) -> str:
        """The media type of its manifest."""
        return str(self._manifest["mediaType"])

    @property
    def images(self) -> tuple[Image, ...]:
        """The image itself, as in an Index."""
        return (self,)

    @property
    def config(self) -> str:
        """The digest of its configuration."""
        return str(self._manifest["config"]["digest"])

    @property
    def blobs(self) -> tuple[str, ...]:
        """The digests of its layers and its configuration."""
        return *self.layers, self.config

    @property
    def layers(self) -> tuple[str, ...]:
        """The digests of its layers, the lowest first."""
        return tuple(layer["digest"] for layer in self._manifest["layers"])

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its layers, the lowest first, with their sizes in a registry."""
        layers = ((layer["digest"], int(layer["size"])) for layer in self._manifest["layers"])
        return of_config(layers, json.loads(self.blob(self.config).read_bytes()))

    @property
    def layer_files(self) -> tuple[Path, ...]:
        """The files of its layers, the lowest first."""
        return tuple(map(self.blob, self.layers))

    @property
    def archives(self) -> tuple[str, ...]:
        """The digests of the layers that are tars, which the blobs of attestations are not."""
        return tuple(layer["digest"] for layer in self._manifest["layers"] if ".tar" in layer["mediaType"])

    def archive(self, reference: str, layers: Iterable[str]) -> Iterator[bytes]:
        """Yield the tar for `docker load` in chunks: named `reference`, with the given `layers`.

        An engine with the containerd image store already has the others. Raises HollowError if the bytes of a
        given layer have been removed.
        """
        index = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                {
                    "mediaType": self._manifest["mediaType"],
                    "digest": self.digest,
                    "size": self.blob(self.digest).stat().st_size,
                    "annotations": {"io.containerd.image.name": _qualified(reference)},
                }
            ],
        }
        for digest in (self.digest, self.config, *layers):
            path = solid(self.blob(digest))
            yield _header(f"blobs/sha256/{path.name}", path.stat().st_size)
            with path.open("rb") as file:
                while piece := file.read(PIECE):
                    yield piece
                yield _padding(file.tell())
        for name, data in (("index.json", json.dumps(index).encode()), ("oci-layout", VERSION)):
            yield _header(name, len(data)) + data + _padding(len(data))
        yield bytes(2 * tarfile.BLOCKSIZE)  # the end of a tar

    def blob(self, digest: str) -> Path:
        """Return the path of a blob."""
        return blob_file(self._folder, digest)


class Index:
    """The image index with the digest `digest` in the layout `folder`: an image with its attestations."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.digest = digest
        self.raw = blob_file(folder, digest).read_bytes()
        data: dict[str, Any] = json.loads(self.raw)
        self.media_type = str(data["mediaType"])
        self.images = tuple(Image(folder, entry["digest"]) for entry in data["manifests"])


class HollowError(Exception):
    """The bytes of a layer are needed, but were removed from the disk because the store had them."""


class Blobs:
    """The blobs of several layouts in one folder. The bytes of a layer are removed after its last use.

    An empty file with its name stays, so that BuildKit, which checks only the name, does not send the layer
    again. A store that has the layer does not need it again either. Thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def used(self, digests: Iterable[str]) -> Iterator[None]:
        """Keep the bytes of these layers while this context is active."""
        own = set(digests)
        with self._lock:
            self._users.update(own)
        try:
            yield
        finally:
            with self._lock:
                self._users.subtract(own)
                for digest in own:
                    if not self._users[digest]:
                        del self._users[digest]
                        os.truncate(self._folder / digest.removeprefix("sha256:"), 0)


def blob_file(folder: Path, digest: str) -> Path:
    """Return the path of a blob in the layout `folder`."""
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def solid(path: Path) -> Path:
    """Return the path of a layer; raise HollowError if its bytes have been removed."""
    if not path.stat().st_size:
        raise HollowError(path.name)
    return path


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf()


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _qualified(reference: str) -> str:
    """Return `reference` with the registry and folder that docker omits."""
    short = familiar(reference)
    if names_registry(short):
        return short
    return f"docker.io/{short}" if "/" in short else f"docker.io/library/{short}"
