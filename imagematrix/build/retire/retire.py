"""Retiring versions: what a registry no longer needs, and its removal.

What is removed is found from the tags that stay: whatever one of them names, directly or through an index, is
kept. The layers are the registry's to remove, by its garbage collection.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from imagematrix.build.retire.retention import RetentionDecision, make_newer_counter, sort_versions
from imagematrix.build.stores.inventory import RepositoryReader
from imagematrix.errors import EngineError
from imagematrix.images.catalog import image_index
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from imagematrix.build.retire.retention import Retention
    from imagematrix.build.stores.inventory import Inventory
    from imagematrix.images.catalog.catalog import Catalog

SCHEMA = "imagematrix.retired/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A manifest of `version` that is to be deleted, and the tags that go with it."""

    digest: str
    tags: tuple[str, ...]
    version: str

    def to_json(self) -> dict[str, object]:
        """Return one element of the document's `removals`."""
        return {"digest": self.digest, "tags": list(self.tags), "version": self.version}


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """What is to be removed from the repository `image`.

    `decide` are those of all versions, the oldest first; `published` are the versions that have an index.
    `removals` are in the order in which they are to be deleted, and `stays` are the digests of all other
    manifests. `size` is that of the blobs, in bytes, that nothing else in the repository has. `unserved` are
    the hosts that no version serves.
    """

    image: str
    fates: Mapping[str, RetentionDecision]
    published: frozenset[str]
    removals: tuple[Removal, ...]
    stays: frozenset[str]
    size: int
    unserved: tuple[str, ...]

    @property
    def retired(self) -> list[str]:
        """The versions of which something is to be removed."""
        return list(dict.fromkeys(removal.version for removal in self.removals))

    def to_json(self) -> dict[str, object]:
        """Return the document, without `dry_run`."""
        return {
            "schema": SCHEMA,
            "image": self.image,
            "versions": [
                {
                    "version": version,
                    "status": "kept" if fate.kept else "retired",
                    "published": version in self.published,
                    "why": list(fate.reasons),
                    "hosts": list(fate.hosts),
                }
                for version, fate in self.fates.items()
            ],
            "unserved": list(self.unserved),
            "removals": [removal.to_json() for removal in self.removals],
            "size": self.size,
        }


def survey_repository(image: str, retention: Retention) -> Retirement:
    """Return what is to be removed from a repository as it is now.

    Raises EngineError if the registry cannot be reached or refuses, UsageError if something in it is damaged.
    """
    with RepositoryReader(image) as reader:
        found = reader.inventory()
        asked: set[str] = set()
        while True:
            result = plan_retirement(image, found, retention)
            new = sorted({removal.digest for removal in result.removals} - asked)
            if not new:
                return result
            asked |= {*new}
            found = reader.add_referrers(found, new)


def plan_retirement(image: str, found: Inventory, retention: Retention) -> Retirement:
    """Return what is to be removed of an inventory.

    A version stays if a tag other than its own names it, or `retention` does. So does one that is pushed but
    not published and is among the newest, because it may be in the making.
    """
    fates, unserved = _decide_retention(image, found, retention)
    own = _group_tags(found)
    leaving = {tag for version, fate in fates.items() if not fate.kept for tag in own[version]}
    removed, tags = _find_unnamed(found, leaving)
    for version, fate in fates.items():
        if not fate.kept and not any(found.tags[tag] in removed for tag in own[version]):
            fate.reasons.append("other tags name its images")
    order = _DeletionOrder(found, removed, tags)
    newer = make_newer_counter(version for version in found.published if fates[version].kept)
    for version, fate in fates.items():
        if not fate.kept:
            # Whether a second run would find all of the version, if this one ends when its index is gone.
            again = newer(version) >= max(retention.keep, 1) and _is_named(found, version, own[version])
            order.add(version, own[version], index_first=again)
    stays = found.items.keys() - removed
    kept = {blob for digest in stays for blob in found.items[digest].blobs}
    gone = (found.items[digest].blobs for digest in removed & found.items.keys())
    freed = {blob: size for blobs in gone for blob, size in blobs.items() if blob not in kept}
    return Retirement(
        image=image,
        fates=fates,
        published=frozenset(found.published),
        removals=tuple(order.removals),
        stays=frozenset(stays),
        size=sum(freed.values()),
        unserved=unserved,
    )


def apply_retirement(
    shown: Retirement, retention: Retention, done: Callable[[Removal], object]
) -> Sequence[Removal]:
    """Remove what was shown, version by version; `done` is called after each manifest.

    Returns what the registry keeps without a tag, because an index that has no tag either names it: such as
    that of a tag that was moved. The registry is read again before each version. Raises EngineError if
    something that was shown is to stay by now, or if the registry refuses to delete a tag; before the first
    deletion, also if it now has more to remove.
    """
    stuck: list[Removal] = []
    left = list(shown.removals)
    now = survey_repository(shown.image, retention)
    if now.removals != shown.removals:
        raise EngineError(f"{shown.image} changed meanwhile: nothing was removed", remedy="run this again")
    with Registry(shown.image) as registry:
        while left:
            group = [removal for removal in left if removal.version == left[0].version]
            left = [removal for removal in left if removal.version != left[0].version]
            stuck += _delete(registry, group, done)
            if left and not survey_repository(shown.image, retention).stays.isdisjoint(
                one.digest for one in left
            ):
                raise EngineError(
                    f"{shown.image} changed meanwhile: {len(left)} of {len(shown.removals)} manifests stay",
                    remedy="run this again",
                )
        return _delete(registry, stuck, done)  # a later version may have named them


def _delete(
    registry: Registry, group: Sequence[Removal], done: Callable[[Removal], object]
) -> Sequence[Removal]:
    """Delete manifests; those that the registry refuses while another one names them, after that one.

    Returns those that it still refuses without any of their tags.
    """
    while group:
        refused = []
        for removal in group:
            if registry.delete(removal.digest, removal.tags):
                done(removal)
            else:
                refused.append(removal)
        if len(refused) == len(group):
            tags = [tag for removal in refused for tag in removal.tags if registry.digest(tag)]
            if not tags:
                return refused
            raise EngineError(
                f"the registry refuses to delete {registry.name}:{tags[0]}",
                remedy="see its log, and its rules for tags that are retained or must not change",
            )
        group = refused
    return group


def _decide_retention(
    image: str, found: Inventory, retention: Retention
) -> tuple[dict[str, RetentionDecision], tuple[str, ...]]:
    """Return the fates of all versions, and the hosts that none of them serves."""
    fates = retention.decide(found.published)
    by_index: dict[str, list[str]] = {}
    for version in found.published:
        by_index.setdefault(found.tags[version], []).append(version)
    for tag in sorted(found.tags):
        if tag in found.published or tag in found.pushed or tag in found.attached:
            continue
        below = found.compute_closure([found.tags[tag]])
        named = {version for digest in below for version in by_index.get(digest, ())}
        for version in (named | {found.named.get(tag, "")}) & fates.keys():
            fates[version].reasons.append(f"tag {tag}")
    unserved: tuple[str, ...] = ()
    if retention.hosts:
        unserved = retention.serve(fates, *_read_catalogs(image, found))
    newer = make_newer_counter(version for version, fate in fates.items() if fate.kept)
    for version in {*found.pushed.values()} - fates.keys():
        fates[version] = RetentionDecision()
        if version in retention.protect:
            fates[version].reasons.append("protected")
        if newer(version) < max(retention.keep, 1):
            fates[version].reasons.append("not published yet")
    return {version: fates[version] for version in sort_versions(fates)}, unserved


def _read_catalogs(image: str, found: Inventory) -> tuple[dict[str, Catalog], set[str]]:
    """Return the catalogs of all versions, and the references of variants that the registry lost."""
    catalogs = {
        version: image_index.make_catalog(image, version, [entry for entry in entries if entry.ours])
        for version, entries in found.published.items()
    }
    lost = {
        variant.reference
        for catalog in catalogs.values()
        for variant in catalog.variants
        if variant.digest not in found.items
    }
    return catalogs, lost


def _group_tags(found: Inventory) -> dict[str, list[str]]:
    """Return the tags of each version: those of its images, and its own at the end."""
    tags: dict[str, list[str]] = {}
    for tag, version in sorted(found.pushed.items()):
        tags.setdefault(version, []).append(tag)
    for version in found.published:
        tags.setdefault(version, []).append(version)
    return tags


def _find_unnamed(found: Inventory, leaving: set[str]) -> tuple[set[str], set[str]]:
    """Return the digests that nothing names once the `leaving` tags are gone, and the tags that go with them.

    What is attached to a manifest goes with it, and what is attached to that.
    """
    attached: dict[str, list[str]] = {}
    for tag, subject in found.attached.items():
        attached.setdefault(subject, []).append(tag)
    holders: dict[str, list[str]] = {}  # by what they name
    for digest in found.compute_closure(found.tags.values()):
        for name in found.below(digest):
            holders.setdefault(name, []).append(digest)
    staying = Counter(found.tags.values())  # how many tags each manifest has that stay
    tags, removed = set[str](), set[str]()
    new = leaving
    while new:
        tags |= new
        staying.subtract(found.tags[tag] for tag in new)
        # Only what new tags lead to may have lost its last name, so that a chain is looked at once.
        below = found.compute_closure([found.tags[tag] for tag in new], beside=removed)
        outside = removed | below
        named = (one for one in below if staying[one] or not outside.issuperset(holders.get(one, ())))
        gone = below - found.compute_closure(named)
        removed |= gone
        new = {tag for digest in gone for tag in attached.get(digest, ())} - tags
    return removed, tags


def _is_named(found: Inventory, version: str, own: Sequence[str]) -> bool:
    """Whether the index of a version has only images that the version's other tags lead to."""
    if version not in found.published:
        return False
    images = found.compute_closure(found.tags[tag] for tag in own if tag != version)
    return images.issuperset(entry.digest for entry in found.published[version])


class _DeletionOrder:
    """The order of deletion: what a manifest names, and what is attached to it, goes before the manifest.

    The index of a version goes first if what remains can be found without it, so that the version is there as
    a whole or not at all. Otherwise it goes last, so that a second run finds the rest.
    """

    def __init__(self, found: Inventory, removed: set[str], tags: set[str]) -> None:
        self.removals: list[Removal] = []
        self._found = found
        self._left = set(removed)
        self._tags: dict[str, list[str]] = {}
        self._attached: dict[str, list[str]] = {}
        for tag in sorted(tags):
            self._tags.setdefault(found.tags[tag], []).append(tag)
            if tag in found.attached:
                self._attached.setdefault(found.attached[tag], []).append(found.tags[tag])

    def add(self, version: str, tags: Iterable[str], *, index_first: bool) -> None:
        """Add what belongs to a version with its own `tags` and was not added before."""
        digests = [self._found.tags[tag] for tag in tags]
        if index_first:
            self._add(digests[-1], version, below=False)
        for digest in digests:
            self._add(digest, version)

    def _add(self, digest: str, version: str, *, below: bool = True) -> None:
        """Add a manifest after what goes before it, and without what it names unless `below`."""
        stack = [(digest, False)]
        while stack:
            one, is_next = stack.pop()
            item = self._found.items.get(one)
            if is_next and item:
                self.removals.append(
                    Removal(digest=one, tags=tuple(self._tags.get(one, ())), version=version)
                )
            if is_next or one not in self._left:
                continue
            self._left.remove(one)
            attached = [*self._attached.get(one, ()), *self._found.referrers.get(one, ())]
            named = item.names if item and (below or one != digest) else ()
            stack += [(one, True), *((other, False) for other in reversed([*attached, *named]))]
