"""The inventory of a repository: its tags, the manifests that they name, and what these name in turn."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from imagematrix.errors import TagMovedError, UnknownImageError
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.registry import read_entry
from imagematrix.images.catalog.warm_image import get_warm_version
from imagematrix.images.oci.manifest import INDEX, INDEXES, Descriptor, ImageIndex, parse_manifest
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from imagematrix.images.catalog.image_index import IndexEntry
    from imagematrix.images.oci.manifest import Manifest

REQUESTS = 8  # at the same time
VARIANT = re.compile(r"([^-]+)-.+-[0-9a-f]{12}", re.ASCII)  # the tag of a variant, and in it the version
# The tag of what is attached to sha256:HEX: signatures and attestations of cosign, or a list of referrers.
ATTACHED = re.compile(r"sha256-([0-9a-f]{64})(?:\.[\w-]+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryManifest:
    """A manifest or an index: the digests of the manifests in it, and its blobs with their sizes in bytes."""

    names: tuple[str, ...]
    blobs: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a repository has.

    `items` are by digest: whatever a tag names, and what that names in turn, if it is there. `published` are
    the entries of the index of each version, `pushed` the version of each tag of a variant or a warm image.
    `aliases` has the version of the index that a tag has, for tags with another name than the version.
    `attached` is the digest to which the content of a tag is attached. `referrers` are the manifests with a
    subject, by the subject, as far as the registry was asked.
    """

    tags: Mapping[str, str]
    items: Mapping[str, RepositoryManifest]
    published: Mapping[str, tuple[IndexEntry, ...]]
    pushed: Mapping[str, str]
    aliases: Mapping[str, str]
    attached: Mapping[str, str]
    referrers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def list_below(self, digest: str) -> tuple[str, ...]:
        """Return what a manifest names, and what refers to it, missing ones too."""
        names = self.items[digest].names if digest in self.items else ()
        return (*names, *self.referrers.get(digest, ()))

    def compute_closure(self, digests: Iterable[str], beside: AbstractSet[str] = frozenset()) -> set[str]:
        """Return these digests and all below them, without those in `beside` and what only these lead to."""
        closure: set[str] = set()
        pending = list(digests)
        while pending:
            digest = pending.pop()
            if digest not in closure and digest not in beside:
                closure.add(digest)
                pending += self.list_below(digest)
        return closure


class RepositoryReader(Registry):
    """A repository at one time: each tag and each manifest is read once. Use it as a context manager."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._manifests: dict[str, Manifest | None] = {}
        self._items: dict[str, RepositoryManifest] = {}

    def find_manifest(self, tag: str) -> Manifest | None:
        """Return the manifest or the index with a tag or a digest; None if there is none."""
        if tag not in self._manifests:
            manifest = super().find_manifest(tag)
            self._manifests |= {tag: manifest} | ({manifest.digest: manifest} if manifest else {})
        return self._manifests[tag]

    def take_inventory(self) -> Inventory:
        """Return what the repository has; raise UsageError if a manifest is damaged, and EngineError."""
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            names = self.list_tags()
            manifests = zip(names, pool.map(self.find_manifest, names), strict=True)
            tags = {tag: manifest.digest for tag, manifest in manifests if manifest}
            self._read_items(pool, tags.values())
            attached = {tag: f"sha256:{match[1]}" for tag in tags if (match := ATTACHED.fullmatch(tag))}
            rest = [tag for tag in tags if tag not in attached]
            published: dict[str, tuple[IndexEntry, ...]] = {}
            aliases: dict[str, str] = {}
            for tag in rest:
                version, entries = self._read_version(tag)
                if version == tag:
                    published[tag] = entries
                elif version:
                    aliases[tag] = version
            images = [tag for tag in rest if "-" in tag]  # the name of a version has no dash
            pushed = zip(images, pool.map(self._find_owner, images), strict=True)
        return Inventory(
            tags=tags,
            items=dict(self._items),
            published=published,
            pushed={tag: version for tag, version in pushed if version},
            aliases=aliases,
            attached=attached,
        )

    def add_referrers(self, inventory: Inventory, digests: Iterable[str]) -> Inventory:
        """Return an inventory with what refers to these digests, as far as the registry tells."""
        referrers = dict(inventory.referrers)
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            for digest in digests:
                names = self.list_referrers(digest)
                if names is None:  # it does not tell of any
                    break
                referrers[digest] = tuple(names)
                self._read_items(pool, names)
        return replace(inventory, items=dict(self._items), referrers=referrers)

    def _find_owner(self, tag: str) -> str | None:
        """Return the version of the variant or the warm image with a tag; None if the tag has anything else.

        Of an attested image that is gone, its tag tells: an interrupted removal leaves such an index behind.
        """
        try:
            entry = read_entry(self, tag)
        except UnknownImageError:  # its configuration is missing, and nothing else says that it is ours
            return None
        if entry and (label := entry.read_warm_label()):
            return get_warm_version(label, tag)
        if entry:
            return entry.annotations[labels.VERSION] if entry.ours and entry.tag == tag else None
        manifest, match = self.find_manifest(tag), VARIANT.fullmatch(tag)
        if match and manifest and manifest.media_type == INDEX:
            entries = image_index.parse_index(manifest.raw, tag)
            attested = {entry.attests for entry in entries if entry.attests}
            return match[1] if attested and attested.isdisjoint(self._items) else None
        return None

    def _read_version(self, tag: str) -> tuple[str | None, tuple[IndexEntry, ...]]:
        """Return the version whose index a tag has, with the entries; None if it has anything else."""
        manifest = self.find_manifest(tag)
        if manifest is None or manifest.media_type not in INDEXES:
            return None, ()
        try:
            index = image_index.read_index(manifest, f"{self.name}:{tag}").require_intact()
        except TagMovedError:  # another tool's, which is not ours to remove
            return None, ()
        return index.annotations.get(labels.VERSION), index.entries

    def _read_items(self, pool: ThreadPoolExecutor, digests: Iterable[str]) -> None:
        """Read the manifests with these digests, and those that they name."""
        unread = set(digests)
        while unread := unread - self._items.keys():
            manifests = list(filter(None, pool.map(self.find_manifest, sorted(unread))))
            for manifest in manifests:
                document = parse_manifest(manifest.raw, f"{self.name}@{manifest.digest}", Descriptor)
                names: tuple[str, ...] = ()
                blobs = {manifest.digest: len(manifest.raw)}
                if isinstance(document, ImageIndex):
                    names = tuple(entry.digest for entry in document.entries)
                else:
                    descriptors = (document.config, *(document.layers or ()))
                    blobs |= {blob.digest: blob.size for blob in descriptors if blob and not blob.foreign}
                self._items[manifest.digest] = RepositoryManifest(names=names, blobs=blobs)
            unread = {name for manifest in manifests for name in self._items[manifest.digest].names}
