"""Archives of images, as `docker save` writes them, or of an OCI layout; all of them untrusted."""

from __future__ import annotations

import contextlib
import posixpath
import re
import tarfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from imagematrix.common import json_documents
from imagematrix.errors import AuditError, UsageError
from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.layer_entries import require_dense
from imagematrix.images.oci.layout import INDEX_FILE
from imagematrix.images.oci.manifest import (
    LIMIT,
    Descriptor,
    ImageIndex,
    ImageManifest,
    compute_digest,
    parse_manifest,
)
from imagematrix.images.oci.tar import open_tar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from imagematrix.images.oci.byte_stream import ByteStream

SAVED_FILE = "manifest.json"
BLOB = re.compile(r"blobs/sha256/[0-9a-f]{64}", re.ASCII)
MOST = 10_000  # files of an archive
ALL_DOCUMENTS = 64 << 20  # bytes of its JSON documents; an image has some 20 KB
JSON = (b"{", b"[")  # the first bytes of a document

L = TypeVar("L")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedImage:
    """An image in manifest.json; `layers` are the names of its layers' files, the lowest first."""

    names: tuple[str, ...]
    config: bytes
    layers: tuple[str, ...]


class ImageArchive(Generic[L]):
    """An archive, read from the beginning to the end; messages call it `name`.

    It may be compressed, as for `docker load`. Layers may come before the manifest that lists them, so
    `read_layer` is called with each file that may be one: its name in the archive, its digest if the name
    states it, and its content. Raises AuditError if the archive cannot be read.
    """

    def __init__(
        self, stream: ByteStream, name: str, read_layer: Callable[[str, str | None, ByteStream], L]
    ) -> None:
        self._read_layer = read_layer
        self._documents: dict[str, bytes] = {}
        self._size = 0  # bytes of these
        self._layers: dict[str, L | AuditError] = {}
        self._links: dict[str, str] = {}
        expanded = DecompressedStream(_ArchiveFile(stream))
        try:
            with open_tar(expanded) as archive:
                for count, member in enumerate(archive):
                    if count > MOST:
                        raise tarfile.ReadError(f"more than {MOST} files")
                    self._read_member(archive, member)
        except (tarfile.TarError, EOFError, ValueError) as error:
            why, remedy = str(error), None
            if expanded.unsupported:
                why = f"compression {expanded.unsupported} is not supported"
                remedy = "decompress it, or compress it with gzip or zstd"
            raise AuditError(f"the archive {name} cannot be read: {why}", remedy=remedy) from error

    @property
    def index(self) -> bytes | None:
        """The index of a layout, or None."""
        return self._documents.get(INDEX_FILE)

    @property
    def images(self) -> tuple[SavedImage, ...] | None:
        """The images that `docker save` lists, or None; raises UsageError, AuditError."""
        if SAVED_FILE not in self._documents:
            return None
        listed = json_documents.parse_json(self._documents[SAVED_FILE], SAVED_FILE)
        return tuple(
            SavedImage(
                names=image.get_texts("RepoTags") if image.has("RepoTags") else (),
                config=self._get_document(image.get_text("Config")),
                layers=image.get_texts("Layers"),
            )
            for image in json_documents.Fields({"images": listed}, SAVED_FILE).list_objects("images")
        )

    @cached_property
    def manifests(self) -> Mapping[str, Sequence[tuple[str, ImageManifest]]]:
        """The manifests with their digests, by the digest of their configuration."""
        by_config: defaultdict[str, list[tuple[str, ImageManifest]]] = defaultdict(list)
        for raw in self._documents.values():
            with contextlib.suppress(UsageError):  # any other document
                parsed = parse_manifest(raw, SAVED_FILE, Descriptor)
                if isinstance(parsed, ImageManifest) and parsed.config and parsed.layers is not None:
                    by_config[parsed.config.digest].append((compute_digest(raw), parsed))
        return by_config

    @cached_property
    def attestations(self) -> Mapping[str, Sequence[str]]:
        """The digests of the manifests that attest an image, by the image's digest."""
        by_image: defaultdict[str, list[str]] = defaultdict(list)
        for raw in self._documents.values():
            with contextlib.suppress(UsageError):  # any other document
                parsed = parse_manifest(raw, SAVED_FILE, Descriptor)
                for entry in parsed.entries if isinstance(parsed, ImageIndex) else ():
                    if entry.attests and entry.digest not in by_image[entry.attests]:
                        by_image[entry.attests].append(entry.digest)
        return by_image

    def read_document(self, digest: str) -> bytes:
        """Return a manifest or a configuration; raise AuditError."""
        return self._get_document(_get_blob_path(digest))

    def find_document(self, digest: str) -> bytes | None:
        """Return a manifest or a configuration, None if there is none; raise AuditError."""
        return (
            self._get_document(_get_blob_path(digest)) if _get_blob_path(digest) in self._documents else None
        )

    def get_file_name(self, name: str) -> str:
        """Return the name of the file with a layer, which is given by its digest or a name."""
        name = _get_blob_path(name) if name.startswith("sha256:") else name
        return self._links.get(name, name)

    def get_layer(self, name: str) -> L:
        """Return the layer with a digest or a name in the archive; raise AuditError."""
        layer = self._layers.get(self.get_file_name(name))
        if layer is None:
            raise AuditError(f"{name} not found in the archive")
        if isinstance(layer, AuditError):
            raise layer
        return layer

    def _read_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = posixpath.normpath(member.name)
        if member.issym() or member.islnk():  # Docker 24 and older write a layer's second use as a link
            base = posixpath.dirname(name) if member.issym() else ""
            self._links[name] = posixpath.normpath(posixpath.join(base, member.linkname))
        file = archive.extractfile(member) if member.isfile() else None
        if file is None:
            return
        require_dense(member, name)
        head = file.read(1)
        if head in JSON and member.size <= LIMIT:
            self._size += member.size
            if self._size > ALL_DOCUMENTS:
                raise tarfile.ReadError(f"more than {ALL_DOCUMENTS} bytes of documents")
            self._documents[name] = head + file.read()
        elif head:
            digest = f"sha256:{posixpath.basename(name)}" if BLOB.fullmatch(name) else None
            try:
                self._layers[name] = self._read_layer(name, digest, _Prefixed(head, file))
            except AuditError as error:  # it may be no layer; raised only if an image needs it
                self._layers[name] = error

    def _get_document(self, name: str) -> bytes:
        raw = self._documents.get(name)
        if raw is None:
            raise AuditError(f"{name[:200]} not found in the archive")
        if BLOB.fullmatch(name) and _get_blob_path(compute_digest(raw)) != name:
            digest = f"sha256:{posixpath.basename(name)}"
            raise AuditError(f"the content of blob {digest} does not match its digest")
        return raw


class _ArchiveFile:
    """The archive's own bytes. An error of them is not one of what is done with its files."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        try:
            return self._stream.read(size)
        except OSError as error:
            raise tarfile.ReadError(str(error)) from error


class _Prefixed:
    """A stream that starts with bytes that were already read from it."""

    def __init__(self, head: bytes, stream: ByteStream) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        head, self._head = self._head, b""
        return head or self._stream.read(size)


def _get_blob_path(digest: str) -> str:
    """Return the name of a blob in an archive."""
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
