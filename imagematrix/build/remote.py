"""Registries as a store of images: pushed by digest, named once, and never named anew."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from imagematrix import documents
from imagematrix.build import layout
from imagematrix.build.backend import Present
from imagematrix.catalog import index, labels
from imagematrix.errors import TagMovedError
from imagematrix.registry import INDEX, Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.build.backend import Made, Order
    from imagematrix.build.local import Engine
    from imagematrix.catalog.index import Entry

__all__ = ["Remote", "attestations", "entries"]

REQUESTS = 8  # at the same time


class Remote:
    """The Store that registries are, each image in the one that its name says. Use it as a context manager.

    What an image was built without a layout, or long ago, the engine `docker` pushes.
    """

    def __init__(self, docker: Engine) -> None:
        self._docker = docker
        self._registries: dict[str, Registry] = {}
        self._digests: dict[str, str] = {}  # of the references that were seen there
        self._blobs: dict[tuple[str, str], threading.Lock] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for registry in self._registries.values():
            registry.__exit__()

    def registry(self, image: str) -> Registry:
        """Return the repository of an image."""
        with self._lock:
            if image not in self._registries:
                self._registries[image] = Registry(image)
            return self._registries[image]

    def present(self, image: str, version: str) -> list[Present]:
        """Return the images of `image`:`version` that its registry has, published or only pushed."""
        found = []
        for own in entries(self.registry(image), image, version):
            cell, made_of = own.annotations[labels.CELL], own.annotations[labels.INPUT]
            reference = f"{image}:{labels.tag(version, cell, made_of)}"
            self._digests[reference] = own.digest
            found.append(Present(reference=reference, cell=cell, input_digest=made_of))
        return found

    def components(self, reference: str) -> Mapping[str, str]:
        """Return what an image that is present was made of."""
        image, _, _ = reference.rpartition(":")
        own = entry(self.registry(image), self._digests[reference])
        return (own and labels.components(own.annotations)) or {}

    def source(self, reference: str) -> str | None:
        """Return where a build finds an image that is present: by its digest."""
        digest = self._digests.get(reference)
        return f"docker-image://{reference}@{digest}" if digest else None

    def store(self, order: Order, made: Made) -> str:
        """Push what was made, from its layout or else from the engine, and name it.

        Where an image of the same input digest has the name by now, that one stays.
        """
        image, _, tag = order.reference.rpartition(":")
        registry = self.registry(image)
        there = _there(registry, order.reference, order.labels[labels.INPUT])
        if there:
            return there
        if made.layout is None:
            self._docker.store(order, made)
            self._docker.push(order.reference)
            return self._read_back(registry, order.reference, None)
        image_alone = layout.Image(made.layout, made.digest)
        named = layout.Index(made.layout, made.attested) if made.attested else image_alone
        for one in named.images:
            for digest in one.blobs:
                self._push_blob(image, digest, one)
            registry.push_manifest(one.digest, one.raw, one.media_type)
        # The layers took their time: somebody else may have pushed an image of the same name.
        there = _there(registry, order.reference, order.labels[labels.INPUT])
        if there:
            return there
        registry.push_manifest(tag, named.raw, named.media_type)
        self._read_back(registry, order.reference, named.digest)
        return made.digest

    def adopt(self, reference: str) -> str:
        """Push the image that the engine has under this name; return its digest."""
        image, _, _ = reference.rpartition(":")
        registry = self.registry(image)
        self._docker.push(reference)
        expected = self._docker.digest(reference) if self._docker.has_manifests else None
        return self._read_back(registry, reference, expected)

    def _push_blob(self, image: str, digest: str, pushed: layout.Image) -> None:
        # Images have most of their layers in common: the first that has one uploads it, the others wait.
        with self._lock:
            once = self._blobs.setdefault((image, digest), threading.Lock())
        with once:
            registry = self.registry(image)
            if not registry.has_blob(digest):
                with pushed.blob(digest).open("rb") as file:
                    registry.push_blob(digest, file)

    def _read_back(self, registry: Registry, reference: str, expected: str | None) -> str:
        _, _, tag = reference.rpartition(":")
        found = registry.digest(tag)
        if found is None or expected not in (None, found):
            raise TagMovedError(
                f"{reference} was pushed as {expected}, and the registry now has {found} under this name",
                remedy="somebody else moves it; look at who pushes to this repository",
            )
        self._digests[reference] = found
        return found


def entries(registry: Registry, image: str, version: str) -> list[Entry]:
    """Return the variants of `image`:`version` in a registry: those of its index, and those only pushed."""
    published = registry.manifest(version)
    known = index.parse(published.raw, f"{image}:{version}") if published else ()
    found = {_tag(own, version): own for own in known if own.ours}
    tags = [tag for tag in registry.tags() if tag.startswith(f"{version}-") and tag not in found]
    with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
        pushed = dict(zip(tags, pool.map(lambda tag: entry(registry, tag), tags), strict=True))
    # A tag is what it says only if the image under it says the same.
    found |= {tag: own for tag, own in pushed.items() if own and own.ours and _says(own, version, tag)}
    return [found[tag] for tag in sorted(found)]


def entry(registry: Registry, tag: str) -> Entry | None:
    """Return what an index says of the image with a tag or digest, read from the image.

    Of an image with attestations it is the image; of any other index it is None. Raises UsageError where the
    image is damaged.
    """
    manifest = registry.manifest(tag)
    if manifest and manifest.media_type == INDEX:
        inside = [one.digest for one in index.parse(manifest.raw, tag) if not one.attests]
        manifest = registry.manifest(inside[0]) if len(inside) == 1 else None
    if manifest is None or manifest.media_type == INDEX:
        return None
    fields = documents.Fields(documents.parse(manifest.raw, tag), tag)
    config = fields.object_or_none("config")
    if config is None:
        return None
    raw = registry.blob(config.text("digest"))
    image = documents.Fields(documents.parse(raw, tag), tag)
    inner = image.object_or_none("config")
    own = inner.object_or_none("Labels") if inner else None
    told = {key: own.text(key) for key in own.keys_of(str)} if own else {}
    size = sum(layer.integer("size") for layer in fields.objects("layers"))
    kept = (labels.VERSION, labels.CELL, labels.INPUT, labels.INPUTS, labels.PREFER, labels.VARIANT)
    return index.Entry(
        digest=manifest.digest,
        size=len(manifest.raw),
        media_type=manifest.media_type,
        annotations={key: told[key] for key in kept if key in told} | {labels.SIZE: str(size)},
        platform={key: image.text(key) for key in ("architecture", "os", "variant") if image.present(key)},
    )


def attestations(registry: Registry, tag: str) -> list[Entry]:
    """Return the attestations of the image with a tag."""
    manifest = registry.manifest(tag)
    if manifest is None or manifest.media_type != INDEX:
        return []
    return [one for one in index.parse(manifest.raw, tag) if one.attests]


def _tag(own: Entry, version: str) -> str:
    return labels.tag(version, own.annotations[labels.CELL], own.annotations[labels.INPUT])


def _says(own: Entry, version: str, tag: str) -> bool:
    return own.annotations.get(labels.VERSION) == version and _tag(own, version) == tag


def _there(registry: Registry, reference: str, input_digest: str) -> str | None:
    """Return the digest of an image of the same input that has a reference already.

    Raises TagMovedError where something else has it.
    """
    _, _, tag = reference.rpartition(":")
    if registry.digest(tag) is None:
        return None
    own = entry(registry, tag)
    if own and own.annotations.get(labels.INPUT) == input_digest:
        return own.digest
    found = own.annotations.get(labels.INPUT) if own else "something else"
    raise TagMovedError(
        f"{reference} is there, made of {found} and not of {input_digest}",
        remedy="a tag never moves: raise the version",
    )
