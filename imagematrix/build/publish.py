"""Publishing a version: an image index of all its variants, which is only ever added to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.build.remote import attestations, entries
from imagematrix.catalog import index, labels
from imagematrix.errors import EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.facts import marches
from imagematrix.registry import DOCKER_LIST, INDEX, TAG

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.catalog.index import Entry
    from imagematrix.registry import Registry

__all__ = ["Published", "publish"]

TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """An index that is there now: its digest, how many variants it has, and how many of them are new."""

    digest: str
    variants: int
    new: int


def publish(registry: Registry, version: str, aliases: Sequence[str] = ()) -> Published:
    """Write the index of all variants of a version that the registry has, under its version.

    What an index had stays in it. The `aliases` are tags that then stand for the same index; only they move.
    Raises UnknownImageError where there is no variant, TagMovedError where two variants of one cell are made
    of different things, or where an alias is the tag of an image or of another version.
    """
    name = f"{registry.name}:{version}"
    for alias in aliases:
        _movable(registry, alias)
    first: frozenset[str] | None = None
    for _ in range(TRIES):
        before = registry.manifest(version)
        known = {entry.digest: entry for entry in index.parse(before.raw, name)} if before else {}
        found = entries(registry, version, before)
        if not found:
            raise UnknownImageError(
                f"the registry has no variant of {name}", remedy="`imagematrix build --push`"
            )
        _frozen(name, found)
        first = frozenset(known) if first is None else first
        own = {entry.digest: _described(name, entry) for entry in found}
        new = [entry for digest, entry in own.items() if digest not in known]
        said = {one.digest: one for entry in new for one in attestations(registry, entry.tag)}
        raw = index.write((own | known | said).values())
        # Somebody else may publish at the same time, with an older list of what there is: it is published
        # what is still there after a look at that list.
        if before and before.raw == raw:
            for alias in aliases:
                registry.push_manifest(alias, raw, INDEX)
            return Published(digest=before.digest, variants=len(own), new=len(own.keys() - first))
        registry.push_manifest(version, raw, INDEX)
    raise EngineError(
        f"{name} is published by somebody else again and again", remedy="nothing is lost; publish it later"
    )


def _movable(registry: Registry, alias: str) -> None:
    """Raise UsageError where an alias is no tag, TagMovedError where its tag never moves."""
    if not TAG.fullmatch(alias):
        raise UsageError(f"--alias: {alias!r} is no tag", remedy="such as latest or stable")
    there = registry.manifest(alias)
    if there is None:
        return
    name = f"{registry.name}:{alias}"
    if there.media_type not in (INDEX, DOCKER_LIST):
        raise TagMovedError(f"{name} is an image and no alias", remedy="choose another alias")
    if any(own.annotations.get(labels.VERSION) == alias for own in index.parse(there.raw, name)):
        raise TagMovedError(f"{name} is a version, and versions never move", remedy="choose another alias")


def _frozen(name: str, found: Sequence[Entry]) -> None:
    cells: dict[str, Entry] = {}
    for entry in found:
        other = cells.setdefault(entry.annotations[labels.CELL], entry)
        if other.annotations[labels.INPUT] != entry.annotations[labels.INPUT]:
            raise TagMovedError(
                f"{name} has two images for one cell: {other.tag} and {entry.tag}",
                remedy="take the wrong one out of the registry, or raise the version",
            )


def _described(name: str, entry: Entry) -> Entry:
    """Return an entry as an index has it: without what only a build wants, and with the CPU variant."""
    annotations = {key: value for key, value in entry.annotations.items() if key != labels.INPUTS}
    reference = f"{name.rpartition(':')[0]}:{entry.tag}"
    variant = labels.read(annotations, reference=reference, digest=None, size=None)
    level = marches.level(variant.cpu_flags) if entry.platform.get("architecture") == "amd64" else None
    platform = dict(entry.platform) | ({"variant": level.removeprefix("x86-64-")} if level else {})
    return replace(entry, annotations=annotations, platform=platform)
