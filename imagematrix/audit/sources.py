"""Reading images from an engine, a registry, an OCI layout, or an archive (of `docker save` or of a layout).

No container is started. Files that are too large for memory are written to temporary files while they are
examined; nothing else of an image is written.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import stat
import tarfile
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from imagematrix import documents, engine
from imagematrix.audit.image import Image, digest, image, images
from imagematrix.audit.layer import opened
from imagematrix.catalog.engine import catalog
from imagematrix.documents import Fields
from imagematrix.errors import AuditError, EngineError, UnknownImageError, UsageError
from imagematrix.oci.expanded import Expanded
from imagematrix.oci.layout import blob_file
from imagematrix.oci.registry import Registry
from imagematrix.reference import Reference, names_registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from imagematrix.audit.layer import Layer
    from imagematrix.audit.layers import Layers
    from imagematrix.oci.expanded import Stream

__all__ = ["read"]

LAYOUT = "oci-layout"  # the file that marks a folder as a layout
INDEX = "index.json"
SAVED = "manifest.json"
BLOB = re.compile(r"blobs/sha256/[0-9a-f]{64}", re.ASCII)
SMALL = 4 << 20  # bytes of a manifest or a configuration
MOST = 10_000  # files of an archive
TRIES = 5  # attempts to read an image from the engine while its name moves to other images
TEXTS = (b"{", b"[")


def read(reference: str, platform: str, layers: Layers) -> Iterator[Image]:
    """Yield the images of a reference: a path of a layout or an archive, or a name in an engine or registry.

    `platform`, such as linux/amd64, selects an image from an index without variants of imagematrix. Raises
    UnknownImageError if there is no image, EngineError if neither engine nor registry can be reached,
    AuditError if the image cannot be read.
    """
    path = Path(reference)
    try:
        folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if reference.startswith((".", "/")):  # no image name begins like this
            raise UnknownImageError(f"{reference}: {error.strerror}") from error
        yield from _named(reference, platform, layers)
        return
    try:
        if not folder:
            with path.open("rb") as file:
                yield from _Archive(file, reference, layers).images(reference, platform)
        elif not (path / LAYOUT).is_file():
            raise UnknownImageError(f"{reference} is not an OCI layout: {LAYOUT} not found")
        else:
            source = _Layout(path, layers)
            yield from images(source, source.index(), reference, platform, layout=True)
    except OSError as error:
        raise AuditError(f"{reference} cannot be read: {error.strerror}") from error


def _named(reference: str, platform: str, layers: Layers) -> Iterator[Image]:
    """Yield the engine's image with this name, or else its images in the registry."""
    remote = names_registry(reference)
    try:
        saved = _saved(reference)
    except EngineError:
        if not remote:
            raise
        saved = None
    if saved is not None:
        with contextlib.closing(saved):
            yield from _Archive(saved, reference, layers, saved.digests).images(reference, platform)
        return
    variants = _variants(reference)
    if variants:
        for variant in variants:
            yield from _named(variant, platform, layers)
        return
    if not remote:
        raise UnknownImageError(f"the engine has no image {reference}", remedy=f"docker pull {reference}")
    name = Reference.parse(reference)
    with Registry(name.name) as registry:
        manifest = registry.manifest(name.tag)
        if manifest is None:
            raise UnknownImageError(f"the registry {name.registry} has no {reference}")
        for one in images(_Remote(registry, layers), manifest.raw, reference, platform):
            yield replace(one, names=(reference,))


def _variants(reference: str) -> list[str]:
    """Return the variants of a version in the engine; none if there is no engine.

    If the reference names a registry, its index lists the variants, so the engine is not asked.
    """
    if names_registry(reference):
        return []
    with contextlib.suppress(UnknownImageError, UsageError):
        return [variant.reference for variant in catalog(reference).variants]
    return []


def _saved(reference: str) -> _Pieces | None:
    """Return an image of the engine as `docker save` writes it, or None if the engine has no such image.

    The engine exports by name, and a build or a pull may move the name to another image meanwhile.
    """
    digests = engine.digests(reference)
    for _ in range(TRIES):
        if not digests:
            return None
        pieces = _exported(reference, digests)
        before, digests = digests, engine.digests(reference)
        if digests == before:
            return pieces
        pieces.close()
    raise EngineError(f"{reference} keeps changing in the engine", remedy="run the command again")


def _exported(reference: str, digests: frozenset[str]) -> _Pieces:
    client = engine.client()
    with contextlib.ExitStack() as undo:
        undo.callback(client.close)
        with engine.errors():
            pieces = client.api.get_image(reference)
        undo.pop_all()
    return _Pieces(pieces, client.close, digests)


class _Pieces:
    """The stream of an image that an engine exports. The engine has the `digests` for this image."""

    def __init__(self, pieces: Iterator[bytes], close: Callable[[], None], digests: frozenset[str]) -> None:
        self._pieces = pieces
        self.digests = digests
        self._left = b""
        self.close = close

    def read(self, size: int = -1, /) -> bytes:
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError

        parts = [self._left]
        length = len(self._left)
        try:
            while length < size and (piece := next(self._pieces, b"")):
                parts.append(piece)
                length += len(piece)
        except (RequestException, HTTPError) as error:
            raise EngineError(f"the engine aborted the export: {error}") from error
        whole = b"".join(parts)
        data, self._left = whole[:size], whole[size:]
        return data


class _Layout:
    """A Source that reads a folder with an OCI layout."""

    def __init__(self, folder: Path, layers: Layers) -> None:
        self._folder = folder
        self._reader = layers

    def index(self) -> bytes:
        return self._bytes(self._folder / INDEX)

    def manifest(self, own: str) -> bytes:
        return _checked(self._bytes(self._path(own)), own)

    config = manifest

    def layers(self, digests: Sequence[str]) -> tuple[Layer, ...]:
        return self._reader.all(digests, self._opened)

    def _opened(self, own: str) -> BinaryIO:
        try:
            return self._path(own).open("rb")
        except OSError as error:
            raise AuditError(f"{self._folder}: {own} cannot be read: {error.strerror}") from error

    def _path(self, own: str) -> Path:
        return blob_file(self._folder, own)

    def _bytes(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                raw = file.read(SMALL + 1)
        except OSError as error:
            raise AuditError(f"the layout {self._folder} cannot be read: {error}") from error
        if len(raw) > SMALL:
            raise AuditError(f"{path} is too large for a manifest")
        return raw


class _Remote:
    """A Source that reads a repository of a registry."""

    def __init__(self, registry: Registry, layers: Layers) -> None:
        self._registry = registry
        self._reader = layers

    def manifest(self, own: str) -> bytes:
        manifest = self._registry.manifest(own)
        if manifest is None:
            raise UnknownImageError(f"the registry has no {self._registry.name}@{own}")
        return manifest.raw

    def config(self, own: str) -> bytes:
        return self._registry.blob(own)

    def layers(self, digests: Sequence[str]) -> tuple[Layer, ...]:
        return self._reader.all(digests, self._registry.open)


class _Archive:
    """A Source that reads an archive of `docker save`, or of an OCI layout, from the beginning to the end.

    The archive may be compressed, as for `docker load`. Layers may come before the manifest that lists them,
    so each is read where it is. `digests` are those that the engine has for the image: the classic image
    store exports manifests that exist nowhere else. Errors name the archive by `reference`.
    """

    def __init__(
        self, file: Stream, reference: str, layers: Layers, digests: frozenset[str] | None = None
    ) -> None:
        self._reader = layers
        self._digests = digests
        self._texts: dict[str, bytes] = {}
        self._layers: dict[str, Layer | AuditError] = {}
        self._links: dict[str, str] = {}
        expanded = Expanded(file)
        try:
            with opened(expanded) as archive:
                for number, member in enumerate(archive):
                    if number > MOST:
                        raise tarfile.ReadError(f"more than {MOST} files")
                    self._take(archive, member)
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            why, remedy = str(error), None
            if expanded.unsupported:
                why = f"compression {expanded.unsupported} is not supported"
                remedy = "decompress it, or compress it with gzip or zstd"
            raise AuditError(f"the archive {reference} cannot be read: {why}", remedy=remedy) from error

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = posixpath.normpath(member.name)
        if member.issym() or member.islnk():
            base = posixpath.dirname(name) if member.issym() else ""
            self._links[name] = posixpath.normpath(posixpath.join(base, member.linkname))
        file = archive.extractfile(member) if member.isfile() else None
        if file is None:
            return
        head = file.read(1)
        if head in TEXTS and member.size <= SMALL:
            self._texts[name] = head + file.read()
        elif head:
            stream = _Prefixed(head, file)
            try:
                if BLOB.fullmatch(name):
                    own = f"sha256:{name.rpartition('/')[2]}"
                    self._layers[name] = self._reader.read(own, lambda _: contextlib.nullcontext(stream))
                else:
                    self._layers[name] = self._reader.unnamed(stream, name)
            except AuditError as error:  # it may be no layer; raised only if an image needs it
                self._layers[name] = error

    def images(self, reference: str, platform: str) -> Iterator[Image]:
        """Yield the images in it; see `image.images`."""
        if SAVED not in self._texts:
            if INDEX not in self._texts:
                raise UnknownImageError(f"{reference} has neither manifest.json nor index.json")
            yield from images(self, self._texts[INDEX], reference, platform, layout=True)
            return
        try:
            listed = list(
                Fields({"images": documents.parse(self._texts[SAVED], SAVED)}, SAVED).objects("images")
            )
            for one in listed:
                names = one.texts("RepoTags") if one.present("RepoTags") else ()
                config = self._text(one.text("Config"))
                own = self._manifest(digest(config))
                name = names[0] if len(listed) > 1 and names else reference
                saved = image(self, config, one.texts("Layers"), reference=name, own=own)
                self._check(config, [layer.digest for layer in saved.layers])
                yield replace(saved, names=names)
        except UsageError as error:
            raise AuditError(str(error)) from error

    def manifest(self, own: str) -> bytes:
        return self._text(f"blobs/sha256/{own.removeprefix('sha256:')}")

    config = manifest

    def layers(self, names: Sequence[str]) -> tuple[Layer, ...]:
        return tuple(map(self._layer, names))

    def _layer(self, name: str) -> Layer:
        name = f"blobs/sha256/{name.removeprefix('sha256:')}" if name.startswith("sha256:") else name
        layer = self._layers.get(self._links.get(name, name))
        if layer is None:
            raise AuditError(f"{name} not found in the archive")
        if isinstance(layer, AuditError):
            raise layer
        return layer

    def _text(self, name: str) -> bytes:
        raw = self._texts.get(name)
        if raw is None:
            raise AuditError(f"{name[:200]} not found in the archive")
        return _checked(raw, f"sha256:{name.rpartition('/')[2]}") if BLOB.fullmatch(name) else raw

    def _check(self, config: bytes, layers: Sequence[str]) -> None:
        """Raise AuditError if layers are not those of a configuration: no engine would load such an archive.

        The digests in `layers` are those of their tars, or those of their blobs in a manifest.
        """
        root = Fields(documents.parse(config, SAVED), SAVED).object_or_none("rootfs")
        tars = root.texts("diff_ids") if root and root.present("diff_ids") else ()
        own = digest(config)
        blobs = (listed for _, listed in self._manifests.get(own, ()))
        if all([*listed] != layers for listed in (tars, *blobs)):
            raise AuditError(f"the layers in the archive do not match its configuration {own}")

    def _manifest(self, config: str) -> str:
        """Return the digest of the manifest with this configuration, or else the configuration's digest.

        If the engine knows the image by neither, return the engine's digest: that of an index, if the image
        is for several platforms.
        """
        for own, _ in self._manifests.get(config, ()):
            if own in (self._digests or {own}):
                return own
        return config if self._digests is None or config in self._digests else min(self._digests)

    @cached_property
    def _manifests(self) -> Mapping[str, list[tuple[str, list[str]]]]:
        """The digest and the layers of each manifest, by the digest of its configuration."""
        by_config: defaultdict[str, list[tuple[str, list[str]]]] = defaultdict(list)
        for raw in self._texts.values():
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                manifest = json.loads(raw)
                layers = [layer["digest"] for layer in manifest["layers"]]
                by_config[manifest["config"]["digest"]].append((digest(raw), layers))
        return by_config


def _checked(raw: bytes, own: str) -> bytes:
    """Return the bytes of a blob; raise AuditError if they do not match its digest."""
    if digest(raw) != own:
        raise AuditError(f"the content of blob {own} does not match its digest")
    return raw


class _Prefixed:
    """A stream that starts with bytes that were already read from it."""

    def __init__(self, head: bytes, stream: Stream) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int = -1, /) -> bytes:
        head, self._head = self._head, b""
        return head or self._stream.read(size)
