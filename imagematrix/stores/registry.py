"""Registries as a store of images: pushed by digest, named once, and never named anew."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from imagematrix.catalog import index, labels
from imagematrix.catalog.registry import entry
from imagematrix.errors import TagMovedError
from imagematrix.oci import layout
from imagematrix.oci.registry import INDEX, Registry
from imagematrix.planning.backend import Present
from imagematrix.stores.adoption import examine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.catalog.index import Entry
    from imagematrix.oci.registry import Manifest
    from imagematrix.planning.backend import Made, Order
    from imagematrix.stores.engine import Engine

__all__ = ["Remote", "Survey", "attestations", "survey"]

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
        there = survey(self.registry(image), version)
        lost = {one.tag: one for one in there.listed if one.digest in there.lost}
        found = []
        for own in ({one.tag: one for one in there.variants} | lost).values():
            cell, made_of = own.annotations[labels.CELL], own.annotations[labels.INPUT]
            reference = f"{image}:{own.tag}"
            self._digests[reference] = own.digest
            gone = own.tag in lost
            found.append(Present(reference=reference, cell=cell, input_digest=made_of, lost=gone))
        return found

    def components(self, reference: str) -> Mapping[str, str]:
        """Return what an image that is present was made of."""
        image, _, _ = reference.rpartition(":")
        own = entry(self.registry(image), self._digests[reference])
        return (own and labels.components(own.annotations)) or {}

    def source(self, reference: str, *, local: bool) -> str | None:  # noqa: ARG002 - any builder pulls it
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
        """Push the image that the engine has under this name, after a look at its bytes; return its digest.

        Where an image of the same input digest has the name by now, that one stays. Raises AuditError where
        it is not what its labels say.
        """
        registry = self.registry(reference.rpartition(":")[0])
        there = self._there(registry, reference)
        if there:
            return there
        image = self._docker.image(reference)
        with self._docker.save(image) as archive:
            examine(reference, archive)
        self._docker.push(reference)
        if self._docker.image(reference) != image:
            remedy = "delete it from the registry"
            raise TagMovedError(f"{reference} became another image during the push", remedy=remedy)
        expected = self._docker.digest(reference) if self._docker.has_manifests else None
        return self._read_back(registry, reference, expected)

    def _push_blob(self, registry: Registry, digest: str, pushed: layout.Image) -> None:
        # Images have most of their layers in common: the first that has one uploads it, the others wait.
        with self._lock:
            once = self._blobs.setdefault((registry.name, digest), threading.Lock())
        with once:
            if not registry.has_blob(digest):
                with layout.solid(pushed.blob(digest)).open("rb") as file:
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
                    remedy="a tag never moves: delete that from the registry, or raise the version",
                )
        self._digests[reference] = found
        return found

    def _read_back(self, registry: Registry, reference: str, expected: str | None) -> str:
        """Return the digest that the registry now has under a reference.

        Another than we pushed is as good where it is made of the same: two build the same matrix at once.
        """
        remedy = "another client moves it; check who pushes to this repository"
        try:
            found = self._there(registry, reference, expected)
        except TagMovedError as error:
            raise TagMovedError(f"{error}; {expected} was just pushed", remedy=remedy) from error
        if found is None:
            raise TagMovedError(f"{reference} was pushed, but the registry does not have it", remedy=remedy)
        if expected in (None, found):
            self._look_again(registry, reference, found)
        return found

    def _look_again(self, registry: Registry, reference: str, digest: str) -> None:
        """Raise TagMovedError where the cell is there made of something else by now, and take ours back.

        Who pushes the same cell at the same time has another tag, so that nobody is in the other's way. But
        both set their tags before they look: at least one of them sees the other.
        """
        tag = reference.rpartition(":")[2]
        others = _others(registry, tag)
        if not others:
            return
        version = tag.partition("-")[0]
        published = registry.manifest(version)
        known = index.parse(published.raw, f"{registry.name}:{version}") if published else ()
        if any(one.digest == digest for one in known):
            return  # the version has it: the others are too late
        self._digests.pop(reference, None)
        gone = registry.take_back(tag, digest)
        ours = "ours is taken back" if gone else "the registry does not let ours be taken back"
        raise TagMovedError(
            f"{reference}: this cell was pushed made of something else, too: {', '.join(others)}; {ours}",
            remedy="build the same, or raise the version; of two that are there `publish --choose` takes one",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a registry has of a version.

    `known` are the entries of its index, `listed` those that are its variants, `lost` the digests of those
    that are gone. `variants` are the images that the index has, and those only pushed. `others` were pushed,
    too, but the index has their cell made of something else.
    """

    published: Manifest | None
    known: tuple[Entry, ...]
    listed: tuple[Entry, ...]
    lost: frozenset[str]
    variants: tuple[Entry, ...]
    others: tuple[Entry, ...]

    @property
    def alive(self) -> list[Entry]:
        """The entries of the index that are not lost, nor say something of what is."""
        return [one for one in self.known if not {one.digest, one.attests} & self.lost]


def survey(registry: Registry, version: str) -> Survey:
    """Return what a registry has of a version; raise UsageError where an index or an image is damaged."""
    published = registry.manifest(version)
    known = index.parse(published.raw, f"{registry.name}:{version}") if published else ()
    with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
        there = pool.map(lambda one: registry.digest(one.digest), known)
        tags = [tag for tag in registry.tags() if tag.startswith(f"{version}-")]
        lost = frozenset(one.digest for one, digest in zip(known, there, strict=True) if digest is None)
        listed = tuple(one for one in known if one.ours and one.annotations[labels.VERSION] == version)
        found = {one.tag: one for one in listed if one.digest not in lost}
        rest = [tag for tag in tags if tag not in found]
        pushed = zip(rest, pool.map(lambda tag: entry(registry, tag), rest), strict=True)
        # A tag is what it says only if the image under it says the same.
        found |= {tag: one for tag, one in pushed if one and one.ours and one.tag == tag}
    frozen = {one.annotations[labels.CELL]: one.tag for one in listed}
    found_in_order = [found[tag] for tag in sorted(found)]
    late = [one for one in found_in_order if frozen.get(one.annotations[labels.CELL], one.tag) != one.tag]
    return Survey(
        published=published,
        known=known,
        listed=listed,
        lost=lost,
        variants=tuple(one for one in found_in_order if one not in late),
        others=tuple(late),
    )


def _others(registry: Registry, tag: str) -> list[str]:
    """Return the tags of images of the same version and cell that are made of something else."""
    stem = tag.rpartition("-")[0]
    alike = [one for one in registry.tags() if one.rpartition("-")[0] == stem and one != tag]
    found = {one: entry(registry, one) for one in alike}
    return sorted(one for one, own in found.items() if own and own.ours and own.tag == one)


def attestations(registry: Registry, tag: str) -> list[Entry]:
    """Return the attestations of the image with a tag."""
    manifest = registry.manifest(tag)
    if manifest is None or manifest.media_type != INDEX:
        return []
    return [one for one in index.parse(manifest.raw, tag) if one.attests]
