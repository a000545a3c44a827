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
from imagematrix.registry import DIGEST, DOCKER_LIST, INDEX, Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.build.backend import Made, Order
    from imagematrix.build.local import Engine
    from imagematrix.catalog.index import Entry
    from imagematrix.registry import Manifest

__all__ = ["Remote", "attestations", "entries"]

REQUESTS = 8  # at the same time
CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)


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
        for own in entries(self.registry(image), version):
            cell, made_of = own.annotations[labels.CELL], own.annotations[labels.INPUT]
            reference = f"{image}:{own.tag}"
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
        registry = self.registry(order.reference.rpartition(":")[0])
        there = self._there(registry, order.reference)
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
                self._push_blob(registry, digest, one)
            registry.push_manifest(one.digest, one.raw, one.media_type)
        # The layers took their time: somebody else may have pushed an image of the same name.
        there = self._there(registry, order.reference)
        if there:
            return there
        registry.push_manifest(order.reference.rpartition(":")[2], named.raw, named.media_type)
        found = self._read_back(registry, order.reference, named.digest)
        return made.digest if found == named.digest else found

    def adopt(self, reference: str) -> str:
        """Push the image that the engine has under this name; return its digest.

        Where an image of the same input digest has the name by now, that one stays.
        """
        registry = self.registry(reference.rpartition(":")[0])
        there = self._there(registry, reference)
        if there:
            return there
        self._docker.push(reference)
        expected = self._docker.digest(reference) if self._docker.has_manifests else None
        return self._read_back(registry, reference, expected)

    def _push_blob(self, registry: Registry, digest: str, pushed: layout.Image) -> None:
        # Images have most of their layers in common: the first that has one uploads it, the others wait.
        with self._lock:
            once = self._blobs.setdefault((registry.name, digest), threading.Lock())
        with once:
            if not registry.has_blob(digest):
                with pushed.blob(digest).open("rb") as file:
                    registry.push_blob(digest, file)

    def _there(self, registry: Registry, reference: str, expected: str | None = None) -> str | None:
        """Return the digest of the image that has a reference: the `expected` one, or one made of the same.

        None where there is none. Raises TagMovedError where something else has it.
        """
        tag = reference.rpartition(":")[2]
        found = registry.digest(tag)
        if found is None:
            return None
        if found != expected:
            own = entry(registry, found)
            if own is None or not own.ours or own.tag != tag:
                made_of = own.tag if own and own.ours else "no image of imagematrix"
                raise TagMovedError(
                    f"{reference} is there, and made of something else: {found}, by its labels {made_of}",
                    remedy="a tag never moves: take that out of the registry, or raise the version",
                )
        self._digests[reference] = found
        return found

    def _read_back(self, registry: Registry, reference: str, expected: str | None) -> str:
        """Return the digest that the registry now has under a reference.

        Another than we pushed is as good where it is made of the same: two build the same matrix at once.
        """
        remedy = "somebody else moves it; look at who pushes to this repository"
        try:
            found = self._there(registry, reference, expected)
        except TagMovedError as error:
            raise TagMovedError(f"{error}; {expected} was pushed a moment ago", remedy=remedy) from error
        if found is None:
            raise TagMovedError(f"{reference} was pushed, and the registry does not have it", remedy=remedy)
        return found


def entries(registry: Registry, version: str, published: Manifest | None = None) -> list[Entry]:
    """Return the variants of a version in a registry: those of its index, and those only pushed.

    `published` is the index, where it has been read already. Raises UsageError where one is damaged.
    """
    published = published or registry.manifest(version)
    known = index.parse(published.raw, f"{registry.name}:{version}") if published else ()
    found = {own.tag: own for own in known if own.ours and own.annotations[labels.VERSION] == version}
    tags = [tag for tag in registry.tags() if tag.startswith(f"{version}-") and tag not in found]
    with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
        pushed = dict(zip(tags, pool.map(lambda tag: entry(registry, tag), tags), strict=True))
    # A tag is what it says only if the image under it says the same.
    found |= {tag: own for tag, own in pushed.items() if own and own.ours and own.tag == tag}
    return [found[tag] for tag in sorted(found)]


def entry(registry: Registry, tag: str) -> Entry | None:
    """Return what an index says of the image with a tag or digest, read from the image.

    Of an image with attestations it is the image. None where there is none, or something else: another index,
    a signature. Raises UsageError where it is damaged.
    """
    manifest = registry.manifest(tag)
    if manifest and manifest.media_type == INDEX:
        attested = {one.attests for one in index.parse(manifest.raw, tag) if one.attests}
        manifest = registry.manifest(attested.pop()) if len(attested) == 1 else None
    if manifest is None or manifest.media_type in (INDEX, DOCKER_LIST):
        return None
    where = f"{registry.name}:{tag}"
    fields = documents.Fields(documents.parse(manifest.raw, where), where)
    config = fields.object_or_none("config")
    if config is None or config.text_or_none("mediaType") not in CONFIGS:
        return None
    told = fields.named_texts("annotations")
    if labels.VARIANT in told:
        variant = labels.read(told, reference=where, digest=None, size=None)
        platform = dict(zip(("os", "architecture", "variant"), variant.platform.split("/"), strict=False))
    else:  # an engine with the classic image store pushed it
        told, platform = _configured(registry, config, where)
    size = sum(layer.integer("size") for layer in fields.objects("layers"))
    return index.Entry(
        digest=manifest.digest,
        size=len(manifest.raw),
        media_type=manifest.media_type,
        annotations={key: told[key] for key in labels.ANNOTATED if key in told} | {labels.SIZE: str(size)},
        platform=platform,
    )


def _configured(
    registry: Registry, config: documents.Fields, where: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels of an image, and its platform, from its configuration."""
    digest = config.text("digest")
    if not DIGEST.fullmatch(digest):
        raise config.fail("digest", f"{digest[:80]!r} is not a sha256 digest")
    image = documents.Fields(documents.parse(registry.blob(digest), where), where)
    inner = image.object_or_none("config")
    own = inner.named_texts("Labels") if inner else {}
    platform = {key: image.text(key) for key in ("architecture", "os", "variant") if image.present(key)}
    return own, platform


def attestations(registry: Registry, tag: str) -> list[Entry]:
    """Return the attestations of the image with a tag."""
    manifest = registry.manifest(tag)
    if manifest is None or manifest.media_type != INDEX:
        return []
    return [one for one in index.parse(manifest.raw, tag) if one.attests]
