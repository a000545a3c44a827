"""Images in OCI layouts on disk (image-layout.md of the OCI image specification)."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tarfile
import threading
from collections import Counter
from pathlib import Path

from imagematrix.common.image_reference import names_registry, shorten_name
from imagematrix.errors import UsageError
from imagematrix.images.oci.manifest import (
    INDEX,
    LIMIT,
    Descriptor,
    ImageIndex,
    ImageManifest,
    compute_digest,
    parse_manifest,
)
from imagematrix.images.oci.parts import read_config_layers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, BinaryIO

    from imagematrix.errors import ImagematrixError
    from imagematrix.images.oci.parts import SizedLayer

MARK = "oci-layout"  # the file that marks a folder as a layout
VERSION = b'{"imageLayoutVersion":"1.0.0"}'  # its content
INDEX_FILE = "index.json"
NAME = "org.opencontainers.image.ref.name"  # an annotation in the index: the name of an image in the layout
ENGINE_NAME = "io.containerd.image.name"  # another one: its name in an engine
PIECE = 1 << 20  # bytes to read at once


class LayoutFolder:
    """A layout that anyone may have written. What cannot be read is raised as `failure`."""

    def __init__(self, folder: Path, failure: type[ImagematrixError]) -> None:
        self._folder = folder
        self._failure = failure

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def is_marked(self) -> bool:
        """Whether it says that it is a layout."""
        return (self._folder / MARK).is_file()

    def read_index(self) -> bytes:
        """Return the index of its images."""
        return self._read_small(self._folder / INDEX_FILE)

    def find_blob(self, digest: str) -> Path | None:
        """Return the file of a blob, or None if there is none with this digest.

        A link that leads out of the folder is none: whoever reads the blob may not read what it leads to.
        """
        path = Path(os.path.realpath(get_blob_path(self._folder, digest)))
        is_inside = path.is_relative_to(os.path.realpath(self._folder))
        return path if is_inside and path.is_file() else None

    def find_small_blob(self, digest: str) -> bytes | None:
        """Return a small blob, such as a manifest, or None if there is none with this digest."""
        path = self.find_blob(digest)
        if path is None:
            return None
        raw = self._read_small(path)
        if compute_digest(raw) != digest:
            raise self._failure(f"{self}: the content of blob {digest} does not match its digest")
        return raw

    def require_small_blob(self, digest: str) -> bytes:
        """Return a small blob; raise the folder's kind of error if there is none with this digest."""
        raw = self.find_small_blob(digest)
        if raw is None:
            raise self._failure(f"{digest} not found in the layout {self}")
        return raw

    def open(self, digest: str) -> BinaryIO:
        """Open a blob of any size, without comparing it with its digest."""
        path = self.find_blob(digest)
        if path is None:
            raise self._failure(f"{self}: {digest} cannot be read: there is no such file in the layout")
        try:
            return self._open_file(path)
        except OSError as error:
            raise self._failure(f"{self}: {digest} cannot be read: {error.strerror}") from error

    def _read_small(self, path: Path) -> bytes:
        try:
            with self._open_file(path) as file:
                raw = file.read(LIMIT + 1)
        except OSError as error:
            raise self._failure(f"{path} cannot be read: {error.strerror}") from error
        if len(raw) > LIMIT:
            raise self._failure(f"{path} is too large for a manifest: more than {LIMIT // 2**20} MiB")
        return raw

    def _open_file(self, path: Path) -> BinaryIO:
        """Open a regular file; anything else is refused, because to open a pipe may wait without end."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._failure(f"{path} is no file")
        return open(descriptor, "rb")  # noqa: PTH123 - an open descriptor


class LayoutImage:
    """The image with the manifest `digest` in the layout `folder`, which this program or BuildKit wrote."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder = folder
        self.digest = digest
        self.raw = self.get_blob_path(digest).read_bytes()
        manifest = parse_manifest(self.raw, digest, Descriptor)
        if not isinstance(manifest, ImageManifest) or manifest.config is None:
            raise UsageError(f"{digest} is not the manifest of an image")
        self.media_type = manifest.media_type
        self.config = manifest.config.digest
        self._layers = manifest.layers or ()

    @property
    def images(self) -> tuple[LayoutImage, ...]:
        """The image itself, as in a LayoutIndex."""
        return (self,)

    @property
    def blobs(self) -> tuple[str, ...]:
        """The digests of its layers and its configuration."""
        return *self.layers, self.config

    @property
    def layers(self) -> tuple[str, ...]:
        """The digests of its layers, the lowest first."""
        return tuple(layer.digest for layer in self._layers)

    @property
    def configuration(self) -> dict[str, Any]:
        """The document of its configuration."""
        document: dict[str, Any] = json.loads(self.get_blob_path(self.config).read_bytes())
        return document

    @property
    def environment(self) -> dict[str, str]:
        """The variables that its containers inherit."""
        words = self.configuration.get("config", {}).get("Env") or ()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    @property
    def parts(self) -> tuple[SizedLayer, ...]:
        """Its layers, the lowest first, with their sizes in a registry."""
        sizes = ((layer.digest, layer.size) for layer in self._layers)
        return read_config_layers(sizes, self.configuration)

    @property
    def layer_files(self) -> tuple[Path, ...]:
        """The files of its layers, the lowest first."""
        return tuple(map(self.get_blob_path, self.layers))

    @property
    def archives(self) -> tuple[str, ...]:
        """The digests of the layers that are tars, which the blobs of attestations are not."""
        return tuple(layer.digest for layer in self._layers if ".tar" in layer.media_type)

    def stream_archive(self, reference: str, layers: Iterable[str]) -> Iterator[bytes]:
        """Yield the tar for `docker load` in chunks: named `reference`, with the given `layers`.

        An engine with the containerd image store already has the others. Raises MissingBlobError if the bytes
        of a given layer have been removed.
        """
        index = {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [
                {
                    "mediaType": self.media_type,
                    "digest": self.digest,
                    "size": len(self.raw),
                    "annotations": {ENGINE_NAME: _qualify_reference(reference)},
                }
            ],
        }
        for digest in (self.digest, self.config, *layers):
            path = require_blob(self.get_blob_path(digest))
            yield _make_header(f"blobs/sha256/{path.name}", path.stat().st_size)
            with path.open("rb") as file:
                while piece := file.read(PIECE):
                    yield piece
                yield _make_padding(file.tell())
        for name, data in ((INDEX_FILE, json.dumps(index).encode()), (MARK, VERSION)):
            yield _make_header(name, len(data)) + data + _make_padding(len(data))
        yield bytes(2 * tarfile.BLOCKSIZE)  # the end of a tar

    def get_blob_path(self, digest: str) -> Path:
        """Return the path of a blob."""
        return get_blob_path(self._folder, digest)


class LayoutIndex:
    """The image index with the digest `digest` in the layout `folder`: an image with its attestations."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.digest = digest
        self.raw = get_blob_path(folder, digest).read_bytes()
        index = parse_manifest(self.raw, digest, Descriptor)
        if not isinstance(index, ImageIndex):
            raise UsageError(f"{digest} is not an index")
        self.media_type = index.media_type
        self.images = tuple(LayoutImage(folder, entry.digest) for entry in index.entries)


class MissingBlobError(Exception):
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

    def touch_layer(self, digest: str) -> Path:
        """Return the file of a layer that BuildKit is not to send; it is empty if it is new."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / digest.removeprefix("sha256:")
        path.touch()
        return path

    @contextlib.contextmanager
    def keep_layers(self, digests: Iterable[str]) -> Iterator[None]:
        """Keep the bytes of these layers while this context is active."""
        used_digests = set(digests)
        with self._lock:
            self._users.update(used_digests)
        try:
            yield
        finally:
            with self._lock:
                self._users.subtract(used_digests)
                for digest in used_digests:
                    if not self._users[digest]:
                        del self._users[digest]
                        os.truncate(self._folder / digest.removeprefix("sha256:"), 0)


def write_without_layers(folder: Path, manifest: bytes, config: bytes) -> None:
    """Write an image to the new layout `folder`: its manifest and its configuration, but no layer."""
    get_blob_path(folder, "").mkdir(parents=True)
    for raw in (manifest, config):
        get_blob_path(folder, compute_digest(raw)).write_bytes(raw)


def get_blob_path(folder: Path, digest: str) -> Path:
    """Return the path of a blob in the layout `folder`."""
    return folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def require_blob(path: Path) -> Path:
    """Return the path of a layer; raise MissingBlobError if its bytes have been removed."""
    if not path.stat().st_size:
        raise MissingBlobError(path.name)
    return path


def _make_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf()


def _make_padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _qualify_reference(reference: str) -> str:
    """Return `reference` with the registry and folder that docker omits."""
    short = shorten_name(reference)
    if names_registry(short):
        return short
    return f"docker.io/{short}" if "/" in short else f"docker.io/library/{short}"
