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

    `decisions` are those on all versions, the oldest first; `published` are the versions that have an index.
    `removals` are in the order in which they are to be deleted, and `stays` are the digests of all other
    manifests. `size` is that of the blobs, in bytes, that nothing else in the repository has. `unserved` are
    the hosts that no version serves.
    """

    image: str
    decisions: Mapping[str, RetentionDecision]
    published: frozenset[str]
    removals: tuple[Removal, ...]
    stays: frozenset[str]
    size: int
    unserved: tuple[str, ...]

    @property
    def retired_versions(self) -> list[str]:
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
                    "status": "kept" if decision.is_kept else "retired",
                    "published": version in self.published,
                    "why": list(decision.reasons),
                    "hosts": list(decision.hosts),
                }
                for version, decision in self.decisions.items()
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
        inventory = reader.take_inventory()
        queried: set[str] = set()
        while True:
            plan = plan_retirement(image, inventory, retention)
            new = sorted({removal.digest for removal in plan.removals} - queried)
            if not new:
                return plan
            queried |= {*new}
            inventory = reader.add_referrers(inventory, new)


def plan_retirement(image: str, inventory: Inventory, retention: Retention) -> Retirement:
    """Return what is to be removed of an inventory.

    A version stays if a tag other than its own names it, or `retention` does. So does one that is pushed but
    not published and is among the newest, because it may be in the making.
    """
    decisions, unserved = _decide_retention(image, inventory, retention)

    # The tags of each version: those of its images, and its own at the end.
    tags_of: dict[str, list[str]] = {}
    for tag, version in sorted(inventory.pushed.items()):
        tags_of.setdefault(version, []).append(tag)
    for version in inventory.published:
        tags_of.setdefault(version, []).append(version)

    leaving = {
        tag for version, decision in decisions.items() if not decision.is_kept for tag in tags_of[version]
    }
    removed, tags = _find_unnamed(inventory, leaving)
    for version, decision in decisions.items():
        if not decision.is_kept and not any(inventory.tags[tag] in removed for tag in tags_of[version]):
            decision.reasons.append("other tags name its images")
    order = _DeletionOrder(inventory, removed, tags)
    count_newer = make_newer_counter(version for version in inventory.published if decisions[version].is_kept)
    for version, decision in decisions.items():
        if not decision.is_kept:
            # Whether a second run would find all of the version, if this one ends when its index is gone.
            is_found_again = count_newer(version) >= max(retention.keep, 1) and _is_named(
                inventory, version, tags_of[version]
            )
            order.add(version, tags_of[version], index_first=is_found_again)

    stays = inventory.items.keys() - removed
    kept_blobs = {blob for digest in stays for blob in inventory.items[digest].blobs}
    removed_blobs = (inventory.items[digest].blobs for digest in removed & inventory.items.keys())
    freed = {blob: size for blobs in removed_blobs for blob, size in blobs.items() if blob not in kept_blobs}
    return Retirement(
        image=image,
        decisions=decisions,
        published=frozenset(inventory.published),
        removals=tuple(order.removals),
        stays=frozenset(stays),
        size=sum(freed.values()),
        unserved=unserved,
    )


def apply_retirement(
    plan: Retirement, retention: Retention, on_removed: Callable[[Removal], object]
) -> Sequence[Removal]:
    """Remove what was planned, version by version; `on_removed` is called after each manifest.

    Returns what the registry keeps without a tag, because an index that has no tag either names it: such as
    that of a tag that was moved. The registry is read again before each version. Raises EngineError if
    something that was planned is to stay by now, or if the registry refuses to delete a tag; before the first
    deletion, also if it now has more to remove.
    """
    stuck: list[Removal] = []
    remaining = list(plan.removals)
    if survey_repository(plan.image, retention).removals != plan.removals:
        raise EngineError(f"{plan.image} changed meanwhile: nothing was removed", remedy="run this again")
    with Registry(plan.image) as registry:
        while remaining:
            version = remaining[0].version
            group = [removal for removal in remaining if removal.version == version]
            remaining = [removal for removal in remaining if removal.version != version]
            stuck += _delete_manifests(registry, group, on_removed)
            if remaining and not survey_repository(plan.image, retention).stays.isdisjoint(
                removal.digest for removal in remaining
            ):
                stay = f"{len(remaining)} of {len(plan.removals)} manifests stay"
                raise EngineError(f"{plan.image} changed meanwhile: {stay}", remedy="run this again")
        return _delete_manifests(registry, stuck, on_removed)  # a later version may have named them


def _delete_manifests(
    registry: Registry, group: Sequence[Removal], on_removed: Callable[[Removal], object]
) -> Sequence[Removal]:
    """Delete manifests; those that the registry refuses while another one names them, after that one.

    Returns those that it still refuses without any of their tags.
    """
    while group:
        refused = []
        for removal in group:
            if registry.delete(removal.digest, removal.tags):
                on_removed(removal)
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
    image: str, inventory: Inventory, retention: Retention
) -> tuple[dict[str, RetentionDecision], tuple[str, ...]]:
    """Return the decisions on all versions, and the hosts that none of them serves."""
    decisions = retention.decide(inventory.published)
    by_index: dict[str, list[str]] = {}
    for version in inventory.published:
        by_index.setdefault(inventory.tags[version], []).append(version)
    for tag in sorted(inventory.tags):
        if tag in inventory.published or tag in inventory.pushed or tag in inventory.attached:
            continue
        below = inventory.compute_closure([inventory.tags[tag]])
        versions = {version for digest in below for version in by_index.get(digest, ())}
        for version in (versions | {inventory.aliases.get(tag, "")}) & decisions.keys():
            decisions[version].reasons.append(f"tag {tag}")

    unserved: tuple[str, ...] = ()
    if retention.hosts:
        hosts, unserved = retention.assign_hosts(*_read_catalogs(image, inventory))
        for version, names in hosts.items():
            decisions[version].hosts = names

    # A version that is pushed but not published has no index yet.
    count_newer = make_newer_counter(version for version, decision in decisions.items() if decision.is_kept)
    for version in {*inventory.pushed.values()} - decisions.keys():
        decisions[version] = RetentionDecision()
        if version in retention.protect:
            decisions[version].reasons.append("protected")
        if count_newer(version) < max(retention.keep, 1):
            decisions[version].reasons.append("not published yet")
    return {version: decisions[version] for version in sort_versions(decisions)}, unserved


def _read_catalogs(image: str, inventory: Inventory) -> tuple[dict[str, Catalog], set[str]]:
    """Return the catalogs of all versions, and the references of variants that the registry lost."""
    catalogs = {
        version: image_index.make_catalog(image, version, [entry for entry in entries if entry.ours])
        for version, entries in inventory.published.items()
    }
    lost = {
        variant.reference
        for catalog in catalogs.values()
        for variant in catalog.variants
        if variant.digest not in inventory.items
    }
    return catalogs, lost


def _find_unnamed(inventory: Inventory, leaving: set[str]) -> tuple[set[str], set[str]]:
    """Return the digests that nothing names once the `leaving` tags are gone, and the tags that go with them.

    What is attached to a manifest goes with it, and what is attached to that.
    """
    attached: dict[str, list[str]] = {}
    for tag, subject in inventory.attached.items():
        attached.setdefault(subject, []).append(tag)
    holders: dict[str, list[str]] = {}  # by what they name
    for digest in inventory.compute_closure(inventory.tags.values()):
        for name in inventory.list_below(digest):
            holders.setdefault(name, []).append(digest)
    tag_counts = Counter(inventory.tags.values())  # how many tags each manifest has that stay
    tags, removed = set[str](), set[str]()
    new = leaving
    while new:
        tags |= new
        tag_counts.subtract(inventory.tags[tag] for tag in new)
        # Only what new tags lead to may have lost its last name, so that a chain is looked at once.
        below = inventory.compute_closure([inventory.tags[tag] for tag in new], beside=removed)
        outside = removed | below
        named_digests = (
            digest
            for digest in below
            if tag_counts[digest] or not outside.issuperset(holders.get(digest, ()))
        )
        unnamed = below - inventory.compute_closure(named_digests)
        removed |= unnamed
        new = {tag for digest in unnamed for tag in attached.get(digest, ())} - tags
    return removed, tags


def _is_named(inventory: Inventory, version: str, tags: Sequence[str]) -> bool:
    """Whether the index of a version has only images that the version's other tags lead to."""
    if version not in inventory.published:
        return False
    images = inventory.compute_closure(inventory.tags[tag] for tag in tags if tag != version)
    return images.issuperset(entry.digest for entry in inventory.published[version])


class _DeletionOrder:
    """The order of deletion: what a manifest names, and what is attached to it, goes before the manifest.

    The index of a version goes first if what remains can be found without it, so that the version is there as
    a whole or not at all. Otherwise it goes last, so that a second run finds the rest.
    """

    def __init__(self, inventory: Inventory, removed: set[str], tags: set[str]) -> None:
        self.removals: list[Removal] = []
        self._inventory = inventory
        self._remaining = set(removed)
        self._tags: dict[str, list[str]] = {}
        self._attached: dict[str, list[str]] = {}
        for tag in sorted(tags):
            self._tags.setdefault(inventory.tags[tag], []).append(tag)
            if tag in inventory.attached:
                self._attached.setdefault(inventory.attached[tag], []).append(inventory.tags[tag])

    def add(self, version: str, tags: Iterable[str], *, index_first: bool) -> None:
        """Add what belongs to a version with its own `tags` and was not added before."""
        digests = [self._inventory.tags[tag] for tag in tags]
        if index_first:
            self._add(digests[-1], version, below=False)
        for digest in digests:
            self._add(digest, version)

    def _add(self, digest: str, version: str, *, below: bool = True) -> None:
        """Add a manifest after what goes before it, and without what it names unless `below`."""
        stack = [(digest, False)]
        while stack:
            current, is_next = stack.pop()
            item = self._inventory.items.get(current)
            if is_next and item:
                tags = tuple(self._tags.get(current, ()))
                self.removals.append(Removal(digest=current, tags=tags, version=version))
            if is_next or current not in self._remaining:
                continue
            self._remaining.remove(current)
            attached = [*self._attached.get(current, ()), *self._inventory.referrers.get(current, ())]
            names = item.names if item and (below or current != digest) else ()
            stack += [(current, True), *((name, False) for name in reversed([*attached, *names]))]
